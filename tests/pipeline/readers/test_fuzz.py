"""No change of a recording crashes or hangs a reader or takes its memory beyond bounds: see :mod:`tests.pipeline.readers.fuzz`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.readers import READERS, open_source
from pipeline.readers.carla_frames import actor_number, finite_number, finite_vector, lane_of
from pipeline.readers.folders import natural_key
from schemas.errors import Reason
from tests.conftest import REPOSITORY
from tests.pipeline.readers import replay_builder


def fuzz(folder: Path, seed: int, count: int, *names: str) -> None:
    """Run cases in a process of their own, which a crash may end."""
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.pipeline.readers.fuzz",
        str(folder),
        str(seed),
        str(count),
        *names,
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"


def test_changed_recordings_are_answered(tmp_path):
    fuzz(tmp_path, 0, 10, *READERS)


@pytest.mark.parametrize("number", [10**400, -(2**63), 1e300, float("inf"), "9" * 5000, "--5", None, [1], {}])
def test_numbers_that_no_recording_holds_are_none(number):
    assert np.isnan(finite_number(number))
    assert finite_vector({"center": [1.0, number, 2.0]}, "center", 3) is None
    assert lane_of({"road_id": number, "lane_id": 1}) == (0, 0)
    assert -(2**63) <= actor_number(number) < 2**63


def test_names_of_more_digits_than_a_number_may_have_are_in_order():
    names = ["e" + "9" * 5000, "e10", "e2", "e007", "e0"]
    assert sorted(names, key=natural_key) == ["e0", "e2", "e007", "e10", "e" + "9" * 5000]


@pytest.mark.parametrize("filters", [[1], [["id"]], 3, "delta"])
def test_filters_of_zarr_that_are_no_filters_are_refused(tmp_path, filters):
    root = replay_builder.write_pusht(tmp_path, (3, 4))
    for path in root.rglob("*/episode_ends/.zarray"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "filters": filters}))
    index = open_source(tmp_path, "diffusion-policy").index()
    assert index.episodes == ()
    assert index.faults[0].reason in (Reason.BAD_METADATA, Reason.UNSUPPORTED)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_a_thousand_changed_recordings_are_answered(tmp_path, name):
    """Other ones each day."""
    fuzz(tmp_path, 1000 * (int(time.time()) // 86400), 1000, name)
