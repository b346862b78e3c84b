"""The parts of the page that are charts: signals over time and their distributions, ways in the plane, timing."""

from collections.abc import Sequence

import numpy as np

from pipeline.markup import Markup, data_text, table, tag
from pipeline.preview.material import LINE_EPISODES, TIMING_STEPS, Material
from pipeline.preview.sections import name_of, of, section
from pipeline.preview.subject import Episode, Signal
from pipeline.preview.svg import feature_chart, histogram_chart, path_chart
from tasks.chart import histogram, positions, spread_of


def signals(material: Material) -> Markup | None:
    """Return a card for each feature: over time, and its distribution before and after normalisation."""
    if not material.signals:
        return None
    total = sum(len(signal.features) for signal in material.subject.signals)
    drawn = sum(count for _, count in material.signals)
    lined = material.chosen[:LINE_EPISODES]
    rows = max((len(values) for values in material.pool.values()), default=0)
    said = (
        f"Shown: {of(drawn, total, 'features')}. Lines: {of(len(lined), len(material.subject.episodes), 'episodes')}. "
        f"Bands hold 98 % and 50 % of the values. Normalised is (value - mean) / std. Bands and histograms are over {rows:,} of {material.subject.num_steps:,} steps."
    )
    parts: list[object] = [tag("p", said, class_="note"), _line_legend(material, lined)]
    for signal, count in material.signals:
        parts.append(tag("h3", data_text(signal.name), f", {of(count, len(signal.features), 'features')}"))
        parts.append(tag("div", [_card(material, signal, k, lined) for k in range(count)], class_="cards"))
    return section("signals", "State, actions and other signals", parts)


def _line_legend(material: Material, numbers: Sequence[int]) -> Markup:
    items = []
    for k, number in enumerate(numbers):
        swatch = tag(
            "svg",
            tag("path", class_=f"line s{k}", d="M0 8H28"),
            viewbox="0 0 28 16",
            class_="swatch",
            aria_hidden="true",
        )
        items.append(tag("li", swatch, tag("span", "episode ", name_of(material.episode(number), number))))
    return tag("ul", items, class_="legend")


def _card(material: Material, signal: Signal, k: int, lined: Sequence[int]) -> Markup:
    feature, units = signal.features[k], signal.units[k]
    values, spread = material.pool[signal.name][:, k], material.spreads[signal.name, k]
    lines = [(material.lines[number][0], material.lines[number][1][signal.name][:, k]) for number in lined]
    unit = f" {units}" if units else ""
    said = f"{_short(spread.low)} to {_short(spread.high)}{unit}, median {_short(spread.median)}"
    if spread.num_non_finite:
        said += f", {spread.num_non_finite:,} not finite"
    charts = [
        tag("div", feature_chart(lines, spread, label=f"{feature} over time: {said}"), "over time", class_="wide")
    ]
    charts.append(
        tag(
            "div",
            _histogram(values, f"Distribution of {feature}: {said}"),
            f"distribution{', in' if unit else ''}{unit}",
        )
    )
    mean, std = _scaling(signal, k, values)
    if np.isfinite(std):
        label = (
            f"Distribution of {feature} after normalisation by mean {_short(mean)} and standard deviation {_short(std)}"
        )
        charts.append(tag("div", _histogram((values - mean) / (std + 1e-6), label), "normalised"))
    caption = tag("figcaption", tag("strong", data_text(feature)), tag("span", f" {said}", class_="note"))
    return tag("figure", caption, tag("div", charts, class_="row"), class_="card")


def _histogram(values: np.ndarray, label: str) -> Markup:
    counts, low, high = histogram(values)
    return histogram_chart(counts, low, high, label=label) if np.isfinite(low) else tag("p", "no finite value")


def _scaling(signal: Signal, k: int, values: np.ndarray) -> tuple[float, float]:
    """Return the mean and standard deviation that training uses, or else those of what was read."""
    if k < len(signal.mean) and k < len(signal.std):
        return signal.mean[k], signal.std[k]
    finite = values[np.isfinite(values)]
    return (float(finite.mean()), float(finite.std())) if len(finite) else (np.nan, np.nan)


def _short(value: float) -> str:
    return f"{value:.4g}"


