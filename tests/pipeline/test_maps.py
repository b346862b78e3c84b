"""Maps by file and by town, parsed once; and a recorded drive that stays on the lanes of its town."""

import gzip
import struct
import threading

import numpy as np
import pytest

from pipeline import maps
from pipeline.maps import find_map, load_map
from schemas.errors import Reason, SourceError
from schemas.planner import PlannerParams
from tasks.kernels.planner_paths import lane_match
from tasks.planner_lanes import prepare_lanes
from tasks.planner_routes import match_path
from tests.conftest import shared_data
from tests.tasks.xodr_builder import lane, road, section, town

SMALL = town(road(1, section(lane(-1))))


@pytest.fixture(autouse=True)
def _nothing_cached():
    maps._cache.clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Town01.xodr").write_bytes(SMALL)
    (tmp_path / "Town10HD.xodr.gz").write_bytes(gzip.compress(SMALL))
    (tmp_path / "notes.txt").write_text("not a map")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Town01", "Town01.xodr"),
        ("Carla/Maps/Town01", "Town01.xodr"),
        ("town01", "Town01.xodr"),
        ("Town01_Opt", "Town01.xodr"),
        ("/Game/Carla/Maps/Town10HD_Opt", "Town10HD.xodr.gz"),
        ("Town10HD.xodr", "Town10HD.xodr.gz"),
    ],
)
def test_a_town_is_found_under_the_names_that_recordings_give_it(folder, name, file):
    assert find_map(folder, name) == folder / file


def test_of_a_plain_and_a_compressed_map_the_plain_one_is_taken(folder):
    (folder / "Town01.xodr.gz").write_bytes(b"")
    assert find_map(folder, "Town01") == folder / "Town01.xodr"


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("", "Town02", "found town01, town10hd"),
        ("", "", "a map of 'a named town'"),
        ("nowhere", "Town01", "found nothing at"),
    ],
)
def test_a_map_that_is_not_there_is_missed_by_name(folder, path, name, found):
    with pytest.raises(SourceError, match=found) as caught:
        load_map(folder / path, name)
    assert caught.value.reason is Reason.MISSING_FILE


def test_a_pickled_map_is_refused_unopened_and_the_xodr_named(tmp_path):
    """Bench2Drive's ``Town01_HD_map.npz`` holds an array of objects called ``arr``."""
    file = tmp_path / "Town01_HD_map.npz"
    roads = np.empty(1, object)
    roads[0] = (0, {-1: [{"Points": [((1.0, 2.0, 0.0), (0.0, 0.0, 0.0), False)], "Type": "Solid"}]})
    np.savez_compressed(file, arr=roads)
    with np.load(file) as stored, pytest.raises(ValueError, match="allow_pickle=False"):
        stored["arr"]
    for path in (file, tmp_path):
        with pytest.raises(SourceError, match=r"found Town01_HD_map.npz.*are pickles.*give the town's .xodr") as caught:
            load_map(path, "Town01")
        assert caught.value.reason is Reason.UNSUPPORTED
    (tmp_path / "Town01.xodr").write_bytes(SMALL)
    assert load_map(tmp_path, "Town01").ids.tolist() == [[1, 0, -1]]


def test_a_broken_map_is_refused_with_its_path(folder):
    (folder / "Town01.xodr").write_bytes(SMALL[:100])
    with pytest.raises(SourceError, match=r"^map .*Town01.xodr: expected XML"):
        load_map(folder, "Town01")


def test_equal_content_is_parsed_once_and_changed_content_again(folder):
    first = load_map(folder, "Town01")
    (folder / "copy.xodr").write_bytes(SMALL)
    assert load_map(folder / "copy.xodr") is first
    (folder / "Town01.xodr").write_bytes(town(road(2, section(lane(-1)))))
    assert load_map(folder, "Town01").ids.tolist() == [[2, 0, -1]]


