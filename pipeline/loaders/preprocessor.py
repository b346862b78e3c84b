"""Views at run time as training saw them: what a robot's control loop calls before each inference."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Shaped, UInt8
from PIL import Image

from pipeline.store.metadata import read_info
from schemas.errors import Reason, SchemaError, SourceError, UsageError, locate
from schemas.recipe import Recipe, ViewRecipe, recipe_from_mapping
from tasks.decode import decode_frame, encode_jpeg
from tasks.kernels.openpi import scale_pixels
from tasks.normalize import normalize_images
from tasks.resize import decode_resized, resize_frame

Picture = bytes | memoryview | str | Path | np.ndarray | Image.Image | None
"""An encoded image, a file, ``uint8[h, w, 3]``, a Pillow image, or None for a view that is missing."""

FORMS = ("stored", "pixels", "symmetric")


class MultiViewPreprocessor:
    """Decode, resize and normalise the views of one moment, in parallel, by the functions that ``convert`` and the loaders use.

    Parameters
    ----------
    recipe
        Its views, in this order, and how their frames are stored; a lossy codec is applied, since training saw its loss.
    form
        ``stored`` gives what the dataset holds (uint8, or frames normalised before writing), ``pixels`` always uint8,
        ``symmetric`` float32 in [-1, 1] by openpi's own arithmetic: what ``MultiViewLoader`` gives with ``normalize_images``.
    channel_order
        ``rgb`` or ``bgr``: the order of arrays (OpenCV and CARLA cameras give bgr). Encoded and Pillow images know theirs.
    threads
        Views at once, the calling thread included; 0 takes one a view, and not more than there are cores.

    Examples
    --------
    >>> from schemas.recipe import Recipe, ViewRecipe
    >>> views = tuple(ViewRecipe(name=name) for name in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    >>> prepare = MultiViewPreprocessor(Recipe(name="pi0", views=views))
    >>> prepare({"base_0_rgb": np.zeros((480, 640, 3), np.uint8)}).shape
    (3, 224, 224, 3)
    """

    def __init__(self, recipe: Recipe, *, form: str = "stored", channel_order: str = "rgb", threads: int = 0) -> None:
        if form not in FORMS or channel_order not in ("rgb", "bgr") or threads < 0:
            raise UsageError(
                f"expected form of {', '.join(FORMS)}, channel_order rgb or bgr and 0 or more threads, "
                f"found {form!r}, {channel_order!r} and {threads}; correct the call"
            )
        sizes = {(view.height_px, view.width_px) for view in recipe.views}
        if len(sizes) != 1:
            raise SchemaError(f"expected views of one size, found {sorted(sizes)}; make one preprocessor for each size")
        self.recipe, self.form, self.channel_order = recipe, form, channel_order
        self.views = tuple(view.name for view in recipe.views)
        self.shape = (len(self.views), *sizes.pop(), 3)
        stored = recipe.frames.dtype
        self.dtype = np.dtype({"stored": stored, "pixels": "uint8", "symmetric": "float32"}[form])
        self.threads = threads or min(len(self.views), len(os.sched_getaffinity(0)))
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    @classmethod
    def from_dataset(cls, path: str | Path, **options: Any) -> Self:
        """Prepare views as the dataset at ``path`` was made; ``options`` are those of the class."""
        info = read_info(path)
        return cls(recipe_from_mapping(dict(info.recipe), "dataset"), **options)

    def __call__(
        self,
        pictures: Mapping[str, Picture] | Sequence[Picture],
        out: Shaped[np.ndarray, "view height width 3"] | None = None,
    ) -> Shaped[np.ndarray, "view height width 3"]:
        """Return the views in the recipe's order; one that is missing is zero, as it is in a dataset (-1 if ``symmetric``).

        Parameters
        ----------
        pictures
            By name of view, or in the recipe's order.
        out
            Where to put them, C-contiguous and of ``dtype``; allocated if None.

        Raises
        ------
        SourceError
            With its reason and ``view``, where a picture cannot be read, or is missing and the recipe does not mask it.
        """
        named = self._named(pictures)
        if out is None:
            out = np.empty(self.shape, self.dtype)
        elif out.shape != self.shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise SchemaError(
                f"expected a C-contiguous {self.dtype}{list(self.shape)}, found {out.dtype}{list(out.shape)}; allocate it so"
            )
        jobs = [(view, named[view.name], out[number]) for number, view in enumerate(self.recipe.views)]
        if self.threads == 1:
            for job in jobs:
                self._fill(*job)
            return out
        others = [self._executor().submit(self._fill, *job) for job in jobs[1:]]
        try:
            self._fill(*jobs[0])
        finally:
            for other in others:  # nothing may write to `out` after this call, not even after an error
                other.exception()
        for other in others:
            other.result()
        return out

    def mask(self, pictures: Mapping[str, Picture] | Sequence[Picture]) -> Bool[np.ndarray, " view"]:
        """Return which views are there: the ``image_mask``."""
        named = self._named(pictures)
        return np.array([named[name] is not None for name in self.views])

    def observation(
        self, pictures: Mapping[str, Picture] | Sequence[Picture], state: np.ndarray, prompt: str = ""
    ) -> dict[str, Any]:
        """Return a batch of one as ``MultiViewLoader`` gives it, without actions: what openpi's ``Observation.from_dict`` takes.

        ``state`` is padded with zeros to the recipe's ``action_dim``; it is not normalised.
        """
        frames, mask = self(pictures), self.mask(pictures)
        padded = np.zeros((1, max(self.recipe.action_dim, len(state))), np.float32)
        padded[0, : len(state)] = state
        return {
            "image": {name: frames[number : number + 1] for number, name in enumerate(self.views)},
            "image_mask": {name: mask[number : number + 1] for number, name in enumerate(self.views)},
            "state": padded,
            "prompt": [prompt],
        }

    def warm(self) -> Self:
        """Compile the kernels and start the threads, one to two seconds, so that the first control step does not."""
        self([np.zeros((2 * self.shape[1] + 1, 2 * self.shape[2] + 1, 3), np.uint8)] * len(self.views))
        return self

    def close(self) -> None:
        """Stop the threads; they start again when needed."""
        if self._pool is not None and self._pool[0] == os.getpid():
            self._pool[1].shutdown()
        self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": None}

    def _executor(self) -> ThreadPoolExecutor:
        """Return this process's threads; those of a parent do not live on in a forked child."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = (os.getpid(), ThreadPoolExecutor(self.threads - 1, thread_name_prefix="headrace-view"))
        return self._pool[1]

    def _named(self, pictures: Mapping[str, Picture] | Sequence[Picture]) -> dict[str, Picture]:
        if not isinstance(pictures, Mapping):
            if len(pictures) != len(self.views):
                raise UsageError(
                    f"expected {len(self.views)} pictures, found {len(pictures)}; give None for a missing view"
                )
            pictures = dict(zip(self.views, pictures, strict=True))
        unknown = sorted(set(pictures) - set(self.views))
        if unknown:
            raise UsageError(f"expected views of {list(self.views)}, found {unknown}; correct the names")
        return {name: pictures.get(name) for name in self.views}

    def _fill(self, view: ViewRecipe, picture: Picture, out: np.ndarray) -> None:
        if picture is None and view.missing != "mask":
            raise SourceError(
                "expected a picture, found none; the recipe does not mask it", Reason.MISSING_FILE, view=view.name
            )
        is_direct = self.dtype == np.uint8
        pixels = out if is_direct else np.empty(out.shape, np.uint8)
        if picture is None:
            pixels[...] = 0
        else:
            with locate(view=view.name):
                self._resize(view, picture, pixels)
            self._apply_codec(pixels)
        if self.form == "symmetric":
            scale_pixels(pixels.reshape(-1), out.reshape(-1))
        elif picture is None:
            out[...] = 0
        elif not is_direct:
            normalize_images(pixels, self.recipe.frames.mean, self.recipe.frames.std, out)

    def _apply_codec(self, pixels: UInt8[np.ndarray, "h w 3"]) -> None:
        kind, _, quality = self.recipe.frames.codec.partition(":")
        if kind == "jpeg":
            decode_frame(encode_jpeg(pixels, int(quality)), pixels)

    def _resize(self, view: ViewRecipe, picture: Picture, pixels: UInt8[np.ndarray, "h w 3"]) -> None:
        if isinstance(picture, str | Path):
            picture = _read(Path(picture))
        if isinstance(picture, bytes | bytearray | memoryview):
            fast = view.decode == "fast"
            decode_resized(picture, pixels, method=view.resize, filter=view.filter, fast=fast)
        else:
            resize_frame(self._decoded(picture), pixels, method=view.resize, filter=view.filter)

    def _decoded(self, picture: Picture) -> UInt8[np.ndarray, "h w 3"]:
        if isinstance(picture, np.ndarray):
            return picture if self.channel_order == "rgb" else picture[..., ::-1]
        if isinstance(picture, Image.Image):
            return np.asarray(picture.convert("RGB"))
        raise UsageError(
            f"expected bytes, a path, an array or a Pillow image, found {type(picture).__name__}; convert it"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise SourceError("expected a file, found none; check the path", Reason.MISSING_FILE, file=path) from error
    except OSError as error:
        raise SourceError(f"expected to read a file, found: {error.strerror}", Reason.IO, file=path) from error
