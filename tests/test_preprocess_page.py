"""The example page, as far as it goes without Gradio."""

import importlib.util
import json
from types import ModuleType

import numpy as np
import pytest

from pipeline.loaders import MultiViewPreprocessor
from pipeline.recipes import load_recipe
from schemas.errors import MissingExtraError
from tasks.decode import encode_jpeg
from tests.conftest import REPOSITORY


@pytest.fixture(name="page", scope="module")
def _page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preprocess_page", REPOSITORY / "examples" / "preprocess_page.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_frames_batch_and_times(page, tmp_path):
    path = tmp_path / "front.jpg"
    path.write_bytes(encode_jpeg(np.full((60, 80, 3), 200, np.uint8), 90))
    prepare = MultiViewPreprocessor(load_recipe("pi0"))
    gallery, batch, times = page.prepare_views(prepare, [str(path), None, None], "pick")
    assert [name for _, name in gallery] == list(prepare.views)
    assert gallery[0][0].max() == 200
    assert not gallery[1][0].any()
    assert batch["prompt"] == ["pick"]
    assert batch["image_mask"] == {"base_0_rgb": [True], "left_wrist_0_rgb": [False], "right_wrist_0_rgb": [False]}
    json.dumps(batch)
    assert [row[1] for row in times] == ["read", "decode", "resize", ""]


def test_without_gradio_the_extra_is_named(page, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gradio", None)
    with pytest.raises(MissingExtraError, match="page"):
        page.build_page(MultiViewPreprocessor(load_recipe("pi0")))
