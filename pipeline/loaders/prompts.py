"""Which instruction a sample is given."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32, Int64

from pipeline.loaders.reader import DatasetReader
from schemas.errors import DatasetError


@dataclass(frozen=True, slots=True)
class Prompts:
    """The instruction of every step: its task's, or one of several by a seed."""

    task_index: Int32[np.ndarray, " step"]
    """-1 where a step has no task."""
    tasks: list[str]
    """By task; the last one serves steps without a task."""
    choices: dict[int, list[str]] = field(default_factory=dict)
    """``episode -> instructions`` of those that may be told in several ways."""
    episode_ends: Int64[np.ndarray, " episode"] = field(default_factory=lambda: np.zeros(0, np.int64))
    seed: int = 0

    @classmethod
    def read(cls, reader: DatasetReader, default: str, seed: int | None = None) -> "Prompts":
        """Read the tasks of a dataset; with a seed also the other instructions of each episode.

        An episode whose steps have different tasks keeps them: its instructions are what to do next, and not other
        words for the same.
        """
        if "task_index" not in reader.info.arrays:
            return cls(np.full(reader.num_steps, -1, np.int32), [default])
        index = reader.rows("task_index")
        table = reader.table("tasks")
        known = dict(zip(table["task_index"].to_pylist(), table["task"].to_pylist(), strict=True))
        tasks = [known.get(task) or default for task in range(max(known, default=-1) + 1)]
        if index.size and not (index.min() >= -1 and index.max() < len(tasks)):
            raise DatasetError(
                f"expected a task_index in [-1, {len(tasks)}), found {index.min()} to {index.max()}; run `headrace verify`"
            )
        if seed is None:
            return cls(index, [*tasks, default])
        ends = reader.rows("episode_ends")
        return cls(index, [*tasks, default], _choices(reader, index, ends), ends, seed)

    def of(self, steps: Int64[np.ndarray, " batch"]) -> list[str]:
        """Return the instruction of each step, the same whenever and wherever it is asked for."""
        prompts = [self.tasks[task] for task in self.task_index[steps].tolist()]
        if self.choices:
            episodes = np.searchsorted(self.episode_ends, steps, side="right").tolist()
            numbers = _hash(steps, self.seed).tolist()
            for row, (episode, number) in enumerate(zip(episodes, numbers, strict=True)):
                if episode in self.choices:
                    prompts[row] = self.choices[episode][number % len(self.choices[episode])]
        return prompts


def _choices(reader: DatasetReader, task_index: np.ndarray, ends: np.ndarray) -> dict[int, list[str]]:
    choices, start = {}, 0
    instructions = reader.table("episodes", ["instructions"])["instructions"].to_pylist()
    for episode, (stop, texts) in enumerate(zip(ends.tolist(), instructions, strict=True)):
        told = [text for text in texts or () if text]
        if len(told) > 1 and np.all(task_index[start:stop] == task_index[start]):
            choices[episode] = told
        start = stop
    return choices


def _hash(steps: np.ndarray, seed: int) -> np.ndarray:
    """Return splitmix64 of the steps (Steele, Lea and Flood, 2014), as numbers of 63 bits."""
    mixed = steps.astype(np.uint64) + np.array([seed & (2**64 - 1)], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    hashed: np.ndarray = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)
    return hashed
