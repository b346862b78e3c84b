"""Small worlds for planner tests: lane graphs from centre lines, and tracks from functions of time."""

import numpy as np

from schemas.lanes import LaneGraph, Signals
from schemas.tracks import ActorClass, LightState, Tracks

WIDTH_M = 3.5


def line(start, stop, spacing_m=1.0):
    start, stop = np.array(start, float), np.array(stop, float)
    count = max(int(np.ceil(np.hypot(*(stop - start)) / spacing_m)), 1) + 1
    return start + np.linspace(0, 1, count)[:, None] * (stop - start)


def bend(start, heading, stop, spacing_m=1.0):
    """A cubic Bezier curve that leaves along ``heading`` and meets ``stop`` (x, y, heading)."""
    start, end = np.array(start, float), np.array(stop[:2], float)
    reach = 0.4 * np.hypot(*(end - start))
    control = (
        start + reach * np.array([np.cos(heading), np.sin(heading)]),
        end - reach * np.array([np.cos(stop[2]), np.sin(stop[2])]),
    )
    t = np.linspace(0, 1, int(np.hypot(*(end - start)) / spacing_m * 1.3) + 2)[:, None]
    return (1 - t) ** 3 * start + 3 * t * (1 - t) ** 2 * control[0] + 3 * t**2 * (1 - t) * control[1] + t**3 * end


def make_graph(lanes, signals=()):
    """``lanes``: dicts of center, ids, junction, along, limit, to, kind, flipped; ``signals``: (id, position, lanes)."""
    kinds = tuple(dict.fromkeys(lane.get("kind", "driving") for lane in lanes)) or ("driving",)
    centers, lefts, rights = [], [], []
    for lane in lanes:
        center = np.asarray(lane["center"], float)
        ahead = np.gradient(center, axis=0)
        normal = np.stack([-ahead[:, 1], ahead[:, 0]], 1) / np.hypot(*ahead.T)[:, None]
        left, right = center + normal * WIDTH_M / 2, center - normal * WIDTH_M / 2
        if lane.get("flipped"):
            left = left[::-1]
        for found, points in ((centers, center), (lefts, left), (rights, right)):
            found.append(np.concatenate([points, np.zeros((len(points), 1))], 1))
    offsets = np.concatenate([[0], np.cumsum([len(c) for c in centers])]).astype(np.int64)
    to = [sorted(lane.get("to", [])) for lane in lanes]
    back = [sorted(i for i, row in enumerate(to) if lane in row) for lane in range(len(lanes))]
    stack = lambda rows: np.concatenate([np.zeros((0, 3)), *rows])  # noqa: E731
    ragged = lambda rows: np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)  # noqa: E731
    flat = lambda rows: np.array([v for row in rows for v in row], np.int32)  # noqa: E731
    points = int(offsets[-1])
    return LaneGraph(
        ids=np.array([lane.get("ids", (i, 0, -1)) for i, lane in enumerate(lanes)], np.int32).reshape(-1, 3),
        is_along_s=np.array([lane.get("along", True) for lane in lanes], bool),
        junction_id=np.array([lane.get("junction", -1) for lane in lanes], np.int32),
        types=kinds,
        type_index=np.array([kinds.index(lane.get("kind", "driving")) for lane in lanes], np.int16),
        speed_limit_mps=np.array([lane.get("limit") or 0.0 for lane in lanes], np.float32),
        has_speed_limit=np.array([lane.get("limit") is not None for lane in lanes], bool),
        offsets=offsets,
        s_m=np.zeros(points),
        center_m=stack(centers),
        left_m=stack(lefts),
        right_m=stack(rights),
        width_m=np.full(points, WIDTH_M),
        successor_offsets=ragged(to),
        successors=flat(to),
        predecessor_offsets=ragged(back),
        predecessors=flat(back),
        signals=Signals(
            ids=tuple(s[0] for s in signals),
            types=("1000001",) * len(signals),
            controllers=("",) * len(signals),
            position_m=np.array([[*s[1], 0.0] for s in signals], float).reshape(-1, 3),
            heading_rad=np.zeros(len(signals)),
            lane_offsets=ragged([s[2] for s in signals]),
            lanes=flat([sorted(s[2]) for s in signals]),
        ),
    )


