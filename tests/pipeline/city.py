"""A made-up city in CARLA's own formats: an OpenDRIVE map of crossings, and recorder logs of dense traffic in it.

Nodes of a grid, moved and turned so that nothing lies along an axis, are joined by roads of two lanes a direction; at every crossing
lanes lead straight on, left and right. Cars and bicycles drive along the lanes at changing speeds and not quite in their middle, people walk
beside them, cones stand about, lights change: as many digits differ from step to step as in a recording.
"""

import itertools
from pathlib import Path

import numpy as np

from schemas.lanes import LaneGraph
from tasks.opendrive import read_opendrive
from tests.pipeline.readers import log_writer
from tests.tasks.xodr_builder import junction, lane, link, piece, road, section, town

SPACING_M, GAP_M, LANE_M, TURN_RAD = 85.0, 14.0, 3.5, 0.37
STEP_S = 0.1
COUNTS = {"vehicle.audi.tt": 90, "vehicle.any.bike": 25, "walker.pedestrian.0001": 45, "static.prop.mesh": 30}
SIZES_M = {
    "vehicle.audi.tt": (4.2, 1.9), "vehicle.any.bike": (1.8, 0.6), "walker.pedestrian.0001": (0.4, 0.4),
    "static.prop.mesh": (0.34, 0.34),
}  # fmt: skip
MIDDLE = '<lane id="0" type="none" level="false"/>'


