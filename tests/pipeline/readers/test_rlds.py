"""RLDS datasets: what is read of them, what the index costs, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.graph import frames, signals
from pipeline.readers import open_source
from pipeline.readers.rlds import RldsReader
from schemas.errors import Reason
from schemas.source import EpisodeRef, Fault
from tests.conftest import shared_data
from tests.pipeline.readers.builders import colour, image_bytes, write
from tests.pipeline.readers.rlds_builder import (
    BRIDGE,
    bridge_episode,
    folder,
    image,
    sequence,
    shard_name,
    tensor,
    text,
    write_bridge,
    write_rlds,
)
from tests.tasks.example_encoder import bytes_list, float_list, int64_list


def state_of(episode: int, steps: np.ndarray) -> np.ndarray:
    return 100 * episode + 10 * steps[:, None] + np.arange(7) / 8


def read(reader: RldsReader, ref: EpisodeRef, name: str) -> np.ndarray:
    block = reader.read_signals(ref, [name], np.arange(ref.num_steps))
    assert block.faults == ()
    return block.values[name]


def reasons(root: Path) -> list[Reason]:
    return [fault.reason for fault in RldsReader(root).index().faults]


def test_episodes_come_with_their_exact_length_from_both_shards(tmp_path):
    write_bridge(tmp_path)
    index = open_source(tmp_path).index()
    assert index.format == "rlds" and index.faults == ()
    assert [(ref.key, ref.num_steps) for ref in index.episodes] == [
        ("bridge_dataset/1.0.0/train-00000/episode_000000", 3),
        ("bridge_dataset/1.0.0/train-00000/episode_000001", 4),
        ("bridge_dataset/1.0.0/train-00001/episode_000000", 2),
    ]
    assert (index.state, index.actions) == (("state",), ("action",))
    assert [ref.instructions for ref in index.episodes] == [("task 0",), ("task 1",), ("task 2",)]


@pytest.mark.parametrize("below", ["", "bridge_dataset", "bridge_dataset/1.0.0"])
def test_the_root_may_be_the_version_or_lie_above_it(tmp_path, below):
    write_bridge(tmp_path)
    index = open_source(tmp_path / below).index()
    assert [ref.num_steps for ref in index.episodes] == [3, 4, 2]


def test_rows_and_frames_are_those_of_the_step_in_the_declared_dtypes(tmp_path):
    write_bridge(tmp_path)
    reader = RldsReader(tmp_path)
    for number, ref in enumerate(reader.index().episodes):
        steps = np.array([0, ref.num_steps - 1, ref.num_steps - 1])
        block = reader.read_signals(ref, ["state", "action", "is_last", "timestamp_s"], steps)
        np.testing.assert_array_equal(block.values["state"], state_of(number, steps))
        np.testing.assert_array_equal(block.values["action"], -state_of(number, steps))
        assert [block.values[name].dtype for name in ("state", "action", "is_last")] == [
            np.float32,
            np.float64,
            np.bool_,
        ]
        assert block.values["is_last"].tolist() == [False, True, True]
        np.testing.assert_array_equal(block.values["timestamp_s"], steps / 5.0)
        for view, offset in (("image_0", 0), ("image_1", 8)):
            found = list(frames(reader, ref, view, steps))
            for frame, step in zip(found, steps.tolist(), strict=True):
                np.testing.assert_allclose(frame, colour(number + offset, step), atol=3)


def test_images_cross_as_they_were_encoded(tmp_path):
    write_bridge(tmp_path)
    reader = RldsReader(tmp_path)
    ref = reader.index().episodes[1]
    assert list(reader.read_frames(ref, "image_1", np.array([2]))) == [image_bytes(colour(9, 2))]
    assert [view.encoding for view in ref.views] == ["jpeg", "png"]


def test_flags_that_deny_images_are_not_believed_and_kept_as_facts(tmp_path):
    write_bridge(tmp_path)
    ref = RldsReader(tmp_path).index().episodes[2]
    assert all(view.present for view in ref.views)
    assert ref.details["has_image_0"] == 0 and ref.details["episode_id"] == -2
    assert ref.details["file_path"] == "/nfs/bridge/2/out.npy"
    json.dumps(ref.details, allow_nan=False)


def test_a_view_of_one_image_again_and_again_is_a_placeholder(tmp_path):
    episode = bridge_episode(0, 4)
    episode["steps/observation/image_1"] = bytes_list([image_bytes(colour(0, 0))] * 4)
    write_rlds(tmp_path, {"train": [[episode, bridge_episode(1, 2)]]})
    reader = RldsReader(tmp_path)
    index = reader.index()
    assert [[view.present for view in ref.views] for ref in index.episodes] == [[True, False], [True, True]]
    assert [fault.reason for fault in reader.read_frames(index.episodes[0], "image_1", np.arange(2))] == [
        Reason.MISSING_FILE
    ] * 2
    assert any("image_1" in note and "1 episodes" in note for note in index.notes)


def test_an_index_reads_some_hundred_bytes_of_each_feature(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (3, 40, 200, 3), dtype=np.uint8)
    episode = bridge_episode(0, 3)
    episode["steps/observation/image_1"] = bytes_list([image_bytes(frame) for frame in noise])
    version = write_rlds(tmp_path, {"train": [[episode, {**episode, "steps/action": float_list([1] * 21)}]]})
    fetched = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: fetched.append(args[1]) or pread(*args))
    assert len(RldsReader(tmp_path).index().episodes) == 2
    size = (version / shard_name("train", 0, 1)).stat().st_size
    assert size > 140_000 and sum(fetched) < 30_000


# -- DROID, LIBERO and other layouts -----------------------------------------------------------------------------------


def droid(path: str, texts: list[list[str]], num_steps: int = 2) -> dict[str, bytes]:
    names = ("language_instruction", "language_instruction_2", "language_instruction_3")
    return {
        "steps/is_first": int64_list([1] + [0] * (num_steps - 1)),
        "steps/observation/joint_position": float_list(range(7 * num_steps)),
        "steps/observation/gripper_position": float_list(range(num_steps)),
        "steps/action_dict/joint_position": float_list(range(7 * num_steps)),
        "steps/action_dict/gripper_position": float_list(range(num_steps)),
        "steps/action": float_list(range(7 * num_steps)),
        **{f"steps/{name}": bytes_list([t.encode() for t in said]) for name, said in zip(names, texts, strict=True)},
        "episode_metadata/file_path": bytes_list([path.encode()]),
    }


DROID = folder(
    steps=sequence(
        folder(
            is_first=tensor("bool"),
            observation=folder(joint_position=tensor("float64", 7), gripper_position=tensor("float64", 1)),
            action_dict=folder(joint_position=tensor("float64", 7), gripper_position=tensor("float64", 1)),
            action=tensor("float64", 7),
            language_instruction=text(),
            language_instruction_2=text(),
            language_instruction_3=text(),
        )
    ),
    episode_metadata=folder(file_path=text()),
)


def test_droid_takes_joints_as_openpi_does_and_success_from_its_path(tmp_path):
    texts = [["wipe the table"] * 2, [""] * 2, ["clean the desk"] * 2]
    episodes = [
        droid("/raw/AUTOLab/success/2023-07-07/trajectory.h5", texts),
        droid("/raw/AUTOLab/failure/2023-07-07/trajectory.h5", texts),
    ]
    write_rlds(tmp_path, {"train": [episodes]}, features=DROID, name="droid")
    index = RldsReader(tmp_path).index()
    assert index.state == ("joint_position", "gripper_position")
    assert index.actions == ("action_dict/joint_position", "action_dict/gripper_position")
    assert [ref.details["success"] for ref in index.episodes] == [True, False]
    assert index.episodes[0].instructions == ("wipe the table", "clean the desk")
    assert index.episodes[0].rate_hz == 15.0
    rows, faults = signals(RldsReader(tmp_path), index.episodes[0], index.actions, np.array([1]))
    assert faults == () and rows.tolist() == [[7, 8, 9, 10, 11, 12, 13, 1]]


def test_an_instruction_that_changes_says_which_one_serves_a_step(tmp_path):
    texts = [["open", "open", "", "close", "open"], ["later"] * 5, [""] * 5]
    write_rlds(tmp_path, {"train": [[droid("/x", texts, 5)]]}, features=DROID, name="droid")
    reader = RldsReader(tmp_path)
    (ref,) = reader.index().episodes
    assert ref.instructions == ("open", "close", "later")
    assert read(reader, ref, "instruction_index").tolist() == [0, 0, 0, 1, 0]


def test_ragged_encoded_and_odd_features_are_left_alone_and_named(tmp_path):
    features = folder(
        steps=sequence(
            folder(
                is_first=tensor("bool"),
                points=tensor("float32", -1, 3),
                boxes=sequence(tensor("float32", 4)),
                path=sequence(tensor("float32", 2), 5),
                packed=tensor("float32", 3, encoding="zlib"),
                depth=image("png", 6, 8, 1),
                names=tensor("string", 2),
                label={"classLabel": {"numClasses": "4"}},
                count=tensor("int8"),
                unsigned=tensor("uint64"),
            )
        )
    )
    episode = {
        "steps/is_first": int64_list([1, 0]),
        "steps/points/ragged_flat_values": float_list([1.0] * 9),
        "steps/points/ragged_row_lengths_0": int64_list([1, 2]),
        "steps/path": float_list(range(20)),
        "steps/label": int64_list([3, 0]),
        "steps/count": int64_list([-5, 5]),
        "steps/unsigned": int64_list([-1, 1]),
    }
    write_rlds(tmp_path, {"train": [[episode]]}, features=features, name="odd")
    reader = RldsReader(tmp_path)
    index = reader.index()
    (ref,) = index.episodes
    assert {signal.name for signal in ref.signals} == {"is_first", "path", "label", "count", "unsigned", "timestamp_s"}
    notes = "\n".join(index.notes)
    assert "2 features were left alone, ragged: steps/boxes, steps/points" in notes
    assert all(name in notes for name in ("steps/packed", "steps/depth", "steps/names"))
    assert read(reader, ref, "path").shape == (2, 5, 2)
    assert read(reader, ref, "count").tolist() == [-5, 5]
    assert read(reader, ref, "unsigned").tolist() == [2**64 - 1, 1]


def test_names_that_would_collide_keep_their_folder(tmp_path):
    features = folder(
        steps=sequence(
            folder(is_first=tensor("bool"), state=tensor("float32"), observation=folder(state=tensor("float32")))
        )
    )
    episode = {
        "steps/is_first": int64_list([1]),
        "steps/state": float_list([1]),
        "steps/observation/state": float_list([2]),
    }
    write_rlds(tmp_path, {"train": [[episode]]}, features=features)
    reader = RldsReader(tmp_path)
    (ref,) = reader.index().episodes
    assert (read(reader, ref, "state")[0], read(reader, ref, "observation/state")[0]) == (1, 2)


def test_the_rate_comes_from_the_field_then_meta_json_then_the_name_then_is_a_step_a_second(tmp_path):
    version = write_rlds(tmp_path, {"train": [[bridge_episode(0, 2)]]}, name="mystery")
    index = RldsReader(tmp_path).index()
    assert index.episodes[0].rate_hz == 1.0 and any("one second" in note for note in index.notes)
    write(version / "meta.json", b'{"rate_hz": 12.5}')
    assert RldsReader(tmp_path).index().episodes[0].rate_hz == 12.5
    assert RldsReader(tmp_path, rate_hz=30).index().episodes[0].rate_hz == 30
    write(version / "meta.json", b"{")
    assert reasons(tmp_path) == [Reason.BAD_METADATA]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_equal_episodes_are_read_once(tmp_path):
    episodes = [bridge_episode(k, 2) for k in range(2)]
    write_rlds(tmp_path, {"train": [episodes], "val": [[*episodes, bridge_episode(2, 2)]]})
    index = RldsReader(tmp_path).index()
    assert [ref.key.rpartition("1.0.0/")[2] for ref in index.episodes] == [
        "train-00000/episode_000000",
        "train-00000/episode_000001",
        "val-00000/episode_000002",
    ]
    (fault,) = index.faults
    assert fault.reason == Reason.DUPLICATE and "2 of 3 records" in fault.message


def test_shards_that_are_declared_and_absent_are_one_fault_a_split(tmp_path):
    episodes = [bridge_episode(k, 2) for k in range(3)]
    version = write_rlds(tmp_path, {"train": [[episode] for episode in episodes]})
    for number in (0, 2):
        (version / shard_name("train", number, 3)).unlink()
    index = RldsReader(tmp_path).index()
    assert [ref.key[-26:] for ref in index.episodes] == ["train-00001/episode_000000"]
    (fault,) = index.faults
    assert fault.reason == Reason.MISSING_FILE and "found 1: 2 episodes are missing" in fault.message


def test_a_shard_cut_short_keeps_the_records_before_the_cut(tmp_path):
    version = write_rlds(tmp_path, {"train": [[bridge_episode(k, 3) for k in range(3)]]})
    shard = version / shard_name("train", 0, 1)
    shard.write_bytes(shard.read_bytes()[:-100])
    index = RldsReader(tmp_path).index()
    assert len(index.episodes) == 2
    assert [fault.reason for fault in index.faults] == [Reason.TRUNCATED, Reason.COUNT_MISMATCH, Reason.COUNT_MISMATCH]


def test_counts_that_dataset_info_contradicts_are_faults(tmp_path):
    def change(info):
        info["splits"][0].update(shardLengths=["5"], numBytes="12")

    write_rlds(tmp_path, {"train": [[bridge_episode(0, 2)]]}, change=change)
    assert reasons(tmp_path) == [Reason.COUNT_MISMATCH, Reason.COUNT_MISMATCH]


def test_a_flipped_byte_refuses_the_episode_and_no_other(tmp_path):
    version = write_bridge(tmp_path)
    shard = version / shard_name("train", 0, 2)
    data = bytearray(shard.read_bytes())
    data[data.index(image_bytes(colour(0, 1), "JPEG")) + 50] ^= 1
    shard.write_bytes(data)
    reader = RldsReader(tmp_path)
    index = reader.index()
    assert index.faults == ()  # the framing is whole: only reading the record shows it
    first, second, _ = index.episodes
    block = reader.read_signals(first, ["state", "timestamp_s"], np.arange(3))
    assert [(fault.reason, fault.start, fault.stop) for fault in block.faults] == [(Reason.DECODE, 0, 3)]
    assert np.isnan(block.values["state"]).all() and block.values["timestamp_s"].tolist() == [0, 0.2, 0.4]
    assert [frame.reason for frame in reader.read_frames(first, "image_1", np.arange(2))] == [Reason.DECODE] * 2
    assert read(reader, second, "state").shape == (4, 7)


def test_a_broken_header_ends_the_shard_and_says_after_how_many(tmp_path):
    version = write_bridge(tmp_path)
    shard = version / shard_name("train", 1, 2)
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    faults = RldsReader(tmp_path).index().faults
    assert faults[0].reason == Reason.DECODE and faults[0].message.startswith("after 0 records")


def test_streams_of_another_length_are_refused_and_the_others_served(tmp_path):
    episode = bridge_episode(0, 3)
    episode["steps/observation/state"] = float_list([0] * 14)
    episode["steps/observation/image_0"] = bytes_list([b"", b""])
    episode["steps/reward"] = int64_list([1, 2, 3])
    del episode["steps/observation/image_1"], episode["steps/is_last"]
    write_rlds(tmp_path, {"train": [[episode]]})
    reader = RldsReader(tmp_path)
    (ref,) = reader.index().episodes
    block = reader.read_signals(ref, ["state", "action", "reward", "is_last"], np.arange(3))
    found = {fault.stream: fault.reason for fault in block.faults}
    assert found == {
        "state": Reason.WRONG_SHAPE,
        "reward": Reason.BAD_METADATA,
        "is_last": Reason.MISSING_FILE,
    }
    assert np.isfinite(block.values["action"]).all()
    assert {view.name: view.present for view in ref.views} == {"image_0": True, "image_1": False}
    for view, reason in (("image_0", Reason.COUNT_MISMATCH), ("image_1", Reason.MISSING_FILE)):
        assert [frame.reason for frame in frames(reader, ref, view, np.arange(3)) if isinstance(frame, Fault)] == [
            reason
        ] * 3


def test_an_integer_beyond_its_declared_dtype_is_refused(tmp_path):
    features = folder(steps=sequence(folder(is_first=tensor("bool"), count=tensor("uint8"))))
    write_rlds(
        tmp_path,
        {"train": [[{"steps/is_first": int64_list([1]), "steps/count": int64_list([256])}]]},
        features=features,
    )
    reader = RldsReader(tmp_path)
    (ref,) = reader.index().episodes
    (fault,) = reader.read_signals(ref, ["count"], np.arange(1)).faults
    assert fault.reason == Reason.BAD_METADATA and "256" in fault.message


def test_an_episode_without_steps_is_refused(tmp_path):
    write_rlds(tmp_path, {"train": [[bridge_episode(0, 0), bridge_episode(1, 1)]]})
    index = RldsReader(tmp_path).index()
    assert [fault.reason for fault in index.faults] == [Reason.EMPTY_EPISODE]
    assert [ref.num_steps for ref in index.episodes] == [1]


def test_a_dataset_that_is_no_rlds_is_refused_by_name(tmp_path):
    write_rlds(tmp_path, {"train": [[]]}, features=folder(image=image(), label=tensor("int64")), name="mnist")
    (fault,) = RldsReader(tmp_path).index().faults
    assert fault.reason == Reason.BAD_METADATA and "another kind of TFDS dataset" in fault.message


def test_without_dataset_info_the_shards_are_read_and_a_note_says_so(tmp_path):
    version = write_bridge(tmp_path)
    (version / "dataset_info.json").unlink()
    index = RldsReader(tmp_path).index()
    assert [ref.num_steps for ref in index.episodes] == [3, 4, 2] and index.faults == ()
    assert any("no dataset_info.json" in note for note in index.notes)


def test_another_file_format_is_refused(tmp_path):
    write_rlds(tmp_path, {"train": [[]]}, change=lambda info: info.update(fileFormat="riegeli"))
    (fault,) = RldsReader(tmp_path).index().faults
    assert "found riegeli" in fault.message


def test_files_of_an_episode_are_its_shard(tmp_path):
    write_bridge(tmp_path)
    reader = RldsReader(tmp_path)
    names = [[str(path) for path in reader.files(ref)] for ref in reader.index().episodes]
    assert names == [[f"bridge_dataset/1.0.0/{shard_name('train', k, 2)}"] for k in (0, 0, 1)]
    assert BRIDGE["featuresDict"]["features"].keys() == {"steps", "episode_metadata"}


# -- real recordings ---------------------------------------------------------------------------------------------------


def test_the_bridge_episodes_of_octo_are_read():
    reader = RldsReader(shared_data("rlds", "octo_debug"))
    index = reader.index()
    assert len(index.episodes) == 25 and {ref.num_steps for ref in index.episodes} == {10}
    assert [fault.reason for fault in index.faults] == [Reason.MISSING_FILE]  # the val split, which was not copied
    assert index.episodes[0].instructions == ("put cup from counter or drying rack into sink",)
    for ref in index.episodes[::8]:
        assert [view.name for view in ref.views if view.present] == ["image_0", "image_1", "image_2"]
        assert [ref.details[f"has_image_{k}"] for k in range(4)] == [0, 0, 0, 0]
        state, faults = signals(reader, ref, index.state, np.arange(10))
        assert faults == () and np.isfinite(state).all() and state.shape == (10, 7)
        for frame in frames(reader, ref, "image_0", np.array([0, 9])):
            assert frame.shape == (64, 64, 3) and frame.std() > 10
