"""Planner samples from above, as inline SVG and as a picture: the same marks, two pens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.markup import Markup, tag
from pipeline.store.metadata import DatasetInfo, read_info
from pipeline.store.rows import RowReader
from pipeline.store.tables import read_table
from pipeline.track_arrays import keeps_tracks
from pipeline.track_scenes import TrackScenes
from schemas.errors import DatasetError
from schemas.planner import MASKS, TENSORS, PlannerParams
from schemas.vehicles import vehicle_axles, vehicle_size
from tasks.chart import evenly
from tasks.from_above import EGO_SIZE_M, LEGEND, LIGHTS, Mark, marks_of, on_page, side_m
from tasks.planner_normalize import denormalize_observation, stored_normalization

SIDE_PX = 520
COLOURS = {
    "surface": "#e4e7eb",
    "boundary": "#9aa3ad",
    "centre": "#c3c9d0",
    "route": "#b78cf0",
    "light-green": "#1a8f46",
    "light-yellow": "#c58a00",
    "light-red": "#d1242f",
    "static": "#7d6a52",
    "vehicle": "#2f6fce",
    "pedestrian": "#c2410c",
    "bicycle": "#0f766e",
    "history": "#2f6fce",
    "neighbor-future": "#5c93e6",
    "ego-future": "#c2185b",
    "ego": "#c2185b",
}
"""Of the picture, which is always light; the page has its own in both themes."""
_WIDTHS = {
    "route": 5,
    "ego-future": 3,
    "light-green": 3,
    "light-yellow": 3,
    "light-red": 3,
    "history": 2,
    "neighbor-future": 2,
}
_FILLED = frozenset({"surface", "static", "vehicle", "pedestrian", "bicycle", "ego"})
_DASHED = frozenset({"history"})
_BACKGROUND, _INK = "#f6f8fa", "#24292f"


def colour_of(kind: str) -> tuple[int, int, int]:
    """Return red, green and blue of a kind of mark."""
    red, green, blue = bytes.fromhex(COLOURS[kind][1:])
    return red, green, blue


class PlannerSamples:
    """The samples of a planner dataset, read one at a time and in their physical units.

    Raises
    ------
    DatasetError
        Not a planner dataset.
    """

    def __init__(self, path: Path, info: DatasetInfo | None = None) -> None:
        self.info = read_info(path) if info is None else info
        if not has_samples(self.info):
            raise DatasetError("expected the planner's tensors, found none; convert with --recipe diffusion-planner")
        self._reader = RowReader(self.info)
        self._tracks = TrackScenes(self.info) if keeps_tracks(self.info) else None
        is_sample = self._reader.read("is_anchor", 0, self.info.num_steps) & self._reader.read(
            "valid", 0, self.info.num_steps
        )
        self.anchors = np.flatnonzero(is_sample)
        """Steps that are samples."""
        episodes = read_table(self.info, "episodes", ["stop", "details"]).to_pylist()
        self._ends = np.array([row["stop"] for row in episodes])
        self._ego_models = [str(json.loads(row["details"]).get("ego_type", "")) for row in episodes]

    def chosen(self, count: int, span: tuple[int, int] | None = None) -> np.ndarray:
        """Return at most ``count`` of the samples, evenly spread over the dataset, or over some of its steps."""
        anchors = self.anchors
        if span is not None:
            anchors = anchors[(anchors >= span[0]) & (anchors < span[1])]
        return anchors[evenly(len(anchors), count)]

    def sample(self, step: int, *, physical: bool = True) -> dict[str, np.ndarray]:
        """Return the tensors and masks of one sample, without a batch axis."""
        if self._tracks is not None:
            block = self._tracks.block(np.array([step]))
            stored = stored_normalization(self._tracks.recipe.normalize) if physical else {}
            return {name: rows[0] for name, rows in denormalize_observation(block, stored).items()}
        names = [name for name in (*TENSORS, *MASKS) if name in self.info.arrays]
        block = {name: self._reader.take(name, np.array([step])) for name in names}
        scalings = stored_normalization(self.info.recipe["planner"]["normalize"])
        if physical and scalings:
            block = denormalize_observation(block, scalings)
        return {name: rows[0] for name, rows in block.items()}

    def marks(self, step: int) -> list[Mark]:
        """Return what a picture of one sample shows."""
        model = self._ego_models[int(np.searchsorted(self._ends, step, side="right"))]
        axles = vehicle_axles(model)
        usual = axles.rear_m if axles else PlannerParams().rear_axle[0]
        rear_axle_m = float(self.info.recipe["planner"]["rear_axle_m"]) or usual
        return marks_of(self.sample(step), rear_axle_m=rear_axle_m, ego_size_m=vehicle_size(model) or EGO_SIZE_M)


def has_samples(info: DatasetInfo) -> bool:
    """Return whether a dataset holds planner samples."""
    kept = {"is_anchor", "tracks_actors"}, {"is_anchor", *TENSORS}
    return bool(info.recipe.get("planner")) and any(names <= info.arrays.keys() for names in kept)


def counted(marks: Sequence[Mark]) -> str:
    """Say in words what a picture shows."""
    kinds = [mark.kind for mark in marks]
    ego = next((mark.points[-1] for mark in marks if mark.kind == "ego-future"), np.zeros(2))
    things = [
        f"{kinds.count(kind)} {LEGEND[kind]}{'s' if kinds.count(kind) != 1 else ''}"
        for kind in ("vehicle", "pedestrian", "bicycle", "static")
        if kind in kinds
    ]
    lights = [f"{kinds.count(kind)} at {kind.removeprefix('light-')}" for kind in LIGHTS if kind in kinds]
    lanes = f"{kinds.count('surface')} lanes" + (f" ({', '.join(lights)})" if lights else "")
    seen = ", ".join([lanes, *things])
    side = f"{abs(ego[1]):.1f} m to the {'left' if ego[1] > 0 else 'right'}"
    return f"{seen}; the ego ends {ego[0]:.1f} m ahead and {side}"


def draw_svg(marks: Sequence[Mark], *, label: str) -> Markup:
    """Return one sample as SVG, forward up and left to the left."""
    side = side_m(list(marks))
    scale = SIDE_PX / side
    paths: dict[str, list[str]] = {}
    for mark in marks:
        points = on_page(mark.points, side, SIDE_PX)
        if (points.max(axis=0) < 0).any() or (points.min(axis=0) > SIDE_PX).any():
            continue
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points.tolist())
        paths.setdefault(mark.kind, []).append(path + ("Z" if mark.is_closed else ""))
    drawn = [tag("path", class_=f"plan {kind}", d="".join(parts)) for kind, parts in paths.items()]
    bar = _bar_m(side)
    ruler = [
        tag("path", class_="ruler", d=f"M14 {SIDE_PX - 14}h{bar * scale:.1f}"),
        tag("text", f"{bar} m", class_="tick large", x="14", y=f"{SIDE_PX - 20}"),
        tag("text", "forward (x) ↑, left (y) ←", class_="tick large", x="14", y="24"),
    ]
    size = f"0 0 {SIDE_PX} {SIDE_PX}"
    return tag("svg", drawn, ruler, class_="plan-view", viewbox=size, role="img", aria_label=label)


def draw_picture(marks: Sequence[Mark], *, title: str, side_px: int = SIDE_PX) -> Image.Image:
    """Return one sample as a picture, drawn at twice its size and reduced."""
    side, factor = side_m(list(marks)), 2
    whole_px = side_px * factor
    image = Image.new("RGB", (whole_px, whole_px), _BACKGROUND)
    pen = ImageDraw.Draw(image)
    for mark in marks:
        points = [(x, y) for x, y in on_page(mark.points, side, whole_px).tolist()]
        colour = COLOURS[mark.kind]
        if mark.kind in _FILLED:
            pen.polygon(points, fill=colour)
        else:
            pieces = zip(points[::2], points[1::2]) if mark.kind in _DASHED else [points]
            for piece in pieces:
                pen.line(list(piece), fill=colour, width=_WIDTHS.get(mark.kind, 1) * factor, joint="curve")
    bar, scale = _bar_m(side), whole_px / side
    low = whole_px - 14 * factor
    pen.line([(14 * factor, low), (14 * factor + bar * scale, low)], fill=_INK, width=2 * factor)
    font = ImageFont.load_default(13 * factor)
    pen.text((14 * factor, low - 6 * factor), f"{bar} m", _INK, font, anchor="ls")
    if title:
        pen.rectangle((0, 0, whole_px, 34 * factor), _BACKGROUND)
    pen.text((14 * factor, 24 * factor), title, _INK, font, anchor="ls")
    return image.resize((side_px, side_px), Image.Resampling.LANCZOS)


def picture_sheet(pictures: Sequence[Image.Image], columns: int = 3) -> Image.Image:
    """Return pictures of one size in rows, with the legend below."""
    columns = min(columns, len(pictures))
    rows, gap, side = -(-len(pictures) // columns), 8, pictures[0].width
    width = gap + columns * (side + gap)
    lines = _legend_lines(width - 2 * gap)
    top = gap + rows * (side + gap)
    sheet = Image.new("RGB", (width, top + 24 * len(lines) + gap), "white")
    for k, picture in enumerate(pictures):
        sheet.paste(picture, (gap + k % columns * (side + gap), gap + k // columns * (side + gap)))
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for row, kinds in enumerate(lines):
        y = top + 24 * row + 12
        for kind, x in kinds:
            half = 6 if kind in _FILLED else max(_WIDTHS.get(kind, 1) / 2, 1)
            for start in (0, 12) if kind in _DASHED else (0,):
                stop = start + 8 if kind in _DASHED else 20
                pen.rectangle((gap + x + start, y - half, gap + x + stop, y + half), COLOURS[kind])
            pen.text((gap + x + 26, y), LEGEND[kind], _INK, font, anchor="lm")
    return sheet


def legend() -> Markup:
    """Return the legend of the page."""
    items = []
    for kind, name in LEGEND.items():
        shape = tag("path", class_=f"plan {kind}", d="M2 2H26V14H2Z" if kind in _FILLED else "M0 8H28")
        swatch = tag("svg", shape, viewbox="0 0 28 16", class_="swatch", aria_hidden="true")
        items.append(tag("li", swatch, name))
    return tag("ul", items, class_="legend")


def _legend_lines(width: int) -> list[list[tuple[str, int]]]:
    font = ImageFont.load_default(13)
    lines: list[list[tuple[str, int]]] = [[]]
    x = 0
    for kind, name in LEGEND.items():
        advance = 26 + round(font.getlength(name)) + 18
        if x + advance > width and lines[-1]:
            lines.append([])
            x = 0
        lines[-1].append((kind, x))
        x += advance
    return lines


def _bar_m(side: float) -> int:
    return 10 if side < 100 else 20


def observed(samples: PlannerSamples, steps: Sequence[int], *, physical: bool) -> Mapping[str, np.ndarray]:
    """Return rows of the observation tensors of some samples, padding left out: ``name -> [n, features]``."""
    found: dict[str, list[np.ndarray]] = {}
    for step in steps:
        block = samples.sample(int(step), physical=physical)
        for name in ("ego_current_state", "neighbor_agents_past", "lanes"):
            rows = block[name].reshape(-1, block[name].shape[-1])
            found.setdefault(name, []).append(rows[rows.any(axis=1)])
    return {name: np.concatenate(parts).astype(np.float64) for name, parts in found.items()}
