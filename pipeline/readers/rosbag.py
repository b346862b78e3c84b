"""ROS 1 bags, ROS 2 bags (SQLite and MCAP) and single MCAP files: one recording an episode, a topic a view or some signals.

Topics come at rates of their own. The messages of one of them are the episode's steps; each other topic is read at the message nearest to a
step's time, or, where the output grid is another one, aligned to that by its own messages (:meth:`RosbagReader.on_own_clock`).
``docs/formats.md`` says what is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from pipeline.readers.bag_folders import Recording, find_recordings
from pipeline.readers.bag_index import Bag, Messages, Stream, Times, messages, open_bag, stream_times
from pipeline.readers.bag_topics import (
    INSTRUCTION,
    RowError,
    Topics,
    default_actions,
    default_state,
    describe_topics,
    row_of,
    topic_of,
)
from pipeline.readers.folders import SNIFF_FOLDERS, source_root
from pipeline.readers.hdf5_episodes import TIME
from pipeline.readers.records import fault_at, join_faults
from pipeline.readers.ros_images import COMPRESSED, compressed_image, image
from pipeline.readers.ros_messages import HEAD_NBYTES, Value, has_stamp, read_stamp_ns
from schemas.errors import Reason, SourceError, UsageError
from schemas.source import EpisodeRef, Fault, Frame, SignalBlock, SourceIndex, declare_all_views

CLOCKS = ("header", "log")
MAX_STAMP_OFF_S = 60.0
"""Distance of a stamp from the time of recording beyond which they are no two readings of one clock."""


@dataclass(frozen=True, slots=True)
class RosbagReader:
    """Bags at or below ``root``."""

    name: ClassVar[str] = "rosbag"

    root: Path
    clock: str = ""
    """Topic whose messages are the steps; empty takes the view with most messages, else the signal with most."""
    time: str = "header"
    """``header``: a message's stamp, where it has one that was set, else when it was recorded; ``log``: when it was recorded."""
    joints: tuple[str, ...] = ()
    """Joints of JointState messages, in order; empty takes those of a topic's first message."""
    instruction: str = ""
    """Topic of texts that are instructions; empty takes those with instruction, task, prompt or language in their name."""

    def __post_init__(self) -> None:
        if self.time not in CLOCKS:
            raise UsageError(f"expected a time of {', '.join(CLOCKS)}, found {self.time!r}; correct it")

    @classmethod
    def sniff(cls, root: Path) -> str:
        """Return an empty string if a bag lies at or below ``root``, else what is missing."""
        found = (found for found in islice(find_recordings(root), SNIFF_FOLDERS) if isinstance(found, Recording))
        return "" if next(found, None) else "no .bag, .mcap or .db3 file"

    def index(self) -> SourceIndex:
        """List the recordings by the indexes of their chunks, and one message of each topic."""
        root = source_root(self.root)
        episodes: list[EpisodeRef] = []
        faults: list[Fault] = []
        notes: dict[str, None] = {}
        for found in find_recordings(root):
            if isinstance(found, Fault):
                faults.append(found)
                continue
            try:
                episodes.append(self._describe(root, found, faults, notes))
            except SourceError as error:
                path = str(error.where.get("file", found.paths[0]))
                faults.append(Fault(reason=error.reason, message=error.message, episode=found.key, path=path))
                continue
        episodes = list(declare_all_views(episodes))
        return SourceIndex(
            format=self.name,
            name=root.name,
            episodes=tuple(episodes),
            faults=tuple(faults),
            state=default_state(episodes),
            actions=default_actions(episodes),
            notes=tuple(notes),
        )

    def _describe(self, root: Path, found: Recording, faults: list[Fault], notes: dict[str, None]) -> EpisodeRef:
        bag = open_bag(root, found.paths)
        topics = describe_topics(bag, found.key, self.joints, self.instruction)
        for problem in bag.problems:
            path = str(problem.where.get("file", found.paths[0]))
            topics.fault(problem.reason, problem.message, path=path, is_warning=True)
        count = sum(len(stream) for stream in bag.streams.values())
        if found.num_messages > count:
            message = f"expected {found.num_messages} messages as the metadata says, found {count}; the rest is missing"
            topics.fault(Reason.COUNT_MISMATCH, message, path=found.metadata, is_warning=True)
        faults += topics.faults
        clock = self._clock(bag, topics)
        stream = bag.streams[clock]
        times = stream_times(bag, clock, "log")
        self._note_stamps(bag, clock, topics)
        notes.update(dict.fromkeys(topics.notes))
        return EpisodeRef(
            key=found.key,
            num_steps=len(stream),
            rate_hz=measured_rate_hz(times.ns),
            views=tuple(topics.views),
            signals=(*topics.signals, TIME, *([INSTRUCTION] if len(topics.instructions) > 1 else [])),
            instructions=tuple(topics.instructions),
            details={
                "paths": list(found.paths),
                "metadata": found.metadata,
                "clock": clock,
                "origin": clock,
                "instruction_topics": topics.instruction_topics,
                "messages": {topic: len(bag.streams[topic]) for topic in topics.served},
            },
        )

    def _note_stamps(self, bag: Bag, clock: str, topics: Topics) -> None:
        """Note stamps that were set by another clock than the recorder's."""
        stream = bag.streams[clock]
        if self.time == "log" or not has_stamp(stream.fields):
            return
        with messages(bag) as read:
            stamp_ns = read_stamp_ns(read.data(stream, 0, HEAD_NBYTES), is_ros1=stream.is_ros1)
        off_s = abs(stamp_ns - int(stream.log_ns[0])) / 1e9
        if stamp_ns and off_s > MAX_STAMP_OFF_S:
            topics.notes.append(
                f"stamps on {clock} lie {off_s:.0f} s from when they were recorded; if those of other topics do not, say time=log"
            )

    def _clock(self, bag: Bag, topics: Topics) -> str:
        """Return the topic whose messages are the steps; SourceError where there is none."""
        if self.clock:
            if self.clock not in bag.streams:
                known = ", ".join(bag.streams) or "none"
                raise SourceError(
                    f"expected messages on the clock {self.clock!r}, found the topics {known}; name another"
                )
            return self.clock
        views = [view.name for view in topics.views]
        offered = views or list(dict.fromkeys(topic_of(signal.name) for signal in topics.signals))
        if not offered:
            others = "; ".join(topics.notes + [fault.message for fault in topics.faults]) or "no messages"
            message = f"expected a topic of pictures or numbers, found none: {others[:400]}; leave the file out"
            nothing = Reason.UNSUPPORTED if bag.streams else Reason.EMPTY_EPISODE
            raise SourceError(message, next((fault.reason for fault in topics.faults), nothing))
        return max(offered, key=lambda topic: len(bag.streams[topic]))

    def on_own_clock(self, ref: EpisodeRef, name: str) -> EpisodeRef:
        """Return the episode as the messages of one view's or signal's topic step through it; seconds count from the same start.

        Of messages of one time the first counts.
        """
        topic = topic_of(name)
        if name in (TIME.name, INSTRUCTION.name) or topic == ref.details["clock"]:
            return ref
        times = self._times(ref, topic).distinct
        details = {**ref.details, "clock": topic}
        return replace(ref, num_steps=len(times.ns), details=details)

    def _bag(self, ref: EpisodeRef) -> Bag:
        return open_bag(self.root, ref.details["paths"])

    def _times(self, ref: EpisodeRef, topic: str) -> Times:
        bag = self._bag(ref)
        if topic not in bag.streams:
            raise SourceError(f"expected messages on {topic!r} as indexed, found none; run again", Reason.MISSING_FILE)
        return stream_times(bag, topic, self.time)

    def _steps_ns(self, ref: EpisodeRef, steps: np.ndarray) -> np.ndarray:
        """Return the times of steps."""
        times = self._times(ref, ref.details["clock"])
        ns = times.ns if ref.details["clock"] == ref.details["origin"] else times.distinct.ns
        if len(steps) and int(steps.max()) >= len(ns):
            raise SourceError(
                f"expected {ref.num_steps} messages as indexed, found {len(ns)}; run again", Reason.COUNT_MISMATCH
            )
        return ns[steps]

    def _numbers(self, ref: EpisodeRef, topic: str, steps: np.ndarray) -> np.ndarray:
        """Return the message of a topic that serves each step: its own, or the one nearest in time, the earlier of two."""
        times = self._times(ref, topic)
        if topic == ref.details["clock"]:
            return (times if topic == ref.details["origin"] else times.distinct).numbers[steps]
        ns = self._steps_ns(ref, steps)
        after = np.searchsorted(times.ns, ns)
        upper, lower = np.minimum(after, len(times.ns) - 1), np.maximum(after - 1, 0)
        return times.numbers[np.where(times.ns[upper] - ns < ns - times.ns[lower], upper, lower)]

    def read_signals(self, ref: EpisodeRef, names: Sequence[str], steps: np.ndarray) -> SignalBlock:
        """Return rows of ``names`` at ``steps``, each message read once; one that lacks a value is NaN and a fault."""
        steps = np.asarray(steps, np.int64)
        wanted = [ref.signal(name) for name in dict.fromkeys(names) if name not in (TIME.name, INSTRUCTION.name)]
        values: dict[str, np.ndarray] = {
            signal.name: np.full((len(steps), *signal.shape), np.nan if signal.dtype[0] == "f" else 0, signal.dtype)
            for signal in wanted
        }
        faults: list[Fault] = []
        try:
            ns = self._steps_ns(ref, steps)
            origin_ns = int(self._times(ref, ref.details["origin"]).ns[0])
            if INSTRUCTION.name in names:
                values[INSTRUCTION.name] = self._instruction_index(ref, ns)
            with messages(self._bag(ref)) as read:
                for topic in dict.fromkeys(topic_of(signal.name) for signal in wanted):
                    own = [signal for signal in wanted if topic_of(signal.name) == topic]
                    faults += self._fill(read, ref, own, (steps, self._numbers(ref, topic, steps)), values)
        except SourceError as error:
            return _unread(ref, error, values, steps)
        return SignalBlock(values={**values, TIME.name: (ns - origin_ns) / 1e9}, faults=tuple(join_faults(faults)))

    def _fill(
        self,
        read: Messages,
        ref: EpisodeRef,
        signals: Sequence[Any],
        places: tuple[np.ndarray, np.ndarray],
        out: dict[str, np.ndarray],
    ) -> Iterator[Fault]:
        """Read the messages of one topic at (steps, messages), and fill the rows of its signals."""
        stream = read.bag.streams[topic_of(signals[0].name)]
        held: tuple[int, dict[str, Value] | SourceError] = (-1, {})
        for row, (step, number) in enumerate(zip(places[0].tolist(), places[1].tolist())):
            if held[0] != number:
                held = (number, _values(read, stream, number))
            if isinstance(held[1], SourceError):
                for signal in signals:
                    yield replace(fault_at(held[1], ref, step, signal.name), path=read.path(stream, number))
                continue
            for signal in signals:
                try:
                    out[signal.name][row] = row_of(signal, held[1])
                except RowError as error:
                    fault = fault_at(SourceError(error.message, error.reason), ref, step, signal.name)
                    yield replace(fault, path=read.path(stream, number))

    def _instruction_index(self, ref: EpisodeRef, ns: np.ndarray) -> np.ndarray:
        """Return the instruction that was the last one said at each time; before the first one, that."""
        bag = self._bag(ref)
        said: list[tuple[int, int]] = []
        with messages(bag) as read:
            for topic in ref.details["instruction_topics"]:
                times = self._times(ref, topic)
                for at_ns, number in zip(times.ns.tolist(), times.numbers.tolist()):
                    found = _values(read, bag.streams[topic], number)
                    text = "" if isinstance(found, SourceError) else str(found.get("data", ""))
                    if text in ref.instructions:
                        said.append((at_ns, ref.instructions.index(text)))
        said.sort()
        at = np.searchsorted([at_ns for at_ns, _ in said], ns, side="right") - 1
        return np.array([index for _, index in said] or [0], np.int64)[np.maximum(at, 0)]

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        """Yield the picture of each step: encoded as it was recorded, or its pixels in RGB."""
        steps, done = np.asarray(steps, np.int64), 0
        try:
            if not ref.view(view).present:
                raise SourceError(
                    "expected messages of this view, found none; choose another view", Reason.MISSING_FILE
                )
            bag, numbers = self._bag(ref), self._numbers(ref, view, steps)
            with messages(bag) as read:
                held: tuple[int, Frame] = (-1, b"")
                for step, number in zip(steps.tolist(), numbers.tolist()):
                    if held[0] != number or isinstance(held[1], Fault):
                        held = (number, self._frame(read, ref, view, (step, number)))
                    yield held[1]
                    done += 1
        except SourceError as error:
            yield from (fault_at(error, ref, step, view) for step in steps[done:].tolist())

    def _frame(self, read: Messages, ref: EpisodeRef, view: str, place: tuple[int, int]) -> Frame:
        stream = read.bag.streams[view]
        try:
            values = read.values(stream, place[1])
            return compressed_image(values) if stream.type == COMPRESSED else image(values)
        except SourceError as error:
            return replace(fault_at(error, ref, place[0], view), path=read.path(stream, place[1]))

    def frame_path(self, ref: EpisodeRef, view: str, step: int) -> str:
        """Name the bag's file, the first of several."""
        return str(ref.details["paths"][0])

    def files(self, ref: EpisodeRef) -> Iterator[Path]:
        """Name the bag's files, and the one that describes them."""
        yield from map(Path, ref.details["paths"])
        if ref.details["metadata"]:
            yield Path(ref.details["metadata"])


def _values(read: Messages, stream: Stream, number: int) -> dict[str, Value] | SourceError:
    try:
        return read.values(stream, number)
    except SourceError as error:
        return error


def _unread(ref: EpisodeRef, error: SourceError, values: dict[str, np.ndarray], steps: np.ndarray) -> SignalBlock:
    times = {TIME.name: np.full(len(steps), np.nan)}
    values = {**values, **({INSTRUCTION.name: np.zeros(len(steps), np.int64)} if INSTRUCTION in ref.signals else {})}
    whole = replace(fault_at(error, ref, 0), stop=ref.num_steps)
    return SignalBlock(values={**values, **times}, faults=(whole,))


def measured_rate_hz(ns: np.ndarray) -> float:
    """Return the usual rate of messages, to a thousandth of a Hz; 0 where there are not two."""
    period_ns = float(np.median(np.diff(ns))) if len(ns) > 1 else 0.0
    return round(1e9 / period_ns, 3) if period_ns > 0 else 0.0
