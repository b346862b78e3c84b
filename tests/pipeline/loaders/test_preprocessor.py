"""Views at run time: the same pixels as in a dataset, in a stable order, whatever they come as."""

import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.loaders import MultiViewLoader, MultiViewPreprocessor
from schemas.errors import Reason, SchemaError, SourceError, UsageError
from schemas.recipe import FrameRecipe, Recipe, ViewRecipe
from tasks.decode import decode_frame, encode_jpeg
from tasks.normalize import IMAGENET_MEAN, IMAGENET_STD, normalize_images
from tasks.resize import resize_frame
from tests.conftest import REPOSITORY
from tests.pipeline.recordings import write_route

NAMES = ("base", "left", "right")


def recipe(**frames: object) -> Recipe:
    views = tuple(
        ViewRecipe(name=name, height_px=32, width_px=40, resize=resize)
        for name, resize in zip(NAMES, ("pad", "stretch", "crop"), strict=True)
    )
    return Recipe(name="test", views=views, frames=FrameRecipe(**frames), action_dim=6)


def scene(seed: int, height: int = 60, width: int = 90) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def jpeg(seed: int) -> bytes:
    return encode_jpeg(scene(seed), 90)


def expected(frames: list[np.ndarray]) -> np.ndarray:
    out = np.zeros((3, 32, 40, 3), np.uint8)
    for place, frame, view in zip(out, frames, recipe().views, strict=True):
        resize_frame(frame, place, method=view.resize)
    return out


def test_every_kind_of_picture_gives_the_same_pixels(tmp_path):
    data = [jpeg(seed) for seed in range(3)]
    arrays = [decode_frame(item) for item in data]
    paths = []
    for number, item in enumerate(data):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(item)
    pictures = [Image.open(io.BytesIO(item)) for item in data]
    with MultiViewPreprocessor(recipe()) as prepare:
        for kind in (data, arrays, paths, [str(path) for path in paths], pictures, [memoryview(item) for item in data]):
            np.testing.assert_array_equal(prepare(kind), expected(arrays))
    with MultiViewPreprocessor(recipe(), channel_order="bgr") as prepare:
        np.testing.assert_array_equal(prepare([array[..., ::-1] for array in arrays]), expected(arrays))
        np.testing.assert_array_equal(prepare(data), expected(arrays))


@pytest.mark.parametrize("threads", [0, 1, 2, 8])
def test_the_order_is_the_recipes_with_any_number_of_threads(threads):
    arrays = [scene(seed, 40 + 50 * seed) for seed in range(3)]
    with MultiViewPreprocessor(recipe(), threads=threads) as prepare:
        for _ in range(5):
            named = {"right": arrays[2], "base": arrays[0], "left": arrays[1]}
            np.testing.assert_array_equal(prepare(named), expected(arrays))


def test_a_missing_view_is_zero_and_masked():
    arrays = [scene(seed) for seed in range(3)]
    prepare = MultiViewPreprocessor(recipe())
    found = prepare({"base": arrays[0], "right": arrays[2]})
    assert not found[1].any()
    np.testing.assert_array_equal(found[[0, 2]], expected(arrays)[[0, 2]])
    np.testing.assert_array_equal(prepare.mask({"base": arrays[0], "right": None}), [True, False, False])
    assert (MultiViewPreprocessor(recipe(), form="symmetric")({})[1] == -1).all()
    normalised = recipe(dtype="float32", mean=IMAGENET_MEAN, std=IMAGENET_STD)
    assert not MultiViewPreprocessor(normalised)({}).any()


def test_a_view_that_the_recipe_does_not_mask_must_be_there():
    view = ViewRecipe(name="base", missing="stop")
    with pytest.raises(SourceError, match="view base") as caught:
        MultiViewPreprocessor(Recipe(name="test", views=(view,)))({})
    assert caught.value.reason == Reason.MISSING_FILE


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_frames_normalised_at_write_are_normalised_here_unless_pixels_are_asked_for(dtype):
    data = [jpeg(seed) for seed in range(3)]
    pixels = expected([decode_frame(item) for item in data])
    stored = np.empty(pixels.shape, dtype)
    normalize_images(pixels, IMAGENET_MEAN, IMAGENET_STD, stored)
    normalised = recipe(dtype=dtype, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    found = MultiViewPreprocessor(normalised)(data)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, stored)
    np.testing.assert_array_equal(MultiViewPreprocessor(normalised, form="pixels")(data), pixels)


def test_symmetric_is_openpis_own_conversion_bit_for_bit():
    data = [jpeg(seed) for seed in range(3)]
    pixels = expected([decode_frame(item) for item in data])
    found = MultiViewPreprocessor(recipe(), form="symmetric")(data)
    np.testing.assert_array_equal(found, pixels.astype(np.float32) / 255.0 * 2.0 - 1.0)


def test_the_loss_of_a_lossy_codec_is_in_the_pixels():
    data = [jpeg(seed) for seed in range(3)]
    pixels = expected([decode_frame(item) for item in data])
    found = MultiViewPreprocessor(recipe(codec="jpeg:80"))(data)
    np.testing.assert_array_equal(found, [decode_frame(encode_jpeg(frame, 80)) for frame in pixels])


