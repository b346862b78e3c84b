"""The node that a notebook and a conversion share."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.graph import frames, signals
from pipeline.loaders import MultiViewPreprocessor
from pipeline.readers import open_source
from pipeline.readers.lbc import LbcReader
from pipeline.readers.npy import NpyReader
from schemas.errors import Reason, SchemaError, SourceError
from schemas.recipe import Recipe, ViewRecipe
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SignalInfo, ViewInfo
from tests.pipeline.readers import builders


def test_frames_are_resized_to_their_target(tmp_path: Path) -> None:
    reader = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    (ref,) = reader.index().episodes
    target = ViewRecipe(name="base", height_px=16, width_px=16, resize="pad")
    found = list(frames(reader, ref, "rgb", np.array([1, 3]), target))
    for step, frame in zip((1, 3), found, strict=True):
        assert isinstance(frame, np.ndarray)
        assert (frame.shape, frame.dtype) == ((16, 16, 3), np.uint8)
        assert tuple(frame[8, 8]) == (0, 8 * step, 255)
        assert not frame[0].any()  # 6x8 px become 12x16 and are padded by 2 above and below


def test_raw_frames_are_resized_like_decoded_ones(tmp_path: Path) -> None:
    target = ViewRecipe(name="base", height_px=5, width_px=9, resize="stretch")
    lbc = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    npy = NpyReader(builders.write_npy(tmp_path / "arrays"))
    (decoded,) = frames(lbc, lbc.index().episodes[0], "rgb_left", np.array([2]), target)
    (raw,) = frames(npy, npy.index().episodes[0], "front", np.array([2]), target)
    np.testing.assert_array_equal(decoded, raw)


def test_labels_are_never_resized(tmp_path: Path) -> None:
    reader = LbcReader(builders.write_lbc_route(tmp_path / "route"))
    (ref,) = reader.index().episodes
    with pytest.raises(SourceError, match="found the labels view 'topdown'") as caught:
        list(frames(reader, ref, "topdown", np.array([0]), ViewRecipe(name="base")))
    assert caught.value.reason == Reason.UNSUPPORTED
    (labels,) = frames(reader, ref, "topdown", np.array([3]))
    np.testing.assert_array_equal(labels, np.full((10, 10), 3))


@pytest.mark.parametrize("name", ["lbc", "bench2drive", "lerobot", "npy"])
def test_no_steps_are_no_frames_and_no_rows(tmp_path: Path, name: str) -> None:
    writers = (builders.write_lbc_route, builders.write_bench2drive_clip, builders.write_lerobot, builders.write_npy)
    for write in writers:
        write(tmp_path / write.__name__)
    reader = open_source(
        tmp_path / {"lbc": "write_lbc_route", "bench2drive": "write_bench2drive_clip"}.get(name, f"write_{name}")
    )
    ref = reader.index().episodes[0]
    assert list(frames(reader, ref, ref.views[0].name, np.array([], np.int64))) == []
    names = [signal.name for signal in ref.signals]
    rows, faults = signals(reader, ref, names, np.array([], np.int64))
    assert (rows.shape, faults) == ((0, sum(signal.size for signal in ref.signals)), ())
    rows, _ = signals(reader, ref, [], np.arange(2))
    assert rows.shape == (2, 0)


class _Stub:
    """A reader that answers what it is told to."""

    name = "stub"
    root = Path()

    def __init__(self, rows: np.ndarray, answer: Sequence[Frame] = ()) -> None:
        self.rows = rows
        self.answer = answer

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        return SignalBlock(values=dict.fromkeys(names, self.rows), faults=(Fault(reason=Reason.IO, message="lost"),))

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        return iter(self.answer)

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        return f"{view}/{step}"


REF = EpisodeRef(
    key="e",
    num_steps=9,
    rate_hz=1.0,
    views=(ViewInfo(name="v", height_px=0, width_px=0, encoding="png"),),
    signals=(SignalInfo(name="a", shape=(2, 2), dtype="int32"),),
)


def test_rows_are_flattened_and_joined_in_the_order_asked_for() -> None:
    rows = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    stub: Any = _Stub(rows)
    found, faults = signals(stub, REF, ["a"], np.arange(3))
    np.testing.assert_array_equal(found, rows.reshape(3, 4))
    assert found.dtype == np.float64
    assert faults[0].episode == "e"


def test_a_reader_that_gives_other_rows_than_it_declared_is_caught() -> None:
    stub: Any = _Stub(np.zeros((3, 4)))
    with pytest.raises(SchemaError, match="bug of the reader"):
        signals(stub, REF, ["a"], np.arange(3))


def test_every_fault_says_its_place_and_a_reader_may_say_it_better() -> None:
    stub: Any = _Stub(
        np.zeros(0),
        [
            Fault(reason=Reason.DECODE, message="bad"),
            Fault(reason=Reason.IO, message="lost", start=3, stop=9),
            b"no image",
        ],
    )
    found = list(frames(stub, REF, "v", np.array([2, 3, 3, 7])))
    faults = [fault for fault in found if isinstance(fault, Fault)]
    assert [(f.episode, f.stream, f.start, f.stop) for f in faults] == [
        ("e", "v", 2, 3),
        ("e", "v", 3, 9),
        ("e", "v", 3, 9),
        ("e", "v", 7, 8),
    ]
    assert [fault.path for fault in faults] == ["v/2", "v/3", "v/3", "v/7"]
    assert faults[3].reason in (Reason.TRUNCATED, Reason.UNSUPPORTED)


def test_fast_decoding_is_asked_for_by_the_recipe_and_close_to_exact(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    smooth = np.asarray(
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize((1280, 960), Image.Resampling.BICUBIC)
    )
    buffer = io.BytesIO()
    Image.fromarray(smooth).save(buffer, "JPEG", quality=90)
    stub: Any = _Stub(np.zeros(0), [buffer.getvalue()])
    found = {}
    for decode in ("exact", "fast"):
        target = ViewRecipe(name="v", decode=decode)
        (frame,) = frames(stub, REF, "v", np.array([0]), target)
        assert isinstance(frame, np.ndarray)
        found[decode] = frame.astype(np.float64)
    assert (found["exact"] != found["fast"]).any()
    recipe = Recipe(name="r", views=(ViewRecipe(name="v", decode="fast"),))
    served = MultiViewPreprocessor(recipe, form="pixels")([buffer.getvalue()])
    np.testing.assert_array_equal(served[0], found["fast"])
    assert 10 * np.log10(255**2 / ((found["exact"] - found["fast"]) ** 2).mean()) > 45
