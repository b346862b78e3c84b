"""What a notebook shows of batches and loaders: true ranges, masked frames, every text escaped."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from pipeline.loaders import MultiViewLoader, show_batch
from schemas.errors import UsageError
from tests.pipeline.store_builder import build_dataset
from tests.pipeline.test_preview import Page


def picture(view):
    (source,) = [image["src"] for image in Page(view._repr_html_().encode()).all("img")]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,")))))


def test_a_batch_of_a_loader_is_shown_with_its_arrays_and_frames(tmp_path):
    built = build_dataset(tmp_path / "out")
    loader = MultiViewLoader(built.root, 4, horizon=3, action_dim=5, shuffle=False)
    batch = next(iter(loader))
    page = Page(show_batch(batch)._repr_html_().encode())
    assert all(f"image/{view}" in page.text for view in batch["image"])
    assert f"{batch['state'].min():.4g} to {batch['state'].max():.4g}" in page.text
    assert batch["prompt"][0] in page.text
    assert [image["alt"] for image in page.all("img")] == [
        f"the first frames of {', '.join(f'image/{v}' for v in batch['image'])}"
    ]
    shown = Page(loader._repr_html_().encode()).text
    assert f"{len(loader):,} an epoch" in shown
    assert "of which 4 samples are served" in shown


@pytest.mark.parametrize(
    ("frames", "level"),
    [
        (np.full((2, 8, 8, 3), 200, np.uint8), 200),
        (np.full((2, 3, 8, 8), 200, np.uint8), 200),
        (np.full((2, 8, 8, 3), -1, np.float32), 0),
        (np.full((2, 8, 8, 3), 0.5, np.float16), 128),
    ],
)
def test_frames_of_every_layout_are_drawn_as_they_are_and_a_masked_one_is_not(frames, level):
    drawn = picture(show_batch({"image": {"top": frames}, "image_mask": {"top": np.array([True, False])}}, 2))
    solid = (drawn == level).all(axis=-1).sum()
    assert 160 * 160 <= solid < 1.5 * 160 * 160  # one tile of two


def test_numbers_that_are_not_finite_are_counted_and_texts_are_escaped():
    batch = {
        "state": np.array([[1.0, np.nan], [np.inf, -2.0]]),
        "prompt": ["<script>alert(1)</script>"] * 5,
        "none": np.empty((0, 3)),
    }
    view = show_batch(batch)
    assert "state: float64[2, 2]  -2 to 1, 2 not finite" in repr(view)
    assert re.search(r"prompt: 5 texts .* \| …", repr(view))
    assert "none: float64[0, 3]  empty" in repr(view)
    page = Page(view._repr_html_().encode())
    assert page.all("script") == []
    assert "<script>alert(1)</script>" in page.text


def test_futures_of_agents_are_no_pictures():
    view = show_batch({"neighbor_agents_future": np.zeros((2, 32, 80, 3), np.float32)})
    assert Page(view._repr_html_().encode()).all("img") == []
    assert "neighbor_agents_future: float32[2, 32, 80, 3]  0 to 0" in repr(view)


def test_torch_tensors_are_shown_too():
    torch = pytest.importorskip("torch")
    assert "state: float32[2, 3]  1 to 1" in repr(show_batch({"state": torch.ones(2, 3, dtype=torch.bfloat16)}))


@pytest.mark.parametrize("wrong", [np.zeros(3), [1, 2], None])
def test_what_is_no_batch_is_refused(wrong):
    with pytest.raises(UsageError, match="expected a batch"):
        show_batch(wrong)
    with pytest.raises(UsageError, match="1 or more samples"):
        show_batch({}, 0)
