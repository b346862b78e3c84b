"""What deserves a look first, found by simple rules."""

from collections.abc import Sequence

import numpy as np

from pipeline.markup import Markup, data_text, join, tag
from pipeline.preview.material import Material
from pipeline.preview.sections import LISTED, commas, section, served
from tasks.odd_pictures import mean_picture, odd_pictures

DARK = 6
"""Mean brightness, in 0 to 255, under which a frame is black, or nearly."""


def hints(material: Material) -> Markup:
    """Return what deserves a look first, found by simple rules."""
    found = [*_view_hints(material), *_signal_hints(material)]
    total = sum(material.refusals.counts.values())
    if total:
        found.append(
            join(
                [
                    f"{total:,} piece{'s' if total != 1 else ''} of the input refused: see ",
                    tag("a", "Quarantine", href="#refused"),
                    ".",
                ]
            )
        )
    invalid = sum(episode.num_invalid for episode in material.subject.episodes)
    if invalid:
        found.append(join([f"{invalid:,} of {material.subject.num_steps:,} steps are not valid, and never served."]))
    if not found:
        found.append(join(["Nothing stands out: every view is in every episode, nothing was refused."]))
    return section("first", "What stands out", tag("ul", [tag("li", item) for item in found]))


def _view_hints(material: Material) -> list[Markup]:
    found, episodes = [], served(material)
    gone = len(material.subject.episodes) - len(episodes)
    if gone:
        names = [data_text(episode.key) for episode in material.subject.episodes if not episode.is_served]
        what = "episode is" if gone == 1 else "episodes are"
        found.append(
            join([f"{gone:,} {what} not served, dropped or replaced by another recording: ", *_listed(names), "."])
        )
    for view in material.subject.views:
        missing = sum(view not in episode.views for episode in episodes)
        if missing:
            found.append(
                join(["View ", data_text(view), f" is missing from {missing:,} of {len(episodes):,} episodes."])
            )
    for view in material.views:
        found += _picture_hints(material, view)
    return found


def _picture_hints(material: Material, view: str) -> list[Markup]:
    """Say which episodes have black frames, and which look unlike the others."""
    sheets = {number: frames for number in material.sheets if (frames := material.frames_of(view, number))}
    total = sum(map(len, sheets.values()))
    found: list[Markup] = []
    bright: dict[int, list[np.ndarray]] = {}
    dark: dict[int, int] = {}
    flat: dict[int, int] = {}
    for number, frames in sheets.items():
        seen = [frame for frame in frames if frame.mean() >= DARK]
        dark |= {number: len(frames) - len(seen)} if len(seen) < len(frames) else {}
        plain = sum(float(frame.std()) < 2 for frame in seen)
        flat |= {number: plain} if plain else {}
        bright |= {number: seen} if seen else {}
    for counts, what in ((dark, "black"), (flat, "of one colour")):
        if counts:
            names = [data_text(material.episode(number).key) for number in counts]
            said = f"{sum(counts.values())} of {total} frames of "
            found.append(join([said, data_text(view), f" are {what}, or nearly: ", *_listed(names), "."]))
    if bright:
        odd = odd_pictures(np.stack([mean_picture(frames) for frames in bright.values()]))
        for number, what in zip(bright, odd, strict=True):
            if what:
                seen_in = [data_text(view), " of ", data_text(material.episode(number).key)]
                found.append(join([*seen_in, f" looks unlike the other episodes, as if {what}."]))
    return found


def _listed(names: Sequence[Markup]) -> list[str]:
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return [*commas(names[:LISTED]), more]


def _signal_hints(material: Material) -> list[Markup]:
    still, broken = [], []
    for signal, count in material.signals:
        for k in range(count if signal.is_main else 0):
            spread = material.spreads[signal.name, k]
            still += [data_text(signal.whole_name(k))] if spread.low == spread.high else []
            broken += [data_text(signal.whole_name(k))] if spread.num_non_finite else []
    found = []
    for names, what in ((still, "never change"), (broken, "have values that are not finite")):
        if names:
            found.append(join([f"Of state and actions, {len(names):,} features {what}: ", *_listed(names), "."]))
    return found
