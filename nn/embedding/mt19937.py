"""Jump-ahead for numpy's legacy generator, so that threads can draw from different positions of one stream.

The Mersenne Twister's words x[0], x[1], ... obey a linear recurrence over bits whose characteristic polynomial p has degree
19,937. With t**n mod p = sum of g[i] t**i, word x[k + n] is the xor of the x[k + i] whose g[i] is 1, for every k: that
moves a state by n words at once (Haramoto et al. 2008, "Efficient Jump Ahead for F2-Linear Random Number Generators").
Polynomials over bits are kept as Python's integers, coefficient i in bit i.
"""

from functools import cached_property
from typing import Any

import numpy as np

# Of MT19937 (Matsumoto and Nishimura 1998).
STATE_WORDS = 624
MIDDLE = 397
LOW_BITS = 31
TWIST = 0x9908B0DF
DEGREE = 19_937

State = dict[str, Any]
"""As `RandomState.get_state(legacy=False)`."""


def generator_at(state: State) -> np.random.RandomState:
    generator = np.random.RandomState(0)
    generator.set_state(state)
    return generator


def words(generator: np.random.RandomState, count: int) -> np.ndarray:
    return generator.randint(0, 2**32, size=count, dtype=np.uint32)


class Jump:
    """Jump-ahead of states by a fixed number of words."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words

    def __call__(self, state: State) -> State:
        generator = generator_at(state)
        blocks = [state["state"]["key"]]
        for _ in range(DEGREE // STATE_WORDS + 2):
            words(generator, STATE_WORDS)
            blocks.append(generator.get_state(legacy=False)["state"]["key"])
        windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(blocks), STATE_WORDS)
        key = np.zeros(STATE_WORDS, np.uint32)
        for start in range(0, len(self._terms), 256):
            key ^= np.bitwise_xor.reduce(windows[self._terms[start : start + 256]], axis=0)
        return state | {"state": {"key": key, "pos": state["state"]["pos"]}}

    @cached_property
    def _terms(self) -> np.ndarray:
        """Exponents i of t**num_words mod p whose coefficient is 1."""
        # p of the paper's appendix: with a[i] bit i of TWIST, (t**624 + t**397) * s + a[31], and s by Horner's rule.
        s = 1
        for bit in range(LOW_BITS):
            s = (s << STATE_WORDS - 1) ^ (s << MIDDLE - 1) ^ (TWIST >> bit & 1)
        characteristic = (s << STATE_WORDS) ^ (s << MIDDLE) ^ (TWIST >> LOW_BITS)
        taps = [i for i in range(DEGREE) if characteristic >> i & 1]
        power = 1
        for digit in f"{self.num_words:b}":
            # Squaring puts a zero between coefficients: the digits of base 2, read in base 4.
            power = int(f"{power:b}", 4) << (digit == "1")
            while high := power >> DEGREE:
                power ^= high << DEGREE
                for tap in taps:
                    power ^= high << tap
        return np.array([i for i in range(DEGREE) if power >> i & 1])
