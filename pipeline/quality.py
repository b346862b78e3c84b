"""What only a whole episode, or all of them, can show: frozen frames, constants, duplicates, uneven clocks.

Computed from what the shard tasks left, just before the commit: no source is read again and no frame decoded.
"""

import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

import numpy as np

from pipeline.arrays import frame_specs
from pipeline.commit_rows import Findings, Finished, Parts
from pipeline.motion import TRAVEL
from pipeline.plan import PlannedEpisode
from pipeline.shard_task import stopped
from pipeline.store.tables import read_table
from schemas.errors import Reason
from schemas.source import Fault
from tasks.quality import repeats

LEAST_STEPS = 5
"""Recorded steps below which nothing is called frozen or constant."""
LEAST_TRAVEL_M = 0.5
LEAST_SHARE = 0.05
"""Share of a number's range, over all new episodes, from which on it has moved: encoders are noisy."""

Row = tuple[str, Fault]


def examine(finished: Finished) -> Findings:
    """Find what is odd about the episodes of a finished run, and what the recipe refuses of it.

    Raises
    ------
    SourceError
        The recipe says stop, and something is refused.
    """
    found = _Examination(finished)
    read = [row for shard in finished.plan.shards for row in finished.results[shard].faults]
    gaps = {(source, fault.episode) for source, fault in read if fault.reason == Reason.TIME_GAP}
    rows = [*found.clocks(gaps), *found.duplicates(), *found.constants(), *found.frozen()]
    refused = [row for row in rows if row[1].is_refusal]
    if refused and finished.plan.recipe.on_bad_frame == "stop":
        raise stopped(refused[0])
    whole = {(source, fault.episode) for source, fault in refused if fault.start == fault.stop}
    if finished.plan.recipe.on_bad_frame == "drop-episode":
        whole |= {(source, fault.episode) for source, fault in (*read, *refused) if fault.is_refusal}
    return Findings(
        faults=tuple(dict.fromkeys([*join_rows(read), *rows])),
        masked=tuple(found.masked),
        dropped=frozenset(whole),
    )


def join_rows(rows: Sequence[Row]) -> list[Row]:
    """Join what is said of neighbouring steps, so that rows do not depend on where a shard ends; the first message stays."""
    joined: list[Row] = []
    last: dict[tuple[object, ...], int] = {}
    for source, fault in rows:
        key = (source, fault.episode, fault.stream, fault.reason, fault.path, fault.is_warning)
        place = last.get(key, -1)
        before = joined[place][1] if place >= 0 else None
        if before is not None and before.start < before.stop == fault.start < fault.stop:
            joined[place] = source, replace(before, stop=fault.stop)
        else:
            last[key] = len(joined)
            joined.append((source, fault))
    return joined


