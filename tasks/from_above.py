"""A planner sample seen from above, as outlines in metres: what a picture of it shows, before any is drawn.

The frame is the sample's own: the ego's rear axle at the origin, x forward, y left.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

EGO_SIZE_M = (4.9, 2.13)
"""Length and width of the ego's box where its model is not known: CARLA's Lincoln MKZ. The tensors do not hold its size."""

AHEAD = 0.7
"""Share of a picture's height that is forward of the ego."""

LIGHTS = ("light-green", "light-yellow", "light-red")
CLASSES = ("vehicle", "pedestrian", "bicycle")

LEGEND = {
    "surface": "lane",
    "boundary": "lane boundary",
    "centre": "lane centre",
    "route": "route",
    "light-green": "green light",
    "light-yellow": "yellow light",
    "light-red": "red light",
    "history": "history",
    "neighbor-future": "neighbour's future",
    "ego-future": "ego's future",
    "static": "static object",
    "vehicle": "vehicle",
    "pedestrian": "pedestrian",
    "bicycle": "bicycle",
    "ego": "ego",
}
"""Kinds of marks in the order in which they are painted, and what they are called."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One outline of the picture."""

    kind: str
    """A key of LEGEND."""
    points: Float[np.ndarray, "point 2"]
    """x and y in m."""
    is_closed: bool = False


def marks_of(
    sample: Mapping[str, np.ndarray], *, rear_axle_m: float = -1.389, ego_size_m: tuple[float, float] = EGO_SIZE_M
) -> list[Mark]:
    """Return the marks of one sample, in the order in which they are painted.

    Parameters
    ----------
    sample
        Tensors without a batch axis, in their physical units, by Diffusion Planner's names; masks ``..._valid`` are
        heeded where they are there, else rows of zeros are absent.
    rear_axle_m
        Place of the rear axle, forward of the middle of the ego's box.
    ego_size_m
        Length and width of the ego.
    """
    marks = [*_lanes(sample), *_routes(sample), *_objects(sample), *_neighbors(sample)]
    future = sample["ego_agent_future"][_valid(sample, "ego_agent_future")]
    marks.append(Mark("ego-future", np.vstack([np.zeros((1, 2)), future[:, :2]])))
    marks.append(Mark("ego", box(-rear_axle_m, 0.0, 0.0, ego_size_m), is_closed=True))
    order = list(LEGEND)
    return sorted((mark for mark in marks if len(mark.points) > 1), key=lambda mark: order.index(mark.kind))


def box(x: float, y: float, heading: float, size_m: tuple[float, float]) -> Float[np.ndarray, "6 2"]:
    """Return the corners of a box of some length and width, with a notch that points forward: a nose tells the heading."""
    length, width = size_m[0] / 2, size_m[1] / 2
    nose = 0.72 * length
    corners = np.array([[length, 0], [nose, width], [-length, width], [-length, -width], [nose, -width], [length, 0]])
    cos, sin = np.cos(heading), np.sin(heading)
    turned: np.ndarray = corners @ np.array([[cos, sin], [-sin, cos]]) + (x, y)
    return turned


def side_m(marks: list[Mark], *, least: float = 50.0, greatest: float = 140.0) -> float:
    """Return the side of the square to draw: it holds the ego's future, within bounds.

    The square reaches :data:`AHEAD` of its side forward of the ego, the rest behind it, and half of it to either side.
    """
    future = np.concatenate([mark.points for mark in marks if mark.kind == "ego-future"] or [np.zeros((1, 2))])
    forward, backward = float(future[:, 0].max()), float(-future[:, 0].min())
    sides = ((forward + 8) / AHEAD, (backward + 8) / (1 - AHEAD), 2 * (float(np.abs(future[:, 1]).max()) + 8))
    return float(np.clip(max(sides), least, greatest))


def on_page(points: Float[np.ndarray, "point 2"], side: float, side_px: float) -> Float[np.ndarray, "point 2"]:
    """Turn x forward and y left into px across and down, of a square of ``side`` m."""
    return np.stack([side / 2 - points[:, 1], AHEAD * side - points[:, 0]], axis=1) * (side_px / side)


def _valid(sample: Mapping[str, np.ndarray], name: str) -> Bool[np.ndarray, "*rows"]:
    mask = sample.get(f"{name}_valid")
    return np.asarray(sample[name].any(axis=-1) if mask is None else mask, np.bool_)


def _lanes(sample: Mapping[str, np.ndarray]) -> list[Mark]:
    marks = []
    for lane in sample["lanes"]:
        points = lane[lane[:, :8].any(axis=1)].astype(np.float64)
        if len(points) < 2:
            continue
        centre = points[:, :2]
        left, right = centre + points[:, 4:6], centre + points[:, 6:8]
        marks.append(Mark("surface", np.vstack([left, right[::-1]]), is_closed=True))
        marks += [Mark("boundary", left), Mark("boundary", right)]
        state = int(points[0, 8:12].argmax()) if points[0, 8:12].any() else len(LIGHTS)
        marks.append(Mark(LIGHTS[state] if state < len(LIGHTS) else "centre", centre))
    return marks


def _routes(sample: Mapping[str, np.ndarray]) -> list[Mark]:
    return [Mark("route", lane[lane[:, :8].any(axis=1)][:, :2].astype(np.float64)) for lane in sample["route_lanes"]]


def _objects(sample: Mapping[str, np.ndarray]) -> list[Mark]:
    rows = sample["static_objects"][_valid(sample, "static_objects")].astype(np.float64)
    return [
        Mark("static", box(x, y, float(np.arctan2(sin, cos)), (length, width)), is_closed=True)
        for x, y, cos, sin, width, length in rows[:, :6].tolist()
    ]


def _neighbors(sample: Mapping[str, np.ndarray]) -> list[Mark]:
    """Return boxes where neighbours are now, and the ways that they came and will go."""
    past, future = sample["neighbor_agents_past"].astype(np.float64), sample["neighbor_agents_future"]
    is_past, is_future = _valid(sample, "neighbor_agents_past"), _valid(sample, "neighbor_agents_future")
    marks = []
    for agent, now in enumerate(past[:, -1]):
        if not now.any():
            continue
        x, y, cos, sin, _, _, width, length = now[:8].tolist()
        kind = CLASSES[int(now[8:11].argmax())]
        marks.append(Mark(kind, box(x, y, float(np.arctan2(sin, cos)), (length, width)), is_closed=True))
        marks.append(Mark("history", past[agent][is_past[agent]][:, :2]))
        if agent < len(future):
            ahead = future[agent][is_future[agent]][:, :2].astype(np.float64)
            marks.append(Mark("neighbor-future", np.vstack([now[None, :2], ahead])))
    return marks
