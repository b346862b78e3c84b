"""What a loader costs, against a bare copy of the same bytes and against what people use instead.

    python -m benchmarks.loaders [--steps 1200] [--size 224] [--rounds 5] [--threads 2] [--folder DIR]

Run from the repository's root. Every system reads the same synthetic three-view frames, in the same random order, from the
page cache, in turns (A B C A B C ...), so that whatever else the machine does falls on all alike. Prints one table: the
median over the rounds of wall time and of CPU time (all threads) per three-view sample, and both as a multiple of the bare copy.

memmap            np.take from one flat .npy file a view into a reused batch: the least that reading can cost
zarr-python       array[step] of the same dataset with its default settings, crc32c checked
npz a sample      one uncompressed .npz file a step
JPEG + Pillow     one JPEG file (q95) a frame of the final size, decoded by Pillow: no resize, so a lower bound
"""

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.turns import Run, measure
from pipeline.loaders import DatasetReader, MultiViewLoader
from tests.pipeline.store_builder import build_dataset

VIEWS = ("main", "side", "top")
BATCH = 32


class Fixture:
    """The same frames in every form that is measured, in a temporary folder."""

    def __init__(self, folder: Path, num_steps: int, size: int) -> None:
        self.folder, self.num_steps, self.size = folder, num_steps, size
        lengths = [num_steps // 2, num_steps - num_steps // 2]
        rows = {"row_chunk_steps": 1024, "row_shard_steps": 262144, "state_dim": 14, "action_dim": 14}
        for codec in ("raw", "zstd", "jpeg:95"):
            build_dataset(
                folder / codec, episode_lengths=lengths, views=VIEWS, size=(size, size), shard_steps=256, codec=codec,
                missing={}, invalid=(), **rows,
            )  # fmt: skip
        reader = DatasetReader(folder / "raw")
        frames = np.empty((num_steps, size, size, 3), np.uint8)
        for view in VIEWS:
            reader.gather(f"rgb_{view}", np.arange(num_steps), frames)
            np.save(folder / f"{view}.npy", frames)
            for step, frame in enumerate(frames):
                Image.fromarray(frame).save(folder / f"{view}-{step}.jpg", quality=95)
        self.flat = {view: np.load(folder / f"{view}.npy", mmap_mode="r") for view in VIEWS}
        for step in range(num_steps):
            np.savez(folder / f"{step}.npz", **{view: self.flat[view][step] for view in VIEWS})

    def steps(self, num: int = 320) -> np.ndarray:
        return np.random.default_rng(1).permutation(self.num_steps)[:num]

    def batches(self) -> Iterator[np.ndarray]:
        order = np.random.default_rng(0).permutation(self.num_steps // BATCH * BATCH)
        yield from order.reshape(-1, BATCH)


def memmap(fixture: Fixture) -> Run:
    shape = (4, len(VIEWS), BATCH, fixture.size, fixture.size, 3)
    ring = np.zeros(shape, np.uint8)  # as many batches in turn as a loader holds, or the cache would keep the only one

    def run() -> int:
        for number, steps in enumerate(fixture.batches()):
            for view, out in zip(VIEWS, ring[number % 4]):
                np.take(fixture.flat[view], steps, axis=0, out=out, mode="clip")
        return fixture.num_steps // BATCH * BATCH

    return run


def memmap_single(fixture: Fixture) -> Run:
    out = np.zeros((fixture.size, fixture.size, 3), np.uint8)

    def run() -> int:
        for step in fixture.steps():
            for view in VIEWS:
                np.copyto(out, fixture.flat[view][step])
        return len(fixture.steps())

    return run


def single(fixture: Fixture, check: str) -> Run:
    reader = DatasetReader(fixture.folder / "raw", check=check)
    out = np.zeros((1, fixture.size, fixture.size, 3), np.uint8)

    def run() -> int:
        for step in fixture.steps().reshape(-1, 1):
            for view in VIEWS:
                reader.gather(f"rgb_{view}", step, out)
        return len(fixture.steps())

    return run


def gather(fixture: Fixture, check: str) -> Run:
    reader = DatasetReader(fixture.folder / "raw", check=check)
    ring = np.zeros((4, len(VIEWS), BATCH, fixture.size, fixture.size, 3), np.uint8)

    def run() -> int:
        for number, steps in enumerate(fixture.batches()):
            for view, out in zip(VIEWS, ring[number % 4]):
                reader.gather(f"rgb_{view}", steps, out)
        return fixture.num_steps // BATCH * BATCH

    return run


def zarr_python(fixture: Fixture) -> Run:
    import zarr

    group = zarr.open_group(fixture.folder / "raw", mode="r")
    arrays = [group[f"rgb_{view}"] for view in VIEWS]

    def run() -> int:
        for step in fixture.steps(32).tolist():
            for array in arrays:
                array[step]
        return 32

    return run


def npz(fixture: Fixture) -> Run:
    def run() -> int:
        for step in fixture.steps(32).tolist():
            with np.load(fixture.folder / f"{step}.npz") as sample:
                [sample[view] for view in VIEWS]
        return 32

    return run


def pillow(fixture: Fixture) -> Run:
    def run() -> int:
        for step in fixture.steps(32).tolist():
            for view in VIEWS:
                with Image.open(fixture.folder / f"{view}-{step}.jpg") as image:
                    np.asarray(image.convert("RGB"))
        return 32

    return run


def loader(fixture: Fixture, codec: str = "raw", **options: object) -> Run:
    stream = MultiViewLoader(fixture.folder / codec, BATCH, **options)

    def run() -> int:
        return sum(len(batch["index"]) for batch in stream)

    return run


def systems(fixture: Fixture, threads: int) -> dict[str, Run]:
    found: dict[str, Run] = {
        "memmap, single steps": memmap_single(fixture),
        "reader, single steps, check always": single(fixture, "always"),
        "zarr-python, single steps": zarr_python(fixture),
        "npz a sample, single steps": npz(fixture),
        "JPEG + Pillow, single steps": pillow(fixture),
        "memmap, batches": memmap(fixture),
    }
    for check in ("always", "first", "never"):
        found[f"reader, batches, check {check}"] = gather(fixture, check)
    for count in sorted({1, threads}):
        for check in ("always", "first"):
            found[f"loader, {count} threads, check {check}"] = loader(fixture, threads=count, check=check)
    found[f"loader, {threads} threads, float32"] = loader(fixture, threads=threads, normalize_images=True)
    for codec in ("zstd", "jpeg:95"):
        found[f"loader, {threads} threads, {codec}"] = loader(fixture, codec, threads=threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1200), ("size", 224), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the data (default: temporary)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        fixture = Fixture(Path(folder), args.steps, args.size)
        times = measure(systems(fixture, args.threads), args.rounds)
    print(
        f"{args.steps} steps of 3 x {args.size}x{args.size}x3, {args.rounds} rounds, {os.cpu_count()} CPUs "
        f"({platform.processor() or platform.machine()}), Python {platform.python_version()}, numpy {np.__version__}, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after\n"
    )
    print("| system | samples/s | wall µs | CPU µs | wall / memmap | CPU / memmap |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, spent in times.items():
        base = times["memmap, single steps" if "single" in name else "memmap, batches"]
        wall, cpu = np.median(spent, axis=0)
        wall_ratio, cpu_ratio = np.median(spent / base, axis=0)  # of the same round
        print(f"| {name} | {1e6 / wall:,.0f} | {wall:.0f} | {cpu:.0f} | {wall_ratio:.2f} | {cpu_ratio:.2f} |")


if __name__ == "__main__":
    main()
