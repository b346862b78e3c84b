"""Whatever happens to a recording's files, a reader answers with values and faults, or with one SourceError."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.graph import frames, signals
from pipeline.readers import READERS, open_source
from pipeline.readers.protocol import Reader
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault
from tests.pipeline.planner_caches import write_cache
from tests.pipeline.readers import (
    bag_builder,
    builders,
    carla_writers,
    droid_builder,
    hdf5_builders,
    replay_builder,
    rlds_builder,
)


def write_planner_cache(root: Path) -> Path:
    """Write a cache of a few samples."""
    write_cache(root, 4)
    return root


WRITERS: dict[str, Callable[[Path], Path]] = {
    "lbc": lambda root: builders.write_lbc_route(root / "route", 3),
    "bench2drive": lambda root: builders.write_bench2drive_clip(root / "Accident_Town03_Route1_Weather2", 3),
    "lerobot": lambda root: builders.write_lerobot(root, (3, 2)),
    "aloha": lambda root: hdf5_builders.write_aloha(root, (3, 2)),
    "robomimic": lambda root: hdf5_builders.write_libero(root / "a_demo.hdf5", (3, 2)),
    "rlds": lambda root: rlds_builder.write_bridge(root, (3, 2)),
    "diffusion-policy": lambda root: replay_builder.write_pusht(root, (3, 4)),
    "npy": lambda root: builders.write_npy(root / "run", 4, episode_ends=np.array([2, 4]), timestamp_s=np.arange(4.0)),
    "carla-garage": carla_writers.write_garage,
    "carla-recorder": carla_writers.write_recorder,
    "carla-dump": carla_writers.write_dump,
    "planner-npz": write_planner_cache,
    "rosbag": bag_builder.write_bags,
    "droid": lambda root: droid_builder.write_droid(root, (3, 2)),
}
JSON_PIECES = (
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"[]",
    b"{}",
    b'""',
    b"9" * 5000,
    b"true",
    b'"\\ud800"',
    b"0.5",
    b"[[[1]]]",
)


def check_refusal(refusal: SourceError | Fault) -> None:
    """A refusal has a reason code, and says what was expected."""
    assert refusal.reason in Reason and "expected " in refusal.message


def answer_tracks(reader: Reader, ref: EpisodeRef) -> None:
    """Ask for an episode's tracks, where the format has them."""
    if not hasattr(reader, "read_tracks"):
        return
    try:
        faults = reader.read_tracks(ref).faults
    except SourceError as error:
        check_refusal(error)
        return
    for fault in faults:
        check_refusal(fault)


