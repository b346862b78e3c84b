"""Builds small finished datasets through the store's own functions; values encode their coordinates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.store import tables
from pipeline.store.atomic import write_atomic
from pipeline.store.copies import write_copies
from pipeline.store.metadata import array_document, read_info, root_document
from pipeline.store.shards import ShardReader, ShardWriter
from schemas.dataset import ArraySpec, ShardRow

UNDIGESTED = ("episode_index", "task_index", "valid")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A dataset and what it must read back as."""

    root: Path
    specs: dict[str, ArraySpec]
    arrays: dict[str, np.ndarray]
    """Decoded values by name; absent frames are zero."""
    episode_lengths: tuple[int, ...]


def frame_value(step: int, view: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Return uint8 frames in which pixel (0, 0) holds step % 256, step // 256 and view, and no two steps are alike."""
    y, x, channel = np.indices(shape)
    frame = (step * 7 + view * 31 + y * 5 + x * 3 + channel * 11) % 251
    frame[0, 0] = step % 256, step // 256, view
    return frame.astype(np.uint8)


def frame_spec(view: str, size: tuple[int, int], *, shard_steps: int, codec: str, dtype: str) -> ArraySpec:
    normalization = () if dtype == "uint8" else (("normalization", {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.25, 0.3]}),)
    return ArraySpec(
        name=f"rgb_{view}",
        dims=("step", f"height_{view}", f"width_{view}", "rgb"),
        row_shape=(*size, 3),
        dtype=dtype,
        chunk_steps=1,
        shard_steps=shard_steps,
        codec=codec,
        valid_array=f"rgb_{view}_valid",
        attributes=(("long_name", f"camera frames, view {view}"), *normalization, ("units", "1")),
    )


def row_spec(
    name: str, dtype: str, shape: tuple[int, ...], *, chunk_steps: int, shard_steps: int, dim: str = "step"
) -> ArraySpec:
    return ArraySpec(
        name=name,
        dims=(dim, *(f"{name}_feature" for _ in shape)),
        row_shape=shape,
        dtype=dtype,
        chunk_steps=chunk_steps,
        shard_steps=shard_steps,
        attributes=(("long_name", name), ("units", "s" if name.endswith("_s") else "1")),
    )


def build_dataset(
    root: Path,
    *,
    episode_lengths: Sequence[int] = (5, 9, 7),
    views: Sequence[str] = ("main", "side"),
    size: tuple[int, int] = (6, 4),
    shard_steps: int = 8,
    codec: str = "raw",
    dtype: str = "uint8",
    row_chunk_steps: int = 4,
    row_shard_steps: int = 16,
    state_dim: int = 3,
    action_dim: int = 2,
    missing: Mapping[str, Sequence[int]] | None = None,
    invalid: Sequence[int] = (6,),
    details: Sequence[Mapping[str, object]] = (),
) -> Built:
    """Build a finished dataset; view ``side`` misses step 3 and all of the second shard unless ``missing`` says otherwise.

    ``state[step, k] = 1000 * episode + step_in_episode + k / 8``, ``actions[step, k] = -state[step, k]``,
    frames as :func:`frame_value` (float frames hold its value / 255).
    """
    num_steps = sum(episode_lengths)
    if missing is None:
        missing = {"side": [3, *range(shard_steps, min(2 * shard_steps, num_steps))]}
    episode = np.repeat(np.arange(len(episode_lengths)), episode_lengths)
    ends = np.cumsum(episode_lengths, dtype=np.int64)
    local = np.arange(num_steps) - (ends - episode_lengths)[episode] if num_steps else np.zeros(0, int)
    base = 1000.0 * episode + local
    arrays: dict[str, np.ndarray] = {
        "state": (base[:, None] + np.arange(state_dim) / 8).astype(np.float32),
        "actions": -(base[:, None] + np.arange(action_dim) / 8).astype(np.float32),
        "timestamp_s": local / 10.0,
        "episode_index": episode.astype(np.int32),
        "task_index": (episode % 2).astype(np.int32),
        "source_step": local.astype(np.int32),
        "align_error_s": np.zeros(num_steps, np.float32),
        "valid": ~np.isin(np.arange(num_steps), invalid),
        "row_size": np.array(episode_lengths, np.int64),
        "episode_ends": ends,
    }
    specs = {
        name: row_spec(
            name,
            str(values.dtype),
            values.shape[1:],
            chunk_steps=row_chunk_steps,
            shard_steps=row_shard_steps,
            dim="episode" if name in ("row_size", "episode_ends") else "step",
        )
        for name, values in arrays.items()
    }
    for number, view in enumerate(views):
        spec = frame_spec(view, size, shard_steps=shard_steps, codec=codec, dtype=dtype)
        mask = ~np.isin(np.arange(num_steps), missing.get(view, ()))
        frames = np.zeros((num_steps, *spec.row_shape), dtype)
        for step in np.flatnonzero(mask):
            frame = frame_value(int(step), number, spec.row_shape)
            frames[step] = frame if dtype == "uint8" else (frame / 255).astype(dtype)
        specs[spec.name], arrays[spec.name] = spec, frames
        mask_name = spec.valid_array
        specs[mask_name] = row_spec(mask_name, "bool", (), chunk_steps=row_chunk_steps, shard_steps=row_shard_steps)
        arrays[mask_name] = mask
    return write_dataset(root, specs, arrays, tuple(episode_lengths), shard_steps=shard_steps, details=details)


