"""What Diffusion Planner's tensors cost: to compute, and to load, beside one npz file a sample.

    python -m benchmarks.planner [--steps 800] [--rounds 5] [--folder DIR]

Run from the repository's root. A made-up city of dense traffic (``tests/pipeline/city.py``: 70 lanes, 32 neighbours and 5 static objects
in every sample) is recorded as CARLA's recorder does, converted, and read in random order from the page cache with one thread,
in turns (A B C A B C ...), so that whatever else the machine does falls on all alike. Medians over the rounds; CPU time is of all threads,
and the ratios are of CPU time: what one core does.

npz a sample      the eleven arrays as Diffusion Planner writes them (np.savez, uncompressed), each read with np.load
loader            batches of 32 with ``check="always"``: checksum, decoding, cut to ten predicted neighbours, gathered
tracks            the same loader, of a dataset that keeps tracks and map (``store = "tracks"``) and computes what it serves
computed          from tracks and map to normalised tensors, 64 steps of an episode at once, nothing read or written

Sizes are of all files, tables and masks included. Asked is what issue 6 asks for.
"""

import argparse
import os
import platform
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.turns import Run, measure
from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import PlannerDataset, PlannerLoader
from pipeline.maps import load_map
from pipeline.planner_arrays import planner_params
from pipeline.readers import open_source
from pipeline.recipes import load_recipe
from schemas.planner import TENSORS
from schemas.recipe import PlannerRecipe
from tasks.planner import planner_scene, scene_block
from tasks.planner_normalize import normalize_observation
from tasks.planner_tracks import planner_anchors
from tests.pipeline.city import write_city

BATCH, BLOCK_STEPS = 32, 64
ASKED = {"raw": "15x", "lz4": "5x at 45 %", "zstd": "3.5x at 30 %", "computed": "1,000/s"}


class Fixture:
    """The same samples as files of each kind."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self.folder = folder
        self.map, self.logs = write_city(folder / "city", num_steps)
        for name in ("raw", "lz4", "zstd"):
            self.convert(name, codec=name)
        self.convert("tracks", store="tracks")
        (folder / "npz").mkdir()
        data = PlannerDataset(folder / "raw", predicted_neighbor_num=32, physical=True)
        self.num_samples = len(data)
        for index in range(len(data)):
            tensors = dict(zip(TENSORS, data[index], strict=True))
            np.savez(folder / "npz" / f"{index}.npz", map_name="City", token=f"{index:016d}", **tensors)

    def convert(self, name: str, **changes: object) -> None:
        recipe = load_recipe("diffusion-planner")
        recipe = replace(recipe, planner=replace(recipe.planner, **changes))
        convert(self.logs, self.folder / name, recipe, map=str(self.map), cluster=ClusterOptions(workers=0))

    def nbytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).rglob("*") if path.is_file())


def npz(fixture: Fixture) -> Run:
    def run() -> int:
        order = np.random.default_rng(1).permutation(fixture.num_samples)[:200]
        for index in order.tolist():
            with np.load(fixture.folder / "npz" / f"{index}.npz") as sample:
                [sample[name] for name in TENSORS]
        return len(order)

    return run


def loader(fixture: Fixture, name: str, check: str = "always") -> Run:
    stream = PlannerLoader(fixture.folder / name, BATCH, threads=1, check=check)

    def run() -> int:
        return sum(len(batch["index"]) for batch in stream)

    return run


def computed(fixture: Fixture) -> Run:
    reader = open_source(fixture.logs)
    ref = reader.index().episodes[0]
    tracks = reader.read_tracks(ref)
    params = planner_params(PlannerRecipe(), 10.0, tracks.ego_model)
    scene = planner_scene(tracks, load_map(fixture.map), params)
    anchors = planner_anchors(scene.tracks, params)

    def run() -> int:
        for start in range(0, len(anchors), BLOCK_STEPS):
            normalize_observation(scene_block(scene, anchors[start : start + BLOCK_STEPS]))
        return len(anchors)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 800), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, default=None, help="where to write the data (default: temporary)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        fixture = Fixture(Path(folder), args.steps)
        runs = {"npz a sample": npz(fixture)}
        runs |= {f"loader, {name}": loader(fixture, name) for name in ("raw", "lz4", "zstd")}
        runs |= {"loader, tracks": loader(fixture, "tracks")}
        runs["loader, raw, check first"] = loader(fixture, "raw", "first")
        runs["computed"] = computed(fixture)
        times = measure(runs, args.rounds)
        sizes = {name: fixture.nbytes(name) / fixture.nbytes("npz") for name in ("raw", "lz4", "zstd", "tracks", "npz")}
        print(
            f"{fixture.num_samples} samples of {fixture.nbytes('npz') / fixture.num_samples:,.0f} bytes as npz, {args.rounds} rounds, "
            f"{os.cpu_count()} CPUs ({platform.processor() or platform.machine()}), Python {platform.python_version()}, "
            f"numpy {np.__version__}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after\n"
        )
    print("| system | samples/s | wall µs | CPU µs | npz / CPU | size / npz | asked |")
    print("|---|--:|--:|--:|--:|--:|---|")
    for name, spent in times.items():
        kind = name.split(", ")[-1]
        wall, cpu = np.median(spent, axis=0)
        ratio = np.median(times["npz a sample"][:, 1] / spent[:, 1])  # of the same round
        size = f"{sizes[kind]:.1%}" if kind in sizes else ""
        print(f"| {name} | {1e6 / wall:,.0f} | {wall:.0f} | {cpu:.0f} | {ratio:.1f} | {size} | {ASKED.get(kind, '')} |")


if __name__ == "__main__":
    main()
