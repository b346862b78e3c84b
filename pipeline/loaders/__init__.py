"""Loaders: finished datasets as training batches. They import neither Dask, nor Zarr, nor any reader of raw recordings."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.loaders.mapstyle import MultiViewDataset, to_torch
    from pipeline.loaders.multiview import MultiViewLoader
    from pipeline.loaders.preprocessor import MultiViewPreprocessor
    from pipeline.loaders.reader import DatasetReader

__all__ = ["DatasetReader", "MultiViewDataset", "MultiViewLoader", "MultiViewPreprocessor", "to_torch"]

_HOMES = {
    "DatasetReader": "pipeline.loaders.reader",
    "MultiViewDataset": "pipeline.loaders.mapstyle",
    "MultiViewLoader": "pipeline.loaders.multiview",
    "MultiViewPreprocessor": "pipeline.loaders.preprocessor",
    "to_torch": "pipeline.loaders.mapstyle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeline.loaders' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
