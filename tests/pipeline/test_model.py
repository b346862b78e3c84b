"""A dataset under any order of recording, converting, dying, appending, replacing, damaging, repairing and reading, against a plain list."""

import json
import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.cluster import ClusterOptions
from pipeline.conversion import convert
from pipeline.generations import remove_old_generations
from pipeline.loaders.reader import DatasetReader
from pipeline.repair import repair
from pipeline.store.metadata import read_info
from pipeline.verification import verify
from schemas.errors import DatasetError, PlanError
from tests.pipeline.recordings import frame, tree, write_recipe, write_route

IS_SOAK = os.environ.get("HYPOTHESIS_PROFILE") == "soak"
THREADS = ClusterOptions(workers=0)


class Killed(BaseException):
    """Stands for SIGKILL of the driver: no handler of the code under test takes it."""


@contextmanager
def killed_at(call: int):
    """Raise Killed before the driver's ``call``-th fsync or rename: the points between which a crash leaves another state."""
    real, calls = {"fsync": os.fsync, "replace": os.replace}, [0]

    def counted(name: str):
        def act(*arguments):
            if threading.current_thread() is threading.main_thread():
                calls[0] += 1
                if calls[0] == call:
                    raise Killed
            return real[name](*arguments)

        return act

    os.fsync, os.replace = counted("fsync"), counted("replace")
    try:
        yield calls
    finally:
        os.fsync, os.replace = real["fsync"], real["replace"]


@dataclass
class Episode:
    route: int
    num_steps: int
    is_replaced: bool = False


@dataclass
class Pending:
    """A plan that was interrupted: what it adds, and as which versions of the recordings."""

    episodes: list[tuple[int, int, int]]
    """``(route, num_steps, version)``."""


@dataclass
class Seen:
    """What a reader saw when it opened the dataset."""

    reader: DatasetReader
    episodes: list[Episode]


def copy_of(episodes: list[Episode]) -> list[Episode]:
    return [Episode(e.route, e.num_steps, e.is_replaced) for e in episodes]


def check_reader(reader: DatasetReader, episodes: list[Episode]) -> None:
    """Hold everything that a reader serves against the list."""
    steps = [(e.route, step) for e in episodes for step in range(e.num_steps)]
    np.testing.assert_array_equal(reader.rows("state")[:, 0], [1000 * route + step for route, step in steps])
    np.testing.assert_array_equal(reader.rows("row_size"), [e.num_steps for e in episodes])
    valid = [not e.is_replaced for e in episodes for _ in range(e.num_steps)]
    np.testing.assert_array_equal(reader.rows("valid"), valid)
    for view, name in enumerate(("rgb_main", "rgb_left")):
        out = np.empty((len(steps), 6, 8, 3), np.uint8)
        reader.gather(name, np.arange(len(steps)), out)
        np.testing.assert_array_equal(out, [frame(route, step, view) for route, step in steps])


@dataclass
class Model:
    recorded: dict[int, tuple[int, int]] = field(default_factory=dict)
    """``route -> (num_steps, version)``."""
    episodes: list[Episode] = field(default_factory=list)
    generation: int = 0
    pending: Pending | None = None

    def current(self) -> dict[int, Episode]:
        return {e.route: e for e in self.episodes if not e.is_replaced}

    def changed(self) -> list[int]:
        return [r for r, e in self.current().items() if self.recorded[r][0] != e.num_steps]

    def next(self) -> list[tuple[int, int, int]]:
        new = [r for r in sorted(self.recorded) if r not in self.current()]
        return [(r, *self.recorded[r]) for r in (*new, *sorted(self.changed()))]

    def commit(self, episodes: list[tuple[int, int, int]]) -> None:
        for route, num_steps, _ in episodes:
            for episode in self.episodes:
                episode.is_replaced |= episode.route == route
            self.episodes.append(Episode(route, num_steps))
        self.generation += bool(episodes)


class DatasetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-model-"))
        self.raw, self.out = self.folder / "raw", self.folder / "out"
        self.recipe = write_recipe(self.folder)
        self.model = Model()
        self.readers: list[Seen] = []
        self.calls = [0]
        """Fsyncs and renames of the last conversion."""
        self.plan = b""
        """The plan file that ``model.pending`` stands for."""
        self.before: Pending | None = None
        self.record(0, 3)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(route=st.integers(0, 4), num_steps=st.integers(1, 6))
    def record(self, route: int, num_steps: int) -> None:
        """Record a route, or record it again."""
        _, version = self.model.recorded.get(route, (0, 0))
        shutil.rmtree(self.raw / f"route_{route:02d}", ignore_errors=True)
        write_route(self.raw, route, num_steps)
        self.model.recorded[route] = num_steps, version + 1

    @rule(kill=st.one_of(st.none(), st.integers(1, 120)), restart=st.booleans())
    def convert(self, kill: int | None, restart: bool) -> None:
        """Convert, continue or append; what changed is replaced. Dies at ``kill``."""
        model = self.model
        replace = [f"route_{route:02d}" for route in model.changed()]
        self.before = model.pending
        if restart:
            model.pending = None
        stale = model.pending is not None and any(
            model.recorded[route] != (num_steps, version) for route, num_steps, version in model.pending.episodes
        )
        try:
            with killed_at(kill or 0) as self.calls:
                convert(
                    self.raw,
                    self.out,
                    self.recipe,
                    shard_steps=4,
                    cluster=THREADS,
                    replace=replace,
                    restart=restart,
                )
        except Killed:
            self.settle()
        except PlanError:
            if not stale:
                raise
        else:
            assert not stale
            while model.pending is not None or model.next():
                self.commit_next()
            assert read_info(self.out).generation == model.generation

    def commit_next(self) -> None:
        """Take into the model what a finished run has made."""
        model = self.model
        episodes = model.pending.episodes if model.pending is not None else model.next()
        model.pending = None
        model.commit(episodes)

    def settle(self) -> None:
        """After a death: the dataset is the generation before or the one after, and the workspace says what is pending."""
        model = self.model
        found = read_info(self.out).generation if (self.out / "zarr.json").exists() else 0
        while model.generation < found:
            self.commit_next()
        assert model.generation == found
        plan = self.folder / "out.work" / "plan.json"
        now = plan.read_bytes() if plan.exists() else b""
        if not now or json.loads(now)["generation"] <= found:
            model.pending, self.plan = None, b""
        elif now != self.plan:
            model.pending, self.plan = Pending(model.next()), now
        elif model.pending is None:
            model.pending = self.before  # it died before --restart had discarded it

    @precondition(lambda self: self.model.generation)
    @rule(pick=st.integers(0, 10_000), act=st.sampled_from(["flip", "cut", "delete"]))
    def damage_and_repair(self, pick: int, act: str) -> None:
        """Damage a file, see that it is found, repair it from the recordings."""
        self.finish_documents()
        before, model = tree(self.out), self.model
        is_whole = not model.changed() and not any(e.is_replaced for e in model.episodes)
        held = [path for path in sorted(before) if is_whole or not path.startswith(("rgb_main/", "rgb_left/"))]
        if (
            model.pending is not None
        ):  # shards that only the unfinished run knows, or that it has extended, are none of the dataset
            held = [path for path in held if path.startswith("_") or path.endswith("zarr.json")]
        path = self.out / held[pick % len(held)]
        content = bytearray(path.read_bytes())
        if act == "delete":
            path.unlink()
        elif act == "cut":
            os.truncate(path, len(content) // 2)
        else:
            content[len(content) // 3] ^= 4
            path.write_bytes(content)
        assert not verify(self.out).ok
        report = repair(self.out, self.raw, cluster=THREADS)
        assert report.left == ()
        assert tree(self.out) == before

    def finish_documents(self) -> None:
        """After a death behind the root, its followers may be absent; repair writes them as well as the next run does."""
        if not verify(self.out).ok:
            report = repair(self.out, self.raw, cluster=THREADS)
            assert {
                path for path in report.repaired if not path.endswith(".json") and not path.startswith("_copies/")
            } == set()
            assert report.ok

    @precondition(lambda self: self.model.generation)
    @rule()
    def open_reader(self) -> None:
        """Open the dataset and keep it open."""
        self.readers = [*self.readers[-2:], Seen(DatasetReader(self.out), copy_of(self.model.episodes))]

    @precondition(lambda self: self.readers)
    @rule()
    def read(self) -> None:
        """Read with what was opened before whatever has happened since."""
        for seen in self.readers:
            check_reader(seen.reader, seen.episodes)

    @precondition(lambda self: self.model.generation and self.model.pending is None)
    @rule()
    def collect(self) -> None:
        """Remove old generations; a plan whose generation was committed may lie there, and is refused."""
        if not (self.folder / "out.work" / "plan.json").exists():
            remove_old_generations(self.out)

    @invariant()
    def the_dataset_is_what_the_model_says(self) -> None:
        if self.model.generation:
            info = read_info(self.out)
            assert (info.generation, info.num_episodes) == (self.model.generation, len(self.model.episodes))
            check_reader(DatasetReader(self.out), self.model.episodes)
            problems = [p.path for p in verify(self.out).problems]
            assert all(
                path.endswith("/zarr.json") or path.startswith("_copies/") or "/zarr-" in path for path in problems
            )
        else:
            with pytest.raises(DatasetError):
                read_info(self.out)


DatasetMachine.TestCase.settings = settings(
    max_examples=200 if IS_SOAK else 2, stateful_step_count=40 if IS_SOAK else 8, deadline=None
)
TestDataset = pytest.mark.timeout(3600)(DatasetMachine.TestCase)


def test_a_walk_past_every_rule():
    """The same machine in a fixed order, since a few random walks need not come past everything."""
    machine = DatasetMachine()
    look = machine.the_dataset_is_what_the_model_says
    machine.convert(None, False)
    machine.open_reader()
    machine.record(1, 4)
    machine.convert(20, False)  # dies at work
    machine.damage_and_repair(3, "flip")
    machine.convert(None, False)
    machine.record(0, 5)
    machine.convert(None, False)  # replaces
    look()
    machine.damage_and_repair(1000, "delete")
    machine.record(2, 4)
    machine.convert(None, False)
    machine.record(3, 4)
    machine.convert(machine.calls[0] - 3, False)  # dies between the root and the end
    look()
    assert (machine.model.generation, machine.model.pending) == (5, None)
    machine.record(3, 2)
    machine.convert(None, False)
    machine.read()
    machine.record(4, 3)
    machine.convert(15, False)
    machine.record(4, 2)
    machine.convert(None, False)  # refused: the recording changed under the plan
    machine.convert(None, True)
    machine.collect()
    look()
    assert len(machine.model.episodes) == 7
    machine.teardown()
