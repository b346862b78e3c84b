"""The demo's road as an OpenDRIVE map, as CARLA ships one with each town.

OpenDRIVE is right-handed, so that CARLA's y and yaw are turned round (ASAM OpenDRIVE 1.7, sections 8 to 11).
"""

import gzip
from pathlib import Path

import numpy as np
from jaxtyping import Float

from pipeline.demo.annotation import ROAD_ID, world_from_plain
from pipeline.demo.driving import plan_drive
from pipeline.demo.road import BAY_M, LANE_M, WALK_M, Road

START_M, BEYOND_M = -100.0, 300.0
"""Where along the road the map begins, and how far it goes on after the bend."""
SECTION_M = 20.0
"""Length of a lane section: towns are cut into pieces of about this size too."""
SPEED_LIMIT_KM_H = 50

_LANES = (("driving", LANE_M), ("parking", BAY_M - LANE_M), ("sidewalk", WALK_M))
"""Of either side, from the centre line outwards."""


def write_town_map(path: Path, *, seed: int = 0) -> Path:
    """Write the map of the drive that :func:`~pipeline.demo.bench2drive.write_bench2drive_clip` makes of ``seed``.

    ``path`` ends in ``.xodr`` or ``.xodr.gz``; equal seeds give equal bytes.
    """
    text = town_map(plan_drive(0.1, seed).road, world_from_plain(seed)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def town_map(road: Road, world: Float[np.ndarray, "4 4"]) -> str:
    """Return the OpenDRIVE document of one road, ``world`` from plain coordinates."""
    arc_m = road.bend_radius_m * road.bend_rad
    lengths = (road.bend_start_m - START_M, arc_m, BEYOND_M)
    begins = (START_M, road.bend_start_m, road.bend_stop_m)
    shapes = ("<line/>", f'<arc curvature="{-road.turn / road.bend_radius_m!r}"/>', "<line/>")
    pieces = [
        _piece(road, world, begin, length, shape) for begin, length, shape in zip(begins, lengths, shapes, strict=True)
    ]
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n<OpenDRIVE>'
        '<header revMajor="1" revMinor="4" name="demo" north="0" south="0" east="0" west="0"/>'
        f'<road name="demo" length="{sum(lengths)!r}" id="{ROAD_ID}" junction="-1"><link/>'
        f'<type s="0.0" type="town"><speed max="{SPEED_LIMIT_KM_H}" unit="km/h"/></type>'
        f"<planView>{''.join(pieces)}</planView>"
        f"<lanes>{''.join(_section(place * SECTION_M) for place in range(int(sum(lengths) // SECTION_M) + 1))}</lanes>"
        "</road></OpenDRIVE>\n"
    )


def _piece(road: Road, world: np.ndarray, begin_m: float, length_m: float, shape: str) -> str:
    x, y, heading = (float(value) for value in road.place(begin_m, 0.0))
    at = world @ np.array([x, y, 0.0, 1.0])
    yaw = heading + float(np.arctan2(world[1, 0], world[0, 0]))
    return (
        f'<geometry s="{begin_m - START_M!r}" x="{float(at[0])!r}" y="{float(-at[1])!r}" hdg="{-yaw!r}" '
        f'length="{length_m!r}">{shape}</geometry>'
    )


def _section(start_m: float) -> str:
    return (
        f'<laneSection s="{start_m!r}"><left>{_side(1)}</left><center><lane id="0" type="none" level="false">'
        f'<roadMark sOffset="0.0" type="broken" color="white"/></lane></center><right>{_side(-1)}</right></laneSection>'
    )


def _side(sign: int) -> str:
    lanes = []
    for number, (kind, width) in enumerate(_LANES, start=1):
        link = f'<predecessor id="{sign * number}"/><successor id="{sign * number}"/>'
        lanes.append(
            f'<lane id="{sign * number}" type="{kind}" level="false"><link>{link}</link>'
            f'<width sOffset="0.0" a="{width!r}" b="0.0" c="0.0" d="0.0"/></lane>'
        )
    return "".join(lanes if sign < 0 else lanes[::-1])
