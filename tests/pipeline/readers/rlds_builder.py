"""Tiny RLDS datasets in the exact layout of TensorFlow Datasets; values say which episode and step they belong to."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.readers.builders import colour, image_bytes, write
from tests.tasks.example_encoder import bytes_list, example, float_list, int64_list, record

Features = dict[str, bytes]


def tensor(dtype: str, *shape: int | str, encoding: str = "none") -> dict[str, Any]:
    sides = {"dimensions": [str(side) for side in shape]} if shape else {}
    return {
        "pythonClassName": "tensorflow_datasets...Tensor",
        "tensor": {"shape": sides, "dtype": dtype, "encoding": encoding},
    }


def image(kind: str = "jpeg", *shape: int) -> dict[str, Any]:
    sides = [str(side) for side in shape or (6, 8, 3)]
    return {"image": {"shape": {"dimensions": sides}, "dtype": "uint8", "encodingFormat": kind}}


def text() -> dict[str, Any]:
    return {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}


def sequence(feature: Mapping[str, Any], length: int = -1) -> dict[str, Any]:
    return {"sequence": {"feature": feature, "length": str(length)}}


def folder(**features: Mapping[str, Any]) -> dict[str, Any]:
    return {"featuresDict": {"features": features}}


BRIDGE = folder(
    steps=sequence(
        folder(
            observation=folder(image_0=image(), image_1=image("png"), state=tensor("float32", 7)),
            action=tensor("float64", 7),
            reward=tensor("float32"),
            is_first=tensor("bool"),
            is_last=tensor("bool"),
            language_instruction=text(),
        )
    ),
    episode_metadata=folder(file_path=text(), episode_id=tensor("int32"), has_image_0=tensor("bool")),
)


def bridge_episode(episode: int, num_steps: int) -> Features:
    """``state[t, d] = 100 * episode + 10 * t + d / 8``; ``action = -state``; pictures as :func:`colour`."""
    steps = range(num_steps)
    state = [100 * episode + 10 * step + d / 8 for step in steps for d in range(7)]
    return {
        "steps/observation/image_0": bytes_list([image_bytes(colour(episode, step), "JPEG") for step in steps]),
        "steps/observation/image_1": bytes_list([image_bytes(colour(episode + 8, step)) for step in steps]),
        "steps/observation/state": float_list(state),
        "steps/action": float_list([-value for value in state]),
        "steps/reward": float_list([float(step == num_steps - 1) for step in steps]),
        "steps/is_first": int64_list([int(step == 0) for step in steps]),
        "steps/is_last": int64_list([int(step == num_steps - 1) for step in steps]),
        "steps/language_instruction": bytes_list([f"task {episode}".encode()] * num_steps),
        "episode_metadata/file_path": bytes_list([f"/nfs/bridge/{episode}/out.npy".encode()]),
        "episode_metadata/episode_id": int64_list([-episode]),
        "episode_metadata/has_image_0": int64_list([0]),
    }


def write_rlds(
    root: Path,
    splits: Mapping[str, Sequence[Sequence[Features]]],
    *,
    features: Mapping[str, Any] = BRIDGE,
    name: str = "bridge_dataset",
    change: Callable[[dict[str, Any]], None] = lambda info: None,
) -> Path:
    """Write ``splits`` (split -> shards -> episodes) as version 1.0.0 below ``root``; ``change`` edits dataset_info.json."""
    version = root / name / "1.0.0"
    declared = []
    for split, shards in splits.items():
        num_bytes = 0
        for number, episodes in enumerate(shards):
            payloads = [example(episode) for episode in episodes]
            num_bytes += sum(map(len, payloads))
            write(version / shard_name(split, number, len(shards), name), b"".join(map(record, payloads)))
        lengths = [str(len(episodes)) for episodes in shards]
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        declared.append(
            {"name": split, "numBytes": str(num_bytes), "shardLengths": lengths, "filepathTemplate": template}
        )
    info = {"name": name, "version": "1.0.0", "fileFormat": "tfrecord", "splits": declared}
    change(info)
    write(version / "dataset_info.json", json.dumps(info).encode())
    write(version / "features.json", json.dumps(features).encode())
    return version


def shard_name(split: str, number: int, count: int, name: str = "bridge_dataset") -> str:
    return f"{name}-{split}.tfrecord-{number:05d}-of-{count:05d}"


def write_bridge(root: Path, lengths: Sequence[int] = (3, 4, 2)) -> Path:
    """Write episodes of ``lengths`` steps in two shards of one split."""
    episodes = [bridge_episode(k, num_steps) for k, num_steps in enumerate(lengths)]
    return write_rlds(root, {"train": [episodes[:2], episodes[2:]]})
