"""The demo's map, read back: its lanes lie where the drive's own road has them, in CARLA's frame turned right-handed."""

import gzip
import json

import numpy as np
import pytest

from pipeline.demo.annotation import world_from_plain
from pipeline.demo.bench2drive import write_bench2drive_clip
from pipeline.demo.driving import LANE_MIDDLE_M, plan_drive
from pipeline.demo.road import LANE_M
from pipeline.demo.town import BEYOND_M, START_M, write_town_map
from pipeline.maps import load_map


def road_points(seed, across_m):
    """Return points along the road, x and y right-handed, from the road's own formula."""
    road = plan_drive(0.1, seed).road
    along = np.arange(START_M, road.bend_stop_m + BEYOND_M, 0.01)
    x, y, _ = road.place(along, across_m).T
    placed = world_from_plain(seed) @ np.stack([x, y, np.zeros_like(x), np.ones_like(x)])
    return np.stack([placed[0], -placed[1]], axis=1)


def driving_lines(graph):
    """Return x and y of the centre of each driving lane."""
    lines = np.split(graph.center_m[:, :2], graph.offsets[1:-1])
    return [line for line, kind in zip(lines, graph.type_index, strict=True) if graph.types[kind] == "driving"]


def distances(points, line):
    return np.array([np.hypot(*(line - point).T).min() for point in points])


@pytest.mark.parametrize("seed", [0, 1])  # a bend to the right, and one to the left
def test_the_lanes_of_the_map_are_those_of_the_road(tmp_path, seed):
    graph = load_map(write_town_map(tmp_path / "Town01.xodr", seed=seed))
    right, left = road_points(seed, LANE_MIDDLE_M), road_points(seed, -LANE_MIDDLE_M)
    sides = {1: 0, -1: 0}
    for line in driving_lines(graph):
        offsets = {1: distances(line[::20], right).max(), -1: distances(line[::20], left).max()}
        side = min(offsets, key=offsets.get)
        assert offsets[side] < 0.02
        sides[side] += 1
        reference = right if side == 1 else left[::-1]  # traffic drives on the right: the other lane leads back
        ends = [int(np.hypot(*(reference - point).T).argmin()) for point in (line[0], line[-1])]
        assert ends[0] < ends[1]
    assert sides[1] == sides[-1] > 10
    assert LANE_MIDDLE_M * 2 == LANE_M


def test_the_car_drives_on_the_map_written_beside_its_clip(tmp_path):
    clip = write_bench2drive_clip(tmp_path, num_steps=60, size=(9, 16), cameras=(), seed=0)
    line = np.concatenate(driving_lines(load_map(write_town_map(tmp_path / "Town01.xodr.gz", seed=0))))
    for path in sorted((clip / "anno").iterdir()):
        ego = json.loads(gzip.decompress(path.read_bytes()))["bounding_boxes"][0]
        x, y, _ = ego["location"]
        assert np.hypot(*(line - [x, -y]).T).min() < 0.8  # the wheel is turned over 6 m, so bends are cut a little
