"""Small CARLA recordings for the tests that go over every format."""

from pathlib import Path

from tests.pipeline.readers.builders import colour, image_bytes, write
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


def write_dump(root: Path) -> Path:
    """Write one recording of two cameras, records and a table of times, every second frame of the simulator, into ``root``."""
    for step in range(4):
        frame = 120 + 2 * step
        for view, name in enumerate(("front", "depth")):
            write(root / f"{name}/{frame:08d}.png", image_bytes(colour(view, step)))
        write(root / f"ego/{frame:08d}.json", f'{{"speed": {step}.0, "location": {{"x": 1.0, "y": 2.0}}}}'.encode())
    lines = [f"{120 + 2 * step},{6 + 0.1 * step:.2f},{step}" for step in range(4)]
    write(root / "timestamps.csv", "\n".join(["frame,timestamp,gear", *lines]).encode())
    return root
