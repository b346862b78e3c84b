"""Stages 3 to 9 of the walk for one shard: read, align, decode, resize, normalise, check, digest, write.

A task is a pure function of its job and the sources: run twice, it writes the same bytes. It returns a manifest row, never an array.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.graph import Laps, frames
from pipeline.motion import TRAVEL
from pipeline.plan import fault_from_json
from pipeline.shard_rows import Rows, RowsWanted, Segment, merge_faults, read_rows
from pipeline.store.atomic import write_atomic, xxh3_hex
from pipeline.store.chunk_codecs import decode_chunk, encode_chunk
from pipeline.store.shards import ShardReader, ShardWriter
from pipeline.track_arrays import HAS_TRACKS
from pipeline.views import Bindings
from pipeline.workspace import Workspace
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import Reason, SourceError, locate
from schemas.recipe import Recipe
from schemas.source import Fault, ViewInfo
from tasks.quality import runs

if TYPE_CHECKING:
    from pipeline.planner_rows import Samples

ANCHOR = "is_anchor"
"""Row array that says which steps are samples."""

UNDIGESTED = ("episode_index", "task_index", "valid", TRAVEL)
"""Step arrays that say where a step stands, not what it is: left out of the digest, like the image masks."""


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
    sample_specs: tuple[ArraySpec, ...] = ()
    """Planner arrays."""
    map_path: str = ""
    """Map, or folder of maps, for the planner arrays."""
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
    """By stage: rows, samples, read, decode, resize, write (with digests)."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; :meth:`from_json` reads them back."""
        rows = [
            {name: getattr(row, name) for name in ShardRow.__slots__} for row in self.rows
        ]  # asdict copies every crc
        faults = [(source, asdict(fault)) for source, fault in self.faults]
        own = {name: getattr(self, name) for name in self.__slots__}
        return {**own, "rows": rows, "faults": faults}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "ShardResult":
        """Read back what :meth:`to_json` gave."""
        rows = tuple(ShardRow(**{**row, "chunk_crc32c": tuple(row["chunk_crc32c"])}) for row in data["rows"])
        faults = tuple((source, fault_from_json(fault)) for source, fault in data["faults"])
        return ShardResult(**{**data, "rows": rows, "faults": faults})


def write_shard(job: ShardJob) -> ShardResult:
    """Write shard ``job.shard`` of every frame array and the part file of its rows; see ``pipeline/DESIGN.md``."""
    laps = Laps()
    workspace = Workspace(Path(job.root))
    want = RowsWanted(
        recipe=job.recipe,
        bindings=job.bindings,
        masks=(*(spec.valid_array for spec in job.specs), *_sample_masks(job)),
        refused=job.refused,
    )
    parts = [read_rows(segment, want) for segment in job.segments]
    laps.lap("rows")
    rows, num_frames, digests = [], 0, _Digests(parts)
    blocks = [_samples(job, part) for part in parts] if job.sample_specs else []
    laps.lap("samples")
    frame_arrays = {spec.name: spec for spec in job.specs}
    sample_arrays = {spec.name: spec for spec in job.sample_specs}
    digested = {name for name in parts[0].columns if name not in UNDIGESTED and name not in want.masks}
    for name in sorted(frame_arrays.keys() | sample_arrays.keys() | digested):
        if name in frame_arrays:
            row, count = _write_frames(job, frame_arrays[name], parts, digests, laps)
            rows.append(row)
            num_frames += count
        elif name in sample_arrays:
            rows.append(_write_samples(job, sample_arrays[name], parts, blocks, digests=digests))
        else:
            digests.update_rows(name)
    nbytes, xxh3 = _write_part(workspace, job.shard, parts, digests)
    laps.lap("write")
    faults = tuple((part.segment.episode.source, fault) for part in parts for fault in merge_faults(part.faults))
    refused = [row for row in faults if row[1].is_refusal]
    if refused and job.recipe.on_bad_frame == "stop":
        raise stopped(refused[0])
    return ShardResult(
        shard=job.shard,
        rows=tuple(rows),
        part_nbytes=nbytes,
        part_xxh3=xxh3,
        faults=faults,
        num_steps=sum(len(part.steps) for part in parts),
        num_frames=num_frames,
        seconds=laps.seconds,
    )


