"""A six-joint arm with a gripper that picks up a block and puts it on a plate: kinematics and the motion.

Metres and radians; right-handed: x away from the robot, y to its left, z up from the table. At zero the arm stands
upright. The tool's z axis points from the wrist to between the fingertips.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

JOINTS = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
STATE_NAMES = (*JOINTS, "gripper")
"""Six angles in radians and the gripper, 0 closed and 1 open."""

BASE_M, UPPER_M, FORE_M, HAND_M = 0.15, 0.30, 0.27, 0.16
"""Height of the shoulder, lengths of upper arm and forearm, from the wrist to between the fingertips."""
BLOCK_HALF_M = 0.022
HOLDING = 0.35
"""Gripper opening at which the fingers touch a block."""
PLATE_TOP_M = 0.012

Pose = Float[np.ndarray, "4 4"]


def turn(axis: str, angle_rad: float) -> Pose:
    """Return a right-handed rotation about ``x``, ``y`` or ``z``."""
    first, second = {"x": (1, 2), "y": (2, 0), "z": (0, 1)}[axis]
    matrix = np.eye(4)
    matrix[first, first] = matrix[second, second] = np.cos(angle_rad)
    matrix[second, first] = np.sin(angle_rad)
    matrix[first, second] = -matrix[second, first]
    return matrix


def shift(x: float, y: float, z: float) -> Pose:
    """Return a translation."""
    matrix = np.eye(4)
    matrix[:3, 3] = x, y, z
    return matrix


def links(joints: Float[np.ndarray, "6"]) -> tuple[Pose, Pose, Pose, Pose, Pose]:
    """Return where the turret, upper arm, forearm, hand and tool are: forward kinematics."""
    waist, shoulder, elbow, roll, wrist, rotate = (float(angle) for angle in joints)
    turret = turn("z", waist) @ shift(0, 0, BASE_M)
    upper = turret @ turn("y", shoulder)
    fore = upper @ shift(0, 0, UPPER_M) @ turn("y", elbow) @ turn("z", roll)
    hand = fore @ shift(0, 0, FORE_M) @ turn("y", wrist) @ turn("z", rotate)
    return turret, upper, fore, hand, hand @ shift(0, 0, HAND_M)


def joints_for(tip_m: Float[np.ndarray, "3"], yaw_rad: float) -> Float[np.ndarray, "6"]:
    """Return the joints that bring the tool to a place, pointing straight down, its fingers beside a block of this yaw.

    Elbow-up solution of the planar two-link arm (law of cosines).
    """
    x, y, z = (float(value) for value in tip_m)
    waist = np.arctan2(y, x)
    reach, height = np.hypot(x, y), z + HAND_M - BASE_M
    distance = np.hypot(reach, height)
    elbow = np.arccos(np.clip((distance**2 - UPPER_M**2 - FORE_M**2) / (2 * UPPER_M * FORE_M), -1, 1))
    shoulder = np.arctan2(reach, height) - np.arctan2(FORE_M * np.sin(elbow), UPPER_M + FORE_M * np.cos(elbow))
    return np.array([waist, shoulder, elbow, 0.0, np.pi - shoulder - elbow, waist - yaw_rad])


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked for, and where things lie."""

    instruction: str
    block: str
    """Colour of the block to move."""
    plate: str
    """Colour of the plate it goes to."""
    blocks: dict[str, tuple[float, float, float]]
    """x, y, yaw by colour."""
    plates: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """One episode's numbers."""

    state: Float[np.ndarray, "step 7"]
    """float32, as recorded; pictures are painted from it."""
    action: Float[np.ndarray, "step 7"]
    """float32, the state asked for at the next step."""
    block: Float[np.ndarray, "step 4 4"]
    """Where the moved block is."""


_ASKED = (("red", "blue"), ("green", "white"), ("yellow", "blue"))
TASKS = tuple(f"pick up the {block} block and put it on the {plate} plate" for block, plate in _ASKED)

_BLOCK_PLACES = ((0.29, -0.19), (0.42, -0.17), (0.37, -0.05))
_PLATE_PLACES = ((0.30, 0.19), (0.44, 0.11))

