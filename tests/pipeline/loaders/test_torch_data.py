"""Loaders in torch's hands: its DataLoader, torchdata's resume convention, and batches on a device.

No GPU is needed: what CUDA does is played by a transfer that ends its copies late, as CUDA may.
"""

import gc
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.loaders import Blocks, MultiViewDataset, MultiViewLoader
from schemas.errors import UsageError
from tests.conftest import REPOSITORY
from tests.pipeline.store_builder import Built, build_dataset

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
ANCHORS = [step for step in range(21) if step != 6]


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_dataset(tmp_path_factory.mktemp("torch") / "out")


def loader(built: Built, batch_size: int = 3, **options: Any) -> MultiViewLoader:
    return MultiViewLoader(built.root, batch_size, **{"horizon": 3, "action_dim": 5, "tail": "keep", **options})


def steps_of(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def order_of(built: Built, epoch: int = 0, **options: Any) -> list[list[int]]:
    stream = loader(built, **options)
    stream.set_epoch(epoch)
    return steps_of(stream)


STATEFUL = [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.soak)]
"""Workers and how they start; to spawn one takes seconds, since it imports torch."""


# -- torch's DataLoader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "fork"), (2, "fork"), (3, "fork"), (2, "spawn")])
def test_workers_take_turns_and_the_batches_come_in_the_loaders_order(built, workers, context):
    from pipeline.loaders import TorchStream

    stream = TorchStream(loader(built))
    data = torch.utils.data.DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
    for epoch in (0, 2) if context == "fork" else (1,):
        stream.set_epoch(epoch)
        batches = list(data)
        assert steps_of(batches) == order_of(built, epoch)
    assert isinstance(batches[0]["image"]["main"], torch.Tensor)
    np.testing.assert_array_equal(batches[0]["image"]["main"], built.arrays["rgb_main"][batches[0]["index"]])


def test_workers_that_stay_go_on_to_the_epoch_that_was_set(built):
    from pipeline.loaders import TorchStream

    stream = TorchStream(loader(built))
    data = torch.utils.data.DataLoader(
        stream, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    for epoch in (0, 1, 5):
        stream.set_epoch(epoch)
        assert steps_of(data) == order_of(built, epoch)


@pytest.mark.parametrize(("workers", "context"), STATEFUL)
def test_a_stateful_data_loader_resumes_the_stream_at_every_batch(built, workers, context):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from pipeline.loaders import TorchStream

    def make():
        return stateful.StatefulDataLoader(
            TorchStream(loader(built)), batch_size=None, num_workers=workers, multiprocessing_context=context
        )

    whole = order_of(built)
    for stop in range(1, len(whole)) if context is None else (3,):
        data = make()
        running = iter(data)
        seen = steps_of(next(running) for _ in range(stop))
        state = data.state_dict()
        del running, data
        again = make()
        again.load_state_dict(state)
        assert seen + steps_of(again) == whole


@pytest.mark.parametrize(("workers", "context"), STATEFUL)
def test_a_stateful_data_loader_resumes_a_map_style_dataset_by_its_batch_sampler(built, workers, context):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    from pipeline.loaders import TorchBatchSampler

    def make(epoch: int = 2):
        dataset = MultiViewDataset(built.root, horizon=3, action_dim=5)
        sampler = TorchBatchSampler(dataset.samples, 3, tail="keep", shuffle=Blocks(block_steps=4, buffer_blocks=2))
        sampler.set_epoch(epoch)
        return stateful.StatefulDataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=dataset.collate,
            num_workers=workers,
            multiprocessing_context=context,
        )

    # the sampler counts samples of the dataset, the batches say steps: the same here but for the step that is not valid
    whole = order_of(built, 2, shuffle=Blocks(block_steps=4, buffer_blocks=2))
    assert len(make()) == len(whole) == 7
    for stop in range(1, len(whole)) if context is None else (3,):
        data = make()
        running = iter(data)
        seen = steps_of(next(running) for _ in range(stop))
        state = data.state_dict()
        del running, data
        again = make(epoch=0)
        again.load_state_dict(state)
        assert seen + steps_of(again) == whole