def stopped(found: tuple[str, Fault]) -> SourceError:
    """Return a fault as the error that ends a conversion whose recipe says stop."""
    source, fault = found
    steps = f"{fault.start}:{fault.stop}" if fault.stop > fault.start else ""
    where = {"source": source, "episode": fault.episode, "stream": fault.stream, "steps": steps, "file": fault.path}
    message = f"{fault.message} (refused, and the recipe says stop)"
    return SourceError(message, fault.reason, **{name: value for name, value in where.items() if value})


def _write_frames(
    job: ShardJob, spec: ArraySpec, parts: list[Rows], digests: "_Digests", laps: Laps
) -> tuple[ShardRow, int]:
    """Stream one view's frames into its shard: one decode buffer and one chunk of memory."""
    root, count = Path(job.root), 0
    with ShardWriter(root, spec, job.shard, Workspace(root).tmp) as writer:
        _copy_committed(root, spec, job, writer)
        for index, part in enumerate(parts):
            with locate(source=part.segment.episode.source, episode=part.segment.episode.ref.key, view=spec.name):
                for row, frame in enumerate(_frames(job, spec, part, laps)):
                    if frame is None:
                        writer.put(None)
                        continue
                    part.columns[spec.valid_array][row] = True
                    digests.update_frame(index, row, _put(writer, spec, frame))
                    laps.lap("write")
                    count += 1
        return writer.commit(), count


def _samples(job: ShardJob, part: Rows) -> dict[str, np.ndarray]:
    """Compute the planner's tensors of a segment's samples; where that cannot be done, no step is one, and a fault says why."""
    episode = part.segment.episode
    if job.refused:
        return {}
    with locate(source=episode.source, episode=episode.ref.key):
        try:
            found = _read_samples(job, part.segment)
        except SourceError as error:
            steps = part.columns["source_step"]
            fault = Fault(
                reason=error.reason,
                message=error.message,
                episode=episode.ref.key,
                stream="tracks",
                start=int(steps[0]),
                stop=int(steps[-1]) + 1,
                path=str(error.where.get("file", "")),
            )
            part.faults.append(fault)
            return {}
    part.columns[ANCHOR][:] = found.is_anchor
    if HAS_TRACKS in part.columns:
        part.columns[HAS_TRACKS][:] = found.has_tracks
    part.faults += [fault for fault in found.faults if fault not in part.faults]
    if found.is_read is not None:
        part.columns["valid"] &= found.is_read
    return found.block


def _read_samples(job: ShardJob, segment: Segment) -> "Samples":
    from pipeline.planner_rows import packed_samples, planner_samples

    ref, steps = segment.episode.ref, range(segment.start, segment.stop)
    if job.bindings.tensors or job.recipe.planner is None:
        return packed_samples(segment.reader, ref, steps, job.bindings.tensors)
    return planner_samples(
        segment.reader,
        ref,
        steps,
        recipe=job.recipe.planner,
        rate_hz=segment.episode.rate_hz,
        map_path=job.map_path,
    )


def _sample_masks(job: ShardJob) -> tuple[str, ...]:
    """Return the masks of planner arrays; the last one says which steps their blocks have rows of."""
    if not job.sample_specs or job.recipe.planner is None:
        return ()
    return (ANCHOR, HAS_TRACKS) if job.recipe.planner.store == "tracks" else (ANCHOR,)


def _write_samples(
    job: ShardJob, spec: ArraySpec, parts: list[Rows], blocks: list[dict[str, np.ndarray]], *, digests: "_Digests"
) -> ShardRow:
    """Write a planner array: a chunk a step that has one, or one chunk a shard in which the others are zero."""
    root, present = Path(job.root), _sample_masks(job)[-1]
    with ShardWriter(root, spec, job.shard, Workspace(root).tmp) as writer:
        if spec.chunk_steps == 1:
            _copy_committed(root, spec, job, writer)
        held = [_committed_rows(root, spec, job)] if spec.chunk_steps > 1 else []
        for index, (part, block) in enumerate(zip(parts, blocks, strict=True)):
            has_rows = part.columns[present]
            rows = np.zeros((len(has_rows), *spec.row_shape), spec.dtype)
            if block:
                rows[has_rows] = block[spec.name]
            held.append(rows)
            for row, is_kept in enumerate(part.columns[spec.valid_array or present].tolist()):
                if spec.chunk_steps == 1:
                    writer.put(rows[row : row + 1] if is_kept else None)
                if spec.chunk_steps > 1 or is_kept:
                    digests.update_frame(index, row, rows[row])
        if spec.chunk_steps > 1:
            writer.put(np.concatenate(held))
        return writer.commit()


