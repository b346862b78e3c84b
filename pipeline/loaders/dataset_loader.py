"""From the path of a dataset to a loader of its samples: what all loaders share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Int64

from pipeline.loaders.delivery import BatchLoader, Samples
from pipeline.loaders.mixed import MixedSamples
from pipeline.loaders.orders import Group, Order, Shuffle, WeightedOrder, order_maker
from pipeline.loaders.reader import DatasetReader
from pipeline.loaders.sampler import EpochSampler, rank_and_world_size
from schemas.errors import UsageError
from tasks.order import Partition

DatasetPath = str | Path
Weighted = Sequence[tuple[DatasetPath, float]]
"""Datasets with the share of samples that each shall have."""


class DatasetSamples(Samples, Protocol):
    """Samples of one dataset."""

    @property
    def reader(self) -> DatasetReader:
        """Whose samples they are."""

    @property
    def steps(self) -> Int64[np.ndarray, " sample"]:
        """Where each sample lies in its dataset: a step, ascending."""


class DatasetLoader(BatchLoader):
    """Batches of a dataset, in an order that survives restarts.

    Every ``(seed, epoch)`` has one order, the same for any number of threads and ranks. A global batch is the next
    ``batch_size * world_size`` samples of it, and each rank takes ``batch_size`` in a row of those. Batches may be kept:
    their memory is reused only once nothing refers to it.

    Parameters
    ----------
    path
        Folder of a finished dataset; or several with weights, ``[("a.zarr", 0.7), ("b.zarr", 0.3)]``, whose batches then say of
        which a sample is (``dataset``: int64[b]). Of any piece of the sequence each has its share, rounded. A dataset that is served
        whole before the epoch ends begins again in another order; one that is not goes on in the next epoch.
    batch_size
        Samples of a batch on this rank.
    seed, shuffle
        The order of each epoch: by the seed, over all samples (True) or in blocks (``"block"``, or
        :class:`~pipeline.loaders.orders.Blocks` of other sizes), or as recorded (False).
    balance
        ``task`` serves every task (of each dataset) as often as any other, however many steps it has.
    epoch_samples
        Samples of an epoch where datasets or tasks are weighted; as many as there are, by default.
    rank, world_size
        Which share is this process's; by default from the environment (``RANK``, ``WORLD_SIZE``), else all.
    tail
        What becomes of the last global batch where it is short: ``drop`` it; ``keep`` it as it is, so that ranks may
        differ by one sample (and the last batch of a rank may be missing); ``pad`` it from the beginning of the order,
        with ``is_repeat`` (bool[b]) in each batch.
    threads, prefetch, on_error
        See :class:`~pipeline.loaders.delivery.BatchLoader`.
    **options
        Fields of the loader's options: what a sample is.
    """

    samples_type: ClassVar[Any]
    """Made of a path and of options: what a sample is."""
    options_type: ClassVar[Any]
    """The dataclass of the options."""

    def __init__(  # noqa: PLR0913 - a keyword is an option, as in torch's DataLoader
        self,
        path: DatasetPath | Weighted,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: Shuffle = True,
        balance: str = "",
        epoch_samples: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "drop",
        threads: int = 2,
        prefetch: int = 2,
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        rank, world_size = rank_and_world_size(rank, world_size)
        weighted: list[Any] = [(path, 1.0)] if isinstance(path, str | Path) else list(path)
        if not weighted or not all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in weighted):
            raise UsageError(f"expected a path, or pairs of path and weight, found {path!r}; correct the call")
        parts = [self.samples_type(place, self.options_type(**options)) for place, _ in weighted]
        order: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "balance": balance, "tail": tail}
        order |= {"epoch_samples": epoch_samples, "rank": rank, "world_size": world_size}
        sampler = make_sampler(parts, [weight for _, weight in weighted], batch_size, **order)
        samples = parts[0] if len(parts) == 1 else MixedSamples(parts, [str(place) for place, _ in weighted])
        delivery: dict[str, Any] = {"threads": threads, "prefetch": prefetch, "on_error": on_error}
        super().__init__(samples, sampler, **delivery)
        self._recipe = (path, batch_size, {**order, **delivery, **options})

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), *self._recipe, self.state_dict())


def _remake(
    kind: type[DatasetLoader], path: Any, batch_size: int, options: Any, state: Mapping[str, Any]
) -> DatasetLoader:
    loader = kind(path, batch_size, **options)
    loader.load_state_dict(state)
    return loader


def make_sampler(  # noqa: PLR0913 - the options of a loader that say which sample comes when
    parts: Sequence[DatasetSamples],
    weights: Sequence[float],
    batch_size: int,
    *,
    seed: int = 0,
    shuffle: Shuffle = True,
    balance: str = "",
    epoch_samples: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    tail: str = "drop",
) -> EpochSampler:
    """Return which samples of ``parts`` come when; the parameters are those of :class:`DatasetLoader`."""
    rank, world_size = rank_and_world_size(rank, world_size)
    order = _order(parts, weights, shuffle, seed, balance=balance, num=epoch_samples)
    partition = Partition(num=order.num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
    return EpochSampler(order, partition)


def _order(
    parts: Sequence[DatasetSamples],
    weights: Sequence[float],
    shuffle: Shuffle,
    seed: int,
    *,
    balance: str,
    num: int | None,
) -> Order:
    """Return the order of the samples of all ``parts``, which are numbered one part after the other."""
    if balance not in ("", "task"):
        raise UsageError(f"expected balance 'task' or none, found {balance!r}; correct the call")
    make = order_maker(shuffle, seed)
    if len(parts) == 1 and not balance:
        if num is not None:
            raise UsageError(
                "expected epoch_samples with weighted datasets or tasks alone, found one dataset; leave it out"
            )
        return make(parts[0].steps, ())
    groups: list[Group] = []
    start = 0
    for part, weight in zip(parts, weights, strict=True):
        members = _by_task(part) if balance else [np.arange(part.num)]
        for inside in members:
            order = make(part.steps[inside], (len(groups) + 1,))  # every group in an order of its own
            groups.append(Group(weight / len(members), order, start + inside if balance else start))
        start += part.num
    return WeightedOrder(groups, start if num is None else num, seed)


def _by_task(part: DatasetSamples) -> list[Int64[np.ndarray, " member"]]:
    """Return the samples of each task; those without one are a task of their own."""
    if "task_index" not in part.reader.info.arrays:
        raise UsageError("expected a dataset with tasks, found no array task_index; leave `balance` out")
    tasks = part.reader.rows("task_index")[part.steps]
    by_task = np.argsort(tasks, kind="stable")
    return np.split(by_task, np.flatnonzero(np.diff(tasks[by_task])) + 1)
