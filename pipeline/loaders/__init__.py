"""Loaders: finished datasets as training batches. They import neither Dask, nor Zarr, nor any reader of raw recordings."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.loaders.mapstyle import MultiViewDataset, to_jax, to_torch
    from pipeline.loaders.multiview import MultiViewLoader
    from pipeline.loaders.openpi import OpenPiDataset
    from pipeline.loaders.orders import Blocks
    from pipeline.loaders.planner import PlannerDataset, PlannerLoader
    from pipeline.loaders.preprocessor import MultiViewPreprocessor
    from pipeline.loaders.reader import DatasetReader
    from pipeline.loaders.shown import show_batch
    from pipeline.loaders.torch_data import DeviceBatches, FrameScale, TorchBatchSampler, TorchStream
    from pipeline.loaders.windows import WindowLoader

__all__ = [
    "Blocks",
    "DatasetReader",
    "DeviceBatches",
    "FrameScale",
    "MultiViewDataset",
    "MultiViewLoader",
    "MultiViewPreprocessor",
    "OpenPiDataset",
    "PlannerDataset",
    "PlannerLoader",
    "TorchBatchSampler",
    "TorchStream",
    "WindowLoader",
    "show_batch",
    "to_jax",
    "to_torch",
]

_HOMES = {
    "show_batch": "pipeline.loaders.shown",
    "to_jax": "pipeline.loaders.mapstyle",
    "TorchStream": "pipeline.loaders.torch_data",
    "TorchBatchSampler": "pipeline.loaders.torch_data",
    "FrameScale": "pipeline.loaders.torch_data",
    "DeviceBatches": "pipeline.loaders.torch_data",
    "Blocks": "pipeline.loaders.orders",
    "DatasetReader": "pipeline.loaders.reader",
    "MultiViewDataset": "pipeline.loaders.mapstyle",
    "MultiViewLoader": "pipeline.loaders.multiview",
    "MultiViewPreprocessor": "pipeline.loaders.preprocessor",
    "OpenPiDataset": "pipeline.loaders.openpi",
    "PlannerDataset": "pipeline.loaders.planner",
    "PlannerLoader": "pipeline.loaders.planner",
    "WindowLoader": "pipeline.loaders.windows",
    "to_torch": "pipeline.loaders.mapstyle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeline.loaders' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
