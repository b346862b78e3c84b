"""From the XML of an OpenDRIVE map to flat tables of numbers, without any geometry yet."""

import gzip
import math
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO

from schemas.errors import Reason, SourceError, locate
from tasks.plan_view import ARC, LINE, PARAM_POLY3, POLY3, SPIRAL

MAX_NBYTES = 1 << 30
"""Largest text that is read; CARLA's Town12 has 71 MB."""

Record = tuple[int, float, float, float, float, float]
"""Owner, ``s`` from which it holds, and the four coefficients of a cubic."""

_KINDS = {"line": LINE, "arc": ARC, "spiral": SPIRAL, "poly3": POLY3, "paramPoly3": PARAM_POLY3}
_PARAMS = {
    LINE: (),
    ARC: ("curvature",),
    SPIRAL: ("curvStart", "curvEnd"),
    POLY3: ("a", "b", "c", "d"),
    PARAM_POLY3: ("aU", "bU", "cU", "dU", "aV", "bV", "cV", "dV"),
}
_MPS_PER = {"m/s": 1.0, "km/h": 1 / 3.6, "kmh": 1 / 3.6, "mph": 0.44704, "": 1.0}  # the default is m/s


@dataclass(slots=True)
class Road:
    """One ``<road>``; its rows in the tables carry its position in ``Tables.roads``."""

    id: int
    length_m: float
    junction: int
    is_left_hand: bool
    """Whether traffic keeps left, so that lanes of negative id run against ``s``."""
    links: dict[str, tuple[str, int]]
    """``predecessor`` and ``successor`` to ``("road" or "junction", id)``."""
    sections: list[int] = field(default_factory=list)
    """Rows in ``Tables.sections``."""


@dataclass(slots=True)
class Lane:
    """One ``<lane>``, but for the centre lane, which has no width."""

    section: int
    """Row in ``Tables.sections``."""
    id: int
    type: str
    links: dict[str, list[int]]
    """``predecessor`` and ``successor`` to lane ids."""
    has_border: bool
    """Whether it is bounded by ``<border>`` instead of ``<width>``."""


@dataclass(slots=True)
class SignalRow:
    """One ``<signal>`` that changes, such as a traffic light."""

    id: str
    road: int
    type: str
    pose: tuple[float, float, float, float]
    """s, t, height over the road, heading relative to it."""


@dataclass(slots=True)
class Claim:
    """What says that a signal governs lanes: a ``<signal>`` itself, or a ``<signalReference>``."""

    signal: str
    road: int
    s: float
    orientation: str
    lanes: list[tuple[int, int]]
    """Lane ids, from and to, both inclusive; none where orientation alone decides."""


@dataclass(slots=True)
class Tables:
    """A map as the file has it."""

    roads: list[Road] = field(default_factory=list)
    pieces: list[tuple[float, ...]] = field(default_factory=list)
    """Road, s, x, y, heading, length, kind, and nine parameters (see :class:`tasks.plan_view.Pieces`)."""
    offsets: list[Record] = field(default_factory=list)
    elevations: list[Record] = field(default_factory=list)
    superelevations: list[Record] = field(default_factory=list)
    sections: list[tuple[int, float]] = field(default_factory=list)
    """Road and s."""
    lanes: list[Lane] = field(default_factory=list)
    widths: list[Record] = field(default_factory=list)
    """Owned by lanes: widths, or the outer border's distance from the centre lane; ``s`` counts from the road's start."""
    lane_speeds: list[Record] = field(default_factory=list)
    """Owned by lanes; the first coefficient is the limit in m/s, NaN where a record lifts it."""
    road_speeds: list[Record] = field(default_factory=list)
    signals: list[SignalRow] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    controllers: dict[str, str] = field(default_factory=dict)
    """Signal id to controller id."""
    connections: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    """Junction and incoming road to (lane id there, connecting road, lane id on it)."""


