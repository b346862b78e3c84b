"""``headrace preview``: look at recordings or a dataset; what is written is told by the name of the output.

People trust data they have looked at: flipped axes, swapped channels, black frames and wrong rates are visible in one picture.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from schemas.errors import UsageError


def write_preview(
    path: Path, output: Path, *, format: str = "", reader: Mapping[str, str] | None = None, **options: Any
) -> Mapping[str, object]:
    """Write a preview of raw recordings or of a dataset; an output of that name is replaced by a whole one, or stays.

    Parameters
    ----------
    path
        A folder of recordings, or a dataset.
    output
        ``.html`` for a page, ``.png`` for a picture, ``.mp4`` for a video of one episode, ``.rrd`` for Rerun.
    format, reader
        Of raw recordings, as for :func:`pipeline.readers.open_source`.
    options
        Fields of :class:`pipeline.preview.material.PreviewOptions`.

    Raises
    ------
    UsageError
        Another ending of ``output``, a folder of its name, or an episode that is not there.
    SourceError, DatasetError
        There is nothing to be read, or what is read is damaged.
    """
    from pipeline.preview.material import PreviewOptions, open_subject

    write = _writer(output)
    if output.resolve().is_relative_to(path.resolve()):
        raise UsageError(
            f"expected an output outside of {path}, found {output}; nothing is written into what is looked at"
        )
    chosen = PreviewOptions(**options)
    subject = open_subject(path, format, reader)
    unfinished = output.with_name(f".{output.stem}.{os.getpid()}{output.suffix}")
    try:
        said = write(subject, unfinished, chosen)
        os.replace(unfinished, output)
    finally:
        unfinished.unlink(missing_ok=True)
    return {**said, "path": str(output)}


def _writer(output: Path) -> Callable[..., Mapping[str, object]]:
    from pipeline.preview.film import write_film
    from pipeline.preview.page import write_page
    from pipeline.preview.rerun_file import write_recording
    from pipeline.preview.stills import write_picture

    writers = {".html": write_page, ".png": write_picture, ".mp4": write_film, ".rrd": write_recording}
    if output.suffix.lower() not in writers:
        raise UsageError(f"expected an output that ends in {', '.join(writers)}, found {output.name!r}; rename it")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"expected a folder for {output.name!r}, found none at {output.parent}; make it first")
    if output.is_dir():
        raise UsageError(f"expected a file at {output}, found a folder; choose another name")
    return writers[output.suffix.lower()]
