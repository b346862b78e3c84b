"""A page that shows MultiViewPreprocessor at work: three pictures and an instruction in, the batch and the time of each stage out.

    python examples/preprocess_page.py [DATASET] [--port 7860]

With a dataset, views are prepared as it was made; without, as the built-in recipe pi0. Needs the extra: headrace[page].
"""

import argparse
import sys
import time
from typing import Any

import numpy as np

from pipeline.loaders import MultiViewPreprocessor
from pipeline.recipes import load_recipe
from schemas.errors import HeadraceError, MissingExtraError
from tasks.decode import decode_frame
from tasks.resize import resize_frame

Shown = tuple[list[tuple[np.ndarray, str]], dict[str, Any], list[list[Any]]]


def prepare_views(prepare: MultiViewPreprocessor, paths: list[str | None], instruction: str) -> Shown:
    """Return the prepared frames with their names, what the batch holds, and milliseconds by stage."""
    start = time.perf_counter()
    pictures = dict(zip(prepare.views, paths, strict=False))
    state = np.zeros(prepare.recipe.action_dim, np.float32)
    batch = prepare.observation(pictures, state, instruction)
    elapsed_ms = (time.perf_counter() - start) * 1e3
    pixels = MultiViewPreprocessor(prepare.recipe, form="pixels", threads=1)(pictures)
    gallery = [(frame, name) for frame, name in zip(pixels, prepare.views, strict=True)]
    stages = [row for name, path in pictures.items() if path for row in _stages(prepare, name, path)]
    return gallery, _summary(batch), [*stages, ["all views, in parallel", "", round(elapsed_ms, 2)]]


def _stages(prepare: MultiViewPreprocessor, name: str, path: str) -> list[list[Any]]:
    view = prepare.recipe.view(name)
    out = np.empty(prepare.shape[1:], np.uint8)
    times = [time.perf_counter()]
    with open(path, "rb") as file:
        data = file.read()
    times.append(time.perf_counter())
    frame = decode_frame(data)
    times.append(time.perf_counter())
    resize_frame(frame, out, method=view.resize, filter=view.filter)
    times.append(time.perf_counter())
    steps = zip(("read", "decode", "resize"), times, times[1:], strict=False)
    return [[name, stage, round((stop - start) * 1e3, 2)] for stage, start, stop in steps]


def _summary(batch: dict[str, Any]) -> dict[str, Any]:
    """Describe a batch in place of its numbers."""
    found: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, dict):
            found[key] = _summary(value)
        elif isinstance(value, np.ndarray) and value.size > 8:
            found[key] = f"{value.dtype}{list(value.shape)}, {value.min():.3g} to {value.max():.3g}"
        else:
            found[key] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


def build_page(prepare: MultiViewPreprocessor) -> Any:
    """Return the Gradio page; MissingExtraError where Gradio is not installed."""
    try:
        import gradio
    except ImportError as error:
        raise MissingExtraError("expected gradio for this page, found none; pip install 'headrace[page]'") from error

    def run(*inputs: Any) -> Shown:
        try:
            return prepare_views(prepare, list(inputs[:-1]), inputs[-1])
        except HeadraceError as error:
            raise gradio.Error(str(error)) from error

    with gradio.Blocks(title="Headrace: views as training saw them") as page:
        with gradio.Row():
            pictures = [gradio.Image(label=name, type="filepath") for name in prepare.views]
        instruction = gradio.Textbox(label="Instruction", value="pick up the cube")
        button = gradio.Button("Prepare", variant="primary")
        gallery = gradio.Gallery(label="Prepared frames", columns=len(prepare.views), format="png")
        with gradio.Row():
            batch = gradio.JSON(label="Batch")
            times = gradio.Dataframe(label="Time", headers=["view", "stage", "ms"])
        button.click(run, [*pictures, instruction], [gallery, batch, times])
    return page


def main() -> int:
    """Serve the page until it is stopped."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("dataset", nargs="?")
    parser.add_argument("--port", type=int, default=7860)
    options = parser.parse_args()
    try:
        make = MultiViewPreprocessor.from_dataset
        prepare = make(options.dataset) if options.dataset else MultiViewPreprocessor(load_recipe("pi0"))
        page = build_page(prepare.warm())
    except HeadraceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    page.launch(server_port=options.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
