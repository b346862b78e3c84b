"""A dataset as openpi's own training takes it: in the place of its ``LeRobotDataset``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.loaders.mapstyle import MultiViewDataset

Structure = Mapping[str, "str | Structure"]

_OURS = ("actions_is_pad", "index")
"""What a batch of ours has beside what openpi's transforms know."""


class OpenPiDataset:
    """Samples for openpi's transforms, which normalise, tokenise and pad them: map-style, one dictionary a sample.

    A sample is ``{"image": {view: uint8[h, w, 3]}, "image_mask": {view: bool}, "state": float32[dim],
    "actions": float32[horizon, dim], "prompt": str}``, in units and unpadded: what openpi's robot adapters give. Its arrays
    are the caller's own, since ``DeltaActions`` writes into them.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    repack
        openpi's ``RepackTransform`` structure, for its robot adapters: new keys to flat paths of the sample, such as
        ``{"observation/image": "image/base_0_rgb", "observation/state": "state", "actions": "actions", "prompt": "prompt"}``.
    **options
        Fields of :class:`~pipeline.loaders.multiview.SampleOptions`: horizon, views, transforms, prompts.

    Examples
    --------
    >>> dataset = OpenPiDataset("out.zarr", horizon=50)                    # doctest: +SKIP
    >>> dataset[0]["image"]["base_0_rgb"].shape                            # doctest: +SKIP
    (224, 224, 3)
    """

    def __init__(self, path: str | Path, *, repack: Structure | None = None, **options: Any) -> None:
        self._samples = MultiViewDataset(path, **{"action_dim": 0, **options})
        self._repack = repack

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        sample = {name: value for name, value in self._samples[index.__index__()].items() if name not in _OURS}
        return sample if self._repack is None else _repacked(self._repack, _flat(sample))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(_flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {prefix + name: value})
    return flat


def _repacked(structure: Structure, flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {name: flat[path] if isinstance(path, str) else _repacked(path, flat) for name, path in structure.items()}
