"""One episode as a video: its views side by side, state and actions below with a line at the time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from pipeline.preview.dataset_subject import DatasetSubject
from pipeline.preview.material import PreviewOptions, choose_episodes
from pipeline.preview.planner_view import PlannerSamples, draw_picture, has_samples
from pipeline.preview.subject import Picture, Subject
from pipeline.video_file import VideoFile
from schemas.errors import UsageError
from tasks.chart import evenly, padded

MAX_PICTURES = 1800
"""A longer episode is shown every few steps, at its own speed."""
MAX_VIEWS, ROW_VIEWS, VIEW_HEIGHT_PX, LEAST_WIDTH_PX = 6, 3, 256, 640
BLOCK_STEPS = 64
CURVES = 8
"""Features of a signal, and of each of two columns."""
_TITLE_PX, _CURVE_PX = 28, 44
_OPTIONS = {"crf": "23", "g": "60", "preset": "veryfast", "movflags": "+faststart"}
_INK, _FAINT, _LINE, _NOW, _PAPER = (36, 41, 47), (110, 119, 129), (11, 98, 196), (194, 24, 91), (255, 255, 255)
ABOVE = "from above"


def write_film(subject: Subject, output: Path, options: PreviewOptions) -> Mapping[str, object]:
    """Write a video of one episode: the first unless another is asked for.

    Raises
    ------
    UsageError
        The episode has neither a view nor a planner sample, or this build of av has no encoder.
    """
    number = 0 if options.episode is None else choose_episodes(subject.episodes, options)[0]
    film = Film(subject, number)
    with VideoFile(output, film.size_px, film.rate_hz, _OPTIONS) as video:
        for start in range(0, len(film.steps), BLOCK_STEPS):
            for picture in film.pictures(film.steps[start : start + BLOCK_STEPS]):
                video.write(np.asarray(picture)[None])
    return {
        "path": str(output),
        "nbytes": output.stat().st_size,
        "episode": number,
        "pictures": len(film.steps),
        "steps": subject.episodes[number].num_steps,
        "rate_hz": film.rate_hz,
    }


class Film:
    """The pictures of one episode, block by block."""

    def __init__(self, subject: Subject, number: int) -> None:
        self.subject, self.number, self.episode = subject, number, subject.episodes[number]
        stride = -(-self.episode.num_steps // MAX_PICTURES)
        self.steps = np.arange(0, self.episode.num_steps, stride)
        self.rate_hz = max(0.5, (self.episode.rate_hz or 10.0) / stride)
        self._samples = _samples_of(subject)
        views = [view for view in subject.views if view in self.episode.views][:MAX_VIEWS]
        self.views = [*views, ABOVE] if self._samples is not None else views
        if not self.views or not len(self.steps):
            raise UsageError(
                f"expected an episode with frames or planner samples, found none in {self.episode.key}; choose another --episode"
            )
        self._height = VIEW_HEIGHT_PX * (2 if self.views == [ABOVE] else 1)
        self._places, width, self._bottom = self._layout()
        self._panel, self._now = self._curves(width)
        self.size_px = (self._bottom + self._panel.height, width)

    def pictures(self, steps: np.ndarray) -> list[Image.Image]:
        """Return the pictures of some steps."""
        times_s = self.subject.times(self.number, steps)
        frames = [
            self._above(steps) if view == ABOVE else self.subject.frames(self.number, view, steps)
            for view in self.views
        ]
        return [
            self._compose(int(step), float(time_s), [column[k] for column in frames])
            for k, (step, time_s) in enumerate(zip(steps, times_s, strict=True))
        ]

    def _compose(self, step: int, time_s: float, shown: Sequence[Picture]) -> Image.Image:
        picture = Image.new("RGB", (self.size_px[1], self.size_px[0]), _PAPER)
        pen, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
        said = f"   {self.episode.instructions[0]}" if self.episode.instructions else ""
        pen.text((8, _TITLE_PX // 2), f"{time_s:.2f} s, step {step}{said}"[:160], _INK, font, anchor="lm")
        for view, (left, top, width), frame in zip(self.views, self._places, shown, strict=True):
            if isinstance(frame, str):
                pen.text((left + width // 2, top + self._height // 2), frame[:30], _FAINT, font, anchor="mm")
            else:
                scaled = Image.fromarray(frame).resize((width, self._height), Image.Resampling.BILINEAR)
                picture.paste(scaled, (left, top))
            pen.rectangle((left, top, left + round(font.getlength(view)) + 8, top + 18), _PAPER)
            pen.text((left + 4, top + 9), view, _INK, font, anchor="lm")
        picture.paste(self._panel, (0, self._bottom))
        for first, last in self._now:
            x = first + (last - first) * step / max(self.episode.num_steps - 1, 1)
            pen.line([(x, self._bottom), (x, self.size_px[0])], _NOW, 2)
        return picture

    def _layout(self) -> tuple[list[tuple[int, int, int]], int, int]:
        """Return left, top and width of each view, ROW_VIEWS in a row; the whole width; and where the curves begin."""
        places, right = [], LEAST_WIDTH_PX
        left, top = 0, _TITLE_PX
        for k, view in enumerate(self.views):
            if k and k % ROW_VIEWS == 0:
                left, top = 0, top + self._height
            width = self._width(view)
            places.append((left, top, width))
            left += width
            right = max(right, left)
        return places, right, top + self._height

    def _width(self, view: str) -> int:
        """Return the width of a view at the common height, even, by its first frame."""
        if view == ABOVE:
            return self._height
        for step in evenly(self.episode.num_steps, 8):
            (frame,) = self.subject.frames(self.number, view, np.array([step]))
            if not isinstance(frame, str):
                return 2 * max(16, min(512, round(self._height * frame.shape[1] / frame.shape[0] / 2)))
        return self._height

    def _above(self, steps: np.ndarray) -> list[Picture]:
        if self._samples is None:
            return ["no sample"] * len(steps)
        places = steps + self.episode.start
        is_sample = np.isin(places, self._samples.anchors)
        return [
            np.asarray(draw_picture(self._samples.marks(int(place)), title="", side_px=self._height))
            if shown
            else "no sample"
            for place, shown in zip(places, is_sample, strict=True)
        ]

    def _curves(self, width: int) -> tuple[Image.Image, list[tuple[float, float]]]:
        """Draw the curves once, in two columns; return them and where each column's time axis begins and ends."""
        signals = [signal for signal in self.subject.signals if signal.is_main]
        steps = evenly(self.episode.num_steps, 1000)
        rows = self.subject.rows(self.number, [signal.name for signal in signals], steps) if signals else {}
        curves = [
            (signal.whole_name(k), rows[signal.name][:, k])
            for signal in signals
            for k in range(min(len(signal.features), CURVES))
        ][: 2 * CURVES]
        per_column = -(-len(curves) // 2)
        height = _CURVE_PX * per_column
        panel = Image.new("RGB", (width, height + height % 2), _PAPER)
        now = [(column * width / 2 + 96, column * width / 2 + width / 2 - 8) for column in range(2)] if curves else []
        for k, (feature, values) in enumerate(curves):
            (first, last), row = now[k // per_column], k % per_column
            _curve(panel, (first, row * _CURVE_PX, last, (row + 1) * _CURVE_PX), values, feature)
        return panel, now


def _curve(panel: Image.Image, place: tuple[float, float, float, float], values: np.ndarray, feature: str) -> None:
    """Draw one feature into its place, its name and range to the left."""
    first, top, last, bottom = place
    pen, font = ImageDraw.Draw(panel), ImageFont.load_default(11)
    finite = values[np.isfinite(values)]
    low, high = padded(float(finite.min()), float(finite.max()), 0.1) if len(finite) else (-1.0, 1.0)
    pen.text((first - 90, top + 14), feature if len(feature) < 16 else f"…{feature[-14:]}", _INK, font, anchor="lm")
    said = f"{finite.min():.4g} to {finite.max():.4g}" if len(finite) else "no number"
    pen.text((first - 90, top + 30), said[:20], _FAINT, font, anchor="lm")
    pen.rectangle((first, top + 3, last, bottom - 3), outline=(220, 225, 230))
    x = first + (last - first) * np.linspace(0, 1, len(values))
    y = bottom - 4 - (bottom - top - 8) * (values - low) / (high - low)
    known = np.isfinite(y)
    if known.sum() > 1:
        pen.line(list(zip(x[known].tolist(), y[known].tolist(), strict=True)), _LINE, 1)


def _samples_of(subject: Subject) -> PlannerSamples | None:
    if isinstance(subject, DatasetSubject) and has_samples(subject.info):
        return PlannerSamples(subject.path, subject.info)
    return None
