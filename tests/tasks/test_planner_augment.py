"""The perturbation of training samples against the contract, number by number."""

import numpy as np
import pytest

from schemas.errors import SchemaError
from tasks.planner_augment import Perturbation, perturb, perturbed_state, way_back

NAMES = ("neighbor_agents_past", "neighbor_agents_future", "lanes", "route_lanes", "static_objects")


def sample_batch(count=16, seed=0):
    rng = np.random.default_rng(seed)
    current = np.zeros((count, 10), np.float32)
    current[:, 2] = 1
    current[:, 4] = rng.uniform(0, 12, count)
    current[:, 5:10] = rng.normal(0, 0.3, (count, 5))
    turn = np.cumsum(np.full((count, 80), 0.01) * rng.normal(0, 1, (count, 1)), axis=1)
    step = 0.1 * current[:, 4:5]
    future = np.stack([np.cumsum(step * np.cos(turn), 1), np.cumsum(step * np.sin(turn), 1), turn], -1).astype(
        np.float32
    )
    batch = {"ego_current_state": current, "ego_agent_future": future}
    shapes = {
        "neighbor_agents_past": (4, 5, 11),
        "neighbor_agents_future": (4, 8, 3),
        "lanes": (6, 7, 12),
        "route_lanes": (2, 7, 12),
        "static_objects": (3, 10),
    }
    for name, shape in shapes.items():
        rows = rng.normal(0, 20, (count, *shape)).astype(np.float32)
        if name.endswith("future"):
            rows[..., 2] = rng.uniform(-np.pi, np.pi, rows.shape[:-1])
        rows[:, -1] = 0
        batch[name] = rows
    batch["lanes_speed_limit"] = rng.uniform(0, 20, (count, 6, 1)).astype(np.float32)
    return batch


def quintic_by_polyfit(start, end, span):
    """Coefficients by solving for value, slope and curvature at both ends."""
    rows, wanted = [], []
    for time, conditions in ((0.0, start), (span, end)):
        for order, value in enumerate(conditions):
            rows.append(
                [np.polyval(np.polyder(np.eye(6)[5 - k], order) if order else np.eye(6)[5 - k], time) for k in range(6)]
            )
            wanted.append(value)
    return np.linalg.solve(np.array(rows), np.array(wanted))


def reference(batch, uniform, chosen):
    """Row by row, in plain numbers, from section 1.5."""
    widths = [0, 0.75, 0.35, 1, 0.5, 0.2, 0.1, 0, 0]
    out = {name: np.array(rows, np.float64) for name, rows in batch.items()}
    for b in range(len(uniform)):
        if not chosen[b] or abs(batch["ego_current_state"][b, 4]) < 2.0:
            continue
        noise = [w * (2 * u - 1) for w, u in zip(widths, uniform[b])]
        _, _, _, _, vx, vy, ax, ay, _, rate = (float(v) for v in batch["ego_current_state"][b])
        vx, vy, ax, ay, rate = (
            max(vx + noise[3], 0),
            vy + noise[4],
            ax + noise[5],
            ay + noise[6],
            min(max(rate, -0.85), 0.85),
        )
        steering = np.clip(np.arctan(rate * 3.089 / vx), -2 * np.pi / 3, 2 * np.pi / 3) if vx >= 0.2 else 0
        x, y, heading = noise[:3]
        future = out["ego_agent_future"][b]
        toward = np.arctan2(future[10, 1] - y, future[10, 0] - x)
        speed, acceleration = np.hypot(vx, vy), np.hypot(ax, ay)
        end_speed = np.hypot(*(future[20, :2] - future[19, :2])) / 0.1
        end_acceleration = np.hypot(*(future[20, :2] - 2 * future[19, :2] + future[18, :2])) / 0.01
        end_rate, end_heading = (future[20, 2] - future[19, 2]) / 0.1, future[20, 2]
        line = []
        for here, sine, cosine, there, end_sine, end_cosine in (
            (x, -np.sin(toward), np.cos(toward), future[20, 0], -np.sin(end_heading), np.cos(end_heading)),
            (y, np.cos(toward), np.sin(toward), future[20, 1], np.cos(end_heading), np.sin(end_heading)),
        ):
            start = (here, speed * cosine, acceleration * cosine + speed * rate * sine)
            end = (there, end_speed * end_cosine, end_acceleration * end_cosine + end_speed * end_rate * end_sine)
            line.append(np.polynomial.polynomial.polyval(np.arange(1, 21) * 0.1, quintic_by_polyfit(start, end, 2.1)))
        before = (x, y)
        for k in range(20):
            point = line[0][k], line[1][k]
            future[k] = (*point, np.arctan2(point[1] - before[1], point[0] - before[0]))
            before = point
        recenter(out, b, (x, y, heading))
        c, s = np.cos(heading), np.sin(heading)
        out["ego_current_state"][b] = [
            0,
            0,
            1,
            0,
            c * vx + s * vy,
            c * vy - s * vx,
            c * ax + s * ay,
            c * ay - s * ax,
            steering,
            rate,
        ]
    return out


