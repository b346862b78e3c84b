"""The batch, against openpi's list of transforms written once more from its contract, in plain NumPy and Pillow.

``repack, robot adapter, DeltaActions, Normalize, ResizeImages, PadStatesAndActions``, as ``transform_dataset`` of openpi's
``training/data_loader.py`` puts them together. Nothing here but the loader under test is Headrace's: raw files are read with
pyarrow and Pillow, the arithmetic is spelled out.
"""

import io
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import MultiViewLoader, OpenPiDataset
from pipeline.stats_export import dataset_norm_stats
from schemas.errors import DatasetError
from tasks.transforms import AlohaToPi, DeltaActions, Normalize, Transform
from tests.conftest import REPOSITORY

HORIZON, WIDTH = 10, 32
LENGTHS = (12, 1, 7, 23)
"""Longer than two horizons, of one step, shorter than a horizon."""
VIEWS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A robot as its LeRobot set lays it out, and what openpi makes of it."""

    views: dict[str, tuple[str, tuple[int, int]]]
    """openpi's view -> (raw view, height and width)."""
    state: dict[str, int]
    """Raw columns that the adapter concatenates, and their sizes."""
    actions: dict[str, int]
    delta: tuple[bool, ...]
    adapt_to_pi: bool = False


LAYOUTS = {
    "aloha": Layout(
        views={
            "base_0_rgb": ("observation.images.cam_high", (240, 320)),
            "left_wrist_0_rgb": ("observation.images.cam_left_wrist", (240, 320)),
            "right_wrist_0_rgb": ("observation.images.cam_right_wrist", (48, 64)),
        },
        state={"observation.state": 14},
        actions={"action": 14},
        delta=(True,) * 6 + (False,) + (True,) * 6 + (False,),
        adapt_to_pi=True,
    ),
    "droid": Layout(
        views={
            "base_0_rgb": ("exterior_image_1_left", (180, 320)),
            "left_wrist_0_rgb": ("wrist_image_left", (180, 320)),
        },
        state={"state.joint_position": 7, "state.gripper_position": 1},
        actions={"actions": 8},
        delta=(True,) * 7 + (False,),
    ),
    "libero": Layout(
        views={"base_0_rgb": ("image", (256, 256)), "left_wrist_0_rgb": ("wrist_image", (256, 256))},
        state={"state": 8},
        actions={"actions": 7},
        delta=(True,) * 6 + (False,),
    ),
}
INSTRUCTIONS = (("pick up the cube",), ("",), ("open it", "open the drawer", "pull the handle"), ("wipe",))
"""Of each episode; only the first one is on its steps."""


