"""A sky that stays where it is while the car turns below it: gradient, clouds, sun and hills as one panorama."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8

from pipeline.demo.scene import Camera, Colour, Light

_ROWS, _COLUMNS, _TOP_RAD = 256, 2048, np.radians(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How the world is lit, and CARLA's own words for it."""

    light: Light
    zenith: Colour
    horizon: Colour
    clouds: float
    """Share of the sky, 0 .. 1."""

    def carla(self) -> dict[str, float]:
        """Return the ten fields of an annotation's ``weather``, angles in degrees."""
        sun = np.asarray(self.light.towards_sun) / np.linalg.norm(self.light.towards_sun)
        return {
            "cloudiness": 100.0 * self.clouds, "precipitation": 0.0, "precipitation_deposits": 0.0,
            "wind_intensity": 10.0, "sun_azimuth_angle": float(np.degrees(np.arctan2(sun[1], sun[0]))),
            "sun_altitude_angle": float(np.degrees(np.arcsin(sun[2]))), "fog_density": 2.0, "fog_distance": 0.75,
            "wetness": 0.0, "fog_falloff": 0.1,
        }  # fmt: skip


def panorama(weather: Weather, seed: int) -> UInt8[np.ndarray, "elevation azimuth 3"]:
    """Paint the whole sky once: rows from the horizon up to 60 degrees, columns around from x towards y."""
    rng = np.random.default_rng([seed, 11])
    elevation = np.linspace(0, 1, _ROWS)[:, None, None]
    colours = np.asarray(weather.horizon) + elevation**0.6 * (np.asarray(weather.zenith) - np.asarray(weather.horizon))
    colours = np.broadcast_to(colours, (_ROWS, _COLUMNS, 3))
    colours = colours + _sun(weather.light)[..., None] * np.array([0.9, 0.75, 0.5])
    cover = np.clip((_clouds(rng) - (1 - weather.clouds)) * 2.2, 0, 1) * np.clip(elevation[..., 0] * 9 - 0.7, 0, 1)
    colours = colours + (0.85 * cover)[..., None] * (np.asarray(weather.light.haze) * 1.12 - colours)
    for height, share in ((0.085, 0.75), (0.045, 0.5)):
        ridge = height * (1 + 0.5 * _ring(rng, (3, 5, 9, 14, 23)))[None, :]
        inside = np.clip((ridge - elevation[..., 0]) * 120, 0, 1)[..., None]
        hill = share * np.asarray(weather.light.haze) + (1 - share) * np.array([0.20, 0.28, 0.25])
        colours = colours + inside * (hill - colours)
    return np.rint(np.clip(colours, 0, 1) * 255).astype(np.uint8)


class Sky:
    """The part of a panorama that one camera sees above the horizon."""

    def __init__(self, camera: Camera, num_rows: int) -> None:
        """Prepare for the upper ``num_rows`` rows of a camera given in the ego's frame."""
        rays = camera.rays()[:num_rows]
        elevation = np.arctan2(rays[..., 2], np.hypot(rays[..., 0], rays[..., 1]))
        self._row = np.clip(np.rint(elevation / _TOP_RAD * (_ROWS - 1)), 0, _ROWS - 1).astype(np.intp)
        self._turns = np.arctan2(rays[..., 1], rays[..., 0]) / (2 * np.pi)

    def paint(self, sky: UInt8[np.ndarray, "elevation azimuth 3"], heading_rad: float) -> np.ndarray:
        """Return uint8[row, column, 3] for a car of this heading."""
        turns = self._turns + heading_rad / (2 * np.pi)
        return sky[self._row, np.rint(turns * _COLUMNS).astype(np.intp) % _COLUMNS]


def _ring(rng: np.random.Generator, waves: tuple[int, ...]) -> Float[np.ndarray, "azimuth"]:
    """Return a smooth closed curve of height about 1 around the horizon."""
    around = np.linspace(0, 2 * np.pi, _COLUMNS, endpoint=False)
    phases = rng.uniform(0, 2 * np.pi, len(waves))
    swell = np.sin(np.outer(waves, around) + phases[:, None])
    return np.asarray((1 / np.arange(1, len(waves) + 1)) @ swell)


def _clouds(rng: np.random.Generator) -> Float[np.ndarray, "elevation azimuth"]:
    """Return values about 0 .. 1 of streaky noise without a seam."""
    total = np.zeros((_ROWS, _COLUMNS))
    for octave, strength in enumerate((0.5, 0.3, 0.17, 0.1)):
        rows, columns = 4 * 2**octave, 12 * 2**octave
        cells = rng.uniform(0, 1, (rows + 1, columns))
        row, column = np.linspace(0, rows - 1e-6, _ROWS), np.arange(_COLUMNS) * columns / _COLUMNS
        total += strength * _smooth_lookup(cells, row, column)
    return total


def _smooth_lookup(cells: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Interpolate cells with smooth steps; columns wrap around."""
    top, left = row.astype(np.intp), column.astype(np.intp)
    down, right = _soft_step(row - top)[:, None], _soft_step(column - left)
    after = (left + 1) % cells.shape[1]
    upper = cells[top][:, left] * (1 - right) + cells[top][:, after] * right
    lower = cells[top + 1][:, left] * (1 - right) + cells[top + 1][:, after] * right
    return upper * (1 - down) + lower * down


def _soft_step(share: np.ndarray) -> np.ndarray:
    return share * share * (3 - 2 * share)


def _sun(light: Light) -> Float[np.ndarray, "elevation azimuth"]:
    """Return the glare around the sun, 1 in its middle."""
    elevation = np.linspace(0, _TOP_RAD, _ROWS)[:, None]
    azimuth = np.linspace(0, 2 * np.pi, _COLUMNS, endpoint=False)[None, :]
    sun = np.asarray(light.towards_sun) / np.linalg.norm(light.towards_sun)
    cosine = np.cos(elevation) * (np.cos(azimuth) * sun[0] + np.sin(azimuth) * sun[1]) + np.sin(elevation) * sun[2]
    return 0.55 * np.clip(cosine, 0, 1) ** 60 + np.clip((cosine - 0.9985) * 2000, 0, 1)
