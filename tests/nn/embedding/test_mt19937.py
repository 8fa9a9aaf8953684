"""Jump-ahead of the generator against drawing the words."""

import numpy as np
import pytest

from nn.embedding.mt19937 import Jump, generator_at, words


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 1000])
@pytest.mark.parametrize("distance", [1, 624, 20_000, 123_457])
def test_a_jump_equals_drawing(drawn, distance):
    """Start at a fresh seed and at positions inside the generator's block of 624 words."""
    generator = np.random.RandomState(5)
    words(generator, drawn)
    jumped = Jump(distance)(generator.get_state(legacy=False))
    words(generator, distance)
    assert np.array_equal(words(generator_at(jumped), 2000), words(generator, 2000))


def test_two_jumps_equal_one_of_the_sum():
    start = np.random.RandomState(0).get_state(legacy=False)
    far, farther = Jump(1 << 40), Jump(1 << 41)
    expected = words(generator_at(farther(start)), 1000)
    assert np.array_equal(words(generator_at(far(far(start))), 1000), expected)


def test_a_state_is_not_changed_by_drawing_from_it():
    state = np.random.RandomState(0).get_state(legacy=False)
    first = words(generator_at(state), 700)
    assert np.array_equal(words(generator_at(state), 700), first)