def test_threads_that_ask_at_once_get_the_same_graph(folder):
    graphs = []
    threads = [threading.Thread(target=lambda: graphs.append(load_map(folder, "Town01"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(graph) for graph in graphs}) == 1


def test_a_graph_that_others_hold_cannot_be_written_to(folder):
    graph = load_map(folder, "Town01")
    for array in (graph.center_m, graph.ids, graph.signals.lanes):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_only_the_maps_used_last_are_kept(folder):
    graphs = []
    for index in range(maps.MAX_CACHED + 1):
        (folder / f"{index}.xodr").write_bytes(town(road(index, section(lane(-1)))))
        graphs.append(load_map(folder / f"{index}.xodr"))
    assert load_map(folder / f"{maps.MAX_CACHED}.xodr") is graphs[-1]
    assert load_map(folder / "0.xodr") is not graphs[0]


# -- a real drive ------------------------------------------------------------------------------------------------------


def hero_poses(data):
    """Read the town and the poses (x, y, yaw in CARLA's axes, metres and degrees) of the hero from a recorder's log."""

    def text(at):
        (size,) = struct.unpack_from("<H", data, at)
        return data[at + 2 : at + 2 + size].decode(), at + 2 + size

    _, at = text(2)
    name, at = text(at + 8)
    hero, poses = None, []
    while at < len(data):
        kind, size = struct.unpack_from("<BI", data, at)
        body = at + 5
        if kind == 2 and hero is None:
            hero = _hero_of(data, body, text)
        elif kind == 6:
            rows = struct.iter_unpack("<I6f", data[body + 2 : body + size])
            poses += [(x / 100, y / 100, yaw) for actor, x, y, _, _, _, yaw in rows if actor == hero]
        at = body + size
    return name, np.array(poses)


def _hero_of(data, body, text):
    (count,) = struct.unpack_from("<H", data, body)
    at = body + 2
    for _ in range(count):
        (actor,) = struct.unpack_from("<I", data, at)
        _, at = text(at + 33)
        (attributes,) = struct.unpack_from("<H", data, at)
        at += 2
        for _ in range(attributes):
            key, at = text(at + 1)
            value, at = text(at)
            if (key, value) == ("role_name", "hero"):
                return actor
    return None


def test_the_recorded_hero_drives_on_the_lanes_of_its_town():
    """Two conventions meet here: a wrong sign of y or yaw puts the car 130 m off, or on the opposite lane."""
    name, carla_poses = hero_poses(shared_data("carla_recorder", "DistanceBetweenVehicles.log").read_bytes())
    graph = load_map(shared_data("carla_xodr"), name)
    x, y, yaw_deg = carla_poses.T
    lanes, flat, cuts = prepare_lanes(graph, PlannerParams()), np.zeros(len(x)), np.zeros(len(x), bool)
    poses = np.column_stack([x, -y, -np.radians(yaw_deg), flat])
    matched = match_path(poses, cuts, lanes)
    assert len(poses) > 100
    assert (matched >= 0).all()
    found = np.empty((len(poses), 3))
    for step, lane_index in enumerate(matched):
        lane_match(poses[step], graph.center_m[graph.points_of(lanes.graph_lane[lane_index])], found[step])
    assert np.mean(found[:, 0] < 2.0) > 0.95
    assert np.mean(np.degrees(found[:, 1]) < 15) > 0.95
    mirrored = match_path(np.column_stack([x, y, np.radians(yaw_deg), flat]), cuts, lanes)
    assert (mirrored < 0).all()


def test_the_map_of_another_town_is_refused_and_a_name_of_ones_own_is_not(tmp_path):
    for name in ("Town02.xodr", "Town01_Opt.xodr", "campus.xodr"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceError, match=r"expected the map of Carla/Maps/Town01, found Town02\.xodr; give"):
        maps.find_map(tmp_path / "Town02.xodr", "Carla/Maps/Town01")
    for name, place in (
        ("Town01_Opt.xodr", "Town01"),
        ("campus.xodr", "Town01"),
        ("Town02.xodr", "campus"),
        ("Town02.xodr", ""),
    ):
        assert maps.find_map(tmp_path / name, place) == tmp_path / name