def recenter(out, b, center):
    x, y, heading = center
    turn = np.array([[np.cos(heading), np.sin(heading)], [-np.sin(heading), np.cos(heading)]])
    for name in ("ego_agent_future", *NAMES):
        rows = out[name][b].reshape(-1, out[name].shape[-1])
        for row in rows:
            if name != "ego_agent_future" and not row.any():
                continue
            row[:2] = turn @ (row[:2] - (x, y))
            if name.endswith("future"):
                row[2] = np.angle(np.exp(1j * (row[2] - heading)))
            for k in {"neighbor_agents_past": (2, 4), "static_objects": (2,)}.get(
                name, (2, 4, 6) if "lanes" in name else ()
            ):
                row[k : k + 2] = turn @ row[k : k + 2]


def test_a_batch_is_perturbed_as_the_contract_says():
    batch = sample_batch()
    for rows in batch.values():
        rows.flags.writeable = False
    generator = np.random.default_rng(7)
    chosen, uniform = generator.random(16) >= 0.5, generator.random((16, 9))
    found = perturb(batch, np.random.default_rng(7))
    expected = reference(batch, uniform, chosen)
    assert set(found) == set(batch)
    for name, rows in expected.items():
        assert found[name].dtype == batch[name].dtype
        np.testing.assert_allclose(found[name], rows, atol=2e-5, err_msg=name)
    moved = (found["lanes"] != batch["lanes"]).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(moved, chosen & (batch["ego_current_state"][:, 4] >= 2))
    np.testing.assert_array_equal(found["ego_current_state"][:, :4], np.broadcast_to([0, 0, 1, 0], (16, 4)))


def test_the_same_seed_gives_the_same_batch_and_probability_0_none():
    batch = sample_batch()
    one, other = (perturb(batch, np.random.default_rng(3)) for _ in range(2))
    for name in batch:
        np.testing.assert_array_equal(one[name], other[name])
    still = perturb(batch, np.random.default_rng(3), Perturbation(probability=0.0))
    for name in batch:
        np.testing.assert_array_equal(still[name], batch[name])


def test_the_way_back_joins_the_future_smoothly():
    batch = sample_batch(8)
    current, future = batch["ego_current_state"].astype(float), batch["ego_agent_future"].astype(float)
    current[:, 4] += 3
    state = perturbed_state(current, np.full((8, 9), 0.9), Perturbation())
    path = way_back(state, future, Perturbation())
    assert path.shape == (8, 20, 3)
    steps = np.diff(np.concatenate([state[:, None, :2], path[..., :2], future[:, 20:22, :2]], axis=1), axis=1)
    assert np.abs(np.diff(steps, axis=1)).max() < 0.2  # no jump of speed above 2 m/s in a step of 0.1 s


def test_a_sample_whose_future_ends_early_is_left_alone():
    batch = sample_batch()
    valid = np.ones((16, 80), bool)
    valid[:8, 15:] = False
    batch["ego_agent_future_valid"] = valid
    batch["ego_agent_future"][~valid] = 0
    found = perturb(batch, np.random.default_rng(1), Perturbation(probability=1.0))
    np.testing.assert_array_equal(found["lanes"][:8], batch["lanes"][:8])
    assert not found["ego_agent_future"][~valid].any()
    with pytest.raises(SchemaError, match="expected a future of more than 20 steps"):
        perturb(
            {name: rows[:, :20] if name == "ego_agent_future" else rows for name, rows in sample_batch().items()},
            np.random.default_rng(0),
        )
