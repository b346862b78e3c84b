"""Stages 3 to 9 of the walk for one shard: read, align, decode, resize, normalise, check, digest, write.

A task is a pure function of its job and the sources: run twice, it writes the same bytes. It returns a manifest row, never an array.
"""

import io
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.graph import frames, signals
from pipeline.plan import PlannedEpisode, fault_from_json
from pipeline.readers.protocol import Reader
from pipeline.store.atomic import write_atomic, xxh3_hex
from pipeline.store.shards import ShardReader, ShardWriter, decode_chunk, encode_chunk
from pipeline.views import Bindings
from pipeline.workspace import Workspace
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import Reason, SourceError, locate
from schemas.recipe import Recipe
from schemas.source import Fault
from tasks.align import Alignment, align

UNDIGESTED = ("episode_index", "task_index", "valid")
"""Step arrays that say where a step stands, not what it is: left out of the digest, like the image masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The steps of one episode that lie in one shard."""

    reader: Reader
    episode: PlannedEpisode
    start: int
    """First step, counted from the episode's start on the output grid."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """All that a worker needs to write one shard of every frame array, and its rows."""

    root: str
    shard: int
    specs: tuple[ArraySpec, ...]
    """Frame arrays."""
    recipe: Recipe
    bindings: Bindings
    segments: tuple[Segment, ...]
    committed: dict[str, ShardRow] = field(default_factory=dict)
    """For a shard that begins with committed steps: its rows of the manifest, by array."""
    refused: str = ""
    """Why nothing is to be read: set when workers died on this shard, alone and more than once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """What a shard task reports: small, whatever the shard holds."""

    shard: int
    rows: tuple[ShardRow, ...]
    part_nbytes: int
    part_xxh3: str
    faults: tuple[tuple[str, Fault], ...]
    """``(source, fault)``."""
    num_steps: int
    num_frames: int
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; :meth:`from_json` reads them back."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "ShardResult":
        """Read back what :meth:`to_json` gave."""
        rows = tuple(ShardRow(**{**row, "chunk_crc32c": tuple(row["chunk_crc32c"])}) for row in data["rows"])
        faults = tuple((source, fault_from_json(fault)) for source, fault in data["faults"])
        return ShardResult(**{**data, "rows": rows, "faults": faults})


@dataclass(slots=True)
class _Rows:
    """Rows of one segment, filled as its streams are read."""

    segment: Segment
    alignment: dict[str, Alignment]
    columns: dict[str, np.ndarray]
    faults: list[Fault]

    @property
    def steps(self) -> np.ndarray:
        return self.alignment["nearest"].lower

    def refuse(self, steps: np.ndarray, fault: Fault) -> None:
        self.columns["valid"][steps] = False
        self.faults.append(fault)


def write_shard(job: ShardJob) -> ShardResult:
    """Write shard ``job.shard`` of every frame array and the part file of its rows; see ``pipeline/DESIGN.md``."""
    began = time.perf_counter()
    workspace = Workspace(Path(job.root))
    parts = [_read_rows(segment, job) for segment in job.segments]
    read = time.perf_counter()
    rows, num_frames, digests = [], 0, _Digests(parts)
    frame_arrays = {spec.name: spec for spec in job.specs}
    for name in sorted(frame_arrays.keys() | {name for name in parts[0].columns if name not in UNDIGESTED}):
        if name in frame_arrays:
            row, count = _write_frames(job, frame_arrays[name], parts, digests)
            rows.append(row)
            num_frames += count
        elif not name.endswith("_valid"):
            digests.update_rows(name)
    nbytes, xxh3 = _write_part(workspace, job.shard, parts, digests)
    faults = tuple((part.segment.episode.source, fault) for part in parts for fault in merge_faults(part.faults))
    if faults and job.recipe.on_bad_frame == "stop":
        raise _stop(faults[0])
    return ShardResult(
        shard=job.shard,
        rows=tuple(rows),
        part_nbytes=nbytes,
        part_xxh3=xxh3,
        faults=faults,
        num_steps=sum(len(part.steps) for part in parts),
        num_frames=num_frames,
        seconds={"rows": read - began, "frames": time.perf_counter() - read},
    )