def _turned(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


class City:
    """The map: ``document`` is its OpenDRIVE, ``graph`` its lanes, ``stops`` where lights hold (x, y, heading)."""

    def __init__(self, num_nodes: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        grid = list(itertools.product(range(num_nodes), range(num_nodes)))
        self.nodes = {node: _turned(TURN_RAD) @ (SPACING_M * np.array(node) + rng.uniform(-9, 9, 2)) for node in grid}
        self.roads: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        for i, j in grid:
            for other in ((i + 1, j), (i, j + 1)):
                if other in self.nodes:
                    self.roads[len(self.roads) + 1] = ((i, j), other)
        self.stops: list[tuple[float, float, float]] = []
        parts = [self._road(number) for number in self.roads]
        self.next_road = 1000
        for number, node in enumerate(grid):
            parts += self._crossing(node, 10_000 + number)
        self.document = town(*parts)
        self.graph: LaneGraph = read_opendrive(self.document)

    def _ends(self, number: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return start and end of a road's reference line, and its heading."""
        start, end = (self.nodes[node] for node in self.roads[number])
        ahead = (end - start) / np.hypot(*(end - start))
        return start + GAP_M * ahead, end - GAP_M * ahead, float(np.arctan2(ahead[1], ahead[0]))

    def _road(self, number: int) -> str:
        start, end, heading = self._ends(number)
        length = float(np.hypot(*(end - start)))
        lanes = [lane(side * k, width=LANE_M, type="driving") for side in (1, -1) for k in (1, 2)]
        walks = [lane(side * 3, width=2.0, type="sidewalk") for side in (1, -1)]
        before, after = (10_000 + list(self.nodes).index(node) for node in self.roads[number])
        links = link("predecessor", before, kind="junction") + link("successor", after, kind="junction")
        limit = f'<type s="0.0" type="town"><speed max="{30 + 10 * (number % 3)}" unit="km/h"/></type>'
        plan = piece(length=length, x=float(start[0]), y=float(start[1]), heading=heading)
        return road(number, section(*lanes, *walks), length=length, plan=plan, links=links, extra=limit)

    def _crossing(self, node: tuple[int, int], number: int) -> list[str]:
        """Return the roads inside a crossing, and the junction."""
        arms = []  # (road, contact, place of its reference line, heading of someone who drives in)
        for name, nodes in self.roads.items():
            start, end, heading = self._ends(name)
            if nodes[1] == node:
                arms.append((name, "end", end, heading))
            elif nodes[0] == node:
                arms.append((name, "start", start, heading + np.pi))
        parts, connections = [], []
        for arm in arms:
            ahead = np.array([np.cos(arm[3]), np.sin(arm[3])])
            middle = arm[2] + LANE_M * np.array([ahead[1], -ahead[0]]) - 2.0 * ahead
            self.stops.append((float(middle[0]), float(middle[1]), float(arm[3])))
            for other in arms:
                if other[0] == arm[0]:
                    continue
                turn = (other[3] + np.pi - arm[3] + np.pi) % (2 * np.pi) - np.pi
                for k in (1, 2) if abs(turn) < 0.8 else (1,) if turn > 0 else (2,):
                    parts.append(self._connector(number, arm, other, k))
                    sign = -1 if arm[1] == "end" else 1
                    connections.append((arm[0], self.next_road, [(sign * k, -1)]))
                    self.next_road += 1
        return [*parts, junction(number, *connections)]

    def _connector(self, crossing: int, arm: tuple, other: tuple, k: int) -> str:
        """Return a road of one lane from lane ``k`` of one arm to that of another: a Bezier curve as a parametric cubic."""
        out_heading = other[3] + np.pi
        start = arm[2] + (k - 1) * LANE_M * np.array([np.sin(arm[3]), -np.cos(arm[3])])
        end = other[2] + (k - 1) * LANE_M * np.array([np.sin(out_heading), -np.cos(out_heading)])
        local = _turned(-arm[3]) @ (end - start)
        turn = out_heading - arm[3]
        reach = 0.45 * np.hypot(*local)
        points = np.array([[0, 0], [reach, 0], local - reach * np.array([np.cos(turn), np.sin(turn)]), local])
        b, c, d = 3 * (points[1] - points[0]), 3 * (points[0] - 2 * points[1] + points[2]), None
        d = points[3] - 3 * points[2] + 3 * points[1] - points[0]
        t = np.linspace(0, 1, 400)[:, None]
        curve = b * t + c * t**2 + d * t**3
        length = float(np.hypot(*np.diff(curve, axis=0).T).sum())
        terms = " ".join(
            f'{x}{axis}="{float(v[n])!r}"' for n, axis in enumerate("UV") for x, v in zip("abcd", (0 * b, b, c, d))
        )
        shape = f'<paramPoly3 pRange="normalized" {terms}/>'
        leave = -k if arm[1] == "end" else k
        enter = -k if other[1] == "start" else k
        return road(
            self.next_road,
            section(lane(-1, width=LANE_M, before=leave, after=enter)),
            length=length,
            junction=crossing,
            plan=piece(shape, length=length, x=float(start[0]), y=float(start[1]), heading=float(arm[3])),
            links=link("predecessor", arm[0], arm[1]) + link("successor", other[0], other[1]),
        )


def _ways(graph: LaneGraph, kind: str, count: int, length_m: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Return polylines at least ``length_m`` long from lane to lane, beginning at lanes by chance."""
    (lanes,) = np.nonzero(graph.is_type(kind))
    ways = []
    for first in rng.choice(lanes, count):
        points, lane_index, total = [], int(first), 0.0
        while total < length_m:
            center = graph.center_m[graph.points_of(lane_index), :2]
            points.append(center)
            total += float(np.hypot(*np.diff(center, axis=0).T).sum())
            ahead = graph.successors_of(lane_index)
            if not len(ahead):
                break
            lane_index = int(rng.choice(ahead))
        line = np.concatenate(points)
        ways.append(line[np.insert(np.hypot(*np.diff(line, axis=0).T) > 1e-6, 0, True)])
    return ways


def _driven(way: np.ndarray, num_steps: int, speed_m_s: float, rng: np.random.Generator) -> np.ndarray:
    """Return poses (x, y, heading) along a way: at speeds that come and go, a little beside its middle."""
    at = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(way, axis=0).T))])
    phase, time_s = rng.uniform(0, 2 * np.pi, 2), np.arange(num_steps) * STEP_S
    speed = speed_m_s * np.maximum(0.15 + np.sin(0.35 * time_s + phase[0]), 0.0)
    along = rng.uniform(0, 0.3 * at[-1]) + np.cumsum(speed) * STEP_S
    along = at[-1] - np.abs(at[-1] - along % (2 * at[-1]))  # who comes to the end of the world turns round
    beside = 0.25 * np.sin(0.11 * along + phase[1])
    x, y, nx, ny = (np.interp(along + more, at, way[:, axis]) for more in (0.0, 0.7) for axis in (0, 1))
    heading = np.unwrap(np.arctan2(ny - y, nx - x))
    wander = np.cumsum(rng.normal(0, 0.002, num_steps) * (speed > 0))  # who stands, stands still
    return np.stack([x - beside * np.sin(heading), y + beside * np.cos(heading), heading + wander], axis=1)


def _log(city: City, num_steps: int, seed: int, counts: float) -> bytes:
    rng = np.random.default_rng(seed)
    actors = [(1, "vehicle.lincoln.mkz_2020", (4.9, 1.84), _hero(city, num_steps, rng))]
    for blueprint, count in COUNTS.items():
        kind = "driving" if blueprint.startswith("vehicle") else "sidewalk"
        speed = {"vehicle.audi.tt": 9.0, "vehicle.any.bike": 4.0, "walker.pedestrian.0001": 1.3}.get(blueprint, 0.0)
        for way in _ways(city.graph, kind, round(counts * count), 12.0 * num_steps * STEP_S, rng):
            actors.append((len(actors) + 1, blueprint, SIZES_M[blueprint], _driven(way, num_steps, speed, rng)))
    poses = np.array([poses for *_, poses in actors])
    velocity = np.gradient(poses[..., :2], STEP_S, axis=1)
    poses, velocity = poses * (100, -100, -180 / np.pi), velocity * (1, -1)  # CARLA's: left-handed, cm, degrees
    lights = [(5000 + k, place) for k, place in enumerate(city.stops)]
    parts = [log_writer.header("Carla/Maps/City")]
    for step in range(num_steps):
        packets = [
            log_writer.rows(
                6, "I6f", [(a[0], *poses[k, step, :2], 0, 0, 0, poses[k, step, 2]) for k, a in enumerate(actors)]
            ),
            log_writer.rows(8, "I3f?i", [(1, 0.0, 0.4, 0.0, False, 1)]),
            log_writer.rows(12, "I6f", [(a[0], *velocity[k, step], 0, 0, 0, 0) for k, a in enumerate(actors)]),
        ]
        if step % 20 == 0:
            states = [(number, False, 0.0, (k + step // 60) % 3) for k, (number, _) in enumerate(lights)]
            packets.append(log_writer.rows(7, "I?fB", states))
        parts.append(
            log_writer.frame(
                100 + step, STEP_S, step * STEP_S, *(_first(actors, lights) if step == 0 else []), *packets
            )
        )
    return b"".join(parts)


def _hero(city: City, num_steps: int, rng: np.random.Generator) -> np.ndarray:
    """Return the poses of the ego, on a way that begins near the middle of the city."""
    middle = np.mean(list(city.nodes.values()), axis=0)
    ways = _ways(city.graph, "driving", 400, 12.0 * num_steps * STEP_S, rng)
    way = min(ways, key=lambda way: float(np.hypot(*(way - middle).T).mean()))
    return _driven(way, num_steps, 8.0, rng)


def _first(actors: list[tuple], lights: list[tuple]) -> list[bytes]:
    """Return the packets of the first frame: who there is, and how large."""

    def number_of_wheels(blueprint: str) -> dict[str, str]:
        return (
            {"number_of_wheels": "2" if blueprint.endswith("bike") else "4"} if blueprint.startswith("vehicle") else {}
        )

    kinds = {"vehicle": 1, "walker": 2, "static": 0}
    rows = [
        (number, kinds[blueprint.split(".")[0]], (0, 0, 0), (0, 0, 0), blueprint,
         {**number_of_wheels(blueprint), **({"role_name": "hero"} if number == 1 else {}),
          **({"mesh_path": "/Game/SM_ConstructionCone"} if blueprint.startswith("static") else {})})
        for number, blueprint, *_ in actors
    ]  # fmt: skip
    lamps = [
        (number, 3, (100 * x, -100 * y, 0), (0, 0, -np.degrees(heading)), "traffic.traffic_light", {})
        for number, (x, y, heading) in lights
    ]
    boxes = [(number, 0, 0, 75, 50 * size[0], 50 * size[1], 75) for number, _, size, _ in actors]
    volumes = [(number, 0, 0, 50, 200, 330, 100) for number, _ in lights]
    return [log_writer.added(rows + lamps), log_writer.rows(13, "I6f", boxes), log_writer.rows(17, "I6f", volumes)]


def write_city(
    folder: Path, num_steps: int, num_episodes: int = 2, *, num_nodes: int = 6, counts: float = 1.0
) -> tuple[Path, Path]:
    """Write a map and recorder logs of traffic in it, ``counts`` times as much; return the map's file and the folder of the logs."""
    city = City(num_nodes)
    (folder / "logs").mkdir(parents=True)
    (folder / "City.xodr").write_bytes(city.document)
    for episode in range(num_episodes):
        (folder / "logs" / f"{episode}.log").write_bytes(_log(city, num_steps // num_episodes, episode, counts))
    return folder / "City.xodr", folder / "logs"
