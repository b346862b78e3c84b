"""Stages 3, 4 and 8 of the walk for the numbers of one shard: read, align, check."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.graph import signals
from pipeline.motion import TRAVEL, check_motion, pose_columns
from pipeline.plan import PlannedEpisode
from pipeline.readers.protocol import Reader
from pipeline.stream_clocks import StreamClock, gap_faults, own_clock
from pipeline.views import Bindings
from schemas.errors import Reason, SourceError, locate
from schemas.recipe import ALIGNMENTS, Recipe
from schemas.source import EpisodeRef, Fault
from tasks.align import Alignment, align
from tasks.quality import runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The steps of one episode that lie in one shard."""

    reader: Reader
    episode: PlannedEpisode
    start: int
    """First step, counted from the episode's start on the output grid."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWanted:
    """What is to be read of a segment."""

    recipe: Recipe
    bindings: Bindings
    masks: tuple[str, ...]
    """Names of the image masks, which begin all False."""
    refused: str = ""
    """Why nothing is to be read: set when workers died on this shard, alone and more than once."""


@dataclass(slots=True)
class Rows:
    """Rows of one segment, filled as its streams are read."""

    segment: Segment
    alignment: dict[str, Alignment]
    columns: dict[str, np.ndarray]
    faults: list[Fault]
    before: tuple[int, float] | None = None
    """Recorded step and time that serve the step before the segment's first; None at the episode's start."""
    clocks: dict[str, StreamClock] = field(default_factory=dict)
    """Of views and columns that have recorded steps of their own, by name."""

    def recorded(self, name: str) -> tuple[EpisodeRef, dict[str, Alignment]]:
        """Return the episode in the steps of a view or column, and how those serve the segment's."""
        clock = self.clocks.get(name)
        return (clock.ref, clock.alignment) if clock else (self.segment.episode.ref, self.alignment)

    @property
    def steps(self) -> np.ndarray:
        """Recorded steps that serve the segment's."""
        return self.alignment["nearest"].lower

    def refuse(self, steps: np.ndarray | slice, fault: Fault) -> None:
        """Make rows invalid and keep the reason."""
        self.columns["valid"][steps] = False
        self.faults.append(fault)

    def note(self, steps: np.ndarray, fault: Fault) -> None:
        """Keep the reason; rows stay valid where it is a warning."""
        self.columns["valid"][steps] &= fault.is_warning
        self.faults.append(fault)


def read_rows(segment: Segment, want: RowsWanted) -> Rows:
    """Read and align the numeric streams of a segment; what cannot be read leaves invalid rows and a fault."""
    with locate(source=segment.episode.source, episode=segment.episode.ref.key):
        part = _empty_rows(segment, want)
        if want.refused:
            return part
        try:
            _align_rows(part, want.recipe)
            _align_streams(part, want)
            _fill_rows(part, want)
        except SourceError as error:
            _refuse_all(part, error)
    return part


def _empty_rows(segment: Segment, want: RowsWanted) -> Rows:
    count = segment.stop - segment.start
    local = np.arange(segment.start, segment.stop)
    rate_hz = segment.episode.rate_hz or segment.episode.ref.rate_hz
    columns: dict[str, np.ndarray] = {
        name: np.zeros((count, size), np.float32) for name, size in want.bindings.sizes.items()
    }
    columns["timestamp_s"] = local / rate_hz if rate_hz else np.zeros(count)
    columns["align_error_s"] = np.zeros(count, np.float32)
    columns["source_step"] = np.zeros(count, np.int32)
    columns["instruction_index"] = np.zeros(count, np.int32)
    columns["valid"] = np.full(count, not want.refused)
    columns[TRAVEL] = np.full(count, np.nan, np.float32)
    columns.update({name: np.zeros(count, np.bool_) for name in want.masks})
    identity = Alignment(local, local, np.zeros(count), np.zeros(count))
    part = Rows(segment, dict.fromkeys(ALIGNMENTS, identity), columns, [])
    if not segment.episode.is_resampled:
        columns["source_step"][:] = local
    if want.refused:
        fault = _fault(part, Reason.WORKER_DIED, want.refused)
        part.faults.append(fault)
    return part


def _fault(part: Rows, reason: Reason, message: str, stream: str = "", path: str = "") -> Fault:
    steps = part.columns["source_step"]
    return Fault(
        reason=reason,
        message=message,
        episode=part.segment.episode.ref.key,
        stream=stream,
        start=int(steps[0]),
        stop=int(steps[-1]) + 1,
        path=path,
    )


def _refuse_all(part: Rows, error: SourceError) -> None:
    part.columns["valid"][:] = False
    path = str(error.where.get("file", ""))
    part.faults.append(_fault(part, error.reason, error.message, str(error.where.get("stream", "")), path))


