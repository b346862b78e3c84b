"""Windows of observations and actions: what Diffusion Policy and Diffuser train on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.loaders.anchors import ReadOptions, servable_steps
from pipeline.loaders.buffers import Layout
from pipeline.loaders.dataset_loader import DatasetLoader
from pipeline.loaders.delivery import Arrays, Batch, Texts
from pipeline.loaders.ego_trajectory import EGO, NUM_FEATURES, EgoTrajectory, ego_windows
from pipeline.loaders.frames import FRAMES, View, view_names
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.zarr_reader import open_reader
from pipeline.store.atomic import xxh3_hex
from schemas.errors import DatasetError, UsageError
from tasks.windows import Windows, diffuser_windows, padded_windows, split_at_invalid, window_rows, window_steps

Places = tuple[np.ndarray, np.ndarray, np.ndarray]
LAYOUTS = ("diffusion-policy", "diffuser")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions(ReadOptions):
    """What a window is."""

    layout: str = "diffusion-policy"
    """``diffusion-policy`` hands out ``{"obs": ..., "action": ...}``, its edges the episode's first and last step
    repeated; ``diffuser`` hands out ``{"trajectories": ..., "conditions": {0: ...}}``, zeros after the episode's end."""
    horizon: int = 16
    """Steps of a window."""
    num_obs_steps: int = 0
    """First steps of which observations are handed out; 0 for all. Frames of the others are not read."""
    pad_before: int = 0
    """Steps by which a window may begin before its episode: Diffusion Policy's ``n_obs_steps - 1``."""
    pad_after: int = 0
    """Steps by which a window may end after its episode: Diffusion Policy's ``n_action_steps - 1``."""
    obs: Mapping[str, str] = field(default_factory=dict)
    """``key -> array`` of the observations, such as ``{"image": "rgb_base_0_rgb", "agent_pos": "state"}``; by default
    every view under its name, and ``state``. Diffuser's are arrays of numbers, joined in order; by default ``state``."""
    actions: str = "actions"
    """Array of the actions; empty for none, as where Diffuser plans over states alone. Of a planner dataset, here and in
    ``obs``, ``ego_trajectory`` is the ego's pose seen from the window's first step: x, y, cosine and sine of the heading.
    Windows then are the planner's samples, each with its own recorded future, and paddings play no part."""
    normalize_images: bool = False
    """Frames as float32 in [0, 1], channels first, as Diffusion Policy takes them; else uint8, channels last."""
    max_steps: int = 0
    """Diffuser's ``max_path_length``; 0 for episodes of any length."""
    use_padding: bool = True
    """Whether Diffuser's windows may end after their episode."""

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError(f"expected layout one of {', '.join(LAYOUTS)}, found {self.layout!r}; correct the call")
        if not 0 <= self.num_obs_steps <= self.horizon or self.horizon < 1:
            raise UsageError(
                f"expected a horizon of 1 or more and num_obs_steps of 0 to the horizon, found {self.horizon} and "
                f"{self.num_obs_steps}; correct the call"
            )


