"""Kernel of sample order: a permutation that is computed, not stored."""

import numpy as np
from jaxtyping import Int64, UInt64

from tasks.kernels.decorator import kernel


@kernel
def permute(
    positions: Int64[np.ndarray, " position"],
    num: np.uint64,
    bits: np.uint64,
    keys: UInt64[np.ndarray, " round"],
    out: Int64[np.ndarray, " position"],
) -> None:
    """Fill ``out[i] = P(positions[i])`` where ``P`` permutes ``[0, num)``: Feistel rounds, walked until inside.

    A Feistel network is a bijection of ``[0, 2**bits)`` whatever its round function; following a position's cycle
    until it is below ``num <= 2**bits`` is a bijection of ``[0, num)`` (Black and Rogaway, Ciphers with arbitrary
    finite domains, 2002, method 2). The halves need not be equally wide: rounds change them in turn.
    The round function is the finaliser of splitmix64 (Steele, Lea and Flood, 2014) over the other half plus a key.
    """
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    for i in range(np.uintp(positions.size)):
        value = np.uint64(positions[i])
        while True:
            low = value & low_mask
            high = value >> low_bits
            for k in range(np.uintp(keys.size)):
                mixed = (low if k & np.uintp(1) else high) + keys[k]
                mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
                mixed = mixed ^ (mixed >> np.uint64(31))
                if k & np.uintp(1):
                    high = high ^ (mixed & high_mask)
                else:
                    low = low ^ (mixed & low_mask)
            value = (high << low_bits) | low
            if value < num:
                break
        out[i] = np.int64(value)