def test_the_batch_samplers_state_is_the_loaders_and_fits_any_number_of_ranks(built):
    from pipeline.loaders import TorchBatchSampler

    samples = MultiViewDataset(built.root).samples
    first = iter(TorchBatchSampler(samples, 2, seed=3, rank=1, world_size=2, tail="keep"))
    seen = [next(first) for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    other = loader(built, 1, seed=3)
    other.load_state_dict(state)
    rest = [step for batch in other for step in batch["index"].tolist()]
    whole = [step for steps in order_of(built, batch_size=1, seed=3) for step in steps]
    assert rest == whole[8:]
    assert [ANCHORS[sample] for batch in seen for sample in batch] == whole[2:4] + whole[6:8]
    short = TorchBatchSampler(samples, 3, rank=6, world_size=7, tail="keep")
    assert [len(batch) for batch in short] == [2]
    with pytest.raises(UsageError, match="expected tail"):
        TorchBatchSampler(samples, 2, tail="pad")


# -- batches on a device -----------------------------------------------------------------------------------------------


class LateTransfer:
    """Copies to memory of the CPU that begin only when they are waited for: the worst that a GPU may do."""

    def __init__(self) -> None:
        self.pending: list[list[Any]] = []
        self.waited = 0

    def copy(self, work: Any) -> tuple[Any, Any]:
        result = work()
        done = [work, result]
        self.pending.append(done)
        for tensor in _flat(result):
            tensor.zero_()  # nothing has arrived yet
        return result, done

    def finish(self, done: list[Any]) -> None:
        if done in self.pending:
            self.pending.remove(done)
            for tensor, arrived in zip(_flat(done[1]), _flat(done[0]()), strict=True):
                tensor.copy_(arrived)

    def wait(self, done: list[Any], tensors: Any) -> None:
        assert len(tensors) == len(list(_flat(done[1])))
        self.finish(done)
        self.waited += 1

    def is_done(self, done: list[Any]) -> bool:
        return done not in self.pending


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_batches_come_to_the_device_whole_however_late_the_copies_are(built, late, ahead):
    from pipeline.loaders import DeviceBatches

    transfer = LateTransfer() if late else None
    device = DeviceBatches(loader(built, 2), "cpu", ahead=ahead, transfer=transfer)
    assert len(device) == 10
    kept = list(device)
    assert steps_of(kept) == order_of(built, batch_size=2)
    for batch in kept:
        np.testing.assert_array_equal(batch["image"]["side"], built.arrays["rgb_side"][batch["index"]])
        assert batch["image"]["side"].dtype == torch.uint8
        assert len(batch["prompt"]) == 2
    if transfer is not None:
        assert (transfer.waited, transfer.pending) == (10, [])
    assert steps_of(device) == order_of(built, 1, batch_size=2)


def test_a_loop_that_is_left_ends_copies_and_threads_and_resumes_behind_what_it_was_given(built):
    import threading

    from pipeline.loaders import DeviceBatches

    transfer = LateTransfer()
    device = DeviceBatches(loader(built, 2), "cpu", ahead=2, transfer=transfer)
    running = iter(device)
    seen = steps_of(next(running) for _ in range(3))
    state = json.loads(json.dumps(device.state_dict()))
    assert state["samples_seen"] == 6
    del running
    gc.collect()
    assert transfer.pending == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-loader")]
    again = DeviceBatches(loader(built, 5), "cpu")
    again.load_state_dict(state)
    rest = [step for steps in steps_of(again) for step in steps]
    assert [*itertools.chain(*seen), *rest] == list(itertools.chain(*order_of(built, batch_size=2)))


@pytest.mark.parametrize("channels_first", [False, True])
def test_frames_are_scaled_on_the_device_by_the_formula(built, channels_first):
    from pipeline.loaders import DeviceBatches, FrameScale

    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    scale = FrameScale(mean=mean, std=std, channels_first=channels_first)
    for batch in DeviceBatches(loader(built), "cpu", frames=scale):
        frames = built.arrays["rgb_main"][batch["index"]].astype(np.float64)
        expected = (frames / 255 - np.array(mean)) / np.array(std)
        expected = np.moveaxis(expected, -1, 1) if channels_first else expected
        np.testing.assert_allclose(batch["image"]["main"].numpy(), expected, atol=1e-6)
        assert batch["state"].dtype == torch.float32
    (batch,) = DeviceBatches(loader(built, 20), "cpu", frames=FrameScale(dtype="bfloat16"))
    (reference,) = loader(built, 20, normalize_images=True)
    assert batch["image"]["main"].dtype == torch.bfloat16
    np.testing.assert_allclose(batch["image"]["main"].float().numpy(), reference["image"]["main"], atol=2**-8)


def test_the_documentation_of_batches_on_a_device_runs(built, tmp_path, monkeypatch):
    page = (REPOSITORY / "docs/training.md").read_text("utf-8")
    _, device, *_ = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "robot.zarr").symlink_to(built.root)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(device, names)  # noqa: S102 - our own page
    assert names["batch"]["image"]["main"].shape == (4, 3, 6, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_gpu_that_is_not_there_is_asked_for_in_vain(built):
    from pipeline.loaders import DeviceBatches

    with pytest.raises(UsageError, match="expected a GPU, found none that torch sees"):
        DeviceBatches(loader(built))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_gpu_gets_the_batches_from_pinned_memory(built):
    from pipeline.loaders import DeviceBatches, FrameScale, to_torch

    stream = loader(built, 2)
    seen = []
    for batch in DeviceBatches(stream, "cuda", frames=FrameScale()):
        assert batch["image"]["main"].is_cuda
        seen.append(batch["index"].tolist())
    assert seen == order_of(built, batch_size=2)
    assert to_torch(next(iter(stream)))["image"]["main"].is_pinned()


# -- JAX ---------------------------------------------------------------------------------------------------------------


JAX = """
import sys
import jax, numpy as np
from pipeline.loaders import MultiViewLoader, to_jax
kept = [(to_jax(batch), {**batch}) for batch in MultiViewLoader(sys.argv[1], 3, horizon=3)]
for ours, batch in kept:
    assert isinstance(ours["image"]["main"], jax.Array) and isinstance(ours["prompt"], list)
    for one, other in ((ours, batch), (ours["image"], batch["image"]), (ours["image_mask"], batch["image_mask"])):
        for name in one:
            if isinstance(other[name], np.ndarray):
                np.testing.assert_array_equal(np.asarray(one[name]), other[name])
frames, ours = kept[0][1]["image"]["main"], kept[0][0]["image"]["main"]
print(len(kept), ours.unsafe_buffer_pointer() == frames.ctypes.data)
"""


def test_jax_takes_the_batches_without_a_copy(built):
    pytest.importorskip("jax")
    # in a process of its own, since JAX forbids forks in its own; no other framework is there to interfere
    command = [sys.executable, "-c", JAX, str(built.root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout == "6 True\n", done.stderr


def test_an_error_that_is_not_ours_says_at_which_samples(tmp_path: Path):
    from tasks.transforms import ScaleColumns

    built = build_dataset(tmp_path / "out")

    class Broken(ScaleColumns):
        def __call__(self, state, actions):
            if len(state) and state[0, 0] == 3:
                raise ZeroDivisionError
            return state, actions

    stream = MultiViewLoader(built.root, 1, shuffle=False, transforms=[Broken.between((-1, 1), (0, 1), actions=(0,))])
    with pytest.raises(ZeroDivisionError) as caught:
        list(stream)
    assert caught.value.__notes__ == ["while reading samples [3]"]
