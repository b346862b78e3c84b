"""What the example training loops share: steps under autocast, time spent waiting for data, stopping and going on.

A checkpoint holds model, optimiser, the loader's ``state_dict`` and the random state of the noise, so that a run that was stopped goes on with the very
samples that the other would have had.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Loss = Callable[[dict[str, Any]], torch.Tensor]
"""The loss of a batch of tensors."""

WAIT = "wait for data"
"""Name of the profile's row that says how long the loop had nothing to do."""


def parser(description: str | None, dataset: str) -> argparse.ArgumentParser:
    """Return the options that both examples have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dataset", nargs="?", type=Path, default=Path(dataset), help=f"by default {dataset}")
    options.add_argument("--steps", type=int, default=200, help="training steps in all, over every run")
    options.add_argument("--batch-size", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of autocast")
    options.add_argument("--checkpoint", type=Path, help="written at the end, gone on from where it exists")
    options.add_argument("--stop-after", type=int, default=0, help="stop after that many steps of this run")
    options.add_argument(
        "--profile", action="store_true", help="show where the time of ten steps goes (torch.profiler)"
    )
    return options


@dataclass
class Run:
    """What a run of training did."""

    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    """Steps of the dataset that each batch was of."""
    waited_s: float = 0.0
    """Time in which the loop had nothing to do but wait for data."""
    elapsed_s: float = 0.0


def train(model: torch.nn.Module, loader: Any, loss_of: Loss, options: argparse.Namespace) -> Run:
    """Train ``model`` on the batches of ``loader`` until ``--steps``, or ``--stop-after`` of this run; print how it goes.

    Parameters
    ----------
    model
        On ``options.device``.
    loader
        A loader, or :class:`~pipeline.loaders.DeviceBatches` of one: batches of tensors with ``index``, and a ``state_dict``.
    loss_of
        The loss of a batch, under autocast.
    options
        Of :func:`parser`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = _load(options.checkpoint, model, optimizer, loader)
    last = min(options.steps, done + (options.stop_after or options.steps))
    run = Run()
    began = time.perf_counter()
    with _profiler(options.profile) as profiler:
        for step, batch in zip(range(done, last), _batches(loader, run), strict=False):
            with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bfloat16"):
                loss = loss_of(batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            run.losses.append(loss.item())
            run.samples.append(batch["index"].tolist())
            if (step + 1) % 20 == 0 or step + 1 == last:
                recent = run.losses[-20:]
                print(f"step {step + 1}: loss {sum(recent) / len(recent):.4f}")
            if profiler is not None:
                profiler.step()
    run.elapsed_s = time.perf_counter() - began
    if run.losses:
        rate, share = len(run.losses) / run.elapsed_s, run.waited_s / run.elapsed_s
        print(f"{rate:.1f} steps/s; {share:.1%} of the time the loop waited for data, its start included")
    if profiler is not None:
        average = profiler.key_averages()
        waits = next(row for row in average if row.key == WAIT)
        print(f"{WAIT}: {waits.count} times, {waits.cpu_time_total / waits.count / 1e3:.2f} ms each")
        print(average.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))
    if options.checkpoint is not None:
        _save(options.checkpoint, model, optimizer, loader, done + len(run.losses))
    return run


def _batches(loader: Any, run: Run) -> Iterator[dict[str, Any]]:
    """Yield batches, epoch after epoch, and count the time they are waited for."""
    while True:
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            with torch.profiler.record_function(WAIT):
                batch = next(batches, None)
            run.waited_s += time.perf_counter() - began
            if batch is None:
                break
            yield batch


def _profiler(wanted: bool) -> AbstractContextManager[Any]:
    if not wanted:
        return nullcontext()
    plan = torch.profiler.schedule(wait=5, warmup=2, active=10, repeat=1)
    return torch.profiler.profile(schedule=plan)


def _save(path: Path, model: torch.nn.Module, optimizer: Any, loader: Any, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    unfinished = path.with_name(path.name + ".part")
    torch.save({**state, "step": step, "noise": torch.get_rng_state()}, unfinished)
    unfinished.replace(path)


def _load(path: Path | None, model: torch.nn.Module, optimizer: Any, loader: Any) -> int:
    """Take up a checkpoint, where there is one; return the steps done before."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["noise"])
    print(f"going on after step {state['step']}")
    return int(state["step"])
