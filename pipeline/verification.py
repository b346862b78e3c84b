"""Verify a dataset: every byte of every file, once, against what was committed."""

import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.markup import card
from pipeline.store.atomic import read_regular, xxh3_hex
from pipeline.store.chunk_codecs import decode_chunk
from pipeline.store.copies import TABLE_FILE, kept_generations
from pipeline.store.metadata import ROOT_DOCUMENT, TABLES, DatasetInfo, array_document, read_info, root_copies
from pipeline.store.scan import REPAIR, Problem, Shard, scan_index, scan_shard, shards_of
from pipeline.store.tables import manifest_rows, read_document, read_table
from pipeline.summaries import nbytes_text
from schemas.dataset import ArraySpec, ShardRow
from schemas.errors import DatasetError

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all; from worker threads, one at a time."""

UNDIGESTED = ("episode_index", "task_index", "valid")
"""Step arrays that are no part of an episode's digest, like the image masks."""

UNKNOWN = "expected only files of the dataset, found one that nothing names; move it away"
"""Message of a file that lies in the dataset and is none of its."""

ROWS_UNIT_STEPS = 65_536
"""Steps whose digests one thread computes where no array is stored step by step."""

_SHARD_NAME = re.compile(r"c\.(\d+)((?:\.0)*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found."""

    ok: bool
    num_files: int
    """Files that the dataset consists of."""
    nbytes: int
    """Their bytes, as found."""
    problems: tuple[Problem, ...]

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        lines = [f"{problem.path}: {problem.message}" for problem in self.problems]
        facts = {"files": f"{self.num_files:,}", "size": nbytes_text(self.nbytes)}
        return card("sound" if self.ok else "damaged", facts, {"problems": lines})


def verify(
    path: str | Path, *, quick: bool = False, workers: int | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Compare a dataset with what was committed; damage is reported, with array and steps, never raised.

    Parameters
    ----------
    path
        The dataset.
    quick
        Check existence, sizes, shard indexes, tables and metadata only; no chunk is read.
    workers
        Number of threads; the cores this process may use by default.
    progress
        Called as bytes are checked.

    Raises
    ------
    DatasetError
        There is no dataset at ``path``.
    """
    root = Path(path)
    try:
        info = read_info(root)
    except DatasetError as error:
        if not (root / "_tables").is_dir():
            raise
        problem = Problem(path=ROOT_DOCUMENT, message=error.message)
        return VerifyReport(ok=False, num_files=0, nbytes=0, problems=(problem,))
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "verify") as pool:
        return _Verification(info, pool, progress).run(quick=quick)


class _Verification:
    """One run: what is expected, what was found so far."""

    def __init__(self, info: DatasetInfo, pool: ThreadPoolExecutor, progress: Progress | None) -> None:
        self.info, self.pool, self.progress = info, pool, progress
        self.problems: list[Problem] = []
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.nbytes, self.done_nbytes = 0, 0
        self.shards: dict[str, list[Shard]] = {}
        self.unsound: set[str] = set()
        """Arrays of rows that are damaged: a damaged mask accuses no frame."""

    def run(self, *, quick: bool) -> VerifyReport:
        info = self.info
        self.generations = kept_generations(info)
        self.sizes = {path: _size(info.root / path) for path in self._expected_paths()}
        self.nbytes = sum(self.sizes.values())
        self._count(ROOT_DOCUMENT)
        manifest, episodes = self._check_tables()
        self._check_generations()
        self._check_documents()
        self._check_unknown_files()
        rows = self._manifest_rows(manifest)
        self.shards = {name: shards_of(info, name, rows) for name in info.arrays}
        if quick:
            everything = [shard for shards in self.shards.values() for shard in shards]
            for problems in self.pool.map(lambda shard: self._counted(shard, scan_index(info, shard)), everything):
                self.problems += problems
        else:
            self._check_episodes(episodes)
            self._check_steps(episodes)
        found = tuple(self.problems)
        return VerifyReport(ok=not found, num_files=len(self.sizes), nbytes=self.nbytes, problems=found)

    def _expected_paths(self) -> Iterator[str]:
        info = self.info
        yield ROOT_DOCUMENT
        for generation in self.generations:
            yield from generation.files
        for name in info.arrays:
            yield f"{name}/{ROOT_DOCUMENT}"
            yield from (shard.path for shard in shards_of(info, name, {}))

    def _count(self, path: str) -> None:
        with self.lock:
            self.done_nbytes += self.sizes[path]
            if self.progress is not None:
                self.progress(self.done_nbytes, self.nbytes)

    def _counted(self, shard: Shard, problems: list[Problem]) -> list[Problem]:
        self._count(shard.path)
        return problems

    def _check_tables(self) -> tuple[pa.Table | None, pa.Table | None]:
        """Check every file of ``_tables`` and return the manifest and the episodes table, None where damaged."""
        tables: dict[str, pa.Table] = {}
        for name, ref in self.info.tables.items():
            try:
                if name in ("manifest", "episodes"):
                    tables[name] = read_table(self.info, name)
                else:
                    read_document(self.info, name)
            except DatasetError as error:
                self.problems.append(Problem(path=ref.path, message=error.message))
            except OSError as error:
                self.problems.append(
                    Problem(path=ref.path, message=f"expected a readable file, found {error.strerror}")
                )
            self._count(ref.path)
        return tables.get("manifest"), tables.get("episodes")

    def _check_generations(self) -> None:
        """Check copies, and the tables of older generations, against what the root of their generation says."""
        checked = {ref.path for ref in self.info.tables.values()}
        for generation in self.generations:
            if generation.info is None:
                message = f"expected the root's metadata of generation {generation.number}, found no whole copy; `headrace gc` removes what is left of it"
                self.problems += [Problem(path=path, message=message) for path in root_copies(generation.number)]
            for path, ref in generation.files.items():
                if path in checked:
                    continue
                try:
                    data = read_regular(self.info.root / path)
                except OSError as error:
                    message = f"expected a readable file, found {error.strerror}; {REPAIR}"
                    self.problems.append(Problem(path=path, message=message))
                else:
                    if (len(data), xxh3_hex(data)) != (ref.nbytes, ref.xxh3):
                        message = f"expected {ref.nbytes} bytes of xxh3 {ref.xxh3}, found others; {REPAIR}"
                        self.problems.append(Problem(path=path, message=message))
                self._count(path)

    def _check_documents(self) -> None:
        for name, spec in self.info.arrays.items():
            path = f"{name}/{ROOT_DOCUMENT}"
            try:
                found = read_regular(self.info.root / path)
            except OSError as error:
                message = f"expected the array's metadata, found {error.strerror}; {REPAIR}"
                self.problems.append(Problem(array=name, path=path, message=message))
                continue
            finally:
                self._count(path)
            if found != array_document(spec, self.info.lengths[name]):
                message = "expected the metadata that the root has of it, found other bytes; run the same `headrace convert` again"
                self.problems.append(Problem(array=name, path=path, message=message))

    def _check_unknown_files(self) -> None:
        told = {
            path
            for generation in self.generations
            if generation.info is None
            for path in root_copies(generation.number)
        }
        for path in sorted(_files(self.info.root, "")):
            if path not in self.sizes and path not in told and not _may_be_left(self.info, path):
                self.problems.append(Problem(path=path, message=UNKNOWN))

    def _manifest_rows(self, manifest: pa.Table | None) -> dict[tuple[str, int], ShardRow]:
        """Return the manifest's rows that fit the committed shape; those that do not are problems of the manifest."""
        if manifest is None:
            return {}
        rows, path, info = manifest_rows(manifest), self.info.tables["manifest"].path, self.info
        expected = {(name, shard.number): shard for name in info.arrays for shard in shards_of(info, name, {})}
        for key, row in list(rows.items()):
            shard = expected.get(key)
            if shard is None or not _fits(row, shard):
                message = f"expected a row for every committed shard and no other, found {row.path} with {row.start}:{row.stop}"
                self.problems.append(Problem(array=key[0], start=row.start, stop=row.stop, path=path, message=message))
                del rows[key]
        for key in expected.keys() - rows.keys():
            shard = expected[key]
            message = f"expected a row for {shard.path}, found none that fits"
            self.problems.append(Problem(array=key[0], start=shard.start, stop=shard.stop, path=path, message=message))
        return rows

    def _check_episodes(self, episodes: pa.Table | None) -> None:
        """Check the arrays along ``episode``, and the episodes table against them."""
        arrays = [name for name, spec in self.info.arrays.items() if spec.dims[0] == "episode"]
        rows, bad = self._read_rows(arrays, 0, self.info.num_episodes)
        if episodes is None:
            return
        starts, stops = (np.asarray(episodes[name].to_numpy()) for name in ("start", "stop"))
        tiled = np.array_equal(starts, np.concatenate([[0], stops[:-1]])) if len(stops) else True
        if len(stops) != self.info.num_episodes or not tiled or (stops[-1] if len(stops) else 0) != self.info.num_steps:
            message = f"expected {self.info.num_episodes} episodes that fill {self.info.num_steps} steps in order, found others"
            self.problems.append(Problem(path=self.info.tables["episodes"].path, message=message))
            return
        replaced = [
            [start, stop] for start, stop, by in zip(starts, stops, episodes["replaced_by"].to_pylist()) if by >= 0
        ]
        if replaced != self.info.attributes.get("replaced", []):
            message = "expected the replaced episodes that the root names, found others"
            self.problems.append(Problem(path=self.info.tables["episodes"].path, message=message))
        for name, expected in (("row_size", stops - starts), ("episode_ends", stops)):
            if name in rows and not bad.any() and not np.array_equal(rows[name], expected):
                message = "expected the lengths of the episodes table, found others"
                self.problems.append(
                    Problem(array=name, stop=self.info.num_episodes, path=f"{name}/c.0", message=message)
                )

    def _check_steps(self, episodes: pa.Table | None) -> None:
        """Check the arrays along ``step`` block by block, and the episodes' digests over all of them."""
        info = self.info
        specs = [spec for spec in info.arrays.values() if spec.dims[0] == "step"]
        digests, bad = np.zeros((info.num_steps, 16), np.uint8), np.zeros(info.num_steps, bool)
        streamed = [spec for spec in specs if spec.chunk_steps == 1]
        block_steps = math.lcm(*(spec.shard_steps for spec in specs)) if specs else 1
        unit_steps = math.lcm(*(spec.shard_steps for spec in streamed)) if streamed else ROWS_UNIT_STEPS
        # Arrays with shards as small as a unit's are read by the unit: of many features, they are too large to hold for a block.
        rowed = [spec.name for spec in specs if spec.chunk_steps > 1 and unit_steps % spec.shard_steps]
        for start in range(0, info.num_steps, block_steps):
            stop = min(start + block_steps, info.num_steps)
            rows, bad[start:stop] = self._read_rows(rowed, start, stop)
            units = [
                _Unit(self, specs, rows, start, (first, min(first + unit_steps, stop)))
                for first in range(start, stop, unit_steps)
            ]
            for unit, (found, failed, problems) in zip(units, self.pool.map(_Unit.check, units), strict=True):
                digests[unit.start : unit.stop] = found
                bad[unit.start : unit.stop] |= failed
                self.problems += problems
        if episodes is not None and not any(p.path == info.tables["episodes"].path for p in self.problems):
            self._check_digests(episodes, digests, bad)

    def _check_digests(self, episodes: pa.Table, digests: np.ndarray, bad: np.ndarray) -> None:
        """Compare digests of the episodes that have no other problem: damage there is known and would only be said twice."""
        for row in episodes.select(["key", "start", "stop", "digest"]).to_pylist():
            start, stop = row["start"], row["stop"]
            found = xxhash.xxh3_128_hexdigest(digests[start:stop].tobytes())
            if found != row["digest"] and not bad[start:stop].any():
                message = f"expected episode {row['key']!r} of digest {row['digest']}, found {found}; {REPAIR}"
                self.problems.append(
                    Problem(start=start, stop=stop, path=self.info.tables["episodes"].path, message=message)
                )

    def _read_rows(self, names: Iterable[str], start: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Scan the shards of row arrays that lie in ``[start, stop)`` and return their rows, and where any is bad."""
        rows = {name: _zeros(self.info.arrays[name], stop - start) for name in names}
        bad = np.zeros(stop - start, bool)
        pending: list[tuple[Shard, Future[list[Problem]]]] = []
        for name in rows:
            for shard in self.shards[name]:
                if start <= shard.start < stop:
                    sink = _RowSink(shard, rows[name][shard.start - start : shard.stop - start])
                    pending.append((shard, self.pool.submit(scan_shard, self.info, shard, None, sink)))
        for shard, future in pending:
            for problem in future.result():
                self.problems.append(problem)
                bad[problem.start - start : problem.stop - start] = True
                self.unsound.add(shard.spec.name)
            self._count(shard.path)
        return rows, bad


class _RowSink:
    """Puts the chunks of a row array's shard where they belong."""

    def __init__(self, shard: Shard, out: np.ndarray) -> None:
        self.spec, self.out = shard.spec, out
        self.buffer = _zeros(shard.spec, shard.spec.chunk_steps)

    def __call__(self, chunk: int, payload: memoryview) -> None:
        decode_chunk(self.spec, payload, self.buffer)
        rows = self.out[chunk * self.spec.chunk_steps : (chunk + 1) * self.spec.chunk_steps]
        rows[...] = self.buffer[: len(rows)]


class _Unit:
    """The steps that one thread checks: the same shards of every streamed array, and the digests over all arrays."""

    def __init__(
        self,
        run: _Verification,
        specs: list[ArraySpec],
        rows: Mapping[str, np.ndarray],
        block_start: int,
        bounds: tuple[int, int],
    ) -> None:
        self.run = run
        self.start, self.stop = bounds
        self.rows = {name: values[self.start - block_start : self.stop - block_start] for name, values in rows.items()}
        self.own = [spec for spec in specs if spec.chunk_steps > 1 and spec.name not in rows]
        masks = {spec.valid_array for spec in specs}
        digested = [spec for spec in specs if spec.name not in UNDIGESTED and spec.name not in masks]
        self.specs = sorted(digested, key=lambda spec: spec.name)
        self.masks = masks

    def check(self) -> tuple[np.ndarray, np.ndarray, list[Problem]]:
        """Return the steps' digests, which of them are not to be trusted, and the problems."""
        count = self.stop - self.start
        hashes: list[Any] = [xxhash.xxh3_128() for _ in range(count)]
        rows, problems = self._read_own()
        pending: list[np.ndarray] = []
        for spec in self.specs:
            if spec.chunk_steps > 1:
                pending.append(rows[spec.name].reshape(count, -1).view(np.uint8))
                continue
            _update(hashes, pending)
            pending = []
            problems += self._check_streamed(spec, hashes)
        _update(hashes, pending)
        bad = np.zeros(count, bool)
        for problem in problems:
            bad[problem.start - self.start : problem.stop - self.start] = True
        digests = np.frombuffer(b"".join(digest.digest() for digest in hashes), np.uint8).reshape(count, 16)
        return digests, bad, problems

    def _read_own(self) -> tuple[dict[str, np.ndarray], list[Problem]]:
        """Return the rows that this unit is given, and those that it reads itself, with their problems."""
        rows, problems = dict(self.rows), []
        for spec in self.own:
            rows[spec.name] = _zeros(spec, self.stop - self.start)
            for shard in self._shards(spec):
                sink = _RowSink(shard, rows[spec.name][shard.start - self.start : shard.stop - self.start])
                problems += self.run._counted(shard, scan_shard(self.run.info, shard, None, sink))
        return rows, problems

    def _check_streamed(self, spec: ArraySpec, hashes: list[Any]) -> list[Problem]:
        problems = []
        for shard in self._shards(spec):
            offset, length = shard.start - self.start, shard.stop - shard.start
            is_known = spec.valid_array in self.rows and spec.valid_array not in self.run.unsound
            valid = self.rows[spec.valid_array][offset : offset + length] if is_known else None
            sink = _DigestSink(spec, hashes[offset : offset + length])
            found = scan_shard(self.run.info, shard, valid, sink, is_digested=spec.codec == "raw")
            problems += self.run._counted(shard, found)
        return problems

    def _shards(self, spec: ArraySpec) -> Iterator[Shard]:
        return (shard for shard in self.run.shards[spec.name] if self.start <= shard.start < self.stop)


class _DigestSink:
    """Feeds the decoded rows of a streamed array to the digests of their steps."""

    def __init__(self, spec: ArraySpec, hashes: list[Any]) -> None:
        self.spec, self.hashes = spec, hashes
        self.raw_nbytes = spec.row_nbytes if spec.codec == "raw" else -1
        self.buffer = _zeros(spec, 1)

    def __call__(self, chunk: int, payload: memoryview) -> None:
        if len(payload) == self.raw_nbytes:
            self.hashes[chunk].update(payload)  # stored bytes are the row's bytes: no copy
            return
        decode_chunk(self.spec, payload, self.buffer)
        self.hashes[chunk].update(self.buffer.reshape(-1).view(np.uint8))


def _update(hashes: list[Any], columns: list[np.ndarray]) -> None:
    """Feed neighbouring row arrays to the digests with one call a step."""
    if not columns:
        return
    joined = np.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]
    data, width = np.ascontiguousarray(joined).data.cast("B"), joined.shape[1]
    for step, digest in enumerate(hashes):
        digest.update(data[step * width : (step + 1) * width])


def _zeros(spec: ArraySpec, count: int) -> np.ndarray:
    return np.zeros((count, *spec.row_shape), spec.dtype)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a missing or unreadable file is reported where it is read


def _fits(row: ShardRow, shard: Shard) -> bool:
    return (row.start, row.stop, row.path) == (shard.start, shard.stop, shard.path) and (
        len(row.chunk_crc32c) == shard.num_chunks
    )


def _files(root: Path, prefix: str) -> Iterator[str]:
    with os.scandir(root / prefix) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _files(root, f"{path}/")
            else:
                yield path


def _may_be_left(info: DatasetInfo, path: str) -> bool:
    """Whether a file that the root does not name may lie here all the same: an older generation, an unfinished run."""
    is_running = (info.root.parent / f"{info.root.name}.work" / "plan.json").exists()
    name, _, file = path.partition("/")
    table = TABLE_FILE.fullmatch(file)
    if table is not None and name == TABLES:
        return is_running and int(table[1]) == info.generation + 1
    shard = _SHARD_NAME.fullmatch(file)
    if shard is None or name not in info.arrays:
        return False
    spec = info.arrays[name]
    is_beyond = int(shard[1]) * spec.shard_steps >= info.lengths[name]
    return is_running and is_beyond and len(shard[2]) == 2 * len(spec.row_shape)
