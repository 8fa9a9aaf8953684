"""Note about numerical features that nobody scaled: when it is printed, and the columns that it names."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nn.models.options import HSTUOptions
from nn.modes.train import _report_ranges
from nn.observability.numerical_ranges import range_note
from tests.helpers.specs import sized_spec

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


@pytest.mark.parametrize(
    ("hour", "told"), [("I0", "I1 is 50 to 50 in"), (None, "I0 is 900 to 900, I1 is 50 to 50 in")]
)
def test_numbers_that_an_option_names_need_no_scale(hour, told):
    warnings: list[str] = []
    session = SimpleNamespace(
        config=SimpleNamespace(model=HSTUOptions(hour=hour)),
        source=SimpleNamespace(spec=sized_spec(2, 1)),
        ranks=SimpleNamespace(is_rank0=True),
        start=SimpleNamespace(day=SimpleNamespace(position=int), num_steps=0),
        logger=SimpleNamespace(warning=warnings.append),
    )
    batch = SimpleNamespace(numerical=torch.tensor([[900.0, 50.0]] * 4), num_valid=3)
    source = SimpleNamespace(grows=lambda _: False)
    _report_ranges(session, SimpleNamespace(source=source, split="train", batch=lambda _: batch))
    assert [f"not scaled: {told}" in warning for warning in warnings] == [True]
