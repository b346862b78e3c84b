"""Small CARLA recordings for the tests that go over every format."""

from pathlib import Path

from tests.pipeline.readers.log_writer import small_log
from tests.pipeline.readers.test_carla_garage import write_route


def write_garage(root: Path) -> Path:
    """Write one PDM-Lite route below ``root``."""
    write_route(root)
    return root


def write_recorder(root: Path) -> Path:
    """Write one recorder log into ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "drive.log").write_bytes(small_log())
    return root