def _align_rows(part: Rows, recipe: Recipe) -> None:
    """Find which recorded steps serve this segment, and check the recorded times."""
    episode, segment = part.segment.episode, part.segment
    if episode.is_resampled:
        block = segment.reader.read_signals(episode.ref, ["timestamp_s"], np.arange(episode.ref.num_steps))
        recorded_s = np.asarray(block.values["timestamp_s"], np.float64).reshape(-1)
        grid_s = np.arange(segment.start, segment.stop) / episode.rate_hz
        part.alignment = {method: align(recorded_s, grid_s, method) for method in part.alignment}
        nearest = part.alignment["nearest"]
        part.columns["source_step"][:] = nearest.lower
        part.columns["align_error_s"][:] = nearest.error_s
        if segment.start:
            last = align(recorded_s, np.array([segment.start - 1]) / episode.rate_hz, "nearest").lower[0]
            part.before = int(last), float(recorded_s[last])
        period_s = float(np.median(np.diff(recorded_s))) if len(recorded_s) > 1 else 1 / episode.rate_hz
        tolerance_s = (recipe.tolerance_s or 0.75 * period_s) + 1e-6  # a gap of half a period more than usual is one
        _check_gaps(part, np.abs(nearest.error_s) > tolerance_s, tolerance_s)
        return
    first = max(segment.start - 1, 0)  # one step earlier, so that order is checked across shards too
    block = segment.reader.read_signals(episode.ref, ["timestamp_s"], np.arange(first, segment.stop))
    times_s = np.asarray(block.values["timestamp_s"], np.float64).reshape(-1)
    part.before = (first, float(times_s[0])) if first < segment.start else None
    part.faults += block.faults
    unread = ~np.isfinite(times_s)
    part.columns["valid"] &= ~unread[segment.start - first :]
    part.columns["timestamp_s"][:] = np.where(unread, 0.0, times_s)[segment.start - first :]
    # A time that could not be read is a fault already; one that was read and is not finite is out of order.
    explained = unread & bool(block.faults)
    broken = ~(np.diff(times_s) > 0) & ~explained[1:] & ~explained[:-1]
    late = np.flatnonzero(broken) + 1 - (segment.start - first)
    for step in late[late >= 0]:
        found_s = part.columns["timestamp_s"][step]
        message = f"expected timestamps that increase, found {found_s:.6f} s after {times_s[step - 1 + segment.start - first]:.6f} s"
        part.refuse(np.array([step]), _at(part, step, Reason.TIME_ORDER, message, "timestamp_s"))
    _check_periods(part, np.diff(times_s, prepend=np.nan)[segment.start - first :], recipe)


def _align_streams(part: Rows, want: RowsWanted) -> None:
    """Align streams that have clocks of their own; a step that nothing recorded serves is refused."""
    reader, ref = part.segment.reader, part.segment.episode.ref
    methods: dict[str, set[str]] = {}
    for signal in want.recipe.signals:
        for place, column in enumerate(want.bindings.signals.get(signal.name, ())):
            methods.setdefault(column, set()).add(signal.method(place))
    views = [want.bindings.view(ref, view.name) for view in want.recipe.views]
    methods |= {view: {"nearest"} for view in views if view}
    period_s = 1 / ref.rate_hz if ref.rate_hz else 0.0
    for name, wanted in methods.items():
        clock = own_clock(reader, ref, name, part.columns["timestamp_s"], part.clocks.values())
        if clock is None:
            continue
        part.clocks[name] = clock
        for method in sorted(wanted):
            gaps, limit_s = clock.gaps(method, want.recipe.tolerance_s, period_s)
            for steps, fault in gap_faults(clock, name, method, gaps, limit_s):
                part.refuse(steps, fault)


def _record_errors(part: Rows) -> None:
    """Let ``align_error_s`` be that of the stream that lies furthest from a step."""
    errors_s = [part.columns["align_error_s"], *(clock.alignment["nearest"].error_s for clock in part.clocks.values())]
    stacked = np.stack(errors_s)
    part.columns["align_error_s"][:] = stacked[np.abs(stacked).argmax(axis=0), np.arange(stacked.shape[1])]


def _check_periods(part: Rows, periods_s: np.ndarray, recipe: Recipe) -> None:
    """Note steps that come later after the step before than the nominal rate and the tolerance allow."""
    rate_hz, action = part.segment.episode.ref.rate_hz, recipe.checks.time_gap
    if not rate_hz or action == "off":
        return
    limit_s = 1 / rate_hz + (recipe.tolerance_s or 0.75 / rate_hz) + 1e-6
    for start, stop in runs(periods_s > limit_s):
        longest_s = float(periods_s[start:stop].max())
        message = f"expected steps at most {limit_s:.4f} s apart, found {longest_s:.4f} s; frames were lost, or the rate is not {rate_hz:g} Hz"
        fault = _at(part, start, Reason.TIME_GAP, message, "timestamp_s")
        last = int(part.columns["source_step"][stop - 1])
        part.note(np.arange(start, stop), replace(fault, stop=last + 1, is_warning=action == "warn"))


def _check_gaps(part: Rows, gaps: np.ndarray, tolerance_s: float) -> None:
    for start, stop in runs(gaps):
        error_s = float(np.abs(part.columns["align_error_s"][start:stop]).max())
        message = f"expected a recorded step within {tolerance_s:.4f} s of the grid, found one {error_s:.4f} s away; raise tolerance_s"
        fault = _at(part, start, Reason.TIME_GAP, message, "timestamp_s")
        part.refuse(np.arange(start, stop), fault)


