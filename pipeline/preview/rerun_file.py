"""Episodes as a Rerun recording (``.rrd``): frames, signals and instructions on the episode's own time; needs the extra ``rerun``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.preview.dataset_subject import DatasetSubject
from pipeline.preview.material import PreviewOptions, choose_episodes
from pipeline.preview.planner_view import PlannerSamples, colour_of, has_samples
from pipeline.preview.subject import Subject
from schemas.errors import MissingExtraError
from tasks.decode import encode_jpeg

MAX_EPISODES = 4
BLOCK_STEPS = 64
JPEG_QUALITY = 90


def write_recording(subject: Subject, output: Path, options: PreviewOptions) -> Mapping[str, object]:
    """Write a few episodes, every step of them, or the one that is asked for.

    Raises
    ------
    MissingExtraError
        ``rerun-sdk`` is not installed.
    """
    try:
        import rerun
    except ImportError as error:
        raise MissingExtraError(
            "expected rerun-sdk for an .rrd file, found it not installed; pip install headrace[rerun]"
        ) from error
    numbers = choose_episodes(subject.episodes, options)[:MAX_EPISODES]
    recording = rerun.RecordingStream("headrace", recording_id=subject.path.resolve().name)
    recording.save(str(output))
    for number in numbers:
        _Episode(rerun, recording, subject, number).write()
    recording.flush()
    recording.disconnect()
    return {"path": str(output), "nbytes": output.stat().st_size, "episodes": numbers}


class _Episode:
    """One episode on its way into the recording, below ``episode_<number>/``."""

    def __init__(self, rerun: Any, recording: Any, subject: Subject, number: int) -> None:
        self.rerun, self.recording, self.subject, self.number = rerun, recording, subject, number
        self.episode, self.root = subject.episodes[number], f"episode_{number}"
        self._samples = None
        if isinstance(subject, DatasetSubject) and has_samples(subject.info):
            self._samples = PlannerSamples(subject.path, subject.info)

    def write(self) -> None:
        """Log what is known once, then the steps block by block."""
        said = "\n".join([self.episode.key, *self.episode.instructions[:20]])
        self.recording.log(f"{self.root}/instruction", self.rerun.TextDocument(said), static=True)
        for signal in self.subject.signals:
            if signal.is_main:
                names = self.rerun.SeriesLines(names=list(signal.features))
                self.recording.log(f"{self.root}/{signal.name}", names, static=True)
        for start in range(0, self.episode.num_steps, BLOCK_STEPS):
            self._block(np.arange(start, min(start + BLOCK_STEPS, self.episode.num_steps)))

    def _block(self, steps: np.ndarray) -> None:
        views = [view for view in self.subject.views if view in self.episode.views]
        frames = {view: self.subject.frames(self.number, view, steps) for view in views}
        names = [signal.name for signal in self.subject.signals if signal.is_main]
        rows = self.subject.rows(self.number, names, steps) if names else {}
        times_s = self.subject.times(self.number, steps)
        for k, step in enumerate(steps.tolist()):
            self.recording.set_time("step", sequence=step)
            if np.isfinite(times_s[k]):
                self.recording.set_time("time", duration=float(times_s[k]))
            for view, pictures in frames.items():
                picture = pictures[k]
                if not isinstance(picture, str):
                    image = self.rerun.EncodedImage(
                        contents=encode_jpeg(np.ascontiguousarray(picture), JPEG_QUALITY), media_type="image/jpeg"
                    )
                    self.recording.log(f"{self.root}/{view}", image)
            for name, values in rows.items():
                self.recording.log(f"{self.root}/{name}", self.rerun.Scalars(values[k]))
            self._planner(step + self.episode.start)

    def _planner(self, step: int) -> None:
        if self._samples is None or step not in self._samples.anchors:
            return
        strips: dict[str, list[np.ndarray]] = {}
        for mark in self._samples.marks(step):
            closed = np.vstack([mark.points, mark.points[:1]]) if mark.is_closed else mark.points
            strips.setdefault(mark.kind, []).append(
                closed * (1, -1)
            )  # Rerun's 2D view has y downwards: x forward, left is up
        for kind, lines in strips.items():
            shape = self.rerun.LineStrips2D(lines, colors=[colour_of(kind)] * len(lines))
            self.recording.log(f"{self.root}/from_above/{kind}", shape)
