"""Loaders that people use, over the same frames, beside Headrace's: three views a sample, batches of 32, in one run.

    pip install torch torchvision webdataset mosaicml-streaming ffcv grain lerobot torchcodec h5py   # what is absent is left out
    python -m benchmarks.peers [--steps 512] [--rounds 3] [--workers 2] [--folder DIR]

Run from the repository's root. Frames are photographic (benchmarks/pixels.py), 224x224, but for JPEGs of 1920x1080, which are resized as they are
read, and LeRobot's videos of 640x480, which are not: what a training loop does that has converted nothing. Every system reads from the page cache, ``--workers`` processes
or threads, in turns (A B C A B C ...), and hands out whole batches of uint8 (NumPy or torch), of which nothing is done but to count them. Workers of torch's DataLoader are
kept from epoch to epoch, and the first round, which starts them and compiles, is not counted. Medians over the rounds.

"Times" is how many samples Headrace gives in the time of one: its loader of a raw dataset, or, of rows of JPEG, its loader of a ``jpeg:95`` dataset. FFCV is
compared with a raw dataset whose checksums are computed on first touch, which is still one check more than it makes.
"""

import argparse
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.pixels import jpeg, scene
from benchmarks.turns import Run, measure
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.export_lerobot import export_lerobot
from pipeline.loaders import MultiViewLoader
from pipeline.recipes import load_recipe

VIEWS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
BATCH, SIZE, QUALITY = 32, 224, 95
NUM_LARGE, NUM_VIDEO = 96, 96
"""Samples of 1920x1080 JPEGs, and of 640x480 videos."""


class Fixture:
    """The same frames in the form of every system."""

    def __init__(self, folder: Path, num_steps: int, workers: int) -> None:
        self.folder, self.num_steps, self.workers = folder, num_steps, workers
        self.frames = {view: np.empty((num_steps, SIZE, SIZE, 3), np.uint8) for view in VIEWS}
        scenes = [np.asarray(scene(SIZE, SIZE, seed)) for seed in range(24)]
        for number, frames in enumerate(self.frames.values()):
            for step in range(num_steps):
                frames[step] = np.roll(scenes[(step + 5 * number) % len(scenes)], 3 * step, axis=1)
        raw = folder / "recording"
        raw.mkdir()
        for view, frames in self.frames.items():
            np.save(raw / f"{view}.npy", frames)
        np.save(raw / "state.npy", np.zeros((num_steps, 14), np.float32))
        np.save(raw / "action.npy", np.zeros((num_steps, 14), np.float32))
        (raw / "meta.json").write_text('{"rate_hz": 30, "instructions": ["pick"]}')
        for codec in ("raw", f"jpeg:{QUALITY}"):
            convert(raw, folder / codec, "pi0", codec=codec, cluster=ClusterOptions(workers=0))
        (folder / "jpeg").mkdir()
        (folder / "large").mkdir()
        for view, frames in self.frames.items():
            for step, frame in enumerate(frames):
                self.jpeg(view, step).write_bytes(jpeg(Image.fromarray(frame), QUALITY))
        large = [jpeg(scene(1080, 1920, seed), 90) for seed in range(8)]
        for step in range(NUM_LARGE):
            for number, view in enumerate(VIEWS):
                (folder / "large" / f"{view}-{step}.jpg").write_bytes(large[(step + number) % len(large)])

    def jpeg(self, view: str, step: int) -> Path:
        return self.folder / "jpeg" / f"{view}-{step}.jpg"

    def sample(self, step: int) -> dict[str, np.ndarray]:
        return {view: frames[step] for view, frames in self.frames.items()}


def epochs(batches: Iterable[Any], name: str = VIEWS[0]) -> Run:
    """Count the samples of whole epochs, by one of a batch's arrays."""

    def run() -> int:
        return sum(len(batch[name] if isinstance(batch, dict) else batch[0]) for batch in batches)

    return run


