"""Random numbers as pure functions of a key and a counter, vectorised."""

import hashlib

import numpy as np


def stream_key(*names: object) -> int:
    """Return the 64-bit key of the random stream called `names`."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "little")


def uniform(key: int, counters: np.ndarray) -> np.ndarray:
    """Return float64 numbers in [0, 1): output `counters` of the SplitMix64 generator (Steele et al. 2014) at `key`.

    `counters`: uint64 [n].
    """
    state = counters * np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(key)
    scratch = state >> np.uint64(30)
    state ^= scratch
    state *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(state, np.uint64(27), out=scratch)
    state ^= scratch
    state *= np.uint64(0x94D049BB133111EB)
    np.right_shift(state, np.uint64(31), out=scratch)
    state ^= scratch
    state >>= np.uint64(12)  # 52 random bits become the fraction of a float64 in [1, 2)
    state |= np.uint64(0x3FF0000000000000)
    numbers = state.view(np.float64)
    numbers -= 1.0
    return numbers


def power_law(numbers: np.ndarray, cardinality: int, exponent: float) -> np.ndarray:
    """Turn uniform numbers into ids in [0, cardinality); id i is about as frequent as (i + 1) ** -exponent.

    The inverse of the continuous distribution over [1, cardinality + 1), rounded down, as in the generator of NVIDIA's TensorFlow
    2 recipe; exponent 0 is uniform. `numbers`: float64 [n] in [0, 1), overwritten. Returns float64 [n], whole numbers.
    """
    bound = cardinality + 1.0
    if exponent == 1.0:
        numbers *= np.log(bound)
        np.exp(numbers, out=numbers)
    else:
        gamma = 1.0 - exponent
        numbers *= bound**gamma - 1.0
        numbers += 1.0
        if gamma != 1.0:
            np.power(numbers, 1.0 / gamma, out=numbers)
    numbers -= 1.0
    np.floor(numbers, out=numbers)
    return np.clip(numbers, 0, cardinality - 1, out=numbers)
