"""Raw recordings as one lazy xarray.Dataset: opening decodes nothing, touching a frame decodes that frame.

The blocks call :mod:`pipeline.graph`, as a conversion does, so that what a notebook shows is what would be written.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr

import pipeline.accessor  # noqa: F401 - registers ds.headrace
from pipeline.graph import frames
from pipeline.readers import open_source
from pipeline.readers.protocol import Reader
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, SourceIndex

BLOCK_NBYTES = 2**26
"""Greatest size of a block of frames, and so of what one thread holds when a whole view is computed."""
BLOCK_STEPS = 32
"""Greatest number of frames of a block of still images: what a list of steps decodes beside those that it names."""
VIDEO_BLOCK_STEPS = 512
"""The same for video, where every block begins by seeking."""
ROW_BLOCK_STEPS = 2**16
MAX_NOTES = 20
"""Faults of the index that the attributes quote."""

_OWN_NAMES = (
    "step",
    "episode",
    "step_in_episode",
    "timestamp_s",
    "channel",
    "episodes",
    "episode_key",
    "num_steps",
    "rate_hz",
)


def open_raw(path: str | Path, format: str = "") -> xr.Dataset:
    """Open raw recordings, all episodes end to end along ``step``.

    Each rgb view is a variable ``(step, height_<view>, width_<view>, channel)``, each signal one along ``step``, as lazy Dask
    arrays: ``ds.rgb[i].compute()`` decodes one frame, although a Dask block holds many. (A list of steps decodes their whole
    blocks; a slice does not.) Coordinates say which ``episode`` a step belongs to and where in it; those along ``episodes`` are the
    table of episodes. A view that an episode lacks is zeros there, and ``<view>_present`` says so.

    A frame that cannot be decoded raises SourceError when it is touched; rows that cannot be read are NaN (0 in integers), with a warning.

    Parameters
    ----------
    path
        A folder of recordings.
    format
        Name of its format; found by looking where left out.

    Raises
    ------
    SourceError
        Where there are no recordings to open, or where a view has several sizes or a signal several shapes: one array cannot
        hold them. Open one episode's folder, or convert, which resizes.

    Examples
    --------
    >>> ds = open_raw("routes/")  # doctest: +SKIP
    >>> ds.isel(step=ds.episode == 3).speed.plot()  # doctest: +SKIP
    """
    reader = open_source(path, format)
    return raw_dataset(reader, reader.index())


def raw_dataset(reader: Reader, index: SourceIndex) -> xr.Dataset:
    """Return the lazy dataset of an opened and indexed source; see :func:`open_raw`."""
    refs = index.episodes
    if not refs:
        why = f": {index.faults[0].message}" if index.faults else ""
        raise SourceError(
            f"expected an episode, found none that can be read{why}", Reason.EMPTY_EPISODE, source=index.name
        )
    variables: dict[str, Any] = {}
    unread: list[str] = []
    for view in dict.fromkeys(view.name for ref in refs for view in ref.views if view.kind == "rgb"):
        size = _size(refs, view)
        if size == (0, 0):
            unread.append(f"view {view} was left out: no episode says its size")
        else:
            variables.update(_view_variables(reader, refs, view, size))
    for name in dict.fromkeys(signal.name for ref in refs for signal in ref.signals):
        variables.update(_signal_variable(reader, refs, name))
    times = variables.pop("timestamp_s")
    attributes = {
        "format": index.format,
        "source": index.name,
        "state": list(index.state),
        "actions": list(index.actions),
        "notes": [*index.notes, *unread],
        "faults": [f"{fault.episode} {fault.path}: {fault.message}" for fault in index.faults[:MAX_NOTES]],
        "num_faults": len(index.faults),
    }
    return xr.Dataset(variables, {**_coordinates(refs), "timestamp_s": times}, attributes)


def _ends(refs: Sequence[EpisodeRef]) -> np.ndarray:
    return np.cumsum([ref.num_steps for ref in refs], dtype=np.int64)


def _coordinates(refs: Sequence[EpisodeRef]) -> dict[str, Any]:
    ends = _ends(refs)
    lengths = np.diff(ends, prepend=0)
    own_steps = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    return {
        "episode": (
            "step",
            np.repeat(np.arange(len(refs), dtype=np.int32), lengths),
            {"long_name": "row of the episode table"},
        ),
        "step_in_episode": ("step", own_steps.astype(np.int32), {"long_name": "recorded step"}),
        "channel": ("channel", ["red", "green", "blue"]),
        "episode_key": ("episodes", np.array([ref.key for ref in refs], object)),
        "num_steps": ("episodes", lengths),
        "rate_hz": ("episodes", np.array([ref.rate_hz for ref in refs]), {"units": "Hz"}),
        "instruction": ("episodes", np.array([(*ref.instructions, "")[0] for ref in refs], object)),
    }


def _size(refs: Sequence[EpisodeRef], view: str) -> tuple[int, int]:
    """Return the one size of a view; (0, 0) where nothing says it. SourceError names two episodes that disagree."""
    sizes: dict[tuple[int, int], str] = {}
    for ref in refs:
        for info in ref.views:
            if info.name == view and info.present and info.height_px and info.width_px:
                sizes.setdefault((info.height_px, info.width_px), ref.key)
    if len(sizes) > 1:
        found = ", ".join(f"{width}x{height} px in {key}" for (height, width), key in sizes.items())
        raise SourceError(
            f"expected one size of view {view!r}, found {found}; open one episode's folder, or convert, which resizes",
            Reason.WRONG_SHAPE,
        )
    return next(iter(sizes), (0, 0))


def _view_variables(reader: Reader, refs: Sequence[EpisodeRef], view: str, size: tuple[int, int]) -> dict[str, Any]:
    rows = _FrameRows(reader, tuple(refs), _ends(refs), view, (*size, 3), np.dtype(np.uint8))
    is_video = any(info.name == view and info.encoding == "video" for ref in refs for info in ref.views)
    block = max(1, min(VIDEO_BLOCK_STEPS if is_video else BLOCK_STEPS, BLOCK_NBYTES // (size[0] * size[1] * 3)))
    name = _free(view)
    dims = ("step", f"height_{view}", f"width_{view}", "channel")
    present = [any(info.name == view and info.present for info in ref.views) for ref in refs]
    found: dict[str, Any] = {
        name: (dims, _lazy(rows, block), {"long_name": f"camera frames, view {view}", "units": "1"})
    }
    if not all(present):
        mask = np.repeat(present, [ref.num_steps for ref in refs])
        found[f"{name}_present"] = ("step", mask, {"long_name": f"whether the episode has the view {view}"})
    return found


def _signal_variable(reader: Reader, refs: Sequence[EpisodeRef], name: str) -> dict[str, Any]:
    offered = {ref.key: signal for ref in refs for signal in ref.signals if signal.name == name}
    shapes: dict[tuple[int, ...], str] = {}
    for key, info in offered.items():
        shapes.setdefault(info.shape, key)
    if len(shapes) > 1:
        found = ", ".join(f"{list(shape)} in {key}" for shape, key in shapes.items())
        raise SourceError(
            f"expected one shape of signal {name!r}, found {found}; open one episode's folder", Reason.WRONG_SHAPE
        )
    signal = next(iter(offered.values()))
    dtype = np.result_type(*{np.dtype(signal.dtype) for signal in offered.values()})
    rows = _SignalRows(reader, tuple(refs), _ends(refs), name, signal.shape, dtype)
    own = name if name == "timestamp_s" else _free(name)
    dims = (
        ("step", *(f"{own}_{k}" for k in range(len(signal.shape))))
        if len(signal.shape) > 1
        else ("step", f"{own}_feature")
    )
    attributes: dict[str, Any] = {"units": signal.units} if signal.units else {}
    if signal.names:
        attributes["features"] = list(signal.names)
    return {own: (dims[: 1 + len(signal.shape)], _lazy(rows, ROW_BLOCK_STEPS), attributes)}


def _free(name: str) -> str:
    return f"{name}_recorded" if name in _OWN_NAMES else name


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Something along all steps of a source that is read when it is indexed: what Dask asks of an array, and no more."""

    reader: Reader
    refs: tuple[EpisodeRef, ...]
    ends: np.ndarray
    """One past the last step of each episode."""
    name: str
    row_shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self.ends[-1]), *self.row_shape)

    @property
    def ndim(self) -> int:
        return 1 + len(self.row_shape)

    def __getitem__(self, key: Any) -> np.ndarray:
        first, *rest = key if isinstance(key, tuple) else (key,)
        steps = range(self.shape[0])[first] if isinstance(first, int | np.integer | slice) else np.asarray(first)
        rows = self._read(np.atleast_1d(np.asarray(steps, np.int64)))[(slice(None), *rest)]
        return rows[0] if np.ndim(steps) == 0 else rows

    def _read(self, steps: np.ndarray) -> np.ndarray:
        """Read ``steps``, in any order, episode by episode and each episode in order."""
        out = np.zeros((len(steps), *self.row_shape), self.dtype)
        order = np.argsort(steps, kind="stable")
        episodes = np.searchsorted(self.ends, steps[order], side="right")
        for episode in np.unique(episodes).tolist():
            ref, places = self.refs[episode], order[episodes == episode]
            for place, row in zip(
                places.tolist(), self._rows(ref, steps[places] - (self.ends[episode] - ref.num_steps)), strict=True
            ):
                out[place] = row
        return out

    def _rows(self, ref: EpisodeRef, steps: np.ndarray) -> Iterator[Any]:
        raise NotImplementedError