def _at(part: Rows, row: int, reason: Reason, message: str, stream: str) -> Fault:
    step = int(part.columns["source_step"][row])
    return Fault(
        reason=reason, message=message, episode=part.segment.episode.ref.key, stream=stream, start=step, stop=step + 1
    )


def _fill_rows(part: Rows, want: RowsWanted) -> None:
    """Read the recipe's signals at the aligned steps; a row that is not finite is refused."""
    ref = part.segment.episode.ref
    found, faulty = _read_columns(part, want)
    for name, columns in want.bindings.signals.items():
        values = np.concatenate([found[name, column] for column in columns], axis=1)
        part.columns[name][:] = np.where(np.isfinite(values), values, 0)
        bad = ~np.isfinite(values).all(axis=1) | ~np.isfinite(part.columns[name]).all(axis=1)
        _refuse_non_finite(part, bad, bad & ~faulty, name)
    part.columns["valid"] &= ~faulty
    check_motion(part, {column: values for (name, column), values in found.items() if not name}, want.recipe.checks)
    _record_errors(part)
    if ("", "instruction_index") in found:
        index = np.nan_to_num(found["", "instruction_index"][:, 0], nan=0.0)
        part.columns["instruction_index"][:] = np.where(
            (index >= 0) & (index < max(len(ref.instructions), 1)), index, 0
        )


def _read_columns(part: Rows, want: RowsWanted) -> tuple[dict[tuple[str, str], np.ndarray], np.ndarray]:
    """Read every column once for all signals that are aligned alike: a record a step is parsed once, not once a signal.

    Returns rows by ``(signal, column)``, and which rows a fault already explains.
    """
    ref, faulty = part.segment.episode.ref, np.zeros(len(part.steps), np.bool_)
    methods = {signal.name: signal for signal in want.recipe.signals}
    wanted = [
        (methods[name].method(place), name, column)
        for name, columns in want.bindings.signals.items()
        for place, column in enumerate(columns)
    ]
    if any(signal.name == "instruction_index" for signal in ref.signals):
        wanted.append(("nearest", "", "instruction_index"))
    used = {column for _, _, column in wanted}
    places, heading = pose_columns(ref, want.recipe.checks)
    wanted += [("nearest", "", column) for column in (*places, heading) if column]
    groups: dict[tuple[int, str], list[tuple[str, str, str]]] = {}
    for item in wanted:
        _, alignment = part.recorded(item[2])
        mixed = item[0] if item[0] == "slerp" else ""
        groups.setdefault((id(alignment[item[0]]), mixed), []).append(item)
    found: dict[tuple[str, str], np.ndarray] = {}
    for items in groups.values():
        method, _, first = items[0]
        own, alignments = part.recorded(first)
        names = list(dict.fromkeys(column for _, _, column in items))
        values, faults = _mixed(part.segment.reader, own, names, alignments[method], is_rotation=method == "slerp")
        faults = tuple(f for f in faults if f.stream not in names or f.stream in used)  # a lost pose condemns no step
        part.faults += [fault for fault in faults if fault not in part.faults]
        for fault in faults:
            whole, lower = fault.start == fault.stop, alignments[method].lower
            faulty |= whole | ((lower >= fault.start) & (lower < fault.stop))
        ends = np.cumsum([ref.signal(name).size for name in names])
        rows = dict(zip(names, np.split(values, ends[:-1], axis=1), strict=True))
        found.update({(name, column): rows[column] for _, name, column in items})
    return found, faulty


def _mixed(
    reader: Reader, ref: EpisodeRef, columns: list[str], alignment: Alignment, *, is_rotation: bool
) -> tuple[np.ndarray, tuple[Fault, ...]]:
    lower, faults = signals(reader, ref, columns, alignment.lower)
    if np.array_equal(alignment.lower, alignment.upper):
        return lower, faults
    upper, more = signals(reader, ref, columns, alignment.upper)
    return alignment.mix(lower, upper, is_rotation=is_rotation), faults + more


def _refuse_non_finite(part: Rows, bad: np.ndarray, unexplained: np.ndarray, name: str) -> None:
    part.columns["valid"] &= ~bad
    for start, stop in runs(unexplained):
        steps = part.columns["source_step"][start:stop]
        fault = _at(part, start, Reason.NON_FINITE, f"expected finite values in {name!r}, found NaN or infinity", name)
        part.faults.append(replace(fault, start=int(steps[0]), stop=int(steps[-1]) + 1))


def merge_faults(faults: Sequence[Fault]) -> list[Fault]:
    """Join faults of neighbouring steps that say the same of one file, keeping the first message.

    A video that ends early is one row, not one row a frame.
    """
    merged: list[Fault] = []
    for fault in faults:
        last = merged[-1] if merged else None
        same = last is not None and (last.reason, last.stream, last.path) == (fault.reason, fault.stream, fault.path)
        if last is not None and same and fault.path and fault.start <= last.stop and last.start < last.stop:
            merged[-1] = replace(last, stop=max(last.stop, fault.stop))
        elif fault not in merged:
            merged.append(fault)
    return merged
