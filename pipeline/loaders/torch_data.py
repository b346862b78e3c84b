"""Loaders for torch: batches on the device ahead of the loop, and torch's own DataLoader where it is to stay.

Imports torch; needs the extra ``torch``. That torch sees a GPU is checked when one is asked for.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from pipeline.loaders.dataset_loader import DatasetSamples, make_sampler
from pipeline.loaders.delivery import Batch, BatchLoader
from pipeline.loaders.mapstyle import to_torch
from pipeline.loaders.sampler import EpochSampler
from schemas.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameScale:
    """uint8 frames to what the model takes, on the device: ``(frame / 255 - mean) / std``."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """By channel; the default gives [-1, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    dtype: str = "float32"
    """``float32``, ``bfloat16`` or ``float16``."""
    channels_first: bool = False

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        """Return ``dtype[..., h, w, 3]``, or ``dtype[..., 3, h, w]``, of ``uint8[..., h, w, 3]``."""
        offset, factor = _scale(self.mean, self.std, frames.device)
        scaled = torch.addcmul(offset, frames.to(torch.float32), factor).to(getattr(torch, self.dtype))
        return scaled.movedim(-1, -3) if self.channels_first else scaled


class Transfer(Protocol):
    """How tensors come to a device."""

    def copy(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Do ``work``, which copies; return its result, and what tells when it is done."""

    def wait(self, done: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Let what the caller does next with ``tensors`` come after the copy."""

    def is_done(self, done: Any) -> bool:
        """Return whether the copy has ended."""

    def finish(self, done: Any) -> None:
        """Block until the copy has ended."""


class DirectTransfer:
    """To memory of the CPU: done when it returns."""

    def copy(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Do ``work``."""
        return work(), None

    def wait(self, done: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing is to be waited for."""

    def is_done(self, done: Any) -> bool:
        """Return True."""
        return True

    def finish(self, done: Any) -> None:
        """Nothing is to be waited for."""


class CudaTransfer:
    """To a GPU, on a stream of its own, beside what the model computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def copy(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Enqueue ``work`` on the stream."""
        with torch.cuda.stream(self._stream):
            result = work()
            return result, self._stream.record_event()

    def wait(self, done: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Let the caller's stream wait, and keep the allocator from reusing ``tensors`` before that stream is through."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(current)

    def is_done(self, done: Any) -> bool:
        """Ask the event."""
        return bool(done.query())

    def finish(self, done: Any) -> None:
        """Wait for the event."""
        done.synchronize()


class DeviceBatches:
    """A loader's batches as tensors on a device, copied there while the loop works on the batch before.

    Frames travel as uint8, a quarter of float32, from pinned memory where the device is a GPU, and are scaled there.
    Position and order are the loader's: ``state_dict`` is that of the last batch handed out.

    Parameters
    ----------
    loader
        Whose batches.
    device
        Such as ``cuda`` or ``cpu``.
    frames
        What becomes of uint8 tensors with a last axis of 3, such as :class:`FrameScale`; nothing by default.
    ahead
        Batches on the device beside the one that is worked on.
    transfer
        How tensors get there; found by the device.

    Raises
    ------
    UsageError
        A GPU is asked for and torch sees none.
    """

    def __init__(
        self,
        loader: BatchLoader,
        device: str | torch.device = "cuda",
        *,
        frames: Callable[[torch.Tensor], torch.Tensor] | None = None,
        ahead: int = 1,
        transfer: Transfer | None = None,
    ) -> None:
        self.loader, self.device = loader, torch.device(device)
        self._frames, self._ahead = frames, ahead
        self._state = loader.state_dict()
        if self.device.type == "cuda" and transfer is None:
            if not torch.cuda.is_available():
                raise UsageError("expected a GPU, found none that torch sees; use device='cpu'")
            loader.pin_memory()
            transfer = CudaTransfer(self.device)
        self._transfer = transfer or DirectTransfer()

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        waiting: deque[tuple[Any, Any, Batch, dict[str, Any]]] = deque()
        sent: deque[tuple[Any, Batch]] = deque()  # what is still copied from must not be lent again
        batches = iter(self.loader)
        try:
            for batch in batches:
                tensors = to_torch(batch)
                copied, done = self._transfer.copy(partial(self._send, tensors))
                waiting.append((copied, done, tensors, self.loader.state_dict()))
                del batch, tensors
                if len(waiting) > self._ahead:
                    yield self._receive(waiting.popleft(), sent)
            while waiting:
                yield self._receive(waiting.popleft(), sent)
            self._state = self.loader.state_dict()
        finally:
            for done in [*(entry[1] for entry in waiting), *(done for done, _ in sent)]:
                self._transfer.finish(done)
            self.loader.close()

    def set_epoch(self, epoch: int) -> None:
        """As the loader's."""
        self.loader.set_epoch(epoch)
        self._state = self.loader.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is; what was sent ahead is not counted."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As the loader's."""
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def _send(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._send(part) for name, part in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        tensor = value.to(self.device, non_blocking=True, copy=True)
        is_frames = tensor.dtype == torch.uint8 and tensor.shape[-1] == 3
        return self._frames(tensor) if self._frames is not None and is_frames else tensor

    def _receive(self, entry: tuple[Any, Any, Batch, dict[str, Any]], sent: deque[tuple[Any, Batch]]) -> Batch:
        copied, done, host, self._state = entry
        sent.append((done, host))
        while sent and self._transfer.is_done(sent[0][0]):
            sent.popleft()
        self._transfer.wait(done, list(_tensors(copied)))
        return copied


class TorchStream(torch.utils.data.IterableDataset):
    """A loader as torch's ``IterableDataset`` of whole batches, for a ``DataLoader`` with ``batch_size=None``.

    Its workers, if any, take the rank's batches in turns, so that they come in the loader's order. With torchdata's
    ``StatefulDataLoader`` it resumes exactly, on the same number of workers, as torchdata asks. As with torch's
    ``DistributedSampler``, ``set_epoch`` says which epoch comes next.

    Parameters
    ----------
    loader
        Whose batches. It is copied into each worker.

    Examples
    --------
    >>> stream = TorchStream(MultiViewLoader("out.zarr", 32))                          # doctest: +SKIP
    >>> data = StatefulDataLoader(stream, batch_size=None, num_workers=2)              # doctest: +SKIP
    """

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader
        self._epoch = torch.full((1,), loader.epoch, dtype=torch.int64).share_memory_()  # workers that stay see it too

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Run through ``epoch`` next, also in workers that stay from epoch to epoch."""
        self._epoch[0] = epoch

    def __iter__(self) -> "_StreamIterator":
        return _StreamIterator(self.loader, int(self._epoch[0]))


class _StreamIterator:
    """One worker's batches of an epoch, with torchdata's ``state_dict`` convention."""

    def __init__(self, loader: BatchLoader, epoch: int) -> None:
        info = torch.utils.data.get_worker_info()
        worker, every = (info.id, info.num_workers) if info is not None else (0, 1)
        loader.set_epoch(epoch)
        loader.sampler = replace(loader.sampler, every=every)
        state = loader.state_dict()
        loader.load_state_dict({**state, "samples_seen": loader.sampler.skip(state["samples_seen"], worker)})
        self._loader = loader
        self._running: Iterator[Batch] | None = None

    def __iter__(self) -> "_StreamIterator":
        return self

    def __next__(self) -> Batch:
        if self._running is None:
            self._running = iter(self._loader)
        batch: Batch = to_torch(next(self._running))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._running = None
        self._loader.load_state_dict(state)


class TorchBatchSampler:
    """The order of a loader as ``batch_sampler`` of a ``DataLoader`` over one of the map-style datasets.

    Its iterator follows torchdata's ``state_dict`` convention: a ``StatefulDataLoader`` resumes at once, on any number of
    workers. As with torch's ``DistributedSampler``, ``set_epoch`` says which epoch comes next.

    Parameters
    ----------
    samples
        Of the dataset, such as ``MultiViewDataset(...).samples``.
    batch_size
        Samples of a batch on this rank.
    **options
        ``seed``, ``shuffle``, ``balance``, ``epoch_samples``, ``rank``, ``world_size`` and ``tail`` (but ``pad``), as for
        :class:`~pipeline.loaders.dataset_loader.DatasetLoader`.

    Examples
    --------
    >>> dataset = MultiViewDataset("out.zarr")                                         # doctest: +SKIP
    >>> sampler = TorchBatchSampler(dataset.samples, 32, seed=1)                       # doctest: +SKIP
    >>> data = StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)   # doctest: +SKIP
    """

    def __init__(self, samples: DatasetSamples, batch_size: int, **options: Any) -> None:
        self.sampler = make_sampler([samples], [1.0], batch_size, **options)
        if self.sampler.partition.tail == "pad":
            raise UsageError("expected tail 'drop' or 'keep', found 'pad', whose repeats a DataLoader cannot name")
        self.fingerprint, self.place = samples.fingerprint, (0, 0)

    def __len__(self) -> int:
        return self.sampler.partition.num_batches()

    def set_epoch(self, epoch: int) -> None:
        """Run through ``epoch`` next."""
        self.place = (epoch, 0)

    def __iter__(self) -> "_BatchIterator":
        return _BatchIterator(self.sampler, self.fingerprint, self.place)


class _BatchIterator:
    """The batches of one epoch, as lists of samples."""

    def __init__(self, sampler: EpochSampler, fingerprint: str, place: tuple[int, int]) -> None:
        self._sampler, self._fingerprint = sampler, fingerprint
        self._epoch, self._position = place

    def __iter__(self) -> "_BatchIterator":
        return self

    def __next__(self) -> list[int]:
        stop = self._sampler.stop(self._position)
        if stop == self._position:
            raise StopIteration
        samples: list[int] = self._sampler.batch(self._epoch, self._position)[0].tolist()
        self._position = stop
        return samples or next(self)  # of a short tail, this rank may have none

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state(self._epoch, self._position, self._fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = self._sampler.place(state, self._fingerprint)


@lru_cache(maxsize=64)
def _scale(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # kept, since making them on a GPU waits for all that its stream has to do
    values, deviations = (torch.tensor(value, dtype=torch.float64) for value in (mean, std))
    offset, factor = -values / deviations, 1 / (255 * deviations)
    return offset.to(device, torch.float32), factor.to(device, torch.float32)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, torch.Tensor):
        yield value
