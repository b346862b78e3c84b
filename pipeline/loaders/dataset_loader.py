"""From the path of a dataset to a loader of its samples: what all loaders share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pipeline.loaders.delivery import BatchLoader
from pipeline.loaders.sampler import EpochSampler, FullShuffle, InOrder, rank_and_world_size
from tasks.order import Partition


class DatasetLoader(BatchLoader):
    """Batches of a dataset, in an order that survives restarts.

    Every ``(seed, epoch)`` has one order, the same for any number of threads and ranks. A global batch is the next
    ``batch_size * world_size`` samples of it, and each rank takes ``batch_size`` in a row of those. Batches may be kept:
    their memory is reused only once nothing refers to it.

    Parameters
    ----------
    path
        Folder of a finished dataset.
    batch_size
        Samples of a batch on this rank.
    seed, shuffle
        The order of each epoch: by the seed, or as recorded.
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
        path: str | Path,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        tail: str = "drop",
        threads: int = 2,
        prefetch: int = 2,
        on_error: str = "raise",
        **options: Any,
    ) -> None:
        rank, world_size = rank_and_world_size(rank, world_size)
        samples = self.samples_type(path, self.options_type(**options))
        order = FullShuffle(samples.num, seed) if shuffle else InOrder(samples.num)
        partition = Partition(num=order.num, batch_size=batch_size, rank=rank, world_size=world_size, tail=tail)
        super().__init__(samples, EpochSampler(order, partition), threads=threads, prefetch=prefetch, on_error=on_error)
        self._remake = (path, batch_size, {"seed": seed, "shuffle": shuffle, "rank": rank, "world_size": world_size})
        self._options = {"tail": tail, "threads": threads, "prefetch": prefetch, "on_error": on_error, **options}

    def __reduce__(self) -> tuple[Any, ...]:
        path, batch_size, order = self._remake
        return _remake, (type(self), path, batch_size, {**order, **self._options}, self.state_dict())


def _remake(
    kind: type[DatasetLoader], path: Any, batch_size: int, options: Any, state: Mapping[str, Any]
) -> DatasetLoader:
    loader = kind(path, batch_size, **options)
    loader.load_state_dict(state)
    return loader
