"""What a notebook shows of a batch: its arrays with their ranges, and its first samples as pictures.

Batches stay plain dictionaries, which is what JAX, torch and openpi take apart; so showing one is a call.
"""

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.loaders.delivery import Batch
from pipeline.markup import Markup, card, data_text, table, tag
from pipeline.sheet import contact_sheet
from schemas.errors import UsageError

_IMAGE = re.compile("image|rgb")
_NUM_TEXTS = 4
"""Texts of a batch that are listed."""


class BatchView:
    """A batch as a notebook shows it: see :func:`show_batch`."""

    def __init__(self, batch: Batch, num_samples: int) -> None:
        self._values = dict(_flat(batch))
        self._num_samples = num_samples

    def __repr__(self) -> str:
        rows = [f"{name}: {kind}  {contents}" for name, kind, contents in self._rows()]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        arrays = table(
            "Batch", ["array", "shape and type", "values"], [[data_text(cell) for cell in row] for row in self._rows()]
        )
        return str(tag("div", arrays, self._pictures()))

    def _rows(self) -> list[tuple[str, str, str]]:
        return [_row(name, value) for name, value in self._values.items()]

    def _pictures(self) -> Markup | None:
        frames = {name: value for name, value in self._values.items() if _is_frames(name, value)}
        tiles = {name: _tiles(value, self._mask(name))[: self._num_samples] for name, value in frames.items()}
        if not tiles:
            return None
        columns = [f"sample {k}" for k in range(max(len(row) for row in tiles.values()))]
        buffer = io.BytesIO()
        contact_sheet(tiles, columns=columns, tile_width_px=160, missing="masked").save(buffer, "PNG")
        source = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        return tag("img", src=source, alt=f"the first frames of {', '.join(tiles)}")

    def _mask(self, name: str) -> np.ndarray | None:
        mask = self._values.get(name.replace("image/", "image_mask/", 1))
        return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else None


def show_batch(batch: Batch, num_samples: int = 4) -> BatchView:
    """Return ``batch`` as a notebook shows it, and ``print`` too.

    Parameters
    ----------
    batch
        Of any loader: NumPy arrays, torch tensors or JAX arrays by name, also in dictionaries within it.
    num_samples
        Samples whose frames are drawn, in columns; a view that a sample's mask hides is an empty tile.

    Raises
    ------
    UsageError
        Not a dictionary, or no sample is to be drawn.

    Examples
    --------
    >>> show_batch({"state": np.arange(6, dtype=np.float32).reshape(2, 3), "prompt": ["pick", "place"]})
    state: float32[2, 3]  0 to 5
    prompt: 2 texts  pick | place
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"expected a batch, a dictionary of arrays, found {type(batch).__name__}; pass what a loader gave"
        )
    if num_samples < 1:
        raise UsageError(f"expected 1 or more samples to draw, found {num_samples}; correct the call")
    return BatchView(batch, num_samples)


def loader_card(loader: Any) -> str:
    """Return a loader as a notebook shows it: what a batch of it holds, and where it is."""
    partition = loader.sampler.partition
    facts = {
        "batches": f"{len(loader):,} an epoch, of {loader.batch_size:,} samples each",
        "samples": f"{loader.samples.num:,}",
        "epoch": f"{loader.epoch}, of which {loader.state_dict()['samples_seen']:,} samples are served",
        "rank": f"{partition.rank} of {partition.world_size}",
        "threads": f"{loader.threads}, {loader.prefetch} batches ahead",
        "skipped": f"{loader.num_skipped:,} samples",
    }
    layout = loader.samples.layout
    arrays = [
        f"{name}: {dtype}[{', '.join(map(str, (loader.batch_size, *shape)))}]"
        for name, (shape, dtype) in layout.items()
    ]
    return card(type(loader).__name__, facts, {"arrays of a batch": arrays})


def _flat(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", _on_host(value)


def _on_host(value: Any) -> Any:
    """Return torch tensors and JAX arrays as NumPy's, other than NumPy's numbers as float32; everything else as it is."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    if isinstance(value, str | Sequence) or not hasattr(value, "dtype"):
        return value
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" else array.astype(np.float32)


def _row(name: str, value: Any) -> tuple[str, str, str]:
    if isinstance(value, np.ndarray):
        return name, f"{value.dtype}[{', '.join(map(str, value.shape))}]", _range(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        more = " | …" if len(value) > _NUM_TEXTS else ""
        return name, f"{len(value)} texts", " | ".join(str(part) for part in value[:_NUM_TEXTS]) + more
    return name, type(value).__name__, str(value)


def _range(array: np.ndarray) -> str:
    if not array.size:
        return "empty"
    if array.dtype == np.bool_:
        return f"{array.mean():.0%} true"
    finite = array[np.isfinite(array)]
    bounds = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
    return bounds + (f", {array.size - finite.size:,} not finite" if finite.size < array.size else "")


def _is_frames(name: str, value: Any) -> bool:
    """Whether an array is images, channels last or first: bytes, or floats by their name, as futures of agents have three numbers too."""
    if not isinstance(value, np.ndarray) or value.ndim != 4 or 3 not in (value.shape[-1], value.shape[1]):
        return False
    return value.dtype == np.uint8 or (value.dtype.kind == "f" and _IMAGE.search(name) is not None)


def _tiles(frames: np.ndarray, mask: np.ndarray | None) -> list[np.ndarray | None]:
    frames = frames if frames.shape[-1] == 3 else frames.transpose(0, 2, 3, 1)
    if frames.dtype != np.uint8:
        low, high = (float(np.nanmin(frames)), float(np.nanmax(frames))) if frames.size else (0.0, 1.0)
        scale = (low, high) if not -1 <= low <= high <= 1 else (-1.0 if low < 0 else 0.0, 1.0)
        unit = (frames.astype(np.float32) - scale[0]) / max(scale[1] - scale[0], 1e-9)
        frames = (np.nan_to_num(unit).clip(0, 1) * 255).round().astype(np.uint8)
    return [frame if mask is None or mask[row] else None for row, frame in enumerate(frames)]
