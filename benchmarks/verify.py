"""What a full verification costs against a bare copy of memory, and where the rest goes.

    python -m benchmarks.verify [--gigabytes 2] [--size 224] [--rounds 5] [--folder DIR]

Run from the repository's root. Uncompressed frames in the page cache; copy and verification take turns (A B A B ...) on all
cores, and the medians are compared. Below: what each pass over the bytes costs alone, on one core, chunk by chunk as verify does it.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from pipeline.store.atomic import crc32c
from pipeline.verification import verify
from tests.pipeline.store_builder import build_dataset

CORES = len(os.sched_getaffinity(0))


def build(folder: Path, nbytes: float, size: int) -> tuple[Path, int]:
    """Build a dataset of one view and return it with the bytes of its files."""
    num_steps = int(nbytes / (size * size * 3))
    rows = {"row_chunk_steps": 1024, "row_shard_steps": 262144}
    root = build_dataset(
        folder / "out", episode_lengths=[num_steps // 2, num_steps - num_steps // 2], views=("main",), size=(size, size),
        shard_steps=256, missing={}, invalid=(), **rows,
    ).root  # fmt: skip
    return root, sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


def copy(blocks: list[tuple[np.ndarray, np.ndarray]], nbytes: int) -> int:
    """Copy ``nbytes`` on all cores, a block a core in turn; return the bytes copied."""
    turns = max(1, round(nbytes / sum(source.nbytes for source, _ in blocks)))

    def run(block: tuple[np.ndarray, np.ndarray]) -> int:
        source, target = block
        for _ in range(turns):
            np.copyto(target, source)
        return turns * source.nbytes

    with ThreadPoolExecutor(CORES) as pool:
        return sum(pool.map(run, blocks))


def rate(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    return run() / (time.perf_counter() - began) / 1e9


def passes(root: Path, size: int) -> dict[str, float]:
    """Return GB/s of each pass on one core, over chunks as they lie in the first shards."""
    files = sorted((root / "rgb_main").glob("c.*"))[:4]
    chunk = size * size * 3 + 4
    buffer = memoryview(bytearray(chunk))

    def over(act: Callable[[int, int], object]) -> int:
        total = 0
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            for offset in range(0, file.stat().st_size - chunk, chunk):
                act(descriptor, offset)
                total += chunk
            os.close(descriptor)
        return total

    acts: dict[str, Callable[[int, int], object]] = {
        "read": lambda descriptor, offset: os.preadv(descriptor, [buffer], offset),
        "crc32c": lambda descriptor, offset: crc32c(buffer),
        "xxh3-128": lambda descriptor, offset: xxhash.xxh3_128(buffer).digest(),
    }
    return {name: statistics.median(rate(lambda act=act: over(act)) for _ in range(5)) for name, act in acts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the dataset is built; a temporary folder by default")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        root, nbytes = build(Path(folder), asked.gigabytes * 1e9, asked.size)
        blocks = [(np.ones(128 * 2**20, np.uint8), np.zeros(128 * 2**20, np.uint8)) for _ in range(CORES)]
        verify(root)
        copied, verified = [], []
        for _ in range(asked.rounds):
            copied.append(rate(lambda: copy(blocks, nbytes)))
            verified.append(rate(lambda: verify(root).nbytes))
        found = {"copy": statistics.median(copied), "verify": statistics.median(verified)}
        print(
            f"{platform.processor() or platform.machine()}, {CORES} cores, {nbytes / 1e9:.2f} GB, {asked.rounds} rounds"
        )
        print("all cores: " + ", ".join(f"{name} {value:.2f} GB/s" for name, value in found.items()), end="")
        print(f", verify / copy {statistics.median(v / c for v, c in zip(verified, copied, strict=True)):.2f}")
        print("one core: " + ", ".join(f"{name} {value:.2f} GB/s" for name, value in passes(root, asked.size).items()))


if __name__ == "__main__":
    main()