def _stop(found: tuple[str, Fault]) -> SourceError:
    source, fault = found
    return SourceError(
        f"{fault.message} (refused, and the recipe says stop)",
        fault.reason,
        source=source,
        episode=fault.episode,
        stream=fault.stream,
        steps=f"{fault.start}:{fault.stop}",
        file=fault.path,
    )


def _read_rows(segment: Segment, job: ShardJob) -> _Rows:
    """Read and align the numeric streams of a segment; what cannot be read leaves invalid rows and a fault."""
    with locate(source=segment.episode.source, episode=segment.episode.ref.key):
        part = _empty_rows(segment, job)
        if job.refused:
            return part
        try:
            _align_rows(part, job.recipe)
            _fill_rows(part, job)
        except SourceError as error:
            _refuse_all(part, error)
    return part


def _empty_rows(segment: Segment, job: ShardJob) -> _Rows:
    count = segment.stop - segment.start
    local = np.arange(segment.start, segment.stop)
    rate_hz = segment.episode.rate_hz or segment.episode.ref.rate_hz
    columns = {name: np.zeros((count, size), np.float32) for name, size in job.bindings.sizes.items()}
    columns["timestamp_s"] = local / rate_hz if rate_hz else np.zeros(count)
    columns["align_error_s"] = np.zeros(count, np.float32)
    columns["source_step"] = np.zeros(count, np.int32)
    columns["instruction_index"] = np.zeros(count, np.int32)
    columns["valid"] = np.full(count, not job.refused)
    columns.update({spec.valid_array: np.zeros(count, np.bool_) for spec in job.specs})
    identity = Alignment(local, local, np.zeros(count), np.zeros(count))
    part = _Rows(segment, dict.fromkeys(("nearest", "previous", "linear"), identity), columns, [])
    if not segment.episode.is_resampled:
        columns["source_step"][:] = local
    if job.refused:
        fault = _fault(part, Reason.WORKER_DIED, job.refused)
        part.faults.append(fault)
    return part


def _fault(part: _Rows, reason: Reason, message: str, stream: str = "", path: str = "") -> Fault:
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


def _refuse_all(part: _Rows, error: SourceError) -> None:
    part.columns["valid"][:] = False
    path = str(error.where.get("file", ""))
    part.faults.append(_fault(part, error.reason, error.message, str(error.where.get("stream", "")), path))


def _align_rows(part: _Rows, recipe: Recipe) -> None:
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
        period_s = float(np.median(np.diff(recorded_s))) if len(recorded_s) > 1 else 1 / episode.rate_hz
        tolerance_s = (recipe.tolerance_s or period_s / 2) + 1e-6
        _check_gaps(part, np.abs(nearest.error_s) > tolerance_s, tolerance_s)
        return
    first = max(segment.start - 1, 0)  # one step earlier, so that order is checked across shards too
    block = segment.reader.read_signals(episode.ref, ["timestamp_s"], np.arange(first, segment.stop))
    times_s = np.asarray(block.values["timestamp_s"], np.float64).reshape(-1)
    part.columns["timestamp_s"][:] = times_s[segment.start - first :]
    late = np.flatnonzero(~(np.diff(times_s) > 0)) + 1 - (segment.start - first)
    for step in late[late >= 0]:
        found_s = part.columns["timestamp_s"][step]
        message = f"expected timestamps that increase, found {found_s:.6f} s after {times_s[step - 1 + segment.start - first]:.6f} s"
        part.refuse(np.array([step]), _at(part, step, Reason.TIME_ORDER, message, "timestamp_s"))


def _check_gaps(part: _Rows, gaps: np.ndarray, tolerance_s: float) -> None:
    for start, stop in runs(gaps):
        error_s = float(np.abs(part.columns["align_error_s"][start:stop]).max())
        message = f"expected a recorded step within {tolerance_s:.4f} s of the grid, found one {error_s:.4f} s away; raise tolerance_s"
        fault = _at(part, start, Reason.TIME_GAP, message, "timestamp_s")
        part.refuse(np.arange(start, stop), fault)


