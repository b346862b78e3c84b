"""A short drive, in numbers: slow down at a red light while someone crosses, go on green, follow the bend.

Everything here is in road coordinates and seconds; :mod:`pipeline.demo.bench2drive` turns it into CARLA's world.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from pipeline.demo import props
from pipeline.demo.road import Road
from pipeline.demo.scene import Colour, Light
from pipeline.demo.sky import Weather

LANE_MIDDLE_M, WHEELBASE_M, MAX_STEER_RAD = 1.75, 2.86, float(np.radians(70.0))
FIRST_PARKED = 140
"""Vehicles with this number and higher are parked."""
_FINE_HZ = 200

_PAINTS: tuple[Colour, ...] = (
    (0.72, 0.10, 0.09), (0.12, 0.28, 0.58), (0.85, 0.85, 0.86), (0.16, 0.17, 0.19),
    (0.86, 0.62, 0.10), (0.16, 0.42, 0.33), (0.50, 0.53, 0.57), (0.45, 0.16, 0.38),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """One thing of the world at one instant, in plain coordinates before the world is turned."""

    kind: str
    """``vehicle``, ``static_vehicle``, ``walker``, ``traffic_light``, ``speed_sign``, ``cone``."""
    number: int
    """CARLA's id."""
    x_m: float
    y_m: float
    heading_rad: float
    along_m: float
    across_m: float
    speed_m_s: float = 0.0
    colour: Colour = (0.5, 0.5, 0.5)
    state: int = 0
    """A light's state, a walker's stride, 1 for a braking car."""
    phase_rad: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ego:
    """The ego vehicle at one instant."""

    x_m: float
    y_m: float
    heading_rad: float
    speed_m_s: float
    acceleration_m_s2: float
    yaw_rate_rad_s: float
    steer: float
    throttle: float
    brake: float
    along_m: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """All that happens, as a function of time; :func:`plan_drive` makes one from a seed."""

    road: Road
    weather: Weather
    green_s: float
    paints: tuple[Colour, ...]
    time_s: Float[np.ndarray, "tick"] = field(repr=False)
    ego: Float[np.ndarray, "tick 6"] = field(repr=False)
    """x, y, heading, speed, acceleration, curvature at every tick of 5 ms."""
    parked_m: tuple[float, ...] = ()

    def ego_at(self, time_s: float) -> Ego:
        """Return the ego vehicle, its controls by a kinematic bicycle."""
        x, y, heading, speed, acceleration, curvature = (
            float(np.interp(time_s, self.time_s, column)) for column in self.ego.T
        )
        steer = float(np.arctan(WHEELBASE_M * curvature) / MAX_STEER_RAD)
        pedal = acceleration + 0.02 * speed
        along = float(self.road.locate(np.array(x), np.array(y))[0])
        return Ego(
            x_m=x, y_m=y, heading_rad=heading, speed_m_s=speed, acceleration_m_s2=acceleration,
            yaw_rate_rad_s=speed * curvature, steer=steer, along_m=along,
            throttle=float(np.clip(pedal / 4, 0, 1)), brake=float(np.clip(-pedal / 4, 0, 1)),
        )  # fmt: skip

    def light_at(self, time_s: float) -> int:
        """Return the state of the traffic light, as CARLA numbers it."""
        return props.GREEN if time_s >= self.green_s else props.RED

    def actors_at(self, time_s: float) -> list[Actor]:
        """Return everything but the ego, in a fixed order and with fixed numbers."""
        end = self.road.crossing_m[1]
        parked = []
        for place, along in enumerate(self.parked_m):
            kind = "static_vehicle" if place % 3 == 2 else "vehicle"
            car = self._stand(kind, FIRST_PARKED + place, along, 4.68)
            parked.append(replace(car, colour=self.paints[(4 + place) % len(self.paints)]))
        light = self._stand("traffic_light", 60, end + 1.2, 6.6)
        cones = [self._stand("cone", 170 + place, end + 9 + 2.2 * place, 3.05 - 0.1 * place) for place in range(3)]
        signs = [replace(light, state=self.light_at(time_s)), self._stand("speed_sign", 63, end - 9.5, 6.7)]
        return [*self._traffic(time_s), *parked, *self._walkers(time_s), *signs, *cones]

    def _traffic(self, time_s: float) -> list[Actor]:
        """Return who else drives: one ahead, one waiting on the other side, one that has passed, one behind."""
        arriving_m, arriving_m_s = _brake_to(40.0, self.road.crossing_m[1] + 4.6, 7.5, time_s)
        late = self.ego_at(max(time_s - 0.6, 0.0))
        behind_m = late.along_m - 10.5 - 3.0 * max(0.6 - time_s, 0.0)
        cars = [
            (26.0 + 5.0 * time_s, LANE_MIDDLE_M, 5.0, False),
            (arriving_m, -LANE_MIDDLE_M, arriving_m_s, 0.0 < arriving_m_s < 7.5),
            (9.0 - 8.0 * time_s, -LANE_MIDDLE_M, 8.0, False),
            (behind_m, LANE_MIDDLE_M, late.speed_m_s, late.brake > 0),
        ]
        traffic = []
        for place, (along, across, speed, braking) in enumerate(cars):
            car = self._stand("vehicle", 120 + place, along, across, turn_rad=0.0 if across > 0 else np.pi)
            traffic.append(replace(car, speed_m_s=speed, colour=self.paints[place], state=int(braking)))
        return traffic

    def _walkers(self, time_s: float) -> list[Actor]:
        """Return one who crosses from right to left, and two on the pavements."""
        stride, across = 2 * np.pi * 0.95 * time_s, max(2.9 - 1.35 * time_s, -5.0)
        people: list[tuple[float, float, float, float, Colour]] = [
            (sum(self.road.crossing_m) / 2, across, -np.pi / 2, stride if across > -5.0 else 0.0, (0.86, 0.30, 0.12)),
            (14.0 - 1.3 * time_s, 7.4, np.pi, stride + 1.0, (0.20, 0.45, 0.62)),
            (23.0 - 1.2 * time_s, -5.2, np.pi, stride + 2.0, (0.75, 0.70, 0.30)),
        ]
        walkers = []
        for place, (along, side, turn, phase, shirt) in enumerate(people):
            walker = self._stand("walker", 150 + place, along, side, turn_rad=turn)
            walkers.append(replace(walker, colour=shirt, phase_rad=phase))
        return walkers

    def _stand(self, kind: str, number: int, along: float, across: float, *, turn_rad: float = 0.0) -> Actor:
        """Put something beside the road's middle, turned from the road's heading."""
        x, y, heading = (float(value) for value in self.road.place(along, across))
        return Actor(
            kind=kind, number=number, x_m=x, y_m=y, heading_rad=heading + turn_rad, along_m=along, across_m=across
        )