@pytest.mark.parametrize(
    "frames", ['codec = "raw"', 'codec = "jpeg:85"', 'dtype = "float16"\nmean = [0.5, 0.4, 0.3]\nstd = [0.2, 0.3, 0.4]']
)
@pytest.mark.parametrize("resize", ["pad", "crop"])
def test_a_robot_sees_what_the_dataset_of_its_training_holds(tmp_path, frames, resize):
    route = write_route(tmp_path / "raw", 1, 5)
    text = f"""
        action_dim = 4
        [views.main]
        from = ["rgb"]
        size = [16, 20]
        resize = "{resize}"
        [views.side]
        from = ["rgb_left"]
        size = [16, 20]
        [signals.state]
        from = ["speed"]
        [signals.actions]
        from = ["steer"]
        [frames]
        {frames}
    """
    (tmp_path / "small.toml").write_text(text)
    convert(tmp_path / "raw", tmp_path / "out", tmp_path / "small.toml", cluster=ClusterOptions(workers=0))
    loader = MultiViewLoader(tmp_path / "out", 5, shuffle=False, tail="keep", horizon=2, action_dim=4)
    images = next(iter(loader))["image"]
    prepare = MultiViewPreprocessor.from_dataset(tmp_path / "out")
    for step in range(5):
        files = {"main": route / "rgb" / f"{step:04d}.png", "side": route / "rgb_left" / f"{step:04d}.png"}
        found = prepare(files)
        for number, name in enumerate(("main", "side")):
            np.testing.assert_array_equal(found[number], images[name][step])


def test_an_observation_is_a_loaders_batch_of_one_without_actions():
    prepare = MultiViewPreprocessor(recipe())
    batch = prepare.observation({"base": scene(0), "left": scene(1)}, np.array([1.0, 2.0]), "pick it up")
    assert list(batch) == ["image", "image_mask", "state", "prompt"]
    assert {name: frame.shape for name, frame in batch["image"].items()} == dict.fromkeys(NAMES, (1, 32, 40, 3))
    assert {name: bool(mask[0]) for name, mask in batch["image_mask"].items()} == {
        "base": True,
        "left": True,
        "right": False,
    }
    np.testing.assert_array_equal(batch["state"], np.array([[1, 2, 0, 0, 0, 0]], np.float32))
    assert batch["state"].dtype == np.float32
    assert batch["prompt"] == ["pick it up"]


def test_a_batch_may_be_preallocated():
    out = np.full((2, 3, 32, 40, 3), 7, np.uint8)
    assert MultiViewPreprocessor(recipe())([scene(0), scene(1), scene(2)], out[1]) is not None
    np.testing.assert_array_equal(out[1], expected([scene(0), scene(1), scene(2)]))
    assert (out[0] == 7).all()
    with pytest.raises(SchemaError, match="C-contiguous"):
        MultiViewPreprocessor(recipe())([scene(0), scene(1), scene(2)], np.empty((3, 32, 40, 3), np.float32))


@pytest.mark.parametrize("number", [0, 2])
def test_a_broken_picture_names_its_view_and_reason(number):
    pictures = [jpeg(0), jpeg(1), jpeg(2)]
    pictures[number] = pictures[number][:300]
    with pytest.raises(SourceError, match=f"view {NAMES[number]}") as caught:
        MultiViewPreprocessor(recipe())(pictures)
    assert caught.value.reason == Reason.TRUNCATED


def test_a_missing_file_names_its_view_and_reason(tmp_path):
    with pytest.raises(SourceError, match="view left") as caught:
        MultiViewPreprocessor(recipe())({"left": tmp_path / "none.jpg"})
    assert caught.value.reason == Reason.MISSING_FILE


@pytest.mark.parametrize("pictures", [{"front": None}, [None], {"base": 3}], ids=["name", "number", "type"])
def test_wrong_calls_are_refused(pictures):
    with pytest.raises(UsageError, match="expected"):
        MultiViewPreprocessor(recipe())(pictures)


@pytest.mark.parametrize("options", [{"form": "float"}, {"channel_order": "grb"}, {"threads": -1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match="expected form"):
        MultiViewPreprocessor(recipe(), **options)


def test_views_of_different_sizes_are_refused():
    views = (ViewRecipe(name="a", height_px=32), ViewRecipe(name="b"))
    with pytest.raises(SchemaError, match="one size"):
        MultiViewPreprocessor(Recipe(name="test", views=views))


def test_it_goes_on_after_close_after_pickling_and_in_a_forked_child():
    arrays = [scene(seed) for seed in range(3)]
    prepare = MultiViewPreprocessor(recipe(), threads=2)
    np.testing.assert_array_equal(prepare(arrays), expected(arrays))
    prepare.close()
    np.testing.assert_array_equal(prepare(arrays), expected(arrays))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(prepare))(arrays), expected(arrays))
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork with threads; this is what is tested
        child = os.fork()
    if child == 0:
        os.write(write, b"same" if np.array_equal(prepare(arrays), expected(arrays)) else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"same"


def test_a_robot_needs_neither_dask_nor_a_reader(tmp_path: Path):
    code = """if True:
        import sys, numpy as np
        from pipeline.loaders import MultiViewPreprocessor
        from schemas.recipe import Recipe, ViewRecipe
        MultiViewPreprocessor(Recipe(name="t", views=(ViewRecipe(name="a"),)))([np.zeros((48, 64, 3), np.uint8)])
        heavy = {"dask", "distributed", "zarr", "av", "torch", "xarray"} | {m for m in sys.modules if m.startswith("pipeline.readers")}
        print(sorted(heavy & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
