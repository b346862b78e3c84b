"""Small charts as inline SVG, coloured by classes of the page's style, so that they follow light and dark."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.markup import Markup, tag
from tasks.chart import Spread, padded, thin, ticks

LINE_POINTS = 160
"""Points of a drawn line; peaks are kept."""
_RIGHT, _TOP, _BOTTOM = 6.0, 6.0, 16.0


@dataclass(frozen=True, slots=True)
class Axes:
    """A plot area: data coordinates and their place."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float
    left: float = 38.0
    """Room for the numbers of the y axis; none are written where there is little."""

    def place_x(self, x: np.ndarray) -> np.ndarray:
        """Return where values of x are, in px."""
        inner = self.width - self.left - _RIGHT
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * inner

    def place_y(self, y: np.ndarray) -> np.ndarray:
        """Return where values of y are, in px: up is more."""
        inner = self.height - _TOP - _BOTTOM
        return _TOP + (self.y[1] - y) / (self.y[1] - self.y[0]) * inner

    def grid(self, x_units: str = "") -> list[Markup]:
        """Return tick lines and their labels."""
        found = [tag("rect", class_="plot", x=_px(self.left), y=_px(_TOP), width=_px(self.width - self.left - _RIGHT),
                     height=_px(self.height - _TOP - _BOTTOM))]  # fmt: skip
        for value in ticks(*self.y) if self.left > 20 else ():
            y = float(self.place_y(np.array(value)))
            found.append(tag("path", class_="grid", d=f"M{self.left} {_px(y)}H{_px(self.width - _RIGHT)}"))
            found.append(tag("text", _number(value), class_="tick end", x=_px(self.left - 4), y=_px(y + 3.5)))
        found_x = ticks(*self.x, count=4)
        for value in found_x:
            label = _number(value) + (f" {x_units}" if value == found_x[-1] and x_units else "")
            at = float(self.place_x(np.array(value)))
            kind = "tick end" if at > self.width - 24 else "tick mid" if at > 14 else "tick"
            found.append(tag("text", label, class_=kind, x=_px(at), y=_px(self.height - 4)))
        return found


def chart(axes: Axes, marks: Sequence[Markup], *, label: str, x_units: str = "") -> Markup:
    """Return one chart; ``label`` says in words what it shows."""
    size = f"0 0 {axes.width:g} {axes.height:g}"
    return tag("svg", axes.grid(x_units), marks, class_="chart", viewbox=size, role="img", aria_label=label)


def line(axes: Axes, x: np.ndarray, y: np.ndarray, kind: str) -> Markup:
    """Return a line; NaN breaks it."""
    kept = thin(y, LINE_POINTS)
    shown_x, shown_y = axes.place_x(x[kept]), axes.place_y(np.clip(y[kept], *axes.y))
    parts, pen = [], "M"
    for px, py in zip(shown_x.tolist(), shown_y.tolist(), strict=True):
        if np.isfinite(px) and np.isfinite(py):
            parts.append(f"{pen}{px:.1f} {py:.1f}")
            pen = "L"
        else:
            pen = "M"
    return tag("path", class_=f"line {kind}", d="".join(parts))


def band(axes: Axes, low: float, high: float, kind: str) -> Markup | None:
    """Return a horizontal band between two values."""
    if not (np.isfinite(low) and np.isfinite(high)):
        return None
    top, bottom = axes.place_y(np.clip(np.array([high, low]), *axes.y)).tolist()
    return tag(
        "rect",
        class_=kind,
        x=_px(axes.left),
        y=_px(top),
        width=_px(axes.width - axes.left - _RIGHT),
        height=_px(max(bottom - top, 1.0)),
    )


def bars(axes: Axes, counts: np.ndarray, kind: str = "bars") -> Markup:
    """Return the outline of a histogram over the whole width of the axes."""
    edges = axes.place_x(np.linspace(*axes.x, len(counts) + 1))
    tops = axes.place_y(counts.astype(np.float64))
    floor = float(axes.place_y(np.array(axes.y[0])))
    path = f"M{edges[0]:.1f} {floor:.1f}" + "".join(
        f"V{top:.1f}H{right:.1f}" for top, right in zip(tops.tolist(), edges[1:].tolist(), strict=True)
    )
    return tag("path", class_=kind, d=f"{path}V{floor:.1f}Z")


