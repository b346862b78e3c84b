"""One self-contained page: no script, no request, below MAX_NBYTES whatever the dataset."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np

import pipeline
from pipeline.markup import Markup, data_text, tag
from pipeline.preview import curves, hints, sections
from pipeline.preview.dataset_subject import DatasetSubject
from pipeline.preview.material import Material, PreviewOptions
from pipeline.preview.planner_view import PlannerSamples, counted, draw_svg, has_samples, legend, observed
from pipeline.preview.subject import Subject
from pipeline.preview.svg import histogram_chart
from schemas.planner import FEATURES
from tasks.chart import histogram

MAX_NBYTES = 5_000_000
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""The browser itself then refuses any request that a mistake here would make."""


def build_page(subject: Subject, options: PreviewOptions) -> bytes:
    """Return the page; it shows fewer episodes where it would be too large otherwise."""
    while True:
        data = _build(subject, options)
        if len(data) < MAX_NBYTES or options.episodes == options.samples == options.columns == 1:
            return data
        options = replace(
            options,
            episodes=-(-options.episodes // 2),
            samples=-(-options.samples // 2),
            columns=-(-options.columns // 2),
        )


def _build(subject: Subject, options: PreviewOptions) -> bytes:
    material = Material(subject, options)
    parts = [
        sections.view_table(material),
        sections.sheets(material),
        *_planner(subject, options),
        curves.signals(material),
        curves.trajectories(material),
        curves.timing(material),
        sections.pixels(material),
        sections.refused(material),
        sections.provenance(material),
    ]
    shown = [part for part in [hints.hints(material), *parts] if part is not None]
    title = f"Headrace preview: {subject.path.resolve().name}"
    body = [
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag("header", tag("h1", data_text(subject.path.resolve().name)), _facts(material)),
        tag("nav", tag("ul", [_entry(part) for part in shown]), aria_label="Parts of this page"),
        tag("main", shown, id="content"),
        tag(
            "footer",
            f"Made by Headrace {pipeline.__version__}. What is shown is sampled by rule: the same input gives the same page.",
        ),
    ]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("title", data_text(title, "bdi").removeprefix("<bdi>").removesuffix("</bdi>")),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(files("pipeline.preview").joinpath("page.css").read_text("utf-8"))),
    ]
    page = tag("html", tag("head", head), tag("body", body), lang="en")
    return f"<!doctype html>\n{page}\n".encode()


def _entry(part: Markup) -> Markup:
    anchor = part.split('id="', 1)[1].split('"', 1)[0]
    title = part.split("</h2>", 1)[0].rsplit(">", 1)[1]
    return tag("li", tag("a", Markup(title), href=f"#{anchor}"))


def _facts(material: Material) -> Markup:
    subject, chosen = material.subject, material.chosen
    rates = sorted({episode.rate_hz for episode in subject.episodes})
    listed = ", ".join(f"{rate:g} Hz" if rate else "irregular" for rate in rates[:4]) + (
        " and others" if len(rates) > 4 else ""
    )
    facts = [
        ("What", subject.kind),
        ("Episodes", f"{len(subject.episodes):,}"),
        ("Steps", f"{subject.num_steps:,}"),
        ("Duration", _duration(material)),
        ("Rate", listed),
        ("Refused pieces", f"{sum(material.refusals.counts.values()):,}"),
        *subject.facts(),
        ("Shown here, evenly spread", sections.of(len(chosen), len(subject.episodes), "episodes")),
    ]
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", data_text(value))) for name, value in facts], class_="facts"
    )


def _duration(material: Material) -> str:
    """Return how long all of it is; where the rate is irregular, as far as recorded times were read."""
    total_s, num_unknown = 0.0, 0
    for number, episode in enumerate(material.subject.episodes):
        times_s = material.lines[number][0] if number in material.lines else np.zeros(0)
        times_s = times_s[np.isfinite(times_s)]
        if episode.rate_hz:
            total_s += episode.num_steps / episode.rate_hz
        elif len(times_s):
            total_s += float(times_s[-1] - times_s[0])
        else:
            num_unknown += 1
    said = f"{total_s / 3600:.1f} h" if total_s >= 7200 else f"{total_s:.1f} s"
    return said if not num_unknown else f"{said}, and {num_unknown:,} of irregular rate"


def _planner(subject: Subject, options: PreviewOptions) -> list[Markup]:
    """Return the samples from above and their distributions; nothing for what holds none."""
    if not isinstance(subject, DatasetSubject) or not has_samples(subject.info):
        return []
    samples = PlannerSamples(subject.path, subject.info)
    span = None
    if options.episode is not None:
        episode = subject.episodes[options.episode]
        span = (episode.start, episode.start + episode.num_steps)
    chosen = samples.chosen(options.samples, span)
    said = (
        f"Shown: {sections.of(len(chosen), len(samples.anchors), 'samples')}. Seen from the ego's rear axle: forward is up, left is left. "
        "The notch of a box is its front. The ego's box has the size of its recorded model, or of CARLA's Lincoln MKZ."
    )
    figures = []
    for step in chosen.tolist():
        marks = samples.marks(step)
        caption = tag("figcaption", f"Step {step:,}: {counted(marks)}")
        figures.append(
            tag(
                "figure",
                caption,
                draw_svg(marks, label=f"Sample at step {step} from above: {counted(marks)}"),
                class_="card",
            )
        )
    views = tag("div", figures, class_="plans")
    return [
        sections.section("samples", "Planner samples from above", tag("p", said, class_="note"), legend(), views),
        *_observations(samples, chosen),
    ]


def _observations(samples: PlannerSamples, chosen: np.ndarray) -> list[Markup]:
    if not len(chosen):
        return []
    before, after = (observed(samples, chosen.tolist(), physical=physical) for physical in (True, False))
    stored = "as they are stored" if samples.info.recipe["planner"]["normalize"] != "none" else "stored as they are"
    parts: list[object] = [
        tag(
            "p",
            f"Of the {len(chosen)} samples above, padding left out; in physical units, and {stored}.",
            class_="note",
        )
    ]
    for name, rows in before.items():
        cards = [
            tag(
                "figure",
                tag("figcaption", tag("strong", feature)),
                _pair(rows[:, k], after[name][:, k], feature),
                class_="card",
            )
            for k, feature in enumerate(FEATURES[name])
        ]
        parts += [tag("h3", name), tag("div", cards, class_="small")]
    return [sections.section("tensors", "Planner tensors, before and after normalisation", parts)]


def _pair(before: np.ndarray, after: np.ndarray, feature: str) -> Markup:
    charts = []
    for values, what in ((before, "in physical units"), (after, "as stored")):
        counts, low, high = histogram(values)
        if np.isfinite(low):
            label = f"Distribution of {feature} {what}: {low:.3g} to {high:.3g}"
            charts.append(tag("div", histogram_chart(counts, low, high, label=label), what))
    return tag("div", charts, class_="row")


def write_page(subject: Subject, output: Path, options: PreviewOptions) -> Mapping[str, object]:
    """Write the page and say how large it is."""
    data = build_page(subject, options)
    output.write_bytes(data)
    return {"path": str(output), "nbytes": len(data)}