def trajectories(material: Material) -> Markup | None:
    """Return ways in the plane, of whatever features are told to be x and y by their names."""
    every = [(signal.name, k, signal.whole_name(k)) for signal, count in material.signals for k in range(count)]
    pairs = positions([feature for _, _, feature in every])[:6]
    if not every:
        return None
    if not pairs:
        said = "No feature is told to be a position by its name, so no way in the plane is drawn."
        return section("ways", "Trajectories", tag("p", said, class_="note"))
    cards = []
    for across, along in pairs:
        (name_x, x, label_x), (name_y, y, label_y) = every[across], every[along]
        paths = [np.stack([rows[name_x][:, x], rows[name_y][:, y]], axis=1) for _, rows in material.lines.values()]
        paths = [path for path in paths if np.isfinite(path).all(axis=1).any()]
        if paths:
            chart = path_chart(paths, label=f"{label_y} over {label_x}, {len(paths)} episodes, both axes at one scale")
            caption = tag(
                "figcaption", data_text(label_x), " across, ", data_text(label_y), " up; a dot where an episode begins"
            )
            cards.append(tag("figure", caption, chart, class_="card path-view"))
    said = f"Shown: {of(len(material.chosen), len(material.subject.episodes), 'episodes')}. Both axes have one scale."
    return section("ways", "Trajectories", tag("p", said, class_="note"), tag("div", cards, class_="small"))


# -- time --------------------------------------------------------------------------------------------------------------


def timing(material: Material) -> Markup:
    """Return rates, jitter and gaps of the chosen episodes."""
    rows, cards = [], []
    for number in material.chosen:
        episode = material.episode(number)
        steps = np.arange(min(episode.num_steps, TIMING_STEPS))
        title, late_s = material.subject.lateness(number, steps)
        time_s = material.subject.times(number, steps)
        rows.append(_timing_row(episode, number, time_s))
        spread = spread_of(late_s * 1e3)
        if not np.isfinite(spread.median):
            continue
        said = f"{title} in ms, episode {number}: {_short(spread.low)} to {_short(spread.high)}"
        caption = tag("figcaption", name_of(episode, number), tag("span", f": {title}, ms", class_="note"))
        cards.append(tag("figure", caption, feature_chart([(time_s, late_s * 1e3)], spread, label=said), class_="card"))
    headers = (
        "Episode",
        "Steps",
        "Duration",
        "Nominal rate",
        "Measured rate",
        "Jitter",
        "Longest step",
        "Gaps",
        "Invalid steps",
    )
    shown = of(len(rows), len(material.subject.episodes), "episodes")
    looked = (
        f"Shown: {shown}, the first {TIMING_STEPS:,} steps of each. A gap is a step longer than 1.5 times the median."
    )
    return section("timing", "Rate, jitter and gaps", tag("p", looked, class_="note"),
                   table(f"Timing of {shown}", headers, rows, numeric=range(1, 9)), tag("div", cards, class_="small"))  # fmt: skip


def _timing_row(episode: Episode, number: int, time_s: np.ndarray) -> Sequence[object]:
    periods = np.diff(time_s)
    periods = periods[np.isfinite(periods)]
    usual = float(np.median(periods)) if len(periods) else np.nan
    measured = episode.rate_measured_hz if np.isfinite(episode.rate_measured_hz) else 1 / usual if usual else np.nan
    jitter_s = episode.jitter_s if np.isfinite(episode.jitter_s) else float(np.std(periods)) if len(periods) else np.nan
    return (
        name_of(episode, number),
        f"{episode.num_steps:,}",
        f"{episode.num_steps / episode.rate_hz if episode.rate_hz else periods.sum():.1f} s",
        f"{episode.rate_hz:g} Hz" if episode.rate_hz else "irregular",
        f"{measured:.2f} Hz" if np.isfinite(measured) else "unknown",
        f"{jitter_s * 1e3:.2f} ms" if np.isfinite(jitter_s) else "unknown",
        f"{periods.max() * 1e3:.1f} ms" if len(periods) else "unknown",
        f"{int((periods > 1.5 * usual).sum()):,}" if len(periods) else "0",
        f"{episode.num_invalid:,}",
    )