class _FrameRows(_Rows):
    """The frames of one view."""

    __slots__ = ()

    def _rows(self, ref: EpisodeRef, steps: np.ndarray) -> Iterator[Any]:
        if not any(view.name == self.name and view.present for view in ref.views):
            yield from (0 for _ in steps)
            return
        for step, frame in zip(steps.tolist(), frames(self.reader, ref, self.name, steps), strict=True):
            where = {"episode": ref.key, "view": self.name, "step": step}
            if isinstance(frame, Fault):
                raise SourceError(frame.message, frame.reason, **where)
            if frame.shape != self.row_shape:
                message = f"expected a frame of {list(self.row_shape)}, found {list(frame.shape)}; open the episode alone, or convert"
                raise SourceError(message, Reason.WRONG_SHAPE, **where)
            yield frame


class _SignalRows(_Rows):
    """The rows of one signal."""

    __slots__ = ()

    def _rows(self, ref: EpisodeRef, steps: np.ndarray) -> Iterator[Any]:
        if not any(signal.name == self.name for signal in ref.signals):
            yield from (np.nan if self.dtype.kind == "f" else 0 for _ in steps)
            return
        block = self.reader.read_signals(ref, [self.name], steps)
        for fault in block.faults:
            message = f"{self.name} of {ref.key}, steps {fault.start}:{fault.stop}: {fault.message}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        yield from block.values[self.name]


def _lazy(rows: _Rows, block: int) -> da.Array:
    """Wrap ``rows`` in a Dask array whose blocks end where episodes do."""
    chunks = []
    for ref in rows.refs:
        parts = -(-ref.num_steps // block)
        chunks += [ref.num_steps * (k + 1) // parts - ref.num_steps * k // parts for k in range(parts)]
    meta = np.empty((0,) * rows.ndim, rows.dtype)
    return da.from_array(rows, (tuple(chunks), *rows.row_shape), name=False, asarray=True, fancy=True, meta=meta)
