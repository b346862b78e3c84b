"""Frames of one view: read, and converted where the caller wants them otherwise than they are stored."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.loaders.reader import DatasetReader
from schemas.errors import DatasetError, UsageError
from tasks.kernels.openpi import scale_pixels
from tasks.normalize import denormalize_images

FRAMES = "rgb_"
"""Prefix of the arrays that are frames."""

_PIECE_NBYTES = 1 << 20
"""Frames that are converted after reading go through a piece of this size, which stays in the core's cache."""


def view_names(reader: DatasetReader) -> list[str]:
    """Return the views of a dataset: its arrays ``rgb_<view>`` without the prefix."""
    arrays = reader.info.arrays.values()
    names = sorted(
        spec.name.removeprefix(FRAMES) for spec in arrays if spec.name.startswith(FRAMES) and len(spec.dims) == 4
    )
    if not names:
        raise DatasetError("expected a dataset with frames, found no array rgb_<view>; see `headrace info`")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One view: where its frames are, and what becomes of them."""

    name: str
    mask: Bool[np.ndarray, " step"]
    """Which steps have a frame; the others are zero."""
    shape: tuple[int, ...]
    stored: str
    """dtype on disk."""
    convert: str
    """Empty hands frames out as they are stored, ``pixels`` as uint8, ``symmetric`` as float32 in [-1, 1]."""
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, reader: DatasetReader, name: str, *, convert: str = "") -> "View":
        """Find the view called ``name`` in a dataset."""
        known = view_names(reader)
        if name not in known:
            raise UsageError(f"expected views of {known}, found {name!r}; correct `views`")
        spec = reader.spec(FRAMES + name)
        normalization = dict(spec.attributes).get("normalization", {})
        mean, std = (tuple(normalization.get(key, ())) for key in ("mean", "std"))
        if convert and spec.dtype != "uint8" and not mean:
            raise DatasetError(
                f"expected the attribute `normalization` of {spec.dtype} frames, found none; take them as they are stored",
                array=spec.name,
            )
        mask = reader.rows(spec.valid_array) if spec.valid_array else np.ones(reader.num_steps, np.bool_)
        is_needed = convert == "symmetric" or (convert == "pixels" and spec.dtype != "uint8")
        convert = convert if is_needed else ""
        return cls(name=name, mask=mask, shape=spec.row_shape, stored=spec.dtype, convert=convert, mean=mean, std=std)

    @property
    def dtype(self) -> str:
        """The dtype handed out."""
        return {"": self.stored, "pixels": "uint8", "symmetric": "float32"}[self.convert]

    def fill(self, reader: DatasetReader, steps: Int64[np.ndarray, " batch"], out: np.ndarray) -> None:
        """Fill ``out`` (``dtype[batch, h, w, 3]``, contiguous) with the frames of ``steps``."""
        if not self.convert:
            reader.gather(FRAMES + self.name, steps, out)
            return
        num = max(1, _PIECE_NBYTES // (int(np.prod(self.shape)) * np.dtype(self.stored).itemsize))
        piece = np.empty((min(num, len(steps)), *self.shape), self.stored)
        for start in range(0, len(steps), num):
            part = steps[start : start + num]
            stored = piece[: len(part)]
            reader.gather(FRAMES + self.name, part, stored)
            self._convert(stored, self.mask[part], out[start : start + num])

    def _convert(self, stored: np.ndarray, mask: Bool[np.ndarray, " piece"], out: np.ndarray) -> None:
        frames = stored
        if stored.dtype != np.uint8:
            frames = denormalize_images(stored, self.mean, self.std)
            frames[~mask] = 0  # a missing frame is zero in either form
        if self.convert == "pixels":
            out[...] = frames
        else:
            scale_pixels(frames.reshape(-1), out.reshape(-1))  # a missing frame becomes -1, as in openpi
