"""OpenDRIVE maps to lane graphs: worked out by hand, against a plain loop, and real towns."""

import gzip
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import Reason, SourceError
from schemas.lanes import LaneGraph
from tasks import lane_shapes, opendrive_tables
from tasks.opendrive import read_opendrive
from tests.conftest import REPOSITORY, shared_data
from tests.tasks.xodr_builder import cubic, junction, lane, link, piece, road, section, town

TWO_LANES = section(lane(1), lane(-1, width=3.5), lane(-2, width=2.0, type="sidewalk"))


def line_of(graph, name, road_id=1, section_index=0, lane_id=-1):
    """Return one line of one lane."""
    return getattr(graph, name)[graph.points_of(graph.index_of(road_id, section_index, lane_id))]


def follows(graph):
    """Return every link as pairs of OpenDRIVE's ids."""
    return {
        (tuple(graph.ids[index].tolist()), tuple(graph.ids[other].tolist()))
        for index in range(graph.num_lanes)
        for other in graph.successors_of(index)
    }


# -- lines -------------------------------------------------------------------------------------------------------------


def test_lanes_lie_beside_the_reference_line_and_run_as_one_drives():
    graph = read_opendrive(town(road(1, TWO_LANES, offset=cubic("laneOffset", 0.0, 0.5, position="s"))), spacing_m=2.5)
    assert graph.ids.tolist() == [[1, 0, 1], [1, 0, -1], [1, 0, -2]]
    assert graph.is_along_s.tolist() == [False, True, True]
    assert line_of(graph, "center_m").tolist() == [[x, -1.25, 0.0] for x in (0.0, 2.5, 5.0, 7.5, 10.0)]
    assert line_of(graph, "left_m")[0].tolist() == [0.0, 0.5, 0.0]
    assert line_of(graph, "right_m")[0].tolist() == [0.0, -3.0, 0.0]
    np.testing.assert_allclose(line_of(graph, "center_m", lane_id=1)[:, :2], [[x, 2.0] for x in (10, 7.5, 5, 2.5, 0)])
    np.testing.assert_allclose(line_of(graph, "left_m", lane_id=1)[0], [10.0, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(line_of(graph, "right_m", lane_id=1)[0], [10.0, 3.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(line_of(graph, "s_m", lane_id=1), [10, 7.5, 5, 2.5, 0])
    np.testing.assert_allclose(line_of(graph, "center_m", lane_id=-2)[0], [0.0, -4.0, 0.0])
    assert graph.is_type("driving").tolist() == [True, True, False]
    assert graph.is_type("sidewalk", "driving").all()


def test_where_traffic_keeps_left_lanes_run_the_other_way():
    graph = read_opendrive(town(road(1, TWO_LANES, rule="LHT")), spacing_m=10.0)
    assert graph.is_along_s.tolist() == [True, False, False]
    assert line_of(graph, "center_m")[:, 0].tolist() == [10.0, 0.0]
    assert line_of(graph, "left_m")[0, 1] == -3.5  # driving west, south is on the left
    assert line_of(graph, "right_m")[0, 1] == 0.0
    assert line_of(graph, "left_m", lane_id=1)[0, 1] == 3.0


def test_an_arc_of_a_quarter_circle_ends_where_it_must():
    bend = piece('<arc curvature="0.1"/>', length=5 * math.pi)
    graph = read_opendrive(town(road(1, section(lane(-1, width=4.0)), plan=bend, length=5 * math.pi)))
    np.testing.assert_allclose(line_of(graph, "left_m")[-1], [10.0, 10.0, 0.0], atol=1e-9)
    np.testing.assert_allclose(line_of(graph, "center_m")[-1], [12.0, 10.0, 0.0], atol=1e-9)
    radius = np.hypot(line_of(graph, "right_m")[:, 0], line_of(graph, "right_m")[:, 1] - 10.0)
    np.testing.assert_allclose(radius, 14.0)


def test_elevation_lifts_and_superelevation_tilts_the_road():
    extra = (
        f"<elevationProfile>{cubic('elevation', 0.0, 5.0, 0.1, position='s')}</elevationProfile>"
        f"<lateralProfile>{cubic('superelevation', 0.0, 0.2, position='s')}</lateralProfile>"
    )
    graph = read_opendrive(town(road(1, section(lane(-1, width=3.0)), extra=extra)), spacing_m=10.0)
    right = line_of(graph, "right_m")
    np.testing.assert_allclose(right[:, 1], -3.0 * math.cos(0.2))
    np.testing.assert_allclose(right[:, 2], [5.0 - 3.0 * math.sin(0.2), 6.0 - 3.0 * math.sin(0.2)])


def test_borders_say_the_same_as_widths():
    widths = section(lane(-1, width=3.0), lane(-2, cubic("width", 0.0, 2.0, 0.1), width=None))
    borders = section(
        lane(-1, cubic("border", 0.0, -3.0), width=None), lane(-2, cubic("border", 0.0, -5.0, -0.1), width=None)
    )
    offset = cubic("laneOffset", 0.0, 1.0, position="s")
    first, second = (read_opendrive(town(road(1, lanes, offset=offset))) for lanes in (widths, borders))
    for name in ("center_m", "left_m", "right_m", "width_m"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), atol=1e-12)


def test_a_jump_of_the_lane_offset_belongs_to_the_section_that_begins_there():
    """Tools move the reference line sideways where a lane begins or ends; each section keeps its own side of the jump."""
    offsets = cubic("laneOffset", 0.0, 1.0, position="s") + cubic("laneOffset", 5.0000000001, -1.0, position="s")
    graph = read_opendrive(town(road(1, section(lane(-1)), section(lane(-1), s=5.0), offset=offsets)), spacing_m=5.0)
    np.testing.assert_allclose(line_of(graph, "left_m")[:, 1], [1.0, 1.0])
    np.testing.assert_allclose(line_of(graph, "left_m", section_index=1)[:, 1], [-1.0, -1.0])


coefficients = st.tuples(st.floats(0, 4), st.floats(-0.1, 0.1), st.floats(-0.02, 0.02), st.floats(-1e-3, 1e-3))
records = st.lists(
    st.tuples(st.integers(0, 6), coefficients), min_size=1, max_size=3, unique_by=lambda record: record[0]
)


def evaluated(rows, s):
    """Look up and evaluate cubics as the standard says: the last record that begins at or before ``s``."""
    rows = sorted(rows)
    at, (a, b, c, d) = next((row for row in reversed(rows) if row[0] <= s), rows[0])
    ds = max(s - at, 0.0)
    return a + b * ds + c * ds**2 + d * ds**3


@given(lanes=st.dictionaries(st.sampled_from([-3, -2, -1, 1, 2]), records, min_size=5), offset=records)
def test_widths_add_up_as_in_the_obvious_loop(lanes, offset):
    parts = [lane(i, *(cubic("width", float(at), *row) for at, row in rows), width=None) for i, rows in lanes.items()]
    offset = [(0, offset[0][1]), *((at, row) for at, row in offset[1:] if at)]
    laid = "".join(cubic("laneOffset", float(at), *row, position="s") for at, row in offset)
    graph = read_opendrive(town(road(1, section(*parts), offset=laid, length=7.0)), spacing_m=0.37)
    for lane_id in lanes:
        sign = 1 if lane_id > 0 else -1
        for s, left, right in zip(
            *(line_of(graph, n, lane_id=lane_id) for n in ("s_m", "left_m", "right_m")), strict=True
        ):
            at = min(max(s, 1e-6), 7.0 - 1e-6)  # a record that begins right there has not begun
            t = evaluated(offset, at)
            for inner in range(sign, lane_id, sign):
                t += sign * max(evaluated(lanes[inner], at), 0.0)
            outer = t + sign * max(evaluated(lanes[lane_id], at), 0.0)
            np.testing.assert_allclose([left[:2], right[:2]], [[s, t], [s, outer]], atol=1e-4)


@given(spacing_m=st.floats(0.05, 30.0), length=st.floats(0.0, 40.0))
def test_points_are_no_further_apart_than_asked_and_include_both_ends(spacing_m, length):
    graph = read_opendrive(
        town(road(1, section(lane(-1)), length=length, plan=piece(length=length))), spacing_m=spacing_m
    )
    s = graph.s_m
    assert len(s) >= 2
    assert (s[0], s[-1]) == (0.0, length)
    assert np.diff(s).max() <= spacing_m + 1e-9
    assert np.ptp(np.diff(s)) < 1e-9


# -- links -------------------------------------------------------------------------------------------------------------


def test_sections_of_a_road_follow_each_other_in_driving_direction():
    sections = (
        section(lane(1, after=1), lane(-1, after=-1)),
        section(lane(1, before=1), lane(-1, before=-1, after=-2), s=4.0),
        section(lane(-1), lane(-2, before=-1), s=8.0),
    )
    graph = read_opendrive(town(road(1, *sections)))
    assert follows(graph) == {((1, 0, -1), (1, 1, -1)), ((1, 1, -1), (1, 2, -2)), ((1, 1, 1), (1, 0, 1))}
    assert graph.predecessors_of(graph.index_of(1, 2, -2)).tolist() == [graph.index_of(1, 1, -1)]


def test_roads_that_meet_head_to_head_lead_from_right_lanes_to_left_ones():
    first = road(1, section(lane(1, after=-1), lane(-1, after=1)), links=link("successor", 2, "end"))
    second = road(2, section(lane(1, after=-1), lane(-1, after=1)), links=link("successor", 1, "end"))
    assert follows(read_opendrive(town(first, second))) == {((1, 0, -1), (2, 0, 1)), ((2, 0, -1), (1, 0, 1))}


def test_a_junction_leads_over_its_connecting_roads():
    incoming = road(1, section(lane(1), lane(-1)), links=link("successor", 9, kind="junction"))
    straight = road(
        2, section(lane(-1, before=-1, after=-1)), junction=9,
        links=link("predecessor", 1, "end") + link("successor", 4),
    )  # fmt: skip
    turn = road(
        3, section(lane(1, before=-2, after=-1)), junction=9,
        links=link("predecessor", 4) + link("successor", 1, "end"),
    )  # fmt: skip
    leaving = road(4, section(lane(-1), lane(-2)), links=link("predecessor", 9, kind="junction"))
    crossing = junction(9, (1, 2, [(-1, -1)]), (1, 3, [(-1, 1)]), (1, 3, [(-1, 1)]), (7, 2, [(-1, -1)]))
    graph = read_opendrive(town(incoming, straight, turn, leaving, crossing))
    assert follows(graph) == {
        ((1, 0, -1), (2, 0, -1)),
        ((2, 0, -1), (4, 0, -1)),
        ((1, 0, -1), (3, 0, 1)),  # a left lane is entered at the end of its road
        ((3, 0, 1), (4, 0, -2)),
    }
    assert graph.is_junction.tolist() == [False, False, True, True, False, False]
    assert graph.junction_id.tolist() == [-1, -1, 9, 9, -1, -1]


def test_links_to_what_is_not_there_are_dead_ends():
    lanes = section(lane(-1, after=-5), lane(1, before=4))
    graph = read_opendrive(town(road(1, lanes, links=link("successor", 1, "start") + link("predecessor", 77))))
    assert len(graph.successors) == len(graph.predecessors) == 0


# -- limits and lights -------------------------------------------------------------------------------------------------


def test_a_lanes_own_limit_comes_before_that_of_its_road():
    kind = '<type s="0.0" type="town"><speed max="30" unit="mph"/></type>'
    speeds = (
        '<speed sOffset="0.0" max="50" unit="km/h"/>',
        '<speed sOffset="0.0" max="10"/>',
        '<speed sOffset="0.0" max="90" unit="km/h"/><speed sOffset="4.0" max="36" unit="km/h"/>',
    )
    lanes = [lane(-1), *(lane(-2 - index, speed) for index, speed in enumerate(speeds))]
    graph = read_opendrive(town(road(1, section(*lanes), extra=kind), road(2, section(lane(-1)))))
    np.testing.assert_allclose(graph.speed_limit_mps, [13.4112, 50 / 3.6, 10.0, 10.0, 0.0], rtol=1e-6)
    assert graph.has_speed_limit.tolist() == [True, True, True, True, False]


def test_no_limit_is_not_a_limit_and_a_later_type_holds_from_its_place():
    kinds = (
        '<type s="0.0" type="town"><speed max="no limit"/></type>',
        '<type s="6.0" type="town"><speed max="3" unit="m/s"/></type>',
    )
    parts = (section(lane(-1)), section(lane(-1), s=5.0))
    graph = read_opendrive(town(road(1, *parts, extra="".join(kinds))))
    assert graph.has_speed_limit.tolist() == [False, True]
    assert graph.speed_limit_mps.tolist() == [0.0, 3.0]


def test_a_light_governs_the_lanes_that_refer_to_it():
    post = (
        '<signal id="70" s="4.0" t="-6.0" zOffset="5.0" hOffset="0.5" orientation="-" dynamic="yes" type="1000001">'
        '<validity fromLane="0" toLane="0"/></signal>'
        '<signal id="71" s="4.0" t="-6.0" orientation="+" dynamic="no" type="206"/>'
    )
    near = (
        '<signalReference id="70" s="1.0" t="0" orientation="+"><validity fromLane="-1" toLane="-2"/></signalReference>'
    )
    far = '<signalReference id="70" s="9.0" t="0" orientation="+"><validity fromLane="1" toLane="1"/></signalReference>'
    parts = (section(lane(1), lane(-1), lane(-2), lane(-3)), section(lane(1), lane(-1), s=5.0))
    switch = '<controller id="8" name=""><control signalId="70" type=""/></controller>'
    graph = read_opendrive(town(switch, road(1, *parts, signals=near + far), road(2, section(lane(-1)), signals=post)))
    assert (graph.signals.ids, graph.signals.types, graph.signals.controllers) == (("70",), ("1000001",), ("8",))
    assert graph.ids[graph.signals.lanes_of(0)].tolist() == [[1, 0, -1], [1, 0, -2], [1, 1, 1]]
    assert graph.signals.position_m.tolist() == [[4.0, -6.0, 5.0]]
    assert graph.signals.heading_rad.tolist() == [0.5]


@pytest.mark.parametrize(("orientation", "lanes"), [("+", [1]), ("-", [-1, -2]), ("none", [1, -1, -2])])
def test_a_light_that_names_no_lanes_governs_those_of_its_orientation_as_in_carla(orientation, lanes):
    light = f'<signal id="5" s="1.0" t="0.0" orientation="{orientation}" dynamic="yes" type="1000001"/>'
    graph = read_opendrive(town(road(1, TWO_LANES, signals=light)))
    assert graph.ids[graph.signals.lanes_of(0), 2].tolist() == lanes


# -- what a file may be ------------------------------------------------------------------------------------------------

SMALL = town(road(1, TWO_LANES))


def assert_equal(first, second):
    for name in LaneGraph.__dataclass_fields__:
        if name != "signals":
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_gzip_and_a_namespace_make_no_difference():
    assert_equal(read_opendrive(gzip.compress(SMALL)), read_opendrive(SMALL))
    named = SMALL.replace(
        b"<OpenDRIVE>", b'<OpenDRIVE xmlns="http://code.asam.net/simulation/standard/opendrive_schema">'
    )
    assert_equal(read_opendrive(named), read_opendrive(SMALL))


LAUGHS = b'<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("data", "found", "reason"),
    [
        (b"", "expected XML", Reason.DECODE),
        (b"not xml", "expected XML", Reason.DECODE),
        (SMALL[:-20], "expected XML", Reason.DECODE),
        (gzip.compress(SMALL)[:-20], "whole gzip file", Reason.TRUNCATED),
        (b"\x1f\x8b" + bytes(40), "sound gzip file", Reason.DECODE),
        (SMALL.replace(b"<OpenDRIVE>", LAUGHS + b"<OpenDRIVE>"), "no document type", Reason.UNSUPPORTED),
        ((LAUGHS + b"<OpenDRIVE/>").decode().encode("utf-16"), "expected UTF-8", Reason.UNSUPPORTED),
        (b"<html/>", "XML of <html>", Reason.BAD_METADATA),
        (town(), "expected roads", Reason.BAD_METADATA),
        (town(road(1, section())), "expected lanes", Reason.BAD_METADATA),
        (town(road("A4", TWO_LANES)), "number as id of <road>", Reason.BAD_METADATA),
        (town(road(1, section(lane(-2)))), "lane -1 beside -2", Reason.BAD_METADATA),
        (town(road(1, TWO_LANES, section(lane(-1), s=-3.0))), "sections by growing s", Reason.BAD_METADATA),
        (town(road(1, TWO_LANES, plan=piece("<circle/>"))), r"found \['circle'\]", Reason.UNSUPPORTED),
        (SMALL.replace(b"<planView>", b"<planView><!-- ").replace(b"</planView>", b" --></planView>"), "with geometry", Reason.BAD_METADATA),
        (SMALL.replace(b'hdg="0.0"', b'hdg="nan"'), "finite number as hdg", Reason.BAD_METADATA),
        (SMALL.replace(b'hdg="0.0"', b""), "number as hdg of <geometry>, found None", Reason.BAD_METADATA),
        (SMALL.replace(b'length="10.0"', b'length="1e15"'), "at most 20000000 points", Reason.TOO_LARGE),
        (SMALL.replace(b"<link>", b'<type s="0"><speed max="9" unit="knots"/></type><link>', 1), "found 'knots'", Reason.BAD_METADATA),
    ],
)  # fmt: skip
def test_what_is_no_map_is_refused_with_a_reason(data, found, reason):
    with pytest.raises(SourceError, match=found) as caught:
        read_opendrive(data)
    assert caught.value.reason is reason


def test_a_refusal_names_the_road():
    with pytest.raises(SourceError, match=r"^road 1: expected a finite number as hdg"):
        read_opendrive(SMALL.replace(b'hdg="0.0"', b'hdg="1e999"'))


def test_a_declared_encoding_hides_no_document_type():
    """In EBCDIC the forbidden word has other bytes; the declaration is ignored, and so is that hiding place."""
    hidden = b'<?xml version="1.0" encoding="cp037"?>' + (LAUGHS + b"<OpenDRIVE/>").decode().encode("cp037")
    with pytest.raises(SourceError, match="expected XML"):
        read_opendrive(hidden)


def test_more_text_than_allowed_is_refused_before_it_is_unpacked(monkeypatch):
    monkeypatch.setattr(opendrive_tables, "MAX_NBYTES", 100_000)
    with pytest.raises(SourceError, match="at most 100000 bytes") as caught:
        read_opendrive(gzip.compress(bytes(50_000_000)))
    assert caught.value.reason is Reason.TOO_LARGE


def test_points_are_counted_before_they_are_made(monkeypatch):
    monkeypatch.setattr(lane_shapes, "MAX_POINTS", 33)
    assert len(read_opendrive(SMALL).s_m) == 33
    with pytest.raises(SourceError, match="at most 33 points of lanes, found 36"):
        read_opendrive(town(road(1, TWO_LANES, length=11.0)))


CROSSING = town(
    road(1, section(lane(1), lane(-1)), links=link("successor", 9, kind="junction")),
    road(
        2,
        section(lane(-1, after=-1)),
        section(lane(-1), s=4.0),
        junction=9,
        plan=piece('<spiral curvStart="0.0" curvEnd="0.2"/>'),
    ),
    junction(9, (1, 2, [(-1, -1)])),
)


@given(
    place=st.integers(0, len(CROSSING) - 1), byte=st.sampled_from(list(b'0123456789-.e"<> axy')), cut=st.integers(0, 40)
)
def test_a_damaged_map_gives_a_refusal_or_a_sound_graph(place, byte, cut):
    data = CROSSING[:place] + bytes([byte]) + CROSSING[place + cut :]
    try:
        found = np.isfinite(read_opendrive(data, spacing_m=5.0).center_m).all()
    except SourceError as error:
        found = re.search("expected .*, found .*; ", str(error))
    assert found


# -- real towns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Town01", "Town03", "Town10HD"])
def test_one_lane_ends_where_the_next_one_begins_in_real_towns(name):
    graph = read_opendrive(shared_data("carla_xodr", f"{name}.xodr.gz").read_bytes())
    driving = graph.is_type("driving")
    source = np.repeat(np.arange(graph.num_lanes), np.diff(graph.successor_offsets))
    both = driving[source] & driving[graph.successors]
    end, begin = graph.offsets[source + 1] - 1, graph.offsets[graph.successors]
    gap_m = np.linalg.norm(graph.center_m[end] - graph.center_m[begin], axis=1)[both]
    assert np.mean(gap_m < 0.01) > 0.995  # Town03 itself has one jump of a lane's width
    ahead = graph.center_m[end] - graph.center_m[end - 1], graph.center_m[begin + 1] - graph.center_m[begin]
    cosine = np.sum(ahead[0] * ahead[1], axis=1) / np.prod(np.linalg.norm(ahead, axis=2), axis=0)
    assert np.mean(cosine[both] > 0.9) > 0.995
    assert (np.diff(graph.successor_offsets)[driving] > 0).all()


def test_every_light_of_a_real_town_looks_at_who_drives_under_it():
    graph = read_opendrive(shared_data("carla_xodr", "Town03.xodr.gz").read_bytes())
    assert len(graph.signals.ids) == 38
    for signal, heading in enumerate(graph.signals.heading_rad):
        lanes = graph.signals.lanes_of(signal)
        assert graph.is_junction[lanes].all() and graph.is_type("driving")[lanes].all() and len(lanes)
        step = graph.center_m[graph.offsets[lanes] + 1] - graph.center_m[graph.offsets[lanes]]
        assert (step[:, 0] * math.cos(heading) + step[:, 1] * math.sin(heading) > 0).all()


@pytest.mark.soak
def test_the_largest_town_is_read_in_half_a_minute_and_two_gigabytes():
    path = shared_data("carla_xodr", "Town12.xodr.gz")
    code = f"""
import pathlib, resource, time
from tasks.opendrive import read_opendrive
start = time.process_time()
graph = read_opendrive(pathlib.Path({str(path)!r}).read_bytes())
print(graph.num_lanes, time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    num_lanes, seconds, peak_kib = (float(word) for word in done.stdout.split())
    assert num_lanes == 17111
    assert seconds < 30
    assert peak_kib < 2 * 1024**2