class WindowSamples:
    """The windows of a dataset. A step that is not valid ends an episode and begins another: none crosses it.

    Parameters
    ----------
    path
        Folder of the dataset.
    options
        What a window is.

    Raises
    ------
    DatasetError
        Not a finished dataset, or not one that has the arrays asked for.
    """

    def __init__(self, path: str | Path, options: WindowOptions) -> None:
        self.reader = open_reader(path, check=options.check)
        self.options = options
        obs = dict(options.obs) or self._all_obs()
        has_ego = EGO in (options.actions, *obs.values())
        self._ego = EgoTrajectory(self.reader, options.horizon) if has_ego else None
        self.windows = self._find()
        self._actions = self._signal(options.actions)
        self._views = {
            key: View.of(self.reader, name.removeprefix(FRAMES), convert="pixels")
            for key, name in obs.items()
            if name.startswith(FRAMES)
        }
        self._signals = {key: self._signal(name) for key, name in obs.items() if not name.startswith(FRAMES)}
        if self.is_diffuser and self._views:
            raise UsageError(f"expected arrays of numbers, which Diffuser plans over, found {list(self._views)}")
        digest = np.concatenate([self.windows.starts, self.windows.stops, self.windows.ends, [self.windows.lead]])
        self.fingerprint = xxh3_hex(np.ascontiguousarray(digest, np.int64).view(np.uint8).data)

    @property
    def is_diffuser(self) -> bool:
        """Whether the layout is Diffuser's."""
        return self.options.layout == "diffuser"

    @property
    def num(self) -> int:
        """Number of windows."""
        return self.windows.num

    @property
    def steps(self) -> Int64[np.ndarray, " window"]:
        """The first step of each window that lies in its episode, ascending."""
        firsts, lows, _ = self.windows.at(np.arange(self.windows.num))
        return np.maximum(firsts, lows)

    @property
    def layout(self) -> Layout:
        """Arrays of a batch, flat."""
        horizon, num_obs = self.options.horizon, self._num_obs
        layout: dict[str, tuple[tuple[int, ...], str]] = {
            "actions": ((horizon, _width(self._actions)), "float32"),
            "is_pad": ((horizon,), "bool"),
            "obs_is_pad": ((num_obs,), "bool"),
            "index": ((), "int64"),
        }
        for key, rows in self._signals.items():
            layout[f"obs/{key}"] = ((num_obs, _width(rows)), "float32")
        for key, view in self._views.items():
            height, width, channels = view.shape
            is_float = self.options.normalize_images
            shape = (channels, height, width) if is_float else view.shape
            layout[f"obs/{key}"] = ((num_obs, *shape), "float32" if is_float else "uint8")
            layout[f"mask/{key}"] = ((num_obs,), "bool")
        return layout

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays`` with the windows ``samples``; safe in several threads at once."""
        places = self.windows.at(samples)
        firsts, lows, highs = places
        arrays["index"][:] = firsts
        for key, rows in self._signals.items():
            self._fill_rows(rows, places, arrays["obs_is_pad"], arrays[f"obs/{key}"])
        self._fill_rows(self._actions, places, arrays["is_pad"], arrays["actions"])
        if self._ego is not None:
            pads = self._ego.pads(firsts, self.options.horizon)
            arrays["is_pad"][:] = pads | arrays["is_pad"] if self.options.actions else pads
        for key, view in self._views.items():
            steps = window_steps(firsts, lows, highs, count=self._num_obs)
            arrays[f"mask/{key}"][...] = view.mask[steps]
            self._fill_frames(view, steps, arrays[f"obs/{key}"])

    def _fill_rows(
        self, rows: "np.ndarray | EgoTrajectory", places: Places, is_pad: np.ndarray, out: np.ndarray
    ) -> None:
        if isinstance(rows, EgoTrajectory):
            rows.fill(places[0], is_pad, out, is_zero=self.is_diffuser)
        else:
            window_rows(rows, places, is_zero=self.is_diffuser, is_pad=is_pad, out=out)

    def _signal(self, name: str) -> "np.ndarray | EgoTrajectory":
        if name == EGO and self._ego is not None:
            return self._ego
        return _numbers(self.reader, name) if name else np.zeros((self.reader.num_steps, 0), np.float32)

    def _fill_frames(self, view: View, steps: Int64[np.ndarray, "batch obs"], out: np.ndarray) -> None:
        if not self.options.normalize_images:
            view.fill(self.reader, steps.reshape(-1), out.reshape(-1, *view.shape))
            return
        frames = np.empty((steps.shape[1], *view.shape), np.uint8)
        for row, window in enumerate(steps):
            view.fill(self.reader, window, frames)
            np.divide(np.moveaxis(frames, -1, 1), np.float32(255), out=out[row], dtype=np.float32)

    def texts(self, samples: Int64[np.ndarray, " batch"]) -> dict[str, list[str]]:
        """Return nothing: a batch is its arrays."""
        return {}

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch as the policy expects it."""
        if self.is_diffuser:
            observations = [arrays[f"obs/{key}"] for key in self._signals]
            trajectories = np.concatenate([arrays["actions"], *observations], axis=2)
            start = _width(self._actions)
            batch: Batch = {"trajectories": trajectories, "conditions": {0: trajectories[:, 0, start:]}}
        else:
            obs = {key: arrays[f"obs/{key}"] for key in [*self._views, *self._signals]}
            batch = {"obs": obs, "action": arrays["actions"]}
            batch["obs_mask"] = {key: arrays[f"mask/{key}"] for key in self._views}
        return {**batch, "is_pad": arrays["is_pad"], "index": arrays["index"]}

    @property
    def _num_obs(self) -> int:
        return self.options.horizon if self.is_diffuser else self.options.num_obs_steps or self.options.horizon

    def _find(self) -> Windows:
        options = self.options
        if self._ego is not None:
            return ego_windows(self.reader, options.horizon, options.filter)
        bounds = split_at_invalid(self.reader.rows("episode_ends"), servable_steps(self.reader, options.filter))
        if self.is_diffuser:
            return diffuser_windows(
                bounds, options.horizon, max_steps=options.max_steps, use_padding=options.use_padding
            )
        return padded_windows(bounds, options.horizon, pad_before=options.pad_before, pad_after=options.pad_after)

    def _all_obs(self) -> dict[str, str]:
        has_frames = any(name.startswith(FRAMES) and not name.endswith("_valid") for name in self.reader.info.arrays)
        names = view_names(self.reader) if has_frames and not self.is_diffuser else []
        signals = {"state": "state"} if "state" in self.reader.info.arrays else {}
        return {**{name: FRAMES + name for name in names}, **signals}


class WindowLoader(DatasetLoader):
    """Windows of a dataset in batches, as Diffusion Policy or Diffuser takes them.

    A batch of Diffusion Policy is ``{"obs": {key: uint8[b, t, h, w, 3] or float32[b, t, 3, h, w] or float32[b, t, dim]},
    "action": float32[b, horizon, dim]}``, with ``obs_mask`` (``{key: bool[b, t]}``, False where a view has no frame and
    is zero). One of Diffuser is ``{"trajectories": float32[b, horizon, action + observation], "conditions": {0:
    float32[b, observation]}}``. Both have ``is_pad`` (bool[b, horizon], steps beyond the episode) and ``index``
    (int64[b], the window's first step, which may lie before its episode). Values are in the dataset's units: normalise
    by ``headrace stats``, as the policies do themselves.

    Parameters are those of :class:`~pipeline.loaders.dataset_loader.DatasetLoader`, its options the fields of
    :class:`WindowOptions`.

    Examples
    --------
    >>> loader = WindowLoader("out.zarr", 64, horizon=16, num_obs_steps=2, pad_before=1, pad_after=7)  # doctest: +SKIP
    """

    samples_type = WindowSamples
    options_type = WindowOptions


def _width(rows: np.ndarray | EgoTrajectory) -> int:
    return NUM_FEATURES if isinstance(rows, EgoTrajectory) else int(rows.shape[1])


def _numbers(reader: DatasetReader, name: str) -> Float32[np.ndarray, "step dim"]:
    rows = reader.rows(name)
    if rows.ndim != 2 or rows.dtype != np.float32:
        raise DatasetError(
            f"expected float32[step, dim], found {rows.dtype}{list(rows.shape)}; see `headrace info`", array=name
        )
    return rows
