"""CARLA's vehicles by blueprint: full length and width, and for those that drive as ego the place of their axles.

Sizes are twice the extents of ``actor.bounding_box`` of CARLA 0.9.13 to 0.9.15, to the centimetre. Those of the Lincolns are confirmed by
recordings: a Bench2Drive annotation (``mkz_2020``) and a recorder log (``mkz_2017``).
"""

from dataclasses import dataclass

_RENAMED = {
    "vehicle.lincoln.mkz2017": "vehicle.lincoln.mkz_2017",
    "vehicle.lincoln2020.mkz2020": "vehicle.lincoln.mkz_2020",
    "vehicle.lincoln.mkz": "vehicle.lincoln.mkz_2020",
    "vehicle.mercedes-benz.coupe": "vehicle.mercedes.coupe",
    "vehicle.mini.cooperst": "vehicle.mini.cooper_s",
    "vehicle.mustang.mustang": "vehicle.ford.mustang",
    "vehicle.dodge_charger.police": "vehicle.dodge.charger_police",
}
"""Names of CARLA before 0.9.13, and of 0.10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axles:
    """Where a vehicle's wheels are."""

    rear_m: float
    """Rear axle, forward of the vehicle's origin."""
    wheel_base_m: float


SIZES_M: dict[str, tuple[float, float]] = {
    "vehicle.audi.a2": (3.71, 1.79),
    "vehicle.audi.etron": (4.86, 2.03),
    "vehicle.audi.tt": (4.18, 1.99),
    "vehicle.bmw.grandtourer": (4.61, 2.24),
    "vehicle.carlamotors.carlacola": (5.20, 2.63),
    "vehicle.carlamotors.european_hgv": (7.94, 2.89),
    "vehicle.carlamotors.firetruck": (8.47, 2.89),
    "vehicle.chevrolet.impala": (5.36, 2.03),
    "vehicle.citroen.c3": (3.99, 1.85),
    "vehicle.dodge.charger_2020": (5.01, 1.88),
    "vehicle.dodge.charger_police": (4.97, 2.04),
    "vehicle.dodge.charger_police_2020": (5.24, 1.93),
    "vehicle.ford.ambulance": (6.37, 2.35),
    "vehicle.ford.crown": (5.37, 1.80),
    "vehicle.ford.mustang": (4.72, 1.89),
    "vehicle.jeep.wrangler_rubicon": (3.87, 1.91),
    "vehicle.lincoln.mkz_2017": (4.90, 2.13),
    "vehicle.lincoln.mkz_2020": (4.89, 1.84),
    "vehicle.mercedes.coupe": (5.03, 2.15),
    "vehicle.mercedes.coupe_2020": (4.67, 1.81),
    "vehicle.mercedes.sprinter": (5.92, 1.99),
    "vehicle.micro.microlino": (2.21, 1.48),
    "vehicle.mini.cooper_s": (3.81, 1.97),
    "vehicle.mini.cooper_s_2021": (4.55, 2.10),
    "vehicle.mitsubishi.fusorosa": (10.27, 3.94),
    "vehicle.nissan.micra": (3.63, 1.85),
    "vehicle.nissan.patrol": (4.60, 1.93),
    "vehicle.nissan.patrol_2021": (5.57, 2.15),
    "vehicle.seat.leon": (4.19, 1.82),
    "vehicle.tesla.cybertruck": (6.27, 2.39),
    "vehicle.tesla.model3": (4.79, 2.16),
    "vehicle.toyota.prius": (4.51, 2.01),
    "vehicle.volkswagen.t2": (4.48, 2.07),
    "vehicle.volkswagen.t2_2021": (4.44, 1.77),
    "vehicle.bh.crossbike": (1.51, 0.87),
    "vehicle.diamondback.century": (1.66, 0.58),
    "vehicle.gazelle.omafiets": (1.84, 0.66),
    "vehicle.harley-davidson.low_rider": (2.35, 0.77),
    "vehicle.kawasaki.ninja": (2.04, 0.80),
    "vehicle.vespa.zx125": (1.82, 0.87),
    "vehicle.yamaha.yzf": (2.19, 0.87),
}
"""``blueprint -> length, width``."""

AXLES: dict[str, Axles] = {
    # LEAD (autonomousvision/lead) for the axle; 123D (py123d, "extracted from CARLA") for the wheelbase. 123D puts the axle 1.649 m behind the
    # centre, which leaves 0.80 m of car behind it and 1.23 m ahead of the front axle, the reverse of the real car; LEAD's leaves 1.05 and 0.98 m.
    "vehicle.lincoln.mkz_2020": Axles(rear_m=-1.389, wheel_base_m=2.860),
    # Apollo's parameters for this blueprint: length 4.79178, back_to_rear_axle 1.00947, wheel_base 3.00464; the box's centre lies 0.029 m ahead of
    # the origin (CARLA), so that the axle is at 0.029 - 4.79178 / 2 + 1.00947.
    "vehicle.tesla.model3": Axles(rear_m=-1.357, wheel_base_m=3.005),
}
"""``blueprint -> axles``. Only of models whose wheels somebody published: CARLA's catalogue has none, and only a running server tells."""


def vehicle_size(blueprint: str) -> tuple[float, float] | None:
    """Return full length and width, or None where the blueprint is not CARLA's."""
    return SIZES_M.get(_RENAMED.get(blueprint, blueprint))


def vehicle_axles(blueprint: str) -> Axles | None:
    """Return the axles of a blueprint, or None where they are not known."""
    return AXLES.get(_RENAMED.get(blueprint, blueprint))
