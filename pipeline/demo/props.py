"""What stands on and beside the road: cars, people, lights, signs, cones, houses, trees. x is forwards, z up, metres."""

from functools import lru_cache

import numpy as np
from jaxtyping import Float

from pipeline.demo.scene import Colour, Mesh, merge
from pipeline.demo.shapes import box, circle, decal, dimmed, disc, lump, one_part, pose, prism

CAR_HALF = (2.446, 0.918, 0.745)
"""Half length, width and height of CARLA's Lincoln MKZ."""
WALKER_HALF = (0.19, 0.19, 0.93)
LIGHT_HALF = (0.20, 0.24, 0.62)
LIGHT_HEIGHTS_M = (5.1, 2.9)
"""Middle of the lamp box over the lane, and of the one at the pole."""
SIGN_HEIGHT_M, SIGN_RADIUS_M = 2.5, 0.46

RED, AMBER, GREEN = 0, 1, 2
"""CARLA's enumeration of a traffic light's states."""

GLASS, RUBBER, STEEL, DARK = (0.13, 0.17, 0.22), (0.07, 0.07, 0.08), (0.55, 0.57, 0.60), (0.10, 0.10, 0.11)


@lru_cache(maxsize=64)
def car(colour: Colour, braking: bool = False) -> Mesh:
    """Make a saloon about its ground point: white lamps at +x, red ones at -x."""
    length, width, height = CAR_HALF
    waist = 0.92
    body = box((0, 0, 0.58), (length, width, 0.36), colour, taper=(0.97, 0.93))
    cabin = box(
        (-0.25, 0, (waist + 2 * height) / 2), (1.62, 0.82, height - waist / 2), GLASS, taper=(0.60, 0.84), lean_m=-0.05
    )
    roof = box((-0.30, 0, 2 * height - 0.03), (1.02, 0.69, 0.04), colour)
    return one_part(body, _wheels(length, width), _lamps(length, width, braking), cabin, _pillars(colour), roof)


def _wheels(length: float, width: float) -> Mesh:
    hubs = []
    for x in (-0.58 * length, 0.60 * length):
        for side, facing in ((-1, "-y"), (1, "+y")):
            for radius, out, colour in ((0.36, 0.0, RUBBER), (0.19, 0.01, STEEL)):
                hub = disc(radius, colour, facing=facing, num_corners=10)
                hubs.append(hub.placed(pose(x, side * (width + 0.005 + out), 0.36)))
    return merge(hubs)


def _lamps(length: float, width: float, braking: bool) -> Mesh:
    front, back = length + 0.01, -length - 0.01
    white = [_upright(front, y * 0.66 * width, 0.66, 0.22, 0.09) for y in (-1, 1)]
    red = [_upright(back, y * 0.68 * width, 0.74, 0.22, 0.10) for y in (-1, 1)]
    plates = [
        decal(np.array(white), (1, 0, 0), (1.0, 0.97, 0.86), glow=1.0),
        decal(_upright(front, 0, 0.52, 0.42, 0.10)[None], (1, 0, 0), DARK),
        decal(np.array(red), (-1, 0, 0), (1.0, 0.10, 0.06), glow=1.0 if braking else 0.55),
        decal(_upright(back, 0, 0.52, 0.28, 0.08)[None], (-1, 0, 0), (0.9, 0.9, 0.86)),
    ]
    return merge(plates)


def _pillars(colour: Colour) -> Mesh:
    posts = []
    for side in (-1, 1):
        y0, y1, z0, z1 = side * 0.825, side * 0.70, 0.94, 1.42
        for x0, x1 in ((-1.72, -1.18), (-0.32, -0.30), (1.22, 0.66)):
            corners = [[x0 - 0.05, y0, z0], [x0 + 0.05, y0, z0], [x1 + 0.05, y1, z1], [x1 - 0.05, y1, z1]]
            posts.append(decal(np.array([corners]), (0, side, 0.25), colour))
    return merge(posts)