def _at(part: _Rows, row: int, reason: Reason, message: str, stream: str) -> Fault:
    step = int(part.columns["source_step"][row])
    return Fault(reason=reason, message=message, episode=part.segment.episode.ref.key, stream=stream, start=step, stop=step + 1)


def runs(mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ``[start, stop)`` of each run of True.

    >>> list(runs(np.array([True, True, False, True])))
    [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _fill_rows(part: _Rows, job: ShardJob) -> None:
    """Read the recipe's signals at the aligned steps; a row that is not finite is refused."""
    methods = {signal.name: signal.align for signal in job.recipe.signals}
    faulty = np.zeros(len(part.steps), np.bool_)
    for name, columns in job.bindings.signals.items():
        alignment = part.alignment[methods[name]]
        values, faults = _mixed(part.segment, columns, alignment)
        part.faults += [fault for fault in faults if fault not in part.faults]
        for fault in faults:
            faulty |= (alignment.lower >= fault.start) & (alignment.lower < fault.stop)
        part.columns[name][:] = np.where(np.isfinite(values), values, 0)
        bad = ~np.isfinite(values).all(axis=1) | ~np.isfinite(part.columns[name]).all(axis=1)
        _refuse_non_finite(part, bad, bad & ~faulty, name)
    part.columns["valid"] &= ~faulty
    if any(signal.name == "instruction_index" for signal in part.segment.episode.ref.signals):
        values, _ = signals(part.segment.reader, part.segment.episode.ref, ["instruction_index"], part.steps)
        known = max(len(part.segment.episode.ref.instructions), 1)
        index = np.nan_to_num(values[:, 0], nan=0.0)
        part.columns["instruction_index"][:] = np.where((index >= 0) & (index < known), index, 0)


def _mixed(segment: Segment, columns: tuple[str, ...], alignment: Alignment) -> tuple[np.ndarray, tuple[Fault, ...]]:
    ref = segment.episode.ref
    lower, faults = signals(segment.reader, ref, columns, alignment.lower)
    if np.array_equal(alignment.lower, alignment.upper):
        return lower, faults
    upper, more = signals(segment.reader, ref, columns, alignment.upper)
    return alignment.mix(lower, upper), faults + more


def _refuse_non_finite(part: _Rows, bad: np.ndarray, unexplained: np.ndarray, name: str) -> None:
    part.columns["valid"] &= ~bad
    for start, stop in runs(unexplained):
        steps = part.columns["source_step"][start:stop]
        fault = _at(part, start, Reason.NON_FINITE, f"expected finite values in {name!r}, found NaN or infinity", name)
        part.faults.append(
            Fault(
                reason=fault.reason,
                message=fault.message,
                episode=fault.episode,
                stream=name,
                start=int(steps[0]),
                stop=int(steps[-1]) + 1,
            )
        )


def _write_frames(job: ShardJob, spec: ArraySpec, parts: list[_Rows], digests: "_Digests") -> tuple[ShardRow, int]:
    """Stream one view's frames into its shard: one decode buffer and one chunk of memory."""
    root, count = Path(job.root), 0
    with ShardWriter(root, spec, job.shard, Workspace(root).tmp) as writer:
        _copy_committed(root, spec, job, writer)
        for index, part in enumerate(parts):
            with locate(source=part.segment.episode.source, episode=part.segment.episode.ref.key, view=spec.name):
                for row, frame in enumerate(_frames(job, spec, part)):
                    if frame is None:
                        writer.put(None)
                        continue
                    part.columns[spec.valid_array][row] = True
                    digests.update_frame(index, row, _put(writer, spec, frame))
                    count += 1
        return writer.commit(), count


def _put(writer: ShardWriter, spec: ArraySpec, frame: np.ndarray) -> np.ndarray:
    """Append one frame and return it as a reader will see it: a lossy codec changes it."""
    if not spec.codec.startswith("jpeg"):
        writer.put(frame[None])
        return frame
    payload = encode_chunk(spec, frame[None])
    writer.put_stored(payload)
    stored = np.empty((1, *spec.row_shape), spec.dtype)
    decode_chunk(spec, payload, stored)
    return stored[0]


def _copy_committed(root: Path, spec: ArraySpec, job: ShardJob, writer: ShardWriter) -> None:
    """Begin a shard that holds committed steps with their chunks, verbatim and checked against the manifest."""
    committed = job.committed.get(spec.name)
    if committed is None:
        return
    with ShardReader(root / committed.path, spec, committed) as reader:
        for chunk in range(len(committed.chunk_crc32c)):
            payload = reader.chunk(chunk)
            if payload is None:
                writer.put(None)
            else:
                writer.put_stored(payload)


def _frames(job: ShardJob, spec: ArraySpec, part: _Rows) -> Iterator[np.ndarray | None]:
    """Yield each step's frame as it is stored, or None where there is none; faults are noted and make the step invalid."""
    episode = part.segment.episode
    target = job.recipe.view(spec.name.removeprefix("rgb_"))
    source_view = job.bindings.view(episode.ref, target.name)
    readable = part.columns["valid"].copy()
    if not source_view or job.refused or not readable.any():
        yield from (None for _ in readable)
        return
    store = _storer(job.recipe, spec)
    for row, frame in enumerate(frames(part.segment.reader, episode.ref, source_view, part.steps, target)):
        if isinstance(frame, Fault):
            part.refuse(np.array([row]), frame)
            yield None
        else:
            yield store(frame)


def _storer(recipe: Recipe, spec: ArraySpec) -> Any:
    """Return what turns a resized uint8 frame into what is stored: itself, or its normalised values."""
    if spec.dtype == "uint8":
        return lambda frame: frame
    from tasks.normalize import normalize_images

    out = np.empty(spec.row_shape, spec.dtype)
    mean, std = np.array(recipe.frames.mean), np.array(recipe.frames.std)

    def store(frame: np.ndarray) -> np.ndarray:
        normalize_images(frame, mean, std, out)
        return out

    return store


class _Digests:
    """One running xxh3-128 a step, updated array by array in name order."""

    def __init__(self, parts: list[_Rows]) -> None:
        self.parts = parts
        self.hashes = [[xxhash.xxh3_128() for _ in part.steps] for part in parts]

    def update_rows(self, name: str) -> None:
        if name == "instruction_index":  # stands for the sentence, by a number that only this episode knows
            return
        for part, hashes in zip(self.parts, self.hashes, strict=True):
            for digest, row in zip(hashes, np.ascontiguousarray(part.columns[name]), strict=True):
                digest.update(row.tobytes())

    def update_frame(self, part: int, row: int, frame: np.ndarray) -> None:
        self.hashes[part][row].update(np.ascontiguousarray(frame).data.cast("B"))

    def array(self) -> np.ndarray:
        """Return ``uint8[step, 16]``."""
        joined = b"".join(digest.digest() for hashes in self.hashes for digest in hashes)
        return np.frombuffer(joined, np.uint8).reshape(-1, 16)


def _write_part(workspace: Workspace, shard: int, parts: list[_Rows], digests: _Digests) -> tuple[int, str]:
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    columns["episode"] = np.concatenate([np.full(len(p.steps), p.segment.episode.start, np.int64) for p in parts])
    buffer = io.BytesIO()
    np.savez(buffer, step_digest=digests.array(), **columns)
    data = buffer.getvalue()
    write_atomic(workspace.parts / f"part-{shard:08d}.npz", data, workspace.tmp)
    return len(data), xxh3_hex(data)


def merge_faults(faults: list[Fault]) -> list[Fault]:
    """Join faults of neighbouring steps that say the same of one file, keeping the first message.

    A video that ends early is one row, not one row a frame.
    """
    merged: list[Fault] = []
    for fault in faults:
        last = merged[-1] if merged else None
        same = last is not None and (last.reason, last.stream, last.path) == (fault.reason, fault.stream, fault.path)
        if last is not None and same and fault.path and fault.start <= last.stop and last.start < last.stop:
            merged[-1] = Fault(
                reason=last.reason,
                message=last.message,
                episode=last.episode,
                stream=last.stream,
                start=last.start,
                stop=max(last.stop, fault.stop),
                path=last.path,
            )
        elif fault not in merged:
            merged.append(fault)
    return merged
