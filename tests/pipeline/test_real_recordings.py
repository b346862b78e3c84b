"""Whole conversions of real recordings, against Pillow, pyarrow and PyAV used directly."""

import json
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest
import zarr
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import MultiViewLoader
from pipeline.verification import verify
from tests.conftest import shared_data

THREADS = ClusterOptions(workers=0)


def resize_with_pad(image: Image.Image, height: int, width: int) -> np.ndarray:
    """openpi_client.image_tools.resize_with_pad (openpi 15a9616a) for uint8, written from its contract."""
    ratio = max(image.width / width, image.height / height)
    inner_height, inner_width = int(image.height / ratio), int(image.width / ratio)
    padded = Image.new(image.mode, (width, height), 0)
    top, left = max(0, int((height - inner_height) / 2)), max(0, int((width - inner_width) / 2))
    padded.paste(image.resize((inner_width, inner_height), resample=Image.Resampling.BILINEAR), (left, top))
    return np.asarray(padded)


@pytest.fixture(scope="module")
def lbc(tmp_path_factory) -> tuple[Path, Path]:
    raw = shared_data("carla_lbc_route")
    out = tmp_path_factory.mktemp("lbc") / "out"
    views = {"base_0_rgb": "rgb", "left_wrist_0_rgb": "rgb_left", "right_wrist_0_rgb": "rgb_right"}
    report = convert(raw, out, "pi0", views=views, cluster=THREADS)
    assert (report.exit_code, report.total_steps, report.num_frames) == (0, 160, 480)
    return raw / "route_00", out


def test_every_frame_of_the_lbc_route_is_what_openpi_makes_with_pillow(lbc):
    route, out = lbc
    group = zarr.open_group(out, mode="r")
    for target, source in (("base_0_rgb", "rgb"), ("left_wrist_0_rgb", "rgb_left"), ("right_wrist_0_rgb", "rgb_right")):
        stored = group[f"rgb_{target}"][:]
        for step in range(160):
            with Image.open(route / source / f"{step:04d}.png") as image:
                expected = resize_with_pad(image.convert("RGB"), 224, 224)
            np.testing.assert_array_equal(stored[step], expected, err_msg=f"{source} {step}")


def test_the_lbc_numbers_are_the_recorded_ones(lbc):
    route, out = lbc
    group = zarr.open_group(out, mode="r")
    for step in (0, 3, 159):
        text = (route / "measurements" / f"{step:04d}.json").read_text()
        record = json.loads(text.replace("'", '"').replace("True", "true").replace("False", "false"))
        found = dict(zip(group["actions"].attrs["features"], group["actions"][step].tolist(), strict=True))
        assert found == {key: float(np.float32(record[key])) for key in ("steer", "throttle", "brake")}
        assert group["timestamp_s"][step] == step / 2
    assert verify(out).ok


def decode(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def test_starvla_converts_with_its_missing_view_masked_and_every_number_and_frame_its_own(tmp_path):
    raw = shared_data("lerobot_v2.1", "starvla_sim_pick_place")
    out = tmp_path / "out"
    report = convert(raw, out, "pi0", size=64, cluster=THREADS)  # small: the size is another test's matter
    assert (report.exit_code, report.total_episodes, report.total_steps) == (0, 4, 1667)
    group = zarr.open_group(out, mode="r")
    ends = group["episode_ends"][:].tolist()
    assert ends == [412, 823, 1221, 1667]
    modality = json.loads((raw / "meta" / "modality.json").read_text())
    for name, prefix in (("actions", "action"), ("state", "state")):
        columns = [entry["original_key"] for entry in modality[prefix].values()]
        tables = [pq.read_table(path, columns=columns) for path in sorted((raw / "data/chunk-000").glob("*.parquet"))]
        joined = [
            np.concatenate([np.array(t[c].to_pylist(), np.float64).reshape(len(t), -1) for c in columns], 1)
            for t in tables
        ]
        np.testing.assert_array_equal(group[name][:], np.concatenate(joined).astype(np.float32))
    base = report.views["base_0_rgb"]
    assert base == ("video.base_view",)
    expected = np.zeros(1667, bool)
    expected[823:1221] = True
    np.testing.assert_array_equal(group["rgb_base_0_rgb_valid"][:], expected)
    assert group["valid"][:].all()
    ego = next(target for target, sources in report.views.items() if sources == ("video.ego_view",))
    for view, target, episode in (("video.ego_view", ego, 1), ("video.base_view", "base_0_rgb", 2)):
        start = [0, *ends][episode]
        decoded = decode(raw / "videos" / "chunk-000" / view / f"episode_{episode:06d}.mp4")
        for step in (0, 1, 100, len(decoded) - 1):
            wanted = resize_with_pad(Image.fromarray(decoded[step]), 64, 64)
            np.testing.assert_array_equal(group[f"rgb_{target}"][start + step], wanted)
    assert verify(out).ok
    batch = next(iter(MultiViewLoader(out, batch_size=4, shuffle=False)))
    assert not batch["image_mask"]["base_0_rgb"].any() and batch["image_mask"][ego].all()
    assert batch["prompt"] == ["Move the shoe to the top of the cooking pot."] * 4


def test_the_minimal_lerobot_set_converts(tmp_path):
    report = convert(
        shared_data("lerobot_v2.1_minimal", "data", "lerobot"), tmp_path / "out", "pi0", size=32, cluster=THREADS
    )
    assert report.total_steps > 0
    assert verify(tmp_path / "out").ok