def read_tables(data: bytes) -> Tables:
    """Read an OpenDRIVE map, plain or gzip.

    The text may come from anywhere: document types, by which entities are declared, are refused, and sizes are bounded.

    Raises
    ------
    SourceError
        Not OpenDRIVE, damaged, too large, or with values that are no numbers.
    """
    text = _text(data)
    tables = Tables()
    try:
        # Declared encodings are ignored: under another one the search for a document type would see other characters.
        parser = ET.XMLParser(encoding="utf-8")
        depth = 0
        for event, element in ET.iterparse(BytesIO(text), ("start", "end"), parser):
            depth += 1 if event == "start" else -1
            if depth == 1 and event == "end":
                _read_top(tables, element)
                element.clear()  # a road once read needs no memory: Town12 would take 0.8 GB
            elif depth == 1 and element.tag != "OpenDRIVE":
                raise SourceError(f"expected an OpenDRIVE map, found XML of <{element.tag}>; name the .xodr file")
    except ET.ParseError as error:
        raise SourceError(f"expected XML, found {error}; fetch the map again", Reason.DECODE) from error
    if not tables.roads:
        raise SourceError("expected roads, found none; name the .xodr file of a town")
    return tables


def _text(data: bytes) -> bytes:
    """Return the XML of a plain or compressed map; refuse what could expand into more than it is."""
    text = data
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.GzipFile(fileobj=BytesIO(data)) as stream:
                text = stream.read(MAX_NBYTES + 1)
        except EOFError as error:
            raise SourceError("expected a whole gzip file, found its end; fetch it again", Reason.TRUNCATED) from error
        except (OSError, zlib.error) as error:
            raise SourceError(f"expected a sound gzip file, found {error}; fetch it again", Reason.DECODE) from error
    if len(text) > MAX_NBYTES:
        raise SourceError(f"expected at most {MAX_NBYTES} bytes of XML, found more; cut the map", Reason.TOO_LARGE)
    if b"\0" in text:  # a byte order mark outweighs the encoding the parser is given
        raise SourceError("expected UTF-8, found a null byte; convert the map from UTF-16", Reason.UNSUPPORTED)
    if b"<!DOCTYPE" in text:
        raise SourceError("expected no document type, found one; remove <!DOCTYPE ...>", Reason.UNSUPPORTED)
    return re.sub(rb'\sxmlns="[^"]*"', b"", text[:4096], count=1) + text[4096:]


def _read_top(tables: Tables, element: ET.Element) -> None:
    """Read one child of the root."""
    if element.tag == "road":
        with locate(road=element.get("id")):
            _read_road(tables, element)
    elif element.tag == "junction":
        with locate(junction=element.get("id")):
            _read_junction(tables, element)
    elif element.tag == "controller":
        for control in element.iter("control"):
            tables.controllers.setdefault(_word(control, "signalId"), _word(element, "id"))


def _read_road(tables: Tables, element: ET.Element) -> None:
    index = len(tables.roads)
    links: dict[str, tuple[str, int]] = {}
    for link in element.iterfind("link/*"):
        if link.tag in ("predecessor", "successor"):
            links[link.tag] = (link.get("elementType", "road"), _whole(link, "elementId"))
    road = Road(
        _whole(element, "id"),
        _number(element, "length"),
        _whole(element, "junction", -1),
        element.get("rule") == "LHT",
        links,
    )
    tables.roads.append(road)
    for piece in element.iterfind("planView/geometry"):
        tables.pieces.append((float(index), *_piece(piece)))
    tables.offsets += (_record(index, row, "s") for row in element.iterfind("lanes/laneOffset"))
    tables.elevations += (_record(index, row, "s") for row in element.iterfind("elevationProfile/elevation"))
    tables.superelevations += (_record(index, row, "s") for row in element.iterfind("lateralProfile/superelevation"))
    for kind in element.iterfind("type"):
        tables.road_speeds += (_speed(index, _number(kind, "s"), speed) for speed in kind.iterfind("speed"))
    for section in element.iterfind("lanes/laneSection"):
        road.sections.append(len(tables.sections))
        tables.sections.append((index, _number(section, "s")))
        _read_lanes(tables, section)
    _read_signals(tables, element, index)


def _piece(element: ET.Element) -> Iterator[float]:
    """Yield s, x, y, heading, length, kind and nine parameters of a ``<geometry>``."""
    for name in ("s", "x", "y", "hdg", "length"):
        yield _number(element, name)
    shapes = [child for child in element if child.tag in _KINDS]
    if len(shapes) != 1:
        raise SourceError(
            f"expected one of {list(_KINDS)} in <geometry>, found {[child.tag for child in element]}; correct the map",
            Reason.UNSUPPORTED,
        )
    (shape,) = shapes
    kind = _KINDS[shape.tag]
    params = [_number(shape, name) for name in _PARAMS[kind]]
    if kind == PARAM_POLY3:  # the standard's default is a parameter that runs from 0 to 1
        params.append(_number(element, "length") if shape.get("pRange") == "arcLength" else 1.0)
    yield float(kind)
    yield from params
    yield from [0.0] * (9 - len(params))


