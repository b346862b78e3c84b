"""Planner samples of a tracks store: computed when they are asked for, by the kernels that compute stored ones."""

import json
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from pipeline.maps import parse_map
from pipeline.planner_arrays import planner_params, planner_shapes
from pipeline.store.metadata import DatasetInfo
from pipeline.store.rows import RowReader
from pipeline.store.tables import read_table
from pipeline.track_arrays import HAS_TRACKS
from schemas.errors import DatasetError
from schemas.planner import PlannerParams
from schemas.recipe import PlannerRecipe
from tasks.planner import Scene, scene_block
from tasks.planner_lanes import PlannerLanes, prepare_lanes
from tasks.planner_normalize import normalize_observation, stored_normalization
from tasks.track_rows import scene_of_rows

_BLOCK_STEPS = 128
"""Steps of which all room for actors is held at once while an episode is read."""


KEPT_NBYTES = 4 << 30
"""Memory for prepared episodes, unless another is asked for."""


class TrackScenes:
    """The episodes of a tracks store, each prepared when a sample of it is first asked for, and kept while there is room.

    Parameters
    ----------
    info
        The dataset.
    kept_nbytes
        Memory for prepared episodes, those used last.
    """

    def __init__(self, info: DatasetInfo, kept_nbytes: int = KEPT_NBYTES) -> None:
        self.kept_nbytes = kept_nbytes
        self.recipe = PlannerRecipe(**info.recipe["planner"])
        self.params = planner_params(self.recipe, 10.0)
        self.shapes = planner_shapes(self.params)
        self._rows = RowReader(info)
        episodes = read_table(info, "episodes", ["start", "stop", "details"]).to_pylist()
        self._bounds = np.array([(row["start"], row["stop"]) for row in episodes], np.int64).reshape(-1, 2)
        self._towns = [str(json.loads(row["details"]).get("town", "")) for row in episodes]
        self._documents = {row["town"]: row["document"] for row in read_table(info, "maps").to_pylist()}
        self._lanes: dict[str, PlannerLanes] = {}
        self._scenes: OrderedDict[int, tuple[Scene, int]] = OrderedDict()
        self._lock = threading.Lock()

    def block(self, steps: Int64[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        """Return tensors, masks and extras of samples, ``name -> [n, ...]``, observations normalised as the recipe says."""
        block = {name: np.empty((len(steps), *shape), dtype) for name, (_, shape, dtype) in self.shapes.items()}
        episodes = np.searchsorted(self._bounds[:, 1], steps, side="right")
        for episode in np.unique(episodes).tolist():
            (rows,) = np.nonzero(episodes == episode)
            scene, first = self._scene(episode)
            for name, found in scene_block(scene, steps[rows] - first).items():
                block[name][rows] = found
        return normalize_observation(block, stored_normalization(self.recipe.normalize))

    def _scene(self, episode: int) -> tuple[Scene, int]:
        """Return a prepared episode, and the step of the dataset at which its grid begins."""
        with self._lock:  # a second thread that asks for the same waits for the first
            if episode not in self._scenes:
                self._scenes[episode] = self._prepare(episode)
                while (
                    len(self._scenes) > 1 and sum(_nbytes(one) for one, _ in self._scenes.values()) > self.kept_nbytes
                ):
                    self._scenes.popitem(last=False)
            self._scenes.move_to_end(episode)
            return self._scenes[episode]

    def _prepare(self, episode: int) -> tuple[Scene, int]:
        start, stop = self._bounds[episode].tolist()
        steps = start + np.flatnonzero(self._rows.read(HAS_TRACKS, start, stop))
        names = ("tracks_ego", "tracks_flags", "tracks_lights")
        rows: dict[str, Any] = {name: self._rows.take(name, steps) for name in names}
        rows["tracks_lights"][~self._rows.take("is_anchor", steps)] = -1  # their chunks are absent, which reads as zero
        rows |= self._actors(steps)
        axle_m, wheel_base_m = rows["tracks_ego"][0, -2:].tolist()
        axle = (axle_m, *self.params.rear_axle[1:])
        params = replace(self.params, rear_axle=axle, wheel_base_m=wheel_base_m)
        return scene_of_rows(rows, self._map(self._towns[episode], params), params), int(steps[0])

    def _actors(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of the actors that are there, end to end, and the place of each one's step among ``steps``."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("tracks_actors", "tracks_actor_numbers")}
        places = []
        for start in range(0, len(steps), _BLOCK_STEPS):
            some = steps[start : start + _BLOCK_STEPS]
            whole = {name: self._rows.take(name, some) for name in parts}
            place, slot = np.nonzero(whole["tracks_actor_numbers"][..., 0] >= 0)
            places.append(place + start)
            for name, rows in whole.items():
                parts[name].append(rows[place, slot])
        return {
            **{name: np.concatenate(rows) for name, rows in parts.items()},
            "tracks_actor_steps": np.concatenate(places),
        }

    def _map(self, town: str, params: PlannerParams) -> PlannerLanes:
        if town not in self._lanes:
            if town not in self._documents:
                raise DatasetError(
                    f"expected the map of {town!r} in the dataset, found {sorted(self._documents)}; run `headrace verify`"
                )
            self._lanes[town] = prepare_lanes(parse_map(self._documents[town]), params)
        return self._lanes[town]


def _nbytes(scene: Scene) -> int:
    states = (*scene.by_step, *scene.by_actor, *scene.tracks.arrays().values())
    return sum(array.nbytes for array in states)