def data_loader(dataset: Any, fixture: Fixture, **options: Any) -> Any:
    import torch

    known: dict[str, Any] = {"batch_size": BATCH, "num_workers": fixture.workers, "persistent_workers": True}
    return torch.utils.data.DataLoader(dataset, **{**known, "multiprocessing_context": "fork", **options})


class Files:
    """A map-style dataset of one image file a view and step, or one npz a step."""

    def __init__(self, num: int, read: Callable[[int], dict[str, np.ndarray]]) -> None:
        self.num, self.read = num, read

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        return self.read(step)


def large_jpeg(fixture: Fixture) -> Run:
    def read(step: int) -> dict[str, np.ndarray]:
        sample = {}
        for view in VIEWS:
            with Image.open(fixture.folder / "large" / f"{view}-{step}.jpg") as image:
                sample[view] = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
        return sample

    return epochs(data_loader(Files(NUM_LARGE, read), fixture, shuffle=True))


def small_jpeg(fixture: Fixture) -> Run:
    def read(step: int) -> dict[str, np.ndarray]:
        return {view: np.asarray(Image.open(fixture.jpeg(view, step)).convert("RGB")) for view in VIEWS}

    return epochs(data_loader(Files(fixture.num_steps, read), fixture, shuffle=True))


def npz(fixture: Fixture) -> Run:
    (fixture.folder / "npz").mkdir()
    for step in range(fixture.num_steps):
        np.savez(fixture.folder / "npz" / f"{step}.npz", **fixture.sample(step))

    def read(step: int) -> dict[str, np.ndarray]:
        with np.load(fixture.folder / "npz" / f"{step}.npz") as file:
            return {view: file[view] for view in VIEWS}

    return epochs(data_loader(Files(fixture.num_steps, read), fixture, shuffle=True))


def hdf5(fixture: Fixture) -> Run:
    import h5py

    with h5py.File(fixture.folder / "frames.h5", "w") as file:
        for view, frames in fixture.frames.items():
            file.create_dataset(view, data=frames, chunks=(1, SIZE, SIZE, 3))
    opened: dict[int, Any] = {}

    def read(step: int) -> dict[str, np.ndarray]:
        if os.getpid() not in opened:  # each worker a file of its own
            opened[os.getpid()] = h5py.File(fixture.folder / "frames.h5")
        file = opened[os.getpid()]
        return {view: file[view][step] for view in VIEWS}

    return epochs(data_loader(Files(fixture.num_steps, read), fixture, shuffle=True))


def zarr_python(fixture: Fixture) -> Run:
    import zarr

    arrays = [zarr.open_array(fixture.folder / "raw", path=f"rgb_{view}", mode="r") for view in VIEWS]

    def run() -> int:
        for step in range(16):
            for array in arrays:
                array[step * 7]
        return 16

    return run


