"""Contact sheets, and planner samples from above, as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from pipeline.preview.dataset_subject import DatasetSubject
from pipeline.preview.material import Material, PreviewOptions
from pipeline.preview.planner_view import PlannerSamples, counted, draw_picture, has_samples, picture_sheet
from pipeline.preview.subject import Subject
from pipeline.sheet import contact_sheet
from schemas.errors import UsageError

MAX_EPISODES = 4
"""Contact sheets below one another, unless one episode is asked for."""


def write_picture(subject: Subject, output: Path, options: PreviewOptions) -> Mapping[str, object]:
    """Write contact sheets of some episodes, and planner samples where there are any.

    Raises
    ------
    UsageError
        There is neither a view nor a planner sample.
    """
    pictures = [*_sheets(subject, options), *_samples(subject, options)]
    if not pictures:
        raise UsageError(
            f"expected views or planner samples in {subject.path}, found none; write an .html page instead"
        )
    picture = _stack(pictures)
    picture.save(output)
    return {
        "path": str(output),
        "nbytes": output.stat().st_size,
        "width_px": picture.width,
        "height_px": picture.height,
    }


def _sheets(subject: Subject, options: PreviewOptions) -> list[Image.Image]:
    material = Material(subject, options)
    if not material.views:
        return []
    pictures = []
    for number in material.sheet_episodes[:MAX_EPISODES]:
        episode, sheet = material.episode(number), material.sheets[number]
        said = f": {episode.instructions[0][:80]}" if episode.instructions else ""
        tiles = {
            view: [None if isinstance(picture, str) else picture for picture in shown]
            for view, shown in sheet.pictures.items()
        }
        columns = [f"{time_s:.2f} s" for time_s in sheet.times_s]
        title = f"episode {number} of {len(subject.episodes)}, {episode.key}{said}"
        pictures.append(contact_sheet(tiles, columns=columns, title=title, tile_width_px=200))
    return pictures


def _samples(subject: Subject, options: PreviewOptions) -> list[Image.Image]:
    if not isinstance(subject, DatasetSubject) or not has_samples(subject.info):
        return []
    samples = PlannerSamples(subject.path, subject.info)
    pictures = []
    for step in samples.chosen(options.samples).tolist():
        marks = samples.marks(step)
        pictures.append(draw_picture(marks, title=f"step {step}: {counted(marks).split(';')[0]}"))
    return [picture_sheet(pictures)] if pictures else []


def _stack(pictures: Sequence[Image.Image]) -> Image.Image:
    whole = Image.new(
        "RGB", (max(picture.width for picture in pictures), sum(picture.height for picture in pictures)), "white"
    )
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    return whole
