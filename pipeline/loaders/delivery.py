"""From samples to a stream of batches: threads fill them ahead of the consumer, in an order that survives restarts."""

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Int64

from pipeline.loaders.buffers import BatchBuffers, Layout
from pipeline.loaders.sampler import EpochSampler
from schemas.errors import DatasetError, HeadraceError, UsageError

ON_ERROR = ("raise", "skip")

Batch = dict[str, Any]
Arrays = Mapping[str, np.ndarray]
Texts = Mapping[str, list[str]]

_MIN_SLICE = 16
"""Samples a thread takes at a time at least: handing over costs about as much as reading one."""
_log = logging.getLogger("headrace.loaders")


class Samples(Protocol):
    """What a sample is: how to fill its arrays, and how a batch of them is handed out."""

    @property
    def num(self) -> int:
        """Number of samples."""

    @property
    def fingerprint(self) -> str:
        """Equal where the same number is the same sample."""

    @property
    def layout(self) -> Layout:
        """Arrays of a batch. One called ``epoch`` (int64 a sample) is handed to :meth:`fill` with the epoch in it."""

    def fill(self, samples: Int64[np.ndarray, " batch"], arrays: Arrays) -> None:
        """Fill ``arrays[name][i]`` with what belongs to ``samples[i]``; called from several threads at once."""

    def texts(self, samples: Int64[np.ndarray, " batch"]) -> dict[str, list[str]]:
        """Return what ``samples`` have beside arrays, such as an instruction each."""

    def assemble(self, arrays: Arrays, texts: Texts) -> Batch:
        """Return the batch as the training loop expects it, without copying ``arrays``."""


@dataclass(slots=True)
class _Work:
    """A batch being filled."""

    samples: np.ndarray
    num_new: int
    stop: int
    """Position after its global batch."""
    arrays: dict[str, np.ndarray]
    parts: "list[Future[Bool[np.ndarray, ' slice']]]"


