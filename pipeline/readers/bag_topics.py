"""What the topics of a bag become: pictures are views, numbers are signals, texts are instructions, and the rest is said."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.readers.bag_index import Bag, Messages, Stream, messages
from pipeline.readers.metadata import as_text
from pipeline.readers.ros_images import COMPRESSED, IMAGE, describe_image
from pipeline.readers.ros_messages import Value, joined_names
from schemas.errors import Reason, SourceError
from schemas.source import EpisodeRef, Fault, SignalInfo, ViewInfo

INSTRUCTION = SignalInfo(name="instruction_index", shape=(), dtype="int64")
STRING, JOINTS = "std_msgs/String", "sensor_msgs/JointState"
MAX_ROW_SIZE = 2**16
MAX_TEXTS = 4096
"""Messages of instructions that are read; different ones among them are kept."""
_ACTION = re.compile(r"(^|[/_])(actions?|commands?|cmd|target|leader)([/_]|$)")
_TEXT = re.compile(r"instruction|task|prompt|language")


class RowError(SourceError):
    """A message that lacks a value of a signal, or has another number of them."""


@dataclass(slots=True)
class Topics:
    """What the topics of one episode are."""

    key: str
    views: list[ViewInfo] = field(default_factory=list)
    signals: list[SignalInfo] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    """Topics that became something."""
    instructions: list[str] = field(default_factory=list)
    instruction_topics: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fault(
        self, reason: Reason, message: str, *, stream: str = "", path: str = "", is_warning: bool = False
    ) -> None:
        """Keep a fault of this episode."""
        found = Fault(reason=reason, message=message, episode=self.key, stream=stream, path=path, is_warning=is_warning)
        self.faults.append(found)


def topic_of(name: str) -> str:
    """Return the topic of a view or signal: what stands before the first dot, which no topic's name has.

    >>> topic_of("/joint_states.position")
    '/joint_states'
    """
    return name.partition(".")[0]


def describe_topics(bag: Bag, key: str, joints: Sequence[str], instruction: str) -> Topics:
    """Look at the first message of every topic."""
    topics = Topics(key)
    left: dict[str, str] = {}
    with messages(bag) as read:
        for topic, stream in bag.streams.items():
            if not len(stream):
                continue
            if stream.problem or "." in topic:
                reason = stream.problem or f"expected a topic without dots in its name, found {topic!r}; rename it"
                topics.fault(
                    Reason.UNSUPPORTED,
                    f"{reason} ({len(stream)} messages of {stream.type})",
                    stream=topic,
                    is_warning=True,
                )
                continue
            try:
                why = _add(topics, read, stream, joints, instruction)
            except SourceError as error:
                path = read.path(stream, 0)
                topics.fault(error.reason, error.message, stream=topic, path=path)
                continue
            if why:
                left[topic] = f"{topic} ({stream.type}, {why})"
            else:
                topics.served.append(topic)
    if left:
        topics.notes.append(f"topics that are neither pictures nor numbers were left alone: {', '.join(left.values())}")
    return topics


def _add(topics: Topics, read: Messages, stream: Stream, joints: Sequence[str], instruction: str) -> str:
    """Take a topic for what it is; return why it is nothing, where it is."""
    if stream.type == STRING:
        if stream.topic == instruction or (not instruction and _TEXT.search(stream.topic.lower())):
            topics.instruction_topics.append(stream.topic)
            for text in _texts(read, stream):
                if text and text not in topics.instructions:
                    topics.instructions.append(text)
            return ""
        return "a text that is no instruction"
    values = read.values(stream, 0)
    if stream.type in (IMAGE, COMPRESSED):
        topics.views.append(describe_image(stream.topic, stream.type, values))
        return ""
    found = list(_signals(stream, values, joints))
    topics.signals += found
    return "" if found else "no numbers of fixed shape"


def _texts(read: Messages, stream: Stream) -> Iterator[str]:
    for number in range(min(len(stream), MAX_TEXTS)):
        try:
            yield as_text(read.values(stream, number).get("data", ""))
        except SourceError:
            continue  # refused by none: the others are the episode's instructions


def _signals(stream: Stream, values: Mapping[str, Value], joints: Sequence[str]) -> Iterator[SignalInfo]:
    """Yield the signals that a message gives, with the names of their elements."""
    vectors = dict(joined_names(stream.fields))
    recorded = values.get("name", ()) if stream.type == JOINTS else ()
    for path, value in values.items():
        if not isinstance(value, np.ndarray) or value.ndim > 1 or not 0 < value.size <= MAX_ROW_SIZE:
            continue
        name = f"{stream.topic}.{path}" if path else stream.topic
        info = SignalInfo(name=name, shape=value.shape, dtype=value.dtype.name, names=vectors.get(path, ()))
        if isinstance(recorded, tuple) and recorded and len(recorded) == value.size:
            chosen = tuple(joints) or tuple(map(as_text, recorded))
            missing = [joint for joint in chosen if joint not in recorded]
            if missing:
                raise SourceError(
                    f"expected the joints {missing}, found {list(recorded)}; correct joints", Reason.BAD_METADATA
                )
            info = replace(info, names=chosen, shape=(len(chosen),))
        yield info


def row_of(signal: SignalInfo, values: Mapping[str, Value]) -> np.ndarray:
    """Return a signal's row of a message: joints by their names, in whatever order the message has them; else in order.

    RowError where it has others, or more or fewer.
    """
    found = values.get(signal.name.partition(".")[2])
    if not isinstance(found, np.ndarray):
        raise RowError("expected numbers in the message, found none; record it again", Reason.WRONG_SHAPE)
    names = values.get("name")
    if isinstance(names, tuple) and signal.names and len(names) == len(found) and names != signal.names:
        places = {name: place for place, name in enumerate(names)}
        if len(places) < len(names) or any(name not in places for name in signal.names):
            raise RowError(
                f"expected the joints {list(signal.names)}, found {list(names)}; choose some with joints",
                Reason.WRONG_SHAPE,
            )
        found = found[[places[name] for name in signal.names]]
    if found.shape != signal.shape:
        raise RowError(
            f"expected {list(signal.shape)} numbers in the message, found {list(found.shape)}; check the recording",
            Reason.WRONG_SHAPE,
        )
    return found


def default_state(episodes: Sequence[EpisodeRef]) -> tuple[str, ...]:
    """Return what makes ``state``: positions of joints, else what a topic called state or observation has, else poses; never of actions."""
    signals = [signal for signal in _offered(episodes) if not _ACTION.search(topic_of(signal.name).lower())]
    joints = tuple(signal.name for signal in signals if _is_joints(signal))
    return joints or _first(
        signals, r".*(state|observation).*\.data", r".*\.(position|orientation)|.*\.transform\.(translation|rotation)"
    )


def default_actions(episodes: Sequence[EpisodeRef]) -> tuple[str, ...]:
    """Return what makes ``actions``: numbers on topics called action, command, cmd, target or leader."""
    signals = [signal for signal in _offered(episodes) if _ACTION.search(topic_of(signal.name).lower())]
    found = tuple(signal.name for signal in signals if _is_joints(signal) or signal.name.endswith(".data"))
    return found or _first(signals, r".*\.(linear|angular)", r".*\.(position|orientation)")


def _is_joints(signal: SignalInfo) -> bool:
    return signal.name.partition(".")[2] == "position" and signal.names != ("x", "y", "z")


def _first(signals: Sequence[SignalInfo], *patterns: str) -> tuple[str, ...]:
    """Return the names that fit the first pattern that any fits."""
    for pattern in patterns:
        found = tuple(signal.name for signal in signals if re.fullmatch(pattern, signal.name))
        if found:
            return found
    return ()


def _offered(episodes: Sequence[EpisodeRef]) -> list[SignalInfo]:
    """Return the signals that any episode has: one without is refused by name."""
    return list({signal.name: signal for ref in episodes for signal in ref.signals}.values())