def write_dataset(
    root: Path,
    specs: dict[str, ArraySpec],
    arrays: dict[str, np.ndarray],
    episode_lengths: tuple[int, ...],
    *,
    shard_steps: int,
    details: Sequence[Mapping[str, object]] = (),
    recipe: Mapping[str, object] | None = None,
) -> Built:
    """Write ``arrays`` as a finished dataset of generation 1."""
    tmp = root.parent / f"{root.name}.tmp"
    arrays = dict(arrays)
    shards = [row for name, spec in specs.items() for row in write_array(root, spec, arrays, tmp)]
    for name, spec in specs.items():
        if spec.codec.startswith("jpeg"):
            arrays[name] = read_back(root, spec, arrays[name])
    refs = write_tables(root, specs, arrays, episode_lengths, shards, tmp, details)
    lengths = {name: (spec, len(arrays[name])) for name, spec in specs.items()}
    attributes = {
        "generation": 1,
        "num_steps": sum(episode_lengths),
        "num_episodes": len(episode_lengths),
        "shard_steps": shard_steps,
        "recipe": {"name": "test", "action_dim": 32, "horizon": 4, **(recipe or {})},
        "tables": refs,
    }
    write_atomic(root / "zarr.json", root_document(lengths, attributes), tmp)
    for name, (spec, length) in lengths.items():
        write_atomic(root / name / "zarr.json", array_document(spec, length), tmp)
    write_copies(read_info(root), tmp)
    tmp.rmdir()
    return Built(root=root, specs=specs, arrays=arrays, episode_lengths=episode_lengths)


def write_array(root: Path, spec: ArraySpec, arrays: Mapping[str, np.ndarray], tmp: Path) -> list[ShardRow]:
    """Write all shards of one array."""
    values = arrays[spec.name]
    present = arrays[spec.valid_array] if spec.valid_array else np.ones(len(values), bool)
    rows = []
    for shard, start in enumerate(range(0, len(values), spec.shard_steps)):
        stop = min(start + spec.shard_steps, len(values))
        with ShardWriter(root, spec, shard, tmp) as writer:
            for step in range(start, stop, spec.chunk_steps):
                writer.put(values[step : min(step + spec.chunk_steps, stop)] if present[step] else None)
            rows.append(writer.commit())
    return rows


def read_back(root: Path, spec: ArraySpec, values: np.ndarray) -> np.ndarray:
    """Return the values of a lossy codec as they decode."""
    shards = range(-(-len(values) // spec.shard_steps))
    parts = []
    for shard in shards:
        with ShardReader(root / spec.name / f"c.{shard}.0.0.0", spec) as reader:
            parts.append(reader.rows(0, min(spec.shard_steps, len(values) - shard * spec.shard_steps)))
    return np.concatenate(parts)


def episode_digest(specs: Mapping[str, ArraySpec], arrays: Mapping[str, np.ndarray], start: int, stop: int) -> str:
    """Return an episode's digest, as the format's specification says it, in the most obvious way."""
    masks = {spec.valid_array for spec in specs.values()}
    names = sorted(name for name, spec in specs.items() if spec.dims[0] == "step" and name not in {*UNDIGESTED, *masks})
    total = b""
    for step in range(start, stop):
        data = b"".join(
            arrays[name][step].tobytes()
            for name in names
            if not specs[name].valid_array or arrays[specs[name].valid_array][step]
        )
        total += xxhash.xxh3_128_digest(data)
    return xxhash.xxh3_128_hexdigest(total)


def write_tables(
    root: Path,
    specs: Mapping[str, ArraySpec],
    arrays: Mapping[str, np.ndarray],
    episode_lengths: tuple[int, ...],
    shards: list[ShardRow],
    tmp: Path,
    details: Sequence[Mapping[str, object]],
) -> dict[str, object]:
    """Write the tables of generation 1."""
    views = [name.removeprefix("rgb_") for name, spec in specs.items() if spec.valid_array]
    ends = np.cumsum(episode_lengths).tolist()
    episodes = []
    for index, (length, stop) in enumerate(zip(episode_lengths, ends, strict=True)):
        start = stop - length
        row = {
            "episode_index": index,
            "key": f"episode_{index}",
            "source": "test",
            "start": start,
            "stop": stop,
            "rate_hz": 10.0,
            "rate_measured_hz": 10.0,
            "jitter_s": 0.0,
            "instructions": [f"task {index % 2}"],
            "views": views,
            "num_invalid": int((~arrays["valid"][start:stop]).sum()),
            "valid": True,
            "digest": episode_digest(specs, arrays, start, stop),
            "details": json.dumps(details[index] if details else {}),
            "generation": 1,
            "replaced_by": -1,
        }
        episodes.append(row)
    local = np.concatenate([np.arange(length, dtype=np.int32) for length in episode_lengths] or [np.zeros(0, np.int32)])
    schema = tables.steps_schema(specs)
    batch = tables.steps_batch(schema, {**arrays, "step_in_episode": local})
    sources = [
        {"episode": f"test/episode_{i}", "episode_index": i, "path": f"{i}.bin", "nbytes": i, "xxh3": f"{i:032x}"}
        for i in range(len(ends))
    ]
    contents = {
        "episodes": pa.Table.from_pylist(episodes, tables.EPISODES),
        "steps": pa.Table.from_batches([batch], schema),
        "tasks": pa.Table.from_pylist([{"task_index": i, "task": f"task {i}"} for i in range(2)], tables.TASKS),
        "manifest": tables.manifest_table(shards, pa.Table.from_pylist(sources, tables.SOURCES)),
        "quarantine": tables.QUARANTINE.empty_table(),
    }
    refs: dict[str, object] = {
        name: tables.write_table(root / "_tables" / f"{name}-1.parquet", table, tmp) for name, table in contents.items()
    }
    stats = json.dumps({"norm_stats": {}}).encode()
    refs["norm_stats"] = tables.write_document(root / "_tables" / "norm_stats-1.json", stats, tmp)
    return refs