def make_tracks(ego, actors=(), lights=(), *, time_s=None, ego_valid=None, town="Town"):
    """``ego``: poses [step, 3] of the origin; ``actors``: dicts of poses [step, 3], kind, size, valid; ``lights``: (signal, states)."""
    ego = np.asarray(ego, float)
    n = len(ego)
    time_s = np.arange(n) / 10 if time_s is None else np.asarray(time_s, float)
    rate = lambda values: np.gradient(values, time_s, axis=0) if n > 1 else np.zeros_like(values)  # noqa: E731
    flat = np.zeros((n, 1))
    poses = np.array([a["poses"] for a in actors], float).reshape(len(actors), n, 3).transpose(1, 0, 2)
    valid = np.array([a.get("valid", np.ones(n, bool)) for a in actors], bool).reshape(len(actors), n).T
    there = np.ones(n, bool) if ego_valid is None else np.asarray(ego_valid, bool)
    sizes = np.array([a.get("size", (4.5, 1.9)) for a in actors], float).reshape(-1, 2)
    velocity = rate(ego[:, :2])
    return Tracks(
        town=town,
        time_s=time_s,
        source_step=np.arange(n),
        is_interpolated=np.zeros(n, bool),
        is_break=np.zeros(n, bool),
        ego_length_m=4.9,
        ego_width_m=1.8,
        ego_valid=there,
        ego_position=np.concatenate([ego[:, :2], flat], 1) * there[:, None],
        ego_rotation=np.concatenate([flat + 0.01, flat - 0.02, ego[:, 2:]], 1) * there[:, None],
        ego_velocity=velocity * there[:, None],
        ego_acceleration=rate(velocity) * there[:, None],
        actor_id=np.arange(100, 100 + len(actors)),
        actor_class=np.array([a.get("kind", ActorClass.VEHICLE) for a in actors], np.int8),
        actor_length_m=sizes[:, 0].copy(),
        actor_width_m=sizes[:, 1].copy(),
        actor_valid=valid,
        actor_position=np.concatenate([poses[..., :2], np.zeros((n, len(actors), 1))], 2) * valid[..., None],
        actor_heading=poses[..., 2] * valid,
        actor_velocity=(rate(poses[..., :2]) if len(actors) else np.zeros((n, 0, 2))) * valid[..., None],
        light_id=np.arange(len(lights)),
        light_signal=tuple(light[0] for light in lights),
        light_lane=np.zeros((len(lights), 2), np.int64),
        light_position=np.full((len(lights), 3), np.nan),
        light_trigger=np.full((len(lights), 5), np.nan),
        light_state=np.array([light[1] for light in lights], np.int8).reshape(len(lights), n).T,
    )


def drive(path, speed_m_s, num_steps, start_m=0.0, step_s=0.1):
    """Poses [step, 3] along a polyline."""
    path = np.asarray(path, float)
    at = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    wanted = start_m + np.arange(num_steps) * step_s * speed_m_s
    xy = np.stack([np.interp(wanted, at, path[:, k]) for k in (0, 1)], 1)
    ahead = np.stack(
        [np.interp(wanted + 0.5, at, path[:, k]) - np.interp(wanted - 0.5, at, path[:, k]) for k in (0, 1)], 1
    )
    return np.concatenate([xy, np.unwrap(np.arctan2(ahead[:, 1], ahead[:, 0]))[:, None]], 1)


def crossing():
    """Four arms of two lanes a direction; returns lanes, signals and names: ("in"|"out", arm, lane), (arm, turn, lane)."""
    lanes, number = [], {}

    def add(name, **lane):
        number[name] = len(lanes)
        lanes.append(lane)

    place = {}
    for arm in range(4):
        angle = arm * np.pi / 2
        ahead = np.array([np.cos(angle), np.sin(angle)])  # from the centre outwards
        side = np.array([ahead[1], -ahead[0]])  # right of someone who leaves
        for k in (0, 1):
            offset = (k + 0.5) * WIDTH_M
            out = line(15 * ahead + offset * side, 90 * ahead + offset * side)
            into = line(90 * ahead - offset * side, 15 * ahead - offset * side)
            limit = (13.9, None)[arm % 2]
            add(("out", arm, k), center=out, ids=(arm, 0, -(k + 1)), along=True, limit=limit)
            add(("in", arm, k), center=into, ids=(arm, 0, k + 1), along=False, limit=limit, flipped=k == 1)
            place["out", arm, k], place["in", arm, k] = out[0], into[-1]
    for arm in range(4):
        inward = arm * np.pi / 2 + np.pi
        for turn, other in (("right", (arm + 1) % 4), ("straight", (arm + 2) % 4), ("left", (arm + 3) % 4)):
            for k in (0, 1) if turn == "straight" else (1,) if turn == "right" else (0,):
                end = (*place["out", other, k], other * np.pi / 2)
                center = bend(place["in", arm, k], inward, end)
                add(
                    (arm, turn, k),
                    center=center,
                    ids=(100 + 10 * arm + len(lanes), 0, -1),
                    junction=7,
                    to=[number["out", other, k]],
                )
                lanes[number["in", arm, k]].setdefault("to", []).append(number[arm, turn, k])
    signals = []
    for arm in range(4):
        inside = [n for name, n in number.items() if name[0] == arm]
        governed = inside if arm % 2 else [number["in", arm, 0], number["in", arm, 1]]  # both ways a map may say it
        signals.append((f"s{arm}", (20 * np.cos(arm * np.pi / 2), 20 * np.sin(arm * np.pi / 2)), governed))
    return lanes, signals, number


def path_of(lanes, numbers):
    return np.concatenate([np.asarray(lanes[n]["center"]) for n in numbers])


def nearest_of(lanes, numbers, poses):
    """Which of ``numbers`` (graph lanes in the order driven) each pose lies on: the nearest centre, never going back."""
    found, at = [], 0
    for x, y, _ in poses:
        away = [np.hypot(*(np.asarray(lanes[n]["center"]) - (x, y)).T).min() for n in numbers]
        if at + 1 < len(numbers) and away[at + 1] < away[at]:
            at += 1
        found.append(numbers[at])
    return found


LIGHTS = (LightState.GREEN, LightState.YELLOW, LightState.RED, LightState.UNKNOWN)
