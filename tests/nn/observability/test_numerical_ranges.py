"""Note about numerical features that nobody scaled: when it is printed, and the columns that it names."""

import numpy as np
import pytest

from nn.observability.numerical_ranges import range_note

GENERATOR = np.random.default_rng(1)
ROWS = 2000
SCALED = {
    "standardised": GENERATOR.normal(size=ROWS),
    "minmax": GENERATOR.random(ROWS),
    "logarithms of Criteo's counts": np.log1p(GENERATOR.pareto(0.5, ROWS).clip(0, 1e7)),
    "heavy tail": GENERATOR.standard_t(3, ROWS),
    "constant": np.zeros(ROWS),
}


@pytest.mark.parametrize("name", SCALED)
def test_scaled_features_get_no_note(name):
    values = np.stack([SCALED[name], SCALED["minmax"]], axis=1).astype(np.float32)
    assert range_note(["a", "b"], values) is None


def test_features_that_nobody_scaled_are_named_with_their_ranges():
    price = np.linspace(0, 400, ROWS)
    values = np.stack([SCALED["minmax"], price, price + 1700], axis=1).astype(np.float32)
    note = range_note(["a", "price", "ye\nar"], values)
    assert note.startswith(
        r"numerical features are not scaled: price is 0 to 400, ye\nar is 1700 to 2100 in the first 2,000 rows"
    )
    assert "standardise, minmax or {log: 1}" in note


def test_many_features_take_one_short_line():
    note = range_note([f"n{i}" for i in range(99)], np.full((4, 99), 3e38, np.float32))
    assert "n2 is 3e+38 to 3e+38 and 96 more in the first 4 rows" in note
    assert range_note([], np.zeros((4, 0))) is None