def histogram_chart(
    counts: np.ndarray, low: float, high: float, *, label: str, kinds: Sequence[str] = ("bars",), width: float = 160
) -> Markup:
    """Return one or more histograms over the same bins: ``counts[series, bin]``."""
    stacked = np.atleast_2d(counts)
    left, right = (low, high) if high > low else padded(low, high)
    axes = Axes((left, right), (0.0, max(float(stacked.max(initial=0)), 1.0)), width, 100, left=6)
    return chart(axes, [bars(axes, row, kind) for row, kind in zip(stacked, kinds, strict=True)], label=label)


def feature_chart(lines: Sequence[tuple[np.ndarray, np.ndarray]], spread: Spread, *, label: str) -> Markup:
    """Return one feature over time, a line an episode, above the bands in which its values lie."""
    ends = [float(time_s[-1]) for time_s, _ in lines if len(time_s) and np.isfinite(time_s[-1])]
    seen = [
        spread.low,
        spread.high,
        *(float(edge) for _, y in lines if np.isfinite(y).any() for edge in (np.nanmin(y), np.nanmax(y))),
    ]
    known = [value for value in seen if np.isfinite(value)] or [float("nan")]
    axes = Axes((0.0, max([*ends, 1e-3])), padded(min(known), max(known)), 260, 100)
    marks = [band(axes, spread.q01, spread.q99, "band"), band(axes, spread.q25, spread.q75, "band inner")]
    drawn = [line(axes, time_s, y, f"s{k}") for k, (time_s, y) in enumerate(lines)]
    return chart(axes, [mark for mark in [*marks, *drawn] if mark is not None], label=label, x_units="s")


def path_chart(paths: Sequence[np.ndarray], *, label: str, size_px: float = 320) -> Markup:
    """Return ways in the plane, both axes at one scale, a dot at each beginning."""
    every = np.concatenate([path[np.isfinite(path).all(axis=1)] for path in paths])
    middle = (every.max(axis=0) + every.min(axis=0)) / 2
    half = max(float((every.max(axis=0) - every.min(axis=0)).max()) / 2 * 1.08, 1e-3)
    inner_x, inner_y = size_px - 38 - _RIGHT, size_px - _TOP - _BOTTOM
    half_x, half_y = half * max(1.0, inner_x / inner_y), half * max(1.0, inner_y / inner_x)
    axes = Axes((middle[0] - half_x, middle[0] + half_x), (middle[1] - half_y, middle[1] + half_y), size_px, size_px)
    marks: list[Markup] = []
    for k, path in enumerate(paths):
        marks.append(line(axes, path[:, 0], path[:, 1], f"s{k % 4}"))
        first = path[np.isfinite(path).all(axis=1)][:1]
        if len(first):
            x, y = axes.place_x(first[:, 0])[0], axes.place_y(first[:, 1])[0]
            marks.append(tag("circle", class_=f"dot s{k % 4}", cx=_px(x), cy=_px(y), r="3.5"))
    return chart(axes, marks, label=label)


def strip(shares: np.ndarray, *, label: str) -> Markup:
    """Return a bar of cells, each filled as far as its share in [0, 1] says."""
    width, height = 330.0, 12.0
    cell = width / max(len(shares), 1)
    filled = "".join(
        f"M{k * cell:.1f} {height * (1 - share):.1f}h{cell + 0.1:.1f}V{height}H{k * cell:.1f}Z"
        for k, share in enumerate(shares.tolist())
        if share
    )
    empty = tag("rect", class_="absent", x="0", y="0", width=f"{width:g}", height=f"{height:g}")
    return tag(
        "svg",
        empty,
        tag("path", class_="present", d=filled),
        class_="strip",
        viewbox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def _px(value: object) -> str:
    return f"{float(value):.1f}"  # type: ignore[arg-type]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 and abs(value) < 1e7 else f"{value:.3g}"