def _upright(x: float, y: float, z: float, half_y: float, half_z: float) -> Float[np.ndarray, "4 3"]:
    corners = ((-1, -1), (1, -1), (1, 1), (-1, 1))
    return np.array([[x, y + a * half_y, z + b * half_z] for a, b in corners])


def walker(shirt: Colour, trousers: Colour, stride_rad: float) -> Mesh:
    """Make a person of 1.86 m about the ground point, legs and arms swung by the phase of the stride."""
    swing = 0.24 * np.sin(stride_rad)
    limbs = []
    for side in (-1, 1):
        limbs.append(_limb((0.0, side * 0.10, 0.92), (side * swing * 1.3, side * 0.10, 0.05), 0.085, trousers))
        limbs.append(_limb((0.0, side * 0.25, 1.45), (-side * swing, side * 0.27, 0.90), 0.06, shirt))
    torso = box((0, 0, 1.18), (0.14, 0.21, 0.32), shirt, taper=(1.0, 1.1))
    head = lump((0.0, 0, 1.68), (0.12, 0.12, 0.16), (0.80, 0.60, 0.48), bumps=0)
    hair = lump((-0.02, 0, 1.76), (0.125, 0.125, 0.10), (0.22, 0.15, 0.10), bumps=0)
    return one_part(*limbs, torso, head, hair)


def _limb(top: tuple[float, float, float], end: tuple[float, float, float], half: float, colour: Colour) -> Mesh:
    (x0, y0, z0), (x1, y1, z1) = top, end
    middle = ((x0 + x1) / 2, (y0 + y1) / 2, (z0 + z1) / 2)
    straight = box(middle, (half, half, (z0 - z1) / 2), colour)
    lean = (straight.quads[..., 2] - middle[2]) / (z0 - z1)
    straight.quads[..., 0] += lean * (x0 - x1)
    straight.quads[..., 1] += lean * (y0 - y1)
    return straight


def traffic_light(state: int) -> Mesh:
    """Make a pole on the right with an arm over the lane to its left (-y); lamps look back along -x."""
    arm_m = 4.6
    pole = prism(circle(0.10, 8), 0.0, 5.6, STEEL)
    arm = box((0, -arm_m / 2, 5.45), (0.06, arm_m / 2, 0.06), STEEL)
    heads = [_lamp_box(-arm_m + 0.2, LIGHT_HEIGHTS_M[0], state), _lamp_box(0.0, LIGHT_HEIGHTS_M[1], state)]
    return one_part(pole, arm, *heads)


def _lamp_box(y: float, z: float, state: int) -> Mesh:
    half_x, half_y, half_z = LIGHT_HALF
    plate = decal(_upright(-half_x, y, z, half_y + 0.12, half_z + 0.12)[None], (-1, 0, 0), (0.9, 0.9, 0.9))
    case = box((0, y, z), LIGHT_HALF, DARK)
    lamps = []
    for place, (lamp, colour) in enumerate(
        ((RED, (1.0, 0.12, 0.08)), (AMBER, (1.0, 0.72, 0.1)), (GREEN, (0.15, 1.0, 0.45)))
    ):
        lit = lamp == state
        shade = colour if lit else (0.25 * colour[0] + 0.05, 0.25 * colour[1] + 0.05, 0.25 * colour[2] + 0.05)
        glass = disc(0.17, shade, facing="-x", num_corners=10, glow=1.0 if lit else 0.0)
        lamps.append(glass.placed(pose(-half_x - 0.02, y, z + 0.39 * (1 - place))))
    return merge([plate, case, *lamps])