def _read_lanes(tables: Tables, section: ET.Element) -> None:
    """Read the lanes of a section, by falling id: from the outermost on the left to the outermost on the right."""
    row = len(tables.sections) - 1
    start_m = tables.sections[row][1]
    lanes = sorted(((_whole(lane, "id"), lane) for lane in section.iterfind("*/lane")), key=lambda pair: -pair[0])
    for lane_id, element in lanes:
        if lane_id == 0:
            continue
        owner = len(tables.lanes)
        links: dict[str, list[int]] = {"predecessor": [], "successor": []}
        for link in element.iterfind("link/*"):
            if link.tag in links:
                links[link.tag].append(_whole(link, "id"))
        widths = [_record(owner, width, "sOffset", start_m) for width in element.iterfind("width")]
        borders = [_record(owner, border, "sOffset", start_m) for border in element.iterfind("border")]
        tables.lanes.append(Lane(row, lane_id, element.get("type", "none"), links, bool(borders and not widths)))
        tables.widths += widths or borders
        for speed in element.iterfind("speed"):
            tables.lane_speeds.append(_speed(owner, start_m + _number(speed, "sOffset"), speed))


def _read_signals(tables: Tables, road: ET.Element, index: int) -> None:
    for element in road.iterfind("signals/*"):
        if element.tag not in ("signal", "signalReference"):
            continue
        name, s = _word(element, "id"), _number(element, "s")
        if element.tag == "signal":
            if element.get("dynamic") != "yes":
                continue
            pose = (s, _number(element, "t"), _number(element, "zOffset", 0.0), _number(element, "hOffset", 0.0))
            tables.signals.append(SignalRow(name, index, element.get("type", ""), pose))
        lanes = [(_whole(row, "fromLane"), _whole(row, "toLane")) for row in element.iterfind("validity")]
        tables.claims.append(Claim(name, index, s, element.get("orientation", "none"), lanes))


def _read_junction(tables: Tables, element: ET.Element) -> None:
    junction = _whole(element, "id")
    for connection in element.iterfind("connection"):
        if connection.get("incomingRoad") is None or connection.get("connectingRoad") is None:
            continue  # virtual and direct junctions: a crossing of other kinds, where no lane leads to another
        key = (junction, _whole(connection, "incomingRoad"))
        target = _whole(connection, "connectingRoad")
        rows = tables.connections.setdefault(key, [])
        rows += ((_whole(link, "from"), target, _whole(link, "to")) for link in connection.iterfind("laneLink"))


def _record(owner: int, element: ET.Element, position: str, start_m: float = 0.0) -> Record:
    at, a, b, c, d = (_number(element, name) for name in (position, "a", "b", "c", "d"))
    return (owner, start_m + at, a, b, c, d)


def _speed(owner: int, s: float, element: ET.Element) -> Record:
    """Return a speed limit as a record, NaN where the file says that there is none."""
    text, unit = element.get("max", ""), element.get("unit", "")
    if text in ("no limit", "undefined"):
        return (owner, s, math.nan, 0.0, 0.0, 0.0)
    if unit not in _MPS_PER:
        raise SourceError(f"expected a speed in one of {list(_MPS_PER)[:4]}, found {unit!r}; correct the map")
    return (owner, s, _number(element, "max") * _MPS_PER[unit], 0.0, 0.0, 0.0)


def _number(element: ET.Element, name: str, default: float | None = None) -> float:
    text = element.get(name)
    if text is None and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SourceError(f"expected a finite number as {name} of <{element.tag}>, found {text!r}; correct the map")
    return value


def _whole(element: ET.Element, name: str, default: int | None = None) -> int:
    """Return an integer of 32 bits; ids of roads are strings in OpenDRIVE, and numbers in every map of CARLA."""
    text = element.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\s*-?\d{1,9}\s*", text):
        raise SourceError(f"expected a number as {name} of <{element.tag}>, found {text!r}; number the map's ids")
    return int(text)


def _word(element: ET.Element, name: str) -> str:
    text = element.get(name)
    if not text:
        raise SourceError(f"expected {name} of <{element.tag}>, found none; correct the map")
    return text
