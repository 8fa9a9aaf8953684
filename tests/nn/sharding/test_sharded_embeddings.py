"""Equality of sharded training and one process, for all layouts, models and optimizers."""

from itertools import product

import pytest

from tests.helpers.composed import losses_of_cases, tiny
from tests.helpers.distributed import run_distributed

NUM_STEPS = 6
HOTNESS = {"one_hot": [], "multi_hot": ["data.synthetic.hotness=[3,1,2,5,1]"]}
LAYOUTS = ["table_wise", "column_wise", "row_wise", "data_parallel"]
RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}


def case(model: str, hotness: str, rule: str, layout: str) -> list[str]:
    tables = ",".join(f"cat_{index}:{layout}" for index in range(5))
    return [
        *tiny(model),
        *HOTNESS[hotness],
        f"optimizer.name={rule}",
        f"optimizer.lr={RATES[rule]}",
        "optimizer.eps=0.01",
        f"sharding.tables={{{tables}}}",
    ]


CASES = [
    each
    for each in product(["dlrm", "dcnv2"], HOTNESS, RATES, LAYOUTS)
    if each[2:] != ("rowwise_adagrad", "column_wise")
    # Tables know nothing of the model above them: with the second one each rule and each layout once or twice.
    and (each[0] == "dlrm" or (list(RATES).index(each[2]) + LAYOUTS.index(each[3])) % 4 == 1)
]


@pytest.fixture(scope="module")
def losses() -> dict[int, dict[tuple[str, ...], list[float]]]:
    """World size -> case -> losses of rank 0; with one process, each table is whole."""
    learnt = list(dict.fromkeys(each[:3] for each in CASES))
    one = losses_of_cases([case(*each, "table_wise") for each in learnt], NUM_STEPS)
    whole = dict(zip(learnt, one, strict=True))
    two = run_distributed(losses_of_cases, 2, [case(*each) for each in CASES], NUM_STEPS)
    assert two[0] == two[1], "ranks disagree about the global loss"
    return {
        1: {each: whole[each[:3]] for each in CASES},
        2: dict(zip(CASES, two[0], strict=True)),
    }


@pytest.mark.parametrize("each", CASES, ids="-".join)
def test_two_ranks_train_as_one(losses, each):
    assert losses[2][each] == pytest.approx(losses[1][each], rel=1e-6)
    assert losses[1][each][-1] != losses[1][each][0]


def test_four_ranks_train_as_one(losses):
    four = [each for each in CASES if each[0] == "dlrm" and each[1:3] == ("multi_hot", "adagrad")]
    measured = run_distributed(losses_of_cases, 4, [case(*each) for each in four], NUM_STEPS)[0]
    for each, several in zip(four, measured, strict=True):
        assert several == pytest.approx(losses[1][each], rel=1e-6), "-".join(each)