def plan_drive(duration_s: float, seed: int) -> Drive:
    """Lay out a road and a drive along it; equal seeds give equal drives."""
    rng = np.random.default_rng([seed, 1])
    turn = 1.0 if seed % 2 == 0 else -1.0
    road = Road(
        bend_start_m=20.5 + rng.uniform(0, 1), bend_radius_m=24.0 + rng.uniform(0, 2), bend_rad=float(np.radians(70.0)),
        turn=turn, stop_line_m=12.5, crossing_m=(14.0, 17.0),
    )  # fmt: skip
    green_s = 1.8 + rng.uniform(0, 0.2)
    time_s = np.arange(int(np.ceil((duration_s + 1.0) * _FINE_HZ))) / _FINE_HZ
    order = rng.permutation(len(_PAINTS))
    return Drive(
        road=road, weather=WEATHERS[seed % len(WEATHERS)], green_s=green_s, paints=tuple(_PAINTS[i] for i in order),
        time_s=time_s, ego=_ego_path(road, time_s, green_s), parked_m=(-13.0, -6.5, 3.0, 29.0, 42.0, 48.5, 62.0),
    )  # fmt: skip


def _ego_path(road: Road, time_s: np.ndarray, green_s: float) -> Float[np.ndarray, "tick 6"]:
    """Integrate speed and curvature; the wheel is turned over 6 m around both ends of the bend."""
    knots = [0.0, 0.3, green_s, green_s + 0.6, green_s + 2.6, green_s + 3.4]
    acceleration = np.interp(time_s, knots, [-1.0, -2.4, -2.0, 2.4, 2.4, 0.0])
    speed = np.maximum(6.4 + _integral(acceleration, time_s), 1.2)
    speed = np.minimum(speed, 8.2)
    acceleration = np.gradient(speed, time_s)
    distance = _integral(speed, time_s)
    radius = road.bend_radius_m - road.turn * LANE_MIDDLE_M
    ramp, stop = 3.0, road.bend_start_m + radius * road.bend_rad
    knots = [road.bend_start_m - ramp, road.bend_start_m + ramp, stop - ramp, stop + ramp]
    curvature = road.turn / radius * np.interp(distance, knots, [0.0, 1.0, 1.0, 0.0])
    heading = _integral(curvature * speed, time_s)
    x, y = _integral(speed * np.cos(heading), time_s), LANE_MIDDLE_M + _integral(speed * np.sin(heading), time_s)
    return np.stack([x, y, heading, speed, acceleration, curvature], axis=1)


def _integral(values: np.ndarray, time_s: np.ndarray) -> np.ndarray:
    """Integrate from zero by the trapezoidal rule."""
    return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2 * np.diff(time_s))])


def _brake_to(start_m: float, stop_m: float, speed_m_s: float, time_s: float) -> tuple[float, float]:
    """Drive backwards along the road and come to rest at ``stop_m``: where, and how fast."""
    way = start_m - stop_m
    brake_s = 2.2
    cruise_s = max(way / speed_m_s - brake_s / 2, 0.0)
    braking = float(np.clip(time_s - cruise_s, 0.0, brake_s))
    gone = speed_m_s * (min(time_s, cruise_s) + braking - braking**2 / (2 * brake_s))
    return start_m - gone, speed_m_s * (1 - braking / brake_s)


WEATHERS = (
    Weather(
        light=Light(towards_sun=(-0.50, 0.62, 0.62), ambient=0.62, haze=(0.78, 0.86, 0.92), haze_m=190.0),
        zenith=(0.23, 0.47, 0.80), horizon=(0.74, 0.85, 0.94), clouds=0.48,
    ),
    Weather(
        light=Light(towards_sun=(0.80, -0.50, 0.35), ambient=0.60, haze=(0.92, 0.80, 0.68), haze_m=130.0),
        zenith=(0.36, 0.44, 0.66), horizon=(0.97, 0.80, 0.62), clouds=0.55,
    ),
    Weather(
        light=Light(towards_sun=(-0.30, 0.50, 0.80), ambient=0.74, diffuse=0.30, haze=(0.78, 0.80, 0.82), haze_m=90.0),
        zenith=(0.55, 0.60, 0.66), horizon=(0.80, 0.82, 0.84), clouds=0.80,
    ),
)  # fmt: skip
"""A clear day, a low sun, an overcast sky."""
