"""``ds.headrace``: what a person asks of an opened dataset or of raw recordings in a notebook."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from schemas.errors import MissingExtraError, UsageError


@xr.register_dataset_accessor("headrace")
class HeadraceAccessor:
    """What :func:`~pipeline.dataset.open_dataset` and :func:`~pipeline.raw.open_raw` add to a Dataset, as ``ds.headrace``.

    Examples
    --------
    >>> ds = open_dataset("out")  # doctest: +SKIP
    >>> ds.headrace.episode(3).headrace.show(0)  # doctest: +SKIP
    """

    def __init__(self, dataset: xr.Dataset) -> None:
        self._dataset = dataset

    @property
    def views(self) -> dict[str, str]:
        """Camera views: ``view -> variable``."""
        return {
            str(name).removeprefix("rgb_") if variable.dims[-1] == "rgb" else str(name): str(name)
            for name, variable in self._dataset.data_vars.items()
            if variable.ndim == 4 and variable.dims[-1] in ("rgb", "channel")
        }

    def episode(self, number: int) -> xr.Dataset:
        """Return the steps of one episode, lazily; of a part of a dataset, those that are in it.

        Raises
        ------
        UsageError
            There is no step of that episode, or nothing says which step is of which episode.
        """
        label = next((name for name in ("episode_index", "episode") if name in self._dataset.coords), None)
        if label is None:
            raise UsageError(
                "expected a coordinate episode_index or episode, found neither; open with open_dataset or open_raw"
            )
        labels = self._dataset[label].values
        (steps,) = np.nonzero(labels == number)
        if not steps.size:
            known = f"{labels.min()} to {labels.max()}" if labels.size else "no step at all"
            raise UsageError(f"expected an episode of {known}, found {number}; choose one that there is")
        is_run = steps[-1] - steps[0] + 1 == len(steps)
        return self._dataset.isel(step=slice(int(steps[0]), int(steps[-1]) + 1) if is_run else steps)

    def physical(self) -> xr.Dataset:
        """Return the dataset with frames as uint8, also where they were normalised before writing.

        What is chosen is read and converted at once, since xarray has no lazy function of an array without Dask:
        ``open_dataset(path, physical=True)`` does it as values are asked for.
        """
        from tasks.normalize import denormalize_images

        changed = {}
        for name in self.views.values():
            variable = self._dataset[name]
            scaling = variable.attrs.get("normalization")
            if scaling is None or variable.dtype == np.uint8:
                continue
            frames = denormalize_images(variable.values, np.array(scaling["mean"]), np.array(scaling["std"]))
            mask = variable.attrs.get("valid_array")
            if mask in self._dataset:
                frames[~self._dataset[mask].values] = 0  # an absent frame stays black
            changed[name] = (variable.dims, frames, {**variable.attrs, "units": "1"})
        return self._dataset.assign(changed)

    def show(self, step: int, *, width_px: int = 320) -> Any:
        """Return a picture (``PIL.Image``) of every view at one step, which a notebook displays.

        Parameters
        ----------
        step
            Position along ``step`` of this Dataset.
        width_px
            Of each view.
        """
        from pipeline.sheet import contact_sheet

        if not self.views:
            raise UsageError("expected camera views, found none in this dataset; `headrace preview` draws the rest")
        row = self._dataset.isel(step=[step]).headrace.physical()
        tiles = {view: [_frame(row, name)] for view, name in self.views.items()}
        return contact_sheet(tiles, columns=[_place(row, step)], tile_width_px=width_px, missing="masked")

    def play(self, *, width_px: int = 320) -> Any:
        """Return a player with a slider over the steps of this Dataset; needs ``ipywidgets`` (the extra ``notebook``)."""
        try:
            import ipywidgets
        except ImportError as error:
            raise MissingExtraError(
                "expected ipywidgets for a player, found it not installed; pip install headrace[notebook], or use show(step)"
            ) from error
        last = self._dataset.sizes["step"] - 1
        player = ipywidgets.Play(min=0, max=last, interval=100, description="play")
        slider = ipywidgets.IntSlider(min=0, max=last, description="step", continuous_update=False)
        picture = ipywidgets.Image(value=self._png(0, width_px), format="png")
        ipywidgets.jslink((player, "value"), (slider, "value"))

        def draw(change: Mapping[str, Any]) -> None:
            picture.value = self._png(change["new"], width_px)

        slider.observe(draw, names="value")
        return ipywidgets.VBox([ipywidgets.HBox([player, slider]), picture])

    def _png(self, step: int, width_px: int) -> bytes:
        import io

        buffer = io.BytesIO()
        self.show(step, width_px=width_px).save(buffer, "PNG")
        return buffer.getvalue()


def _frame(row: xr.Dataset, name: str) -> np.ndarray | None:
    """Return the frame of a Dataset of one step, or None where it is absent."""
    mask = row[name].attrs.get("valid_array", f"{name}_present")
    if mask in row and not bool(row[mask].values[0]):
        return None
    return np.asarray(row[name].values[0])


def _place(row: xr.Dataset, step: int) -> str:
    number = next((int(row[name].values[0]) for name in ("episode_index", "episode") if name in row.coords), None)
    said = [f"episode {number}"] if number is not None else []
    if "timestamp_s" in row.coords:
        said.append(f"{float(row['timestamp_s'].values[0]):.2f} s")
    return ", ".join([*said, f"step {step}"])
