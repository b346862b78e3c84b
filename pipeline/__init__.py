"""Headrace: raw CARLA and robot recordings in, a checksummed Zarr + Parquet dataset out, training batches on the other side.

Names are imported when they are used, so that a training host that needs only ``pipeline.loaders`` never imports Dask.
"""

from typing import TYPE_CHECKING, Any

from pipeline.identity import require_own_siblings

require_own_siblings(__file__)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pipeline.conversion import convert
    from pipeline.dataset import open_dataset
    from pipeline.raw import open_raw
    from pipeline.verification import verify

__all__ = ["__version__", "convert", "open_dataset", "open_raw", "verify"]

_HOMES = {
    "convert": "pipeline.conversion",
    "open_dataset": "pipeline.dataset",
    "open_raw": "pipeline.raw",
    "verify": "pipeline.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