def answer(root: Path, name: str) -> None:
    """Ask a reader for everything, and check the form of every answer."""
    try:
        reader = open_source(root, name)
        index = reader.index()
    except SourceError as error:
        check_refusal(error)
        return
    for fault in index.faults:
        check_refusal(fault)
    for ref in index.episodes:
        assert ref.num_steps < 10**6
        steps = np.unique(np.linspace(0, ref.num_steps - 1, 7).astype(int)).repeat(2)
        try:
            rows, faults = signals(reader, ref, [signal.name for signal in ref.signals], steps)
        except SourceError as error:  # none of these steps can be served
            check_refusal(error)
        else:
            assert len(rows) == len(steps)
            for fault in faults:
                check_refusal(fault)
        answer_tracks(reader, ref)
        for view in ref.views:
            found = list(frames(reader, ref, view.name, steps))
            assert len(found) == len(steps)
            assert all(isinstance(frame, Fault | np.ndarray) for frame in found)
        assert all(not path.is_absolute() for path in reader.files(ref))


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes | None]:
    """Draw what happens to a file: it goes, is cut, is changed at some places, is replaced, or a JSON value in it is."""
    kind = draw(st.sampled_from(["remove", "cut", "flip", "replace", "value"]))
    where, piece = draw(st.floats(0, 1, exclude_max=True)), draw(st.sampled_from(JSON_PIECES))
    flips = draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
    junk = draw(st.binary(max_size=40))

    def damage(data: bytes) -> bytes | None:
        if kind == "remove":
            return None
        if kind == "cut":
            return data[: int(len(data) * where)]
        if kind == "replace":
            return junk
        if kind == "value":
            colons = [k for k, byte in enumerate(data) if byte == ord(":")]
            if not colons:
                return junk + data
            start = colons[int(len(colons) * where)] + 1
            stops = [k for k in (data.find(mark, start) for mark in (b",", b"}")) if k >= 0]
            return data[:start] + piece + data[min(stops, default=len(data)) :]
        changed = bytearray(data)
        for place, mask in flips:
            if changed:
                changed[int(len(changed) * place)] ^= mask
        return bytes(changed)

    return damage


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_damage_is_answered_with_faults(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.getbasetemp() / f"damage-{name}"
    if not root.exists():
        WRITERS[name](root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    small = [path for path in files if path.suffix not in (".png", ".jpg", ".npz")]
    path = data.draw(st.sampled_from(small or files) | st.sampled_from(files))
    whole = path.read_bytes()
    changed = data.draw(damages())(whole)
    try:
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        answer(root, name)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("form", ["folder", "pipe", "away", "circle"])
def test_a_file_that_became_something_else_is_answered_with_faults(tmp_path: Path, name: str, form: str) -> None:
    import os

    root = tmp_path / "raw"
    WRITERS[name](root)
    (tmp_path / "outside").write_bytes(b"outside")
    for path in sorted(path for path in root.rglob("*") if path.is_file())[::3]:
        path.unlink()
        if form == "folder":
            path.mkdir()
        elif form == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "outside" if form == "away" else path)
        answer(root, name)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_that_went_is_answered_with_faults(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / "whole")
    for folder in [path for path in (tmp_path / "whole").rglob("*") if path.is_dir()]:
        root = tmp_path / "raw"
        shutil.copytree(tmp_path / "whole", root)
        shutil.rmtree(root / folder.relative_to(tmp_path / "whole"))
        answer(root, name)
        shutil.rmtree(root)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["float32", "video", "image"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "names", "info", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    features=st.dictionaries(
        st.sampled_from(["action", "observation.state", "x", "timestamp_s", "/", "é"]), JSON, max_size=4
    )
    | JSON,
    changes=st.dictionaries(
        st.sampled_from(["fps", "chunks_size", "codebase_version", "robot_type", "video_path"]), JSON, max_size=3
    ),
)
@example(features={"action": {"dtype": "float32", "shape": [2**40]}}, changes={})
@example(features={"action": {"dtype": "float32", "shape": [1024, 1024, 1024]}}, changes={})
@example(features={"action": {"dtype": "float32", "shape": [0]}}, changes={})
@example(features={"v": {"dtype": "video", "shape": [0, 0, 3]}}, changes={"video_path": "{episode_index:99d}"})
def test_any_lerobot_metadata_is_answered(
    tmp_path_factory: pytest.TempPathFactory, features: object, changes: dict[str, object]
) -> None:
    import json

    root = tmp_path_factory.getbasetemp() / "metadata-lerobot"
    if not root.exists():
        builders.write_lerobot(root, (3, 2))
    info = {"codebase_version": "v2.1", "fps": 10, "chunks_size": 2, "features": features, **changes}
    (root / "meta/info.json").write_text(json.dumps(info))
    answer(root, "lerobot")


@given(JSON)
def test_any_record_is_answered(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    import json

    root = tmp_path_factory.getbasetemp() / "record-lbc"
    if not root.exists():
        builders.write_lbc_route(root / "route", 2)
    record = dict.fromkeys(["speed", "command", "x"], value)
    (root / "route/measurements/0001.json").write_text(json.dumps(record))
    answer(root, "lbc")