def write_raw(root: Path, layout: Layout, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    columns = layout.state | layout.actions
    features: dict[str, Any] = {name: {"dtype": "float32", "shape": [size]} for name, size in columns.items()}
    for name, (height, width) in layout.views.values():
        features[name] = {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channel"]}
    info = {
        "codebase_version": "v2.1", "fps": 50, "features": features, "chunks_size": 1000, "video_path": None,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }  # fmt: skip
    texts = [text for texts in INSTRUCTIONS for text in texts]
    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    tasks = [{"task_index": number, "task": text} for number, text in enumerate(texts)]
    episodes = [
        {"episode_index": k, "tasks": list(INSTRUCTIONS[k]), "length": length} for k, length in enumerate(LENGTHS)
    ]
    for name, rows in (("tasks", tasks), ("episodes", episodes)):
        (root / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for episode, length in enumerate(LENGTHS):
        table = {
            name: list(np.cumsum(rng.normal(0, 0.1, (length, size)), axis=0, dtype=np.float64).astype(np.float32) + 0.3)
            for name, size in columns.items()
        }
        arrays = {
            name: pa.array([row.tolist() for row in rows], pa.list_(pa.float32())) for name, rows in table.items()
        }
        for name, size in layout.views.values():
            cells = [{"bytes": png(rng, size), "path": None} for _ in range(length)]
            arrays[name] = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        arrays["timestamp"] = pa.array(np.arange(length) / 50, pa.float32())
        arrays["task_index"] = pa.array([texts.index(INSTRUCTIONS[episode][0])] * length, pa.int64())
        pq.write_table(pa.table(arrays), root / f"data/chunk-000/episode_{episode:06d}.parquet")
    return root


def png(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    """Noise at a third of the size over a gradient: sharp edges, and quick to compress."""
    height, width = size
    coarse = rng.integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    frame = (
        coarse.repeat(3, axis=0).repeat(3, axis=1)[:height, :width] // 2
        + (np.arange(width) % 128).astype(np.uint8)[:, None]
    )
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


# -- openpi's contract, once more --------------------------------------------------------------------------------------


def raw_samples(root: Path, layout: Layout) -> list[dict[str, Any]]:
    """What ``LeRobotDataset`` with ``delta_timestamps`` gives after repack: chunks clamped to the episode's last action."""
    samples = []
    for episode, length in enumerate(LENGTHS):
        table = pq.read_table(root / f"data/chunk-000/episode_{episode:06d}.parquet")
        state = np.concatenate([np.array(table[name].to_pylist(), np.float32) for name in layout.state], axis=1)
        actions = np.concatenate([np.array(table[name].to_pylist(), np.float32) for name in layout.actions], axis=1)
        images = {
            view: [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB")) for cell in table[raw].to_pylist()]
            for view, (raw, _) in layout.views.items()
        }
        for step in range(length):
            chunk = np.stack([actions[min(step + k, length - 1)] for k in range(HORIZON)])
            samples.append(
                {
                    "images": {view: frames[step] for view, frames in images.items()},
                    "state": state[step].copy(),
                    "actions": chunk,
                    "prompt": INSTRUCTIONS[episode][0],
                }
            )
    return samples


def adapted(sample: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """AlohaInputs, DroidInputs or LiberoInputs: a view that is absent is zeros like the base view, its mask False."""
    images = sample["images"]
    base = images["base_0_rgb"]
    state, actions = sample["state"].astype(np.float64), sample["actions"].astype(np.float64)
    if layout.adapt_to_pi:
        flips = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1])
        state, actions = state * flips, actions * flips
        for gripper in (6, 13):
            metres = state[gripper] * (0.05800 - 0.01844) + 0.01844
            sine = (0.022**2 + metres**2 - 0.036**2) / (2 * 0.022 * metres)
            state[gripper] = (np.arcsin(np.clip(sine, -1, 1)) - 0.5476) / (1.6296 - 0.5476)
            actions[:, gripper] = actions[:, gripper] * (1.4910 + 0.6213) - 0.6213 - 0.5476
    return {
        "image": {view: images.get(view, np.zeros_like(base)) for view in VIEWS},
        "image_mask": {view: view in images for view in VIEWS},
        "state": state,
        "actions": actions,
        "prompt": sample["prompt"],
    }


def made_relative(sample: dict[str, Any], mask: tuple[bool, ...]) -> dict[str, Any]:
    actions = sample["actions"].copy()
    actions[..., : len(mask)] -= np.expand_dims(np.where(mask, sample["state"][..., : len(mask)], 0), axis=-2)
    return {**sample, "actions": actions}


def normalized(sample: dict[str, Any], stats: dict[str, Any], method: str) -> dict[str, Any]:
    out = dict(sample)
    for name in ("state", "actions"):
        mean, std, q01, q99 = (np.array(stats["norm_stats"][name][key]) for key in ("mean", "std", "q01", "q99"))
        values = sample[name]
        out[name] = (
            (values - mean) / (std + 1e-6) if method == "zscore" else (values - q01) / (q99 - q01 + 1e-6) * 2.0 - 1.0
        )
    return out


def resized(image: np.ndarray, height: int = 224, width: int = 224) -> np.ndarray:
    """``resize_with_pad`` of openpi_client's image_tools."""
    if image.shape[:2] == (height, width):
        return image
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    inner_height, inner_width = int(image.shape[0] / ratio), int(image.shape[1] / ratio)
    inner = Image.fromarray(image).resize((inner_width, inner_height), resample=Image.Resampling.BILINEAR)
    out = Image.new(inner.mode, (width, height), 0)
    out.paste(inner, (max(0, int((width - inner_width) / 2)), max(0, int((height - inner_height) / 2))))
    return np.asarray(out)


def padded(values: np.ndarray) -> np.ndarray:
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, WIDTH - values.shape[-1])])


# -- fixtures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    out: Path
    samples: list[dict[str, Any]]
    """After the robot adapter, in the order of the steps."""
    raw: list[dict[str, Any]]
    """As recorded."""

    def transforms(self, *, delta: bool) -> list[Transform]:
        adapters: list[Transform] = [AlohaToPi()] if self.layout.adapt_to_pi else []
        return [*adapters, *([DeltaActions(self.layout.delta)] if delta else [])]

    def expected(self, *, delta: bool) -> list[dict[str, Any]]:
        return [made_relative(sample, self.layout.delta) if delta else sample for sample in self.samples]


def brute_force_stats(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Statistics of everything that training sees, every entry of every chunk."""
    stats = {}
    for name in ("state", "actions"):
        rows = np.concatenate([np.atleast_2d(sample[name]) for sample in samples])
        low, high = np.quantile(rows, [0.01, 0.99], axis=0, method="inverted_cdf")
        values = {"mean": rows.mean(axis=0), "std": rows.std(axis=0), "q01": low, "q99": high}
        stats[name] = {key: value.tolist() for key, value in values.items()}
    return {"norm_stats": stats}


@pytest.fixture(name="case", scope="module", params=list(LAYOUTS))
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    layout = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    raw = write_raw(folder / "raw", layout, seed=len(request.param))
    report = convert(raw, folder / "out", "pi0", shard_steps=16, cluster=ClusterOptions(workers=0))
    assert not report.quarantined
    recorded = raw_samples(raw, layout)
    samples = [adapted(sample, layout) for sample in recorded]
    return Case(layout=layout, out=folder / "out", samples=samples, raw=recorded)


# -- what must hold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "absolute"])
@pytest.mark.parametrize("method", ["zscore", "quantile"])
def test_a_batch_is_what_openpis_transforms_give(case: Case, method: str, delta: bool) -> None:
    samples = case.expected(delta=delta)
    stats = brute_force_stats(samples)
    transforms = [*case.transforms(delta=delta), Normalize.from_norm_stats(stats, method)]
    loader = MultiViewLoader(
        case.out, 8, horizon=HORIZON, transforms=transforms, shuffle=True, seed=3, tail="keep", default_prompt="do it"
    )
    seen = []
    for batch in loader:
        for row, step in enumerate(batch["index"].tolist()):
            seen.append(step)
            expected = normalized(samples[step], stats, method)
            for view in VIEWS:
                np.testing.assert_array_equal(batch["image"][view][row], resized(expected["image"][view]))
                assert batch["image_mask"][view][row] == expected["image_mask"][view]
            np.testing.assert_allclose(batch["state"][row], padded(expected["state"]), rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(batch["actions"][row], padded(expected["actions"]), rtol=1e-6, atol=1e-6)
            assert batch["prompt"][row] == (expected["prompt"] or "do it")
    assert sorted(seen) == list(range(sum(LENGTHS)))  # starts, middles and tails of every episode
    assert batch["state"].dtype == batch["actions"].dtype == np.float32


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "absolute"])
def test_the_statistics_we_export_are_those_of_every_chunk_that_training_sees(case: Case, delta: bool) -> None:
    mask = case.layout.delta if delta else None
    adapter = "aloha" if case.layout.adapt_to_pi else ""
    found = dataset_norm_stats(case.out, horizon=HORIZON, delta_mask=mask, adapter=adapter)["norm_stats"]
    expected = brute_force_stats(case.expected(delta=delta))["norm_stats"]
    for name in ("state", "actions"):
        for key in ("mean", "std", "q01", "q99"):
            if name == "actions" or key in ("mean", "std"):
                np.testing.assert_allclose(found[name][key], expected[name][key], rtol=1e-6, atol=1e-6)


def test_the_datasets_own_statistics_normalise_what_they_are_of_and_nothing_else(case: Case) -> None:
    plain = next(iter(MultiViewLoader(case.out, 8, horizon=HORIZON, normalize="zscore", shuffle=False)))
    by_hand = Normalize.from_norm_stats(dataset_norm_stats(case.out), "zscore")
    other = next(iter(MultiViewLoader(case.out, 8, horizon=HORIZON, transforms=[by_hand], shuffle=False)))
    np.testing.assert_array_equal(plain["state"], other["state"])
    np.testing.assert_array_equal(plain["actions"], other["actions"])
    for transforms in ([DeltaActions(case.layout.delta)], [AlohaToPi()], [by_hand]):
        with pytest.raises(DatasetError, match="leave `normalize` out"):
            MultiViewLoader(case.out, 8, normalize="zscore", transforms=transforms)


def test_the_openpi_dataset_gives_what_its_normalize_takes(case: Case) -> None:
    dataset = OpenPiDataset(case.out, horizon=HORIZON, transforms=case.transforms(delta=False), default_prompt="do it")
    assert len(dataset) == sum(LENGTHS)
    for step in (0, LENGTHS[0] - 1, LENGTHS[0], sum(LENGTHS) - 1):
        sample, expected = dataset[np.int64(step)], case.samples[step]
        assert list(sample) == ["image", "image_mask", "state", "actions", "prompt"]
        np.testing.assert_allclose(sample["state"], expected["state"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(sample["actions"], expected["actions"], rtol=1e-6, atol=1e-6)
        assert sample["prompt"] == (expected["prompt"] or "do it")
        for view in VIEWS:
            np.testing.assert_array_equal(sample["image"][view], resized(expected["image"][view]))
            assert bool(sample["image_mask"][view]) is expected["image_mask"][view]
        sample["actions"][...] -= 1  # openpi's DeltaActions writes in place
        assert not np.shares_memory(dataset[step]["actions"], sample["actions"])


def test_samples_are_repacked_for_a_robot_adapter(case: Case) -> None:
    structure = {
        "observation/image": "image/base_0_rgb",
        "images": {"wrist": "image/left_wrist_0_rgb"},
        "actions": "actions",
    }
    sample = OpenPiDataset(case.out, horizon=HORIZON, repack=structure)[0]
    assert list(sample) == ["observation/image", "images", "actions"]
    np.testing.assert_array_equal(sample["images"]["wrist"], resized(case.samples[0]["image"]["left_wrist_0_rgb"]))
    assert sample["actions"].shape == (HORIZON, sum(case.layout.actions.values()))


def test_one_of_several_instructions_is_chosen_by_the_seed(case: Case) -> None:
    def prompts(seed: int | None, **options: Any) -> dict[int, str]:
        loader = MultiViewLoader(case.out, 7, tail="keep", prompt_seed=seed, default_prompt="do it", **options)
        return {
            step: text for batch in loader for step, text in zip(batch["index"].tolist(), batch["prompt"], strict=True)
        }

    first = LENGTHS[0] + LENGTHS[1]
    several = range(first, first + LENGTHS[2])
    plain, chosen = prompts(None), prompts(1)
    assert {plain[step] for step in several} == {"open it"}
    assert {chosen[step] for step in several} <= set(INSTRUCTIONS[2])
    assert {prompts(seed)[step] for seed in range(4) for step in several} == set(INSTRUCTIONS[2])
    assert chosen == prompts(1, shuffle=False) != prompts(2)
    assert all(plain[step] == chosen[step] for step in plain if step not in several)
    assert plain[LENGTHS[0]] == "do it"


@pytest.mark.parametrize("case", [name for name, layout in LAYOUTS.items() if layout.adapt_to_pi], indirect=True)
def test_the_documentation_of_training_runs(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs/training.md").read_text("utf-8")
    loading, _, in_openpi, exporting = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    samples = case.expected(delta=True)
    (tmp_path / "norm_stats.json").write_text(json.dumps(brute_force_stats(samples)))
    (tmp_path / "robot.zarr").symlink_to(case.out)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(loading, names)  # noqa: S102 - our own page
    for row, step in enumerate(names["batch"]["index"].tolist()):
        raw = case.raw[step]
        np.testing.assert_allclose(names["state"][row], raw["state"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(names["actions"][row], raw["actions"], rtol=1e-5, atol=1e-5)
    function = "def create(data_config, action_horizon):\n" + textwrap.indent(in_openpi, "    ")
    exec(function, names)  # noqa: S102
    dataset = names["create"](SimpleNamespace(repo_id="robot.zarr"), HORIZON)
    np.testing.assert_array_equal(dataset[3]["actions"], case.raw[3]["actions"])
    exec(exporting, names)  # noqa: S102
    assert (names["report"].num_episodes, names["report"].num_steps) == (len(LENGTHS), sum(LENGTHS))