def _committed_rows(root: Path, spec: ArraySpec, job: ShardJob) -> np.ndarray:
    """Return the committed rows of a shard that is one chunk, checked against the manifest."""
    committed = job.committed.get(spec.name)
    if committed is None:
        return np.zeros((0, *spec.row_shape), spec.dtype)
    with ShardReader(root / committed.path, spec, committed) as reader:
        return reader.rows(0, committed.stop - committed.start)


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


def _frames(job: ShardJob, spec: ArraySpec, part: Rows, laps: Laps) -> Iterator[np.ndarray | None]:
    """Yield each step's frame as it is stored, or None where there is none; faults are noted and make the step invalid."""
    episode = part.segment.episode
    target = job.recipe.view(spec.name.removeprefix("rgb_"))
    source_view = job.bindings.view(episode.ref, target.name)
    if not source_view or job.refused:
        yield from (None for _ in part.steps)
        return
    store, odd_sizes = _storer(job.recipe, spec), dict[int, tuple[int, int]]()
    ref, alignment = part.recorded(source_view)
    steps = alignment["nearest"].lower
    found = frames(part.segment.reader, ref, source_view, steps, target, odd_sizes=odd_sizes, laps=laps)
    for row, frame in enumerate(found):
        if isinstance(frame, Fault):
            part.refuse(np.array([row]), frame)
            yield None
        else:
            yield store(frame)
    if job.recipe.checks.view_size != "off":
        _note_sizes(part, ref.view(source_view), odd_sizes, is_warning=job.recipe.checks.view_size == "warn")


def _note_sizes(part: Rows, view: ViewInfo, odd_sizes: Mapping[int, tuple[int, int]], *, is_warning: bool) -> None:
    """Note runs of frames of another size than declared."""
    steps = part.recorded(view.name)[1]["nearest"].lower
    found = np.isin(steps, list(odd_sizes))
    for start, stop in runs(found):
        first, last = int(steps[start]), int(steps[stop - 1])
        height, width = odd_sizes[first]
        fault = Fault(
            reason=Reason.WRONG_SHAPE,
            message=f"expected frames of {view.width_px}x{view.height_px} px, found {width}x{height}; see view_size in [checks]",
            episode=part.segment.episode.ref.key,
            stream=view.name,
            start=first,
            stop=last + 1,
            is_warning=is_warning,
        )
        part.note(np.arange(start, stop), fault)


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

    def __init__(self, parts: list[Rows]) -> None:
        self.parts = parts
        self.hashes = [[xxhash.xxh3_128() for _ in part.steps] for part in parts]

    def update_rows(self, name: str) -> None:
        if name == "instruction_index":  # stands for the sentence, by a number that only this episode knows
            return
        for part, hashes in zip(self.parts, self.hashes, strict=True):
            for digest, row in zip(hashes, np.ascontiguousarray(part.columns[name]), strict=True):
                digest.update(row.tobytes())

    def update_frame(self, part: int, row: int, frame: np.ndarray) -> None:
        self.hashes[part][row].update(np.ascontiguousarray(frame).reshape(-1).view(np.uint8).data)

    def array(self) -> np.ndarray:
        """Return ``uint8[step, 16]``."""
        joined = b"".join(digest.digest() for hashes in self.hashes for digest in hashes)
        return np.frombuffer(joined, np.uint8).reshape(-1, 16)


def _write_part(workspace: Workspace, shard: int, parts: list[Rows], digests: _Digests) -> tuple[int, str]:
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    columns["episode"] = np.concatenate([np.full(len(p.steps), p.segment.episode.start, np.int64) for p in parts])
    buffer = io.BytesIO()
    columns["step_digest"] = digests.array()
    np.savez(buffer, **columns)  # type: ignore[arg-type]
    data = buffer.getvalue()
    write_atomic(workspace.parts / f"part-{shard:08d}.npz", data, workspace.tmp)
    return len(data), xxh3_hex(data)
