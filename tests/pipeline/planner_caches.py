"""Writes caches as Diffusion Planner's ``data_process.py`` does: ``np.savez`` of a sample a file."""

from pathlib import Path

import numpy as np

SIZES = {"agents": 3, "past": 4, "future": 24, "static": 2, "lanes": 5, "routes": 2, "points": 4, "lane_features": 12}


def make_sample(seed: int, **sizes: int) -> dict[str, np.ndarray]:
    """Return the arrays of one file, in the order of the contract; some rows are padding."""
    n, rng = {**SIZES, **sizes}, np.random.default_rng(seed)

    def rows(*shape: int) -> np.ndarray:
        values = rng.normal(0, 20, shape).astype(np.float32)
        values[-1:] = 0
        return values

    ego = np.array([0, 0, 1, 0, *rng.normal(3, 1, 6)], np.float32)
    return {
        "map_name": np.array(f"us-nv-{seed % 3}"),
        "token": np.array(f"{seed:016x}"),
        "ego_current_state": ego,
        "ego_agent_future": np.cumsum(rng.normal(0.1, 0.1, (n["future"], 3)), axis=0).astype(np.float32),
        "neighbor_agents_past": rows(n["agents"], n["past"], 11),
        "neighbor_agents_future": rows(n["agents"], n["future"], 3),
        "static_objects": rows(n["static"], 10),
        "lanes": rows(n["lanes"], n["points"], n["lane_features"]),
        "lanes_speed_limit": rows(n["lanes"], 1),
        "lanes_has_speed_limit": rng.random((n["lanes"], 1)) < 0.5,
        "route_lanes": rows(n["routes"], n["points"], n["lane_features"]),
        "route_lanes_speed_limit": rows(n["routes"], 1),
        "route_lanes_has_speed_limit": rng.random((n["routes"], 1)) < 0.5,
    }


def write_cache(
    folder: Path, count: int, *, first: int = 0, extra=None, **sizes: int
) -> dict[str, dict[str, np.ndarray]]:
    """Write ``count`` files; return their arrays by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = {}
    for seed in range(first, first + count):
        sample = {**make_sample(seed, **sizes), **(extra(seed) if extra else {})}
        name = f"{sample['map_name']}_{sample['token']}.npz"
        np.savez(folder / name, **sample)
        samples[name] = sample
    return dict(sorted(samples.items()))


def read_cache(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Read every file of a cache with NumPy alone."""
    found = {}
    for path in sorted(folder.rglob("*.npz")):
        with np.load(path, allow_pickle=False) as file:
            found[path.relative_to(folder).as_posix()] = dict(file)
    return found


def assert_same(found: dict[str, dict[str, np.ndarray]], expected: dict[str, dict[str, np.ndarray]]) -> None:
    """Compare files key by key: order, dtype, shape, values."""
    assert list(found) == list(expected)
    for name, sample in expected.items():
        assert list(found[name]) == list(sample)
        for key, array in sample.items():
            assert (found[name][key].dtype, found[name][key].shape) == (array.dtype, array.shape), (name, key)
            np.testing.assert_array_equal(found[name][key], array, err_msg=f"{name} {key}")