class _Examination:
    """The checks of one finished run, over its parts in step order."""

    def __init__(self, finished: Finished) -> None:
        self.finished, self.plan, self.checks = finished, finished.plan, finished.plan.recipe.checks
        self.parts = Parts(finished)
        self.masked: list[tuple[int, int]] = []
        names = list(self.plan.bindings.sizes)
        self.signals = [name for name in names if name != "actions"] or names
        self.ranges = self._ranges() if self.signals else np.zeros((len(self.plan.episodes), 2, 0))

    def _ranges(self) -> np.ndarray:
        """Return ``float64[episode, 2, feature]``: least and greatest of the valid steps, inf and -inf where none is."""
        width = sum(self.plan.bindings.sizes[name] for name in self.signals)
        out = np.stack(
            [np.full((len(self.plan.episodes), width), np.inf), np.full((len(self.plan.episodes), width), -np.inf)], 1
        )
        for shard in self.plan.shards:
            part = self.parts.load(shard)
            rows = np.concatenate([part[name] for name in self.signals], axis=1)[part["valid"]].astype(np.float64)
            numbers = self.parts.numbers(part)[part["valid"]]
            for number in np.unique(numbers).tolist():
                own = rows[numbers == number]
                out[number, 0] = np.minimum(out[number, 0], own.min(axis=0))
                out[number, 1] = np.maximum(out[number, 1], own.max(axis=0))
        return out

    def _row(self, action: str, reason: Reason, message: str, episode: PlannedEpisode, **place: object) -> Row:
        values: dict[str, object] = {"episode": episode.ref.key, "is_warning": action == "warn", **place}
        return episode.source, Fault(reason=reason, message=message, **values)  # type: ignore[arg-type]

    def clocks(self, gaps: Set[tuple[str, str]]) -> Iterator[Row]:
        """Yield episodes whose periods vary too much; of one in ``gaps`` that is said already."""
        if self.checks.time_jitter == "off":
            return
        for number, episode in enumerate(self.plan.episodes):
            clock = json.loads((self.finished.workspace.parts / f"source-{number:08d}.json").read_bytes())
            share = clock["jitter_s"] * episode.ref.rate_hz
            if share > self.checks.max_jitter and episode.name not in gaps:
                message = (
                    f"expected periods of {1 / episode.ref.rate_hz:.4f} s with a standard deviation of at most "
                    f"{self.checks.max_jitter:g} of it, found {share:.2f}; check the clock, or give a rate_hz"
                )
                yield self._row(self.checks.time_jitter, Reason.TIME_JITTER, message, episode, stream="timestamp_s")

    def duplicates(self) -> Iterator[Row]:
        """Yield episodes of which another has the same steps and instructions."""
        if self.checks.duplicate == "off":
            return
        known: dict[tuple[object, ...], str] = {}
        replaced = {episode.replaces for episode in self.plan.episodes}
        if self.finished.previous is not None:
            columns = ["episode_index", "source", "key", "digest", "instructions", "valid"]
            for row in read_table(self.finished.previous, "episodes", columns).to_pylist():
                if row["valid"] and row["episode_index"] not in replaced:
                    known.setdefault((row["digest"], *row["instructions"]), f"{row['source']}/{row['key']}")
        for episode, (digest, num_invalid) in zip(self.plan.episodes, self.parts.episodes(), strict=True):
            if num_invalid == episode.num_steps or episode.num_steps < LEAST_STEPS:
                continue
            name = "/".join(episode.name)
            other = known.setdefault((digest, *episode.ref.instructions), name)
            if other != name:
                message = f"expected each recording once, found the steps of {other!r} again; remove one of them"
                yield self._row(self.checks.duplicate, Reason.DUPLICATE, message, episode)

    def constants(self) -> Iterator[Row]:
        """Yield numbers that are the same in all new episodes (told once a dataset), and episodes whose state never changes."""
        if self.checks.constant == "off" or not self.ranges.size:
            return
        is_constant = self.ranges[:, 0] >= self.ranges[:, 1]
        never = is_constant.all(axis=0) & (self.ranges[:, 0].min(axis=0) == self.ranges[:, 1].max(axis=0))
        if self.finished.previous is None and self.plan.num_steps >= LEAST_STEPS:
            yield from self._never_change(never)
        if never.all():
            return
        for number, episode in enumerate(self.plan.episodes):
            seconds = episode.num_steps / episode.rate_hz if episode.rate_hz else 0.0
            is_long = episode.num_steps >= LEAST_STEPS and seconds >= self.checks.frozen_s
            if is_long and is_constant[number].all() and np.isfinite(self.ranges[number]).all():
                message = f"expected {', '.join(self.signals)} to change in {seconds:.1f} s, found one value; check the recorder"
                yield self._row(self.checks.constant, Reason.CONSTANT, message, episode, stream=self.signals[0])

    def _never_change(self, never: np.ndarray) -> Iterator[Row]:
        ends = np.cumsum([self.plan.bindings.sizes[name] for name in self.signals])
        for name, constant in zip(self.signals, np.split(never, ends[:-1]), strict=True):
            numbers = np.flatnonzero(constant).tolist()
            if numbers:
                shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
                message = f"expected numbers that change, found {len(numbers)} of {len(constant)} the same at every step: {name}[{shown}]"
                source = self.plan.episodes[0].source
                yield source, Fault(reason=Reason.CONSTANT, message=message, stream=name, is_warning=True)

    def frozen(self) -> Iterator[Row]:
        """Yield runs of one frame while something moves; steps after a run's first are masked where that is refused."""
        if self.checks.frozen == "off":
            return
        for spec in frame_specs(self.plan.recipe, self.plan.bindings, self.plan.shard_steps):
            codes, present = self._codes(spec.name)
            for number, episode in enumerate(self.plan.episodes):
                if not episode.rate_hz:
                    continue
                least = max(LEAST_STEPS, int(np.ceil(self.checks.frozen_s * episode.rate_hz)))
                own = slice(episode.start - self.plan.first_step, episode.stop - self.plan.first_step)
                for start, stop in repeats(codes[own], present[own], least):
                    yield from self._frozen_run(number, spec.name, (episode.start + start, episode.start + stop))

    def _frozen_run(self, number: int, array: str, steps: tuple[int, int]) -> Iterator[Row]:
        episode = self.plan.episodes[number]
        recorded, moves = self._motion(*steps)
        if len(np.unique(recorded)) < LEAST_STEPS or not moves:
            return
        seconds = (steps[1] - steps[0]) / episode.rate_hz
        message = (
            f"expected frames that change while the recording moves, found one for {seconds:.1f} s; check the camera"
        )
        if self.checks.frozen == "refuse":
            self.masked.append((steps[0] + 1, steps[1]))
        yield self._row(
            self.checks.frozen,
            Reason.FROZEN,
            message,
            episode,
            stream=self.plan.bindings.view(episode.ref, array.removeprefix("rgb_")),
            start=int(recorded[0]),
            stop=int(recorded[-1]) + 1,
        )

    def _codes(self, array: str) -> tuple[np.ndarray, np.ndarray]:
        """Return each new step's checksum of the stored frame of a view, and whether there is one."""
        count = self.plan.num_steps - self.plan.first_step
        codes, present = np.zeros(count, np.uint32), np.zeros(count, np.bool_)
        for result in self.finished.results.values():
            for row in result.rows:
                if row.array != array:
                    continue
                skipped = max(self.plan.first_step - row.start, 0)
                crcs = row.chunk_crc32c[skipped:]
                place = slice(row.start + skipped - self.plan.first_step, row.stop - self.plan.first_step)
                present[place] = [crc is not None for crc in crcs]
                codes[place] = [crc or 0 for crc in crcs]
        return codes, present

    def _motion(self, start: int, stop: int) -> tuple[np.ndarray, bool]:
        """Return the recorded steps that serve dataset steps, and whether vehicle or state move in them, or nothing says."""
        held = []
        for shard in range(start // self.plan.shard_steps, -(-stop // self.plan.shard_steps)):
            first = max(shard * self.plan.shard_steps, self.plan.first_step)
            held.append(
                {name: rows[max(start - first, 0) : stop - first] for name, rows in self.parts.load(shard).items()}
            )
        rows = {name: np.concatenate([part[name] for part in held]) for name in held[0]}
        travel_m = rows[TRAVEL][1:]
        if np.isfinite(travel_m).any() and np.nansum(travel_m) > LEAST_TRAVEL_M:
            return rows["source_step"], True
        if not self.signals:
            return rows["source_step"], not np.isfinite(travel_m).any()
        values = np.concatenate([rows[name] for name in self.signals], axis=1)[rows["valid"]].astype(np.float64)
        if not len(values):
            return rows["source_step"], False
        with np.errstate(invalid="ignore"):
            spans = self.ranges[:, 1].max(axis=0) - self.ranges[:, 0].min(axis=0)
        moved = values.max(axis=0) - values.min(axis=0)
        return rows["source_step"], bool(np.any((spans > 0) & (moved > LEAST_SHARE * spans)))
