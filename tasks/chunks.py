"""Action chunks: the next ``horizon`` actions of a step, as Pi0-style policies are trained to predict them."""

import numpy as np
from jaxtyping import Bool, Float32, Int64

from schemas.errors import SchemaError
from tasks.kernels.chunks import gather_chunks


def chunk_stops(
    episode_ends: Int64[np.ndarray, " episode"], valid: Bool[np.ndarray, " step"]
) -> Int64[np.ndarray, " step"]:
    """Return for every step where the chunk that begins there must stop taking new actions.

    That is its episode's end, or the first later step that is not valid: what was recorded there is not to be
    learned from, and what came after does not follow from what came before.

    Parameters
    ----------
    episode_ends
        One past the last step of each episode, increasing; the last is the number of steps.
    valid
        Whether a step may be served.
    """
    ends = np.ascontiguousarray(episode_ends, dtype=np.int64)
    num_steps = int(ends[-1]) if ends.size else 0
    if num_steps != len(valid) or (ends.size and (ends[0] < 0 or np.any(np.diff(ends) < 0))):
        raise SchemaError(
            f"expected episode ends that do not decrease, the last of them {len(valid)}, found one of {num_steps}; "
            "run `headrace verify` on the dataset"
        )
    # no kernel: it would be compiled while a loader opens
    stops = np.union1d(ends, np.flatnonzero(~np.asarray(valid, dtype=np.bool_)))
    return np.repeat(stops, np.diff(stops, prepend=0))


def action_chunks(
    actions: Float32[np.ndarray, "step dim"],
    anchors: Int64[np.ndarray, " batch"],
    stops: Int64[np.ndarray, " batch"],
    *,
    is_pad: Bool[np.ndarray, "batch horizon"],
    out: Float32[np.ndarray, "batch horizon wide"],
) -> None:
    """Fill the action chunk of each anchor, its last action repeated where the episode has no more.

    Parameters
    ----------
    anchors
        Steps at which the chunks begin.
    stops
        Where each stops taking new actions, by :func:`chunk_stops`; above its anchor.
    is_pad
        True where an action is a repeat.
    out
        Receives the chunks; where it is wider than ``actions``, zeros fill the rest.
    """
    if out.shape[:2] != is_pad.shape or out.shape[0] != len(anchors) or out.shape[2] < actions.shape[1]:
        raise SchemaError(
            f"expected chunks of {len(anchors)} x horizon x {actions.shape[1]} or more, found {list(out.shape)} "
            f"and a mask of {list(is_pad.shape)}; correct the call"
        )
    if len(anchors) and not (anchors.min() >= 0 and stops.max() <= len(actions) and np.all(stops > anchors)):
        raise SchemaError(
            f"expected anchors in [0, {len(actions)}) that lie before their stops, found {anchors.min()} to "
            f"{anchors.max()}; correct the call"
        )
    gather_chunks(actions, anchors, stops, is_pad, out)