class BatchLoader:
    """Batches of samples, epoch after epoch.

    Iterating runs through one epoch; the next iteration through the next, in another order. A loop that was left early
    (``break``) does not come back to the rest of its epoch, unless a state is loaded.

    One thing at a time: a new iteration ends the one that is running.

    Parameters
    ----------
    samples
        What a sample is.
    sampler
        Which of them come when.
    threads
        Threads that read and decode.
    prefetch
        Batches to fill ahead of the consumer.
    on_error
        ``raise`` ends the iteration at a sample that cannot be read. ``skip`` leaves it out of its batch, which is
        then shorter, logs it and counts it in ``num_skipped``; all other samples come as they would have.

    Attributes
    ----------
    num_skipped : int
        Samples left out since the loader was made.
    """

    def __init__(
        self, samples: Samples, sampler: EpochSampler, *, threads: int = 2, prefetch: int = 2, on_error: str = "raise"
    ) -> None:
        if threads < 1 or prefetch < 0:
            raise UsageError(f"expected 1 or more threads and 0 or more batches ahead, found {threads} and {prefetch}")
        if on_error not in ON_ERROR:
            raise UsageError(f"expected on_error one of {', '.join(ON_ERROR)}, found {on_error!r}; correct the call")
        if not samples.num:
            raise DatasetError("expected at least one step to serve, found none; see the quarantine table")
        self.samples, self.sampler = samples, sampler
        self.threads, self.prefetch, self.on_error = threads, prefetch, on_error
        self.num_skipped = 0
        self._epoch = self._position = 0
        self._is_placed = True
        """The next iteration begins at this epoch and position; else at the next epoch."""
        self._running: weakref.ref[Any] | None = None
        self._buffers = self._make_buffers()
        self._check_length()

    @property
    def batch_size(self) -> int:
        """Samples of a batch on this rank."""
        return self.sampler.partition.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the next iteration runs through where it was placed there."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank."""
        return self.sampler.partition.num_batches()

    def __iter__(self) -> Iterator[Batch]:
        self._stop_running()
        if not self._is_placed:
            self._epoch, self._position, self._is_placed = self._epoch + 1, 0, True
        running = self._run()
        self._running = weakref.ref(running)
        return running

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the arrays of a batch, and where the loader is."""
        from pipeline.loaders.shown import loader_card

        return loader_card(self)

    def set_epoch(self, epoch: int) -> None:
        """Run through ``epoch`` next, from its beginning; from where a state was loaded, if it is of this epoch."""
        if epoch < 0:
            raise UsageError(f"expected an epoch of 0 or more, found {epoch}; correct the call")
        if self._is_placed and epoch == self._epoch:
            return
        self._stop_running()
        self._epoch, self._position, self._is_placed = epoch, 0, True

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is: a few numbers, the same on every rank, whatever the batch size or world size.

        ``samples_seen`` counts positions of the epoch over all ranks, up to the last batch handed out; what was
        filled ahead and not handed out is not counted.
        """
        return self.sampler.state(self._epoch, self._position, self.samples.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken: the next iteration begins with the next position of the same order.

        The number of ranks and the batch size may differ from those of the run that saved it: the global batches are
        then cut anew from that position on. Every rank must load the same state.
        """
        epoch, seen = self.sampler.place(state, self.samples.fingerprint)
        self._stop_running()
        self._epoch, self._position, self._is_placed = epoch, seen, True

    def pin_memory(self) -> None:
        """Lend batches from memory that a GPU copies from while the CPU goes on. Needs torch with CUDA."""
        self._stop_running()
        self._buffers = self._make_buffers(pin_memory=True)

    def close(self) -> None:
        """End the iteration that is running, if any, and its threads."""
        self._stop_running()

    def _make_buffers(self, *, pin_memory: bool = False) -> BatchBuffers:
        # what is being filled, what the consumer holds, and what it has just asked for
        num_kept = self.prefetch + 2
        return BatchBuffers(self.samples.layout, self.batch_size, num_kept=num_kept, pin_memory=pin_memory)

    def _check_length(self) -> None:
        partition = self.sampler.partition
        if not partition.num_batches() and partition.tail == "drop":
            raise UsageError(
                f"expected a global batch of at most {partition.num} samples, found {partition.batch_size} x "
                f"{partition.world_size} ranks; use a smaller batch_size, or tail='keep'"
            )

    def _stop_running(self) -> None:
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close()
        self._running = None

    def _run(self) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="headrace-loader")
        try:
            yield from self._batches(pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # nobody writes into a batch after this
        self._epoch, self._position, self._is_placed = self._epoch + 1, 0, True

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[Batch]:
        ahead: deque[_Work] = deque()
        position = self._position
        while True:
            while len(ahead) <= self.prefetch and self.sampler.stop(position) > position:
                ahead.append(self._begin(pool, position))
                position = ahead[-1].stop
            if not ahead:
                return
            stop, finished = ahead[0].stop, self._finish(ahead.popleft())
            self._position, self._is_placed = stop, False
            while finished:
                yield finished.pop()  # popped, since a name here would keep its memory from being reused

    def _begin(self, pool: ThreadPoolExecutor, position: int) -> _Work:
        samples, num_new = self.sampler.batch(self._epoch, position)
        arrays = self._buffers.lease(len(samples))
        if "epoch" in arrays:
            arrays["epoch"][:] = self._epoch
        num_parts = max(1, min(2 * self.threads, len(samples) // _MIN_SLICE)) if self.threads > 1 else 1
        bounds = np.linspace(0, len(samples), num_parts + 1).astype(int).tolist()
        parts = [
            pool.submit(self._fill, samples[start:stop], {name: array[start:stop] for name, array in arrays.items()})
            for start, stop in itertools.pairwise(bounds)
        ]
        return _Work(samples, num_new, self.sampler.stop(position), arrays, parts)

    def _fill(self, samples: np.ndarray, arrays: Arrays) -> Bool[np.ndarray, " slice"]:
        """Fill a slice of a batch; return which of its samples could not be read."""
        bad = np.zeros(len(samples), np.bool_)
        try:
            self.samples.fill(samples, arrays)
        except HeadraceError:
            if self.on_error == "raise":
                raise
            for row in range(len(samples)):
                try:
                    self.samples.fill(
                        samples[row : row + 1], {name: array[row : row + 1] for name, array in arrays.items()}
                    )
                except HeadraceError as error:
                    bad[row] = True
                    _log.warning("skipped a sample: %s", error)
        except Exception as error:  # of a transform, say, which knows nothing of samples
            error.add_note(f"while reading samples {samples.tolist()}")
            raise
        return bad

    def _finish(self, work: _Work) -> list[Batch]:
        """Wait for a batch; return it in a list, empty where this rank has no sample of it left."""
        bad = np.concatenate([part.result() for part in work.parts])
        samples, arrays, num_new = work.samples, work.arrays, work.num_new
        if bad.any():
            self.num_skipped += int(bad[:num_new].sum())
            samples, num_new = samples[~bad], num_new - int(bad[:num_new].sum())
            arrays = {name: array[~bad] for name, array in arrays.items()}
        if not len(samples):
            return []
        batch = self.samples.assemble(arrays, self.samples.texts(samples))
        if self.sampler.partition.tail == "pad":
            batch["is_repeat"] = np.arange(len(samples)) >= num_new
        return [batch]