# Share of the episode at which each way point is reached: x, y and z come from the objects.
_TIMES = (0.0, 0.04, 0.26, 0.36, 0.43, 0.54, 0.73, 0.82, 0.88, 1.0)
_GRASPED, _RELEASED = 4, 7


def lay_table(episode: int, seed: int) -> Task:
    """Choose the task of an episode and scatter the blocks and plates."""
    rng = np.random.default_rng([seed, 21, episode])
    block, plate = _ASKED[episode % len(_ASKED)]
    blocks, plates = {}, {}
    for colour, place in zip(("red", "green", "yellow"), rng.permutation(_BLOCK_PLACES), strict=True):
        x, y = place + rng.uniform(-0.015, 0.015, 2)
        blocks[colour] = (float(x), float(y), float(rng.uniform(-0.7, 0.7)))
    for colour, place in zip(("blue", "white"), rng.permutation(_PLATE_PLACES), strict=True):
        x, y = place + rng.uniform(-0.015, 0.015, 2)
        plates[colour] = (float(x), float(y))
    return Task(instruction=TASKS[episode % len(TASKS)], block=block, plate=plate, blocks=blocks, plates=plates)


def plan_motion(task: Task, num_steps: int, seed: int) -> Motion:
    """Plan one pick and place; the tool moves along straight lines between way points, with soft starts and stops."""
    x, y, yaw = task.blocks[task.block]
    to_x, to_y = task.plates[task.plate]
    held, home = HOLDING, (0.22, 0.0, 0.24, 0.0, 1.0)
    rest, set_down = BLOCK_HALF_M, BLOCK_HALF_M + PLATE_TOP_M
    points = np.array([
        home, home, (x, y, 0.13, yaw, 1.0), (x, y, rest, yaw, 1.0), (x, y, rest, yaw, held), (x, y, 0.15, yaw, held),
        (to_x, to_y, 0.15, 0.0, held), (to_x, to_y, set_down, 0.0, held), (to_x, to_y, set_down, 0.0, 1.0),
        (to_x, to_y, 0.17, 0.0, 1.0),
    ])  # fmt: skip
    shares = np.linspace(0, 1, num_steps) if num_steps > 1 else np.zeros(1)
    tips = np.stack([_soft_interpolate(shares, column) for column in points.T], axis=1)
    state = np.stack([[*joints_for(tip[:3], tip[3]), tip[4]] for tip in tips])
    state[:, :6] += _tremble(shares, np.random.default_rng([seed, 22]))
    state = state.astype(np.float32)
    action = np.concatenate([state[1:], state[-1:]])
    return Motion(state=state, action=action, block=_carry(state, shares, (x, y, yaw), (to_x, to_y, set_down)))


def _soft_interpolate(shares: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Go from value to value by the minimum-jerk polynomial (Flash and Hogan, 1985)."""
    times = np.asarray(_TIMES)
    place = np.clip(np.searchsorted(times, shares, side="right") - 1, 0, len(times) - 2)
    part = (shares - times[place]) / (times[place + 1] - times[place])
    soft = part**3 * (10 - 15 * part + 6 * part**2)
    return values[place] + soft * (values[place + 1] - values[place])


def _tremble(shares: np.ndarray, rng: np.random.Generator) -> Float[np.ndarray, "step 6"]:
    """Return slow deviations of a few milliradians, as no real arm is without."""
    phases, waves = rng.uniform(0, 2 * np.pi, (2, 6)), rng.uniform(2, 6, 6)
    return 0.003 * np.sin(2 * np.pi * np.outer(shares, waves) + phases[0])


def _carry(
    state: np.ndarray, shares: np.ndarray, start: tuple[float, float, float], stop: tuple[float, float, float]
) -> Float[np.ndarray, "step 4 4"]:
    """Return the block's pose: at rest, then in the hand, then at rest on the plate."""
    x, y, yaw = start
    resting = shift(x, y, BLOCK_HALF_M) @ turn("z", yaw)
    down = turn("y", np.pi)
    poses = []
    for share, row in zip(shares, state, strict=True):
        if share < _TIMES[_GRASPED]:
            poses.append(resting)
        elif share <= _TIMES[_RELEASED]:
            poses.append(links(row[:6])[-1] @ down)
        else:
            poses.append(shift(*stop))
    return np.stack(poses)