def speed_sign() -> Mesh:
    """Make a round sign, 30, on a post, that looks back along -x."""
    post = prism(circle(0.04, 6), 0.0, 2.4, STEEL)
    back = disc(SIGN_RADIUS_M, STEEL, facing="-x")
    rim = disc(SIGN_RADIUS_M, (0.85, 0.08, 0.08), facing="-x").placed(pose(-0.05, 0))
    face = disc(0.34, (0.96, 0.96, 0.96), facing="-x").placed(pose(-0.06, 0))
    bars = [_upright(-0.07, -0.11, z, 0.08, 0.025) for z in (-0.16, 0.0, 0.16)] + [
        _upright(-0.07, 0.11, z, 0.08, 0.025) for z in (-0.16, 0.16)
    ]
    bars += [_upright(-0.07, y, 0.0, 0.025, 0.18) for y in (-0.045, 0.045, 0.175)]
    digits = decal(np.array(bars), (-1, 0, 0), DARK)
    plates = merge([back, rim, face, digits]).placed(pose(0, 0, SIGN_HEIGHT_M))
    return one_part(post, plates)


def cone() -> Mesh:
    """Make a traffic cone, orange with a white band."""
    orange = (1.0, 0.42, 0.08)
    base = box((0, 0, 0.03), (0.24, 0.24, 0.03), orange)
    low = box((0, 0, 0.22), (0.17, 0.17, 0.16), orange, taper=(0.72, 0.72))
    band = box((0, 0, 0.46), (0.122, 0.122, 0.08), (0.96, 0.96, 0.96), taper=(0.78, 0.78))
    tip = box((0, 0, 0.64), (0.095, 0.095, 0.10), orange, taper=(0.4, 0.4))
    return one_part(base, low, band, tip)


def house(half: tuple[float, float], height_m: float, wall: Colour, *, awning: Colour) -> Mesh:
    """Make a flat-roofed house about its ground point: front with an awning to +y, windows on three sides."""
    half_x, half_y = half
    parts = [box((0, 0, height_m / 2), (half_x, half_y, height_m / 2), wall)]
    roof = box((0, 0, height_m + 0.15), (half_x + 0.2, half_y + 0.2, 0.18), (0.45, 0.36, 0.32))
    floors = np.arange(1.9, height_m - 1.0, 3.0)
    for sign in (-1, 1):
        panes = [_upright(sign * (half_x + 0.02), y, z, 0.55, 0.75) for z in floors for y in _spread(half_y, 2.4)]
        parts.append(decal(np.array(panes), (sign, 0, 0), (0.28, 0.34, 0.42)))
    front = half_y + 0.02
    panes = [_upright(front, x, z, 0.6, 0.75)[:, [1, 0, 2]] for z in floors for x in _spread(half_x, 2.4)]
    parts.append(decal(np.array(panes), (0, 1, 0), (0.28, 0.34, 0.42)))
    door = decal(_upright(front, 0.0, 1.15, 0.6, 1.15)[None][..., [1, 0, 2]], (0, 1, 0), (0.30, 0.20, 0.15))
    return one_part(*parts, door, box((0, front, 3.15), (half_x * 0.8, 0.55, 0.07), awning), roof)


def _spread(half: float, pitch_m: float) -> Float[np.ndarray, "place"]:
    count = max(int(2 * half / pitch_m), 1)
    return (np.arange(count) - (count - 1) / 2) * pitch_m


def tree(height_m: float, leaves: Colour, bumps: int) -> Mesh:
    """Make a tree about its ground point."""
    trunk = prism(circle(0.16, 6), 0.0, height_m * 0.5, (0.36, 0.26, 0.18))
    crown = lump((0, 0, height_m * 0.62), (height_m * 0.30, height_m * 0.30, height_m * 0.26), leaves, bumps=bumps)
    upper = lump(
        (0.1, 0.1, height_m * 0.82),
        (height_m * 0.21, height_m * 0.21, height_m * 0.18),
        dimmed(leaves, 1.12),
        bumps=bumps + 3,
    )
    return one_part(trunk, crown, upper)


def lamp_post() -> Mesh:
    """Make a street lamp whose arm reaches to +y."""
    post = prism(circle(0.07, 6), 0.0, 6.4, (0.35, 0.38, 0.40))
    arm = box((0, 0.8, 6.4), (0.05, 0.85, 0.05), (0.35, 0.38, 0.40))
    return one_part(post, arm, box((0, 1.5, 6.34), (0.14, 0.32, 0.06), (0.9, 0.9, 0.85)))
