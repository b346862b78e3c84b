"""The parts of the page: each turns some of the material into HTML, and says what was sampled of how many."""

from collections.abc import Sequence

import numpy as np

from pipeline.markup import Markup, data_text, join, table, tag
from pipeline.preview.material import Material
from pipeline.preview.subject import TO_UNIT_RANGE, Episode
from pipeline.preview.svg import histogram_chart, strip
from pipeline.preview.tiles import tile
from schemas.source import Fault

TILES_NBYTES = 2_600_000
"""Text of all frames on the contact sheets together."""
STRIP_CELLS = 165
LISTED = 8


def section(anchor: str, title: str, *children: object) -> Markup:
    """Return a part of the page under its heading."""
    return tag(
        "section", tag("h2", title, id=f"{anchor}-title"), *children, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def of(shown: int, total: int, what: str) -> str:
    """Say what was sampled: ``12 of 10,000 episodes``."""
    if total == 1:
        return f"the only {what.removesuffix('s')}"
    return f"all {total:,} {what}" if shown == total else f"{shown:,} of {total:,} {what}"


def name_of(episode: Episode, number: int) -> Markup:
    """Return an episode's number and key."""
    return join([f"{number:,} ", data_text(episode.key), "" if episode.is_served else " (not served)"])


# -- views and frames --------------------------------------------------------------------------------------------------


def served(material: Material) -> list[Episode]:
    """Return the episodes that are served, or all where none is."""
    episodes = material.subject.episodes
    return [episode for episode in episodes if episode.is_served] or list(episodes)


def view_table(material: Material) -> Markup:
    """Say of every view in how many episodes it is, and where it is missing; over all episodes."""
    episodes = served(material)
    rows = []
    for view, what in material.subject.views.items():
        has = np.array([view in episode.views for episode in episodes])
        missing = [data_text(episodes[k].key) for k in np.flatnonzero(~has)[:LISTED].tolist()]
        more = f" and {int((~has).sum()) - len(missing):,} more" if (~has).sum() > len(missing) else ""
        listed = join([*commas(missing), more]) if missing else "none"
        cells = np.array(
            [part.mean() if len(part) else 0.0 for part in np.array_split(has, max(1, min(len(has), STRIP_CELLS)))]
        )
        shown = strip(cells, label=f"Episodes with the view, from first to last: {int(has.sum())} of {len(has)}")
        rows.append((data_text(view), data_text(what), f"{int(has.sum()):,} of {len(has):,}", listed, shown))
    if not rows:
        return section("views", "Views", tag("p", "There are no camera views here."))
    headers = ("View", "What it is", "Episodes that have it", "Missing from", "First to last episode")
    return section("views", "Views", table("Views over all episodes", headers, rows, numeric=(2,)))


def sheets(material: Material) -> Markup | None:
    """Return a contact sheet for each episode: a row a view, a column an instant."""
    if not material.views:
        return None
    num_tiles = sum(len(pictures) for sheet in material.sheets.values() for pictures in sheet.pictures.values())
    most = TILES_NBYTES // max(num_tiles, 1)
    parts = [_sheet(material, number, most) for number in material.sheets]
    views = of(len(material.views), len(material.subject.views), "views")
    said = f"Shown: {of(len(parts), len(material.subject.episodes), 'episodes')}, {views}, evenly spread steps of each."
    return section("frames", "Frames", tag("p", said, class_="note"), parts)


def _sheet(material: Material, number: int, most_nbytes: int) -> Markup:
    episode, sheet = material.episode(number), material.sheets[number]
    headers = [
        f"{time_s:.2f} s" if np.isfinite(time_s) else f"step {step}" for time_s, step in zip(sheet.times_s, sheet.steps)
    ]
    rows = []
    for view, pictures in sheet.pictures.items():
        cells = [
            tag("div", data_text(picture), class_="none")
            if isinstance(picture, str)
            else tile(picture, alt=f"{view} at {header}, episode {number}", most_nbytes=most_nbytes)
            for picture, header in zip(pictures, headers)
        ]
        rows.append(tag("tr", tag("th", data_text(view), scope="row"), [tag("td", cell) for cell in cells]))
    head = tag("tr", tag("th", "View", scope="col"), [tag("th", header, scope="col") for header in headers])
    grid = tag("table", tag("thead", head), tag("tbody", rows), class_="sheet")
    label = f"Frames of episode {number}"
    return join([
        tag("h3", "Episode ", name_of(episode, number)),
        _instructions(episode),
        tag("div", grid, class_="scroll", tabindex="0", role="region", aria_label=label),
    ])  # fmt: skip


def commas(items: Sequence[Markup]) -> list[str]:
    """Return the items with commas between them."""
    return [part for item in items for part in (item, ", ")][:-1]


def _instructions(episode: Episode) -> Markup:
    if not episode.instructions:
        return tag("p", "No instruction.", class_="note")
    more = f" (and {len(episode.instructions) - 3:,} more)" if len(episode.instructions) > 3 else ""
    shown = [data_text(said, "q") for said in episode.instructions[:3]]
    return tag("p", [item for said in shown for item in (said, " ")], more)


def pixels(material: Material) -> Markup | None:
    """Return how bright each channel of each view is, before and after normalisation."""
    cards, rows = [], []
    for view in material.views:
        frames = material.frames_of(view)
        if not frames:
            continue
        values = np.concatenate(
            [frame[:: max(1, frame.shape[0] // 64), :: max(1, frame.shape[1] // 64)].reshape(-1, 3) for frame in frames]
        )
        values = values[values.any(axis=1)]
        if not len(values):
            continue
        counts = np.stack([np.histogram(values[:, channel], 32, (0, 256))[0] for channel in range(3)])
        means, stds = values.mean(axis=0), values.std(axis=0)
        label = f"Brightness of red, green and blue of {view}: means {means[0]:.0f}, {means[1]:.0f}, {means[2]:.0f}"
        chart = histogram_chart(counts, 0, 256, label=label, kinds=("bars red", "bars green", "bars blue"), width=300)
        cards.append(tag("figure", tag("figcaption", data_text(view)), chart, class_="card"))
        scaled = [(m / 255 - m0) / s0 for m, m0, s0 in zip(means, *material.subject.frame_scaling)]
        spread = [d / 255 / s0 for d, s0 in zip(stds, material.subject.frame_scaling[1])]
        before = [f"{mean:.1f} ± {std:.1f}" for mean, std in zip(means, stds)]
        after = [f"{mean:.2f} ± {std:.2f}" for mean, std in zip(scaled, spread)]
        rows.append((data_text(view), f"{len(frames):,}", *before, *after))
    if not cards:
        return None
    is_usual = material.subject.frame_scaling == TO_UNIT_RANGE
    how = "to [-1, 1], as openpi does" if is_usual else "by the recipe's mean and standard deviation"
    headers = ("View", "Frames", "Red", "Green", "Blue", "Red, normalised", "Green, normalised", "Blue, normalised")
    figures = table(
        f"Mean and standard deviation, in 0 to 255 and normalised: {how}", headers, rows, numeric=range(1, 8)
    )
    said = (
        "Brightness in 0 to 255 of the frames above: red, green and blue; pixels that are quite black, such as padding, are left out. "
        "Sky that is orange, or skin that is blue, means swapped channels."
    )
    return section(
        "pixels", "Colours and brightness", tag("p", said, class_="note"), tag("div", cards, class_="small"), figures
    )


# -- refused -----------------------------------------------------------------------------------------------------------


def refused(material: Material) -> Markup:
    """Return what was refused and why, with a frame from just before."""
    found = material.refusals
    total = sum(found.counts.values())
    if not total:
        return section("refused", "Quarantine", tag("p", "Nothing was refused."))
    counts = ", ".join(f"{count:,} {reason}" for reason, count in found.counts.items())
    rows = []
    for fault in found.shown:
        picture, caption = material.subject.near(fault)
        if isinstance(picture, str):
            thumb = data_text(picture)
        else:
            image = tile(picture, alt=f"{caption}, just before what was refused", most_nbytes=9000, width_px=112)
            thumb = tag("div", image, tag("span", data_text(caption), class_="note"), class_="thumb")
        steps = _steps(fault)
        rows.append((data_text(fault.episode or "the source"), data_text(fault.stream or "all"), steps, str(fault.reason),
                     data_text(fault.message), data_text(fault.path), thumb))  # fmt: skip
    headers = (
        "Episode",
        "View or signal",
        "Recorded steps",
        "Reason",
        "What was expected and found",
        "File",
        "Frame just before",
    )
    said = f"Refused: {counts}. Shown: {of(len(rows), total, 'pieces')}."
    return section("refused", "Quarantine", tag("p", said), table("What was refused, and why", headers, rows))


def _steps(fault: Fault) -> str:
    if fault.stop <= fault.start:
        return "all"
    return f"{fault.start:,}" if fault.stop == fault.start + 1 else f"{fault.start:,} to {fault.stop - 1:,}"


def provenance(material: Material) -> Markup:
    """Return where it comes from, checksums and sizes."""
    parts = []
    for facts in material.subject.provenance(material.chosen):
        rows = [[data_text(cell) for cell in row] for row in facts.rows]
        inner = table(facts.caption, facts.headers, rows, numeric=facts.numeric)
        parts.append(tag("details", tag("summary", facts.caption), inner, open=len(facts.rows) <= 40))
    return section("provenance", "Provenance, checksums and sizes", parts)