def webdataset(fixture: Fixture) -> Run:
    import webdataset as wds

    (fixture.folder / "wds").mkdir()
    pattern = str(fixture.folder / "wds" / "%03d.tar")
    with wds.ShardWriter(pattern, maxcount=-(-fixture.num_steps // 8), verbose=0) as sink:
        for step in range(fixture.num_steps):
            sink.write({"__key__": f"{step:06d}", **{f"{v}.jpg": fixture.jpeg(v, step).read_bytes() for v in VIEWS}})
    urls = sorted(map(str, (fixture.folder / "wds").glob("*.tar")))
    stream = wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(256).decode("rgb8")
    stream = stream.to_tuple(*(f"{view}.jpg" for view in VIEWS)).batched(BATCH)
    return epochs(data_loader(stream, fixture, batch_size=None))


def streaming(fixture: Fixture) -> Run:
    from streaming import MDSWriter, StreamingDataset

    columns = dict.fromkeys(VIEWS, "jpeg_array")
    place = str(fixture.folder / "mds")
    with MDSWriter(out=place, columns=dict.fromkeys(VIEWS, "bytes")) as sink:
        for step in range(fixture.num_steps):
            sink.write({view: fixture.jpeg(view, step).read_bytes() for view in columns})

    class Decoded(StreamingDataset):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            import io

            sample = super().__getitem__(index)
            return {view: np.asarray(Image.open(io.BytesIO(sample[view])).convert("RGB")) for view in VIEWS}

    return epochs(data_loader(Decoded(local=place, shuffle=True, batch_size=BATCH), fixture))


def ffcv(fixture: Fixture, mode: str) -> Run:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    class Frames:
        def __len__(self) -> int:
            return fixture.num_steps

        def __getitem__(self, step: int) -> tuple[Any, ...]:
            return (*fixture.sample(step).values(), step)

    path = str(fixture.folder / f"{mode}.beton")
    names = [f"view{number}" for number in range(len(VIEWS))]  # it cuts names after 16 letters
    fields: dict[str, Any] = {name: RGBImageField(write_mode=mode, jpeg_quality=QUALITY) for name in names}
    DatasetWriter(path, {**fields, "step": IntField()}, num_workers=2).from_indexed_dataset(Frames())
    pipelines: dict[str, Any] = {name: [SimpleRGBImageDecoder()] for name in names}
    loader = Loader(
        path, BATCH, num_workers=fixture.workers, order=OrderOption.RANDOM, os_cache=True, drop_last=False,
        pipelines={**pipelines, "step": [IntDecoder()]},
    )  # fmt: skip
    return epochs(loader)


def grain(fixture: Fixture) -> Run:
    import io

    import grain as gr
    from array_record.python.array_record_module import ArrayRecordWriter

    for view in VIEWS:
        writer = ArrayRecordWriter(str(fixture.folder / f"{view}.arrayrecord"), "group_size:1")
        for step in range(fixture.num_steps):
            writer.write(fixture.jpeg(view, step).read_bytes())
        writer.close()
    sources = [gr.sources.ArrayRecordDataSource(str(fixture.folder / f"{view}.arrayrecord")) for view in VIEWS]

    def read(step: int) -> dict[str, np.ndarray]:
        return {
            view: np.asarray(Image.open(io.BytesIO(source[step])).convert("RGB"))
            for view, source in zip(VIEWS, sources)
        }

    steps = gr.MapDataset.range(fixture.num_steps).shuffle(seed=1).map(read)
    options = gr.ReadOptions(num_threads=fixture.workers, prefetch_buffer_size=4 * BATCH)
    return epochs(steps.to_iter_dataset(options).batch(BATCH))


def lerobot(fixture: Fixture) -> Run:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    raw = fixture.folder / "recording-640x480"
    raw.mkdir()
    scenes = [np.asarray(scene(480, 640, seed)) for seed in range(8)]
    for number, view in enumerate(VIEWS):
        np.save(raw / f"{view}.npy", [scenes[(step + number) % len(scenes)] for step in range(NUM_VIDEO)])
    for name in ("state", "action"):
        np.save(raw / f"{name}.npy", np.zeros((NUM_VIDEO, 14), np.float32))
    (raw / "meta.json").write_text('{"rate_hz": 30, "instructions": ["pick"]}')
    recipe = load_recipe("pi0")
    recipe = replace(recipe, views=tuple(replace(view, height_px=480, width_px=640) for view in recipe.views))
    convert(raw, fixture.folder / "large.zarr", recipe, cluster=ClusterOptions(workers=0))
    export_lerobot(fixture.folder / "large.zarr", fixture.folder / "lerobot", images="video", version="3.0")
    dataset = LeRobotDataset("local/peers", root=fixture.folder / "lerobot")
    order = np.random.default_rng(1).permutation(NUM_VIDEO).reshape(-1, BATCH).tolist()
    return epochs(
        data_loader(dataset, fixture, batch_size=1, batch_sampler=order, multiprocessing_context="spawn"),
        "observation.state",
    )


def headrace(fixture: Fixture, codec: str, **options: Any) -> Run:
    return epochs(
        Frames(MultiViewLoader(fixture.folder / codec, BATCH, threads=fixture.workers, tail="keep", **options))
    )


class Frames:
    """The frames of a loader's batches, epoch after epoch."""

    def __init__(self, loader: MultiViewLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return (batch["image"] for batch in self.loader)


RAW, FIRST, ENCODED = "Headrace, raw, check always", "Headrace, raw, check first", f"Headrace, jpeg:{QUALITY}"
PEERS: dict[str, tuple[str, str, Callable[[Fixture], Run], str]] = {
    "torch DataLoader, 1920x1080 JPEG, Pillow": ("torch", RAW, large_jpeg, "100x"),
    "torch DataLoader, 224x224 JPEG, Pillow": ("torch", ENCODED, small_jpeg, ""),
    "torch DataLoader, npz a sample": ("torch", RAW, npz, "15x"),
    "torch DataLoader, HDF5": ("h5py", RAW, hdf5, ""),
    "zarr-python, single steps, 1 thread": ("zarr", RAW, zarr_python, "12x"),
    "WebDataset, 224x224 JPEG": ("webdataset", RAW, webdataset, "10x"),
    "MosaicML Streaming, 224x224 JPEG": ("streaming", ENCODED, streaming, ""),
    "FFCV, raw": ("ffcv", FIRST, lambda fixture: ffcv(fixture, "raw"), "1x"),
    "FFCV, JPEG": ("ffcv", ENCODED, lambda fixture: ffcv(fixture, "jpg"), "1x"),
    "Grain, ArrayRecord, 224x224 JPEG": ("grain", ENCODED, grain, ""),
    "LeRobotDataset, 640x480 mp4, random": ("lerobot", RAW, lerobot, "100x"),
}
"""``name -> (package, the system of ours that it is compared with, how it reads, how many times are asked)``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 512), ("rounds", 3), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="*", default=None, help="peers whose names contain one of these")
    parser.add_argument("--folder", type=Path, default=None, help="where to write the data (default: temporary)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    absent = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        fixture = Fixture(Path(folder), args.steps, args.workers)
        runs = {
            RAW: headrace(fixture, "raw"),
            FIRST: headrace(fixture, "raw", check="first"),
            ENCODED: headrace(fixture, f"jpeg:{QUALITY}"),
        }
        for name, (package, _, make, _) in PEERS.items():
            if args.only is not None and not any(part in name for part in args.only):
                continue
            if importlib.util.find_spec(package) is None:
                absent.append(f"{name} ({package} is not installed)")
                continue
            runs[name] = make(fixture)
        print("measuring", file=sys.stderr, flush=True)
        times = measure(runs, args.rounds)
    print(
        f"{args.steps} samples of 3 x {SIZE}x{SIZE}x3, batches of {BATCH}, {args.workers} workers or threads, {args.rounds} rounds, {os.cpu_count()} CPUs "
        f"({platform.processor() or platform.machine()}), Python {platform.python_version()}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after\n"
    )
    print("| system | samples/s | wall µs a sample | times | asked |")
    print("|---|--:|--:|--:|---|")
    for name, spent in times.items():
        wall = float(np.median(spent[:, 0]))
        _, against, _, asked = PEERS.get(name, ("", name, None, ""))
        times_faster = float(np.median(spent[:, 0] / times[against][:, 0]))  # of the same round
        shown = f"{times_faster:.1f}" if name in PEERS else ""
        bold = "**" if name in PEERS and times_faster < 1 else ""  # a peer that wins
        print(f"| {bold}{name}{bold} | {1e6 / wall:,.0f} | {wall:,.0f} | {bold}{shown}{bold} | {asked} |")
    for line in absent:
        print(f"\nleft out: {line}")


if __name__ == "__main__":
    main()
