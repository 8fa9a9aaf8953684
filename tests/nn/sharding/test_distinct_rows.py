"""The distinct rows of a batch: pooled on the rank of the samples, or taken by the dense component, against plain PyTorch.

Tables are whole, shared by rows, and replicated; features are ragged and of fixed hotness.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding
from torchrec.modules.embedding_configs import PoolingType

from configs.schema import ModelConfig
from nn.embedding.declared_tables import embedding_columns, one_table_per_feature
from nn.models.model import Model
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed
from tests.nn.models.test_kinds_of_tables import case as kinds
from tests.nn.models.test_kinds_of_tables import plain_losses, sharded
from tests.nn.training.test_ragged import RaggedModel, dataset, sharded_with  # noqa: F401

HERE = "tests.nn.sharding.test_distinct_rows"
LAYOUTS = ["table_wise", "row_wise", "data_parallel"]
RULES = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.01}
LONGEST = 12


@dataclass(kw_only=True, slots=True)
class TakerOptions(ModelConfig):
    """Options of the model."""


class Taker(Model):
    """Takes the rows of two tables itself, a ragged and a fixed feature of one of them, and pools the others.

    An id is weighted by its place in the sample, so that its rows cannot be pooled before.
    """

    Options = TakerOptions

    def __init__(self, num_columns: int, columns: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(1, 0.1, LONGEST))
        self.last = nn.Linear(num_columns + 3 * columns, 1)

    @classmethod
    def tables(cls, options, spec):
        genres, item, _, pair = one_table_per_feature(options, spec)
        return [
            replace(item, feature_names=["item", "tags"], pooling=PoolingType.NONE),
            replace(genres, pooling=PoolingType.NONE),
            pair,
        ]

    @classmethod
    def build(cls, options, spec):
        columns = embedding_columns(cls.tables(options, spec), spec)
        return cls(len(spec.numerical) + columns, options.embedding_dim)

    def forward(self, numerical, embeddings):
        taken = []
        for table, feature in (("item", "tags"), ("item", "item"), ("genres", "genres")):
            found = embeddings.distinct_rows(table, feature)
            place = torch.arange(LONGEST)
            at = found.starts.long()[:, None] + place
            is_id = place < found.lengths[:, None]
            positions = found.positions.long()[at.clamp(max=len(found.positions) - 1)]
            rows = embedding(torch.where(is_id, positions, len(found.rows) - 1), found.rows)
            taken.append((rows.tanh() * self.places[:, None]).sum(1))
        return self.last(torch.cat([numerical, embeddings.matrix(), *taken], 1)).squeeze(1).float()


def model(name: str, data: Path | None, rule: str, *overrides: str) -> list[str]:
    """Return the overrides of a model: `kinds` on synthetic clicks, the others on ragged features."""
    if name == "kinds":
        return kinds(rule, RULES[rule], *overrides)
    chosen = {"ragged": f"{RaggedModel.__module__}:RaggedModel", "taker": f"{HERE}:Taker"}
    return [
        *TINY,
        f"model.name={chosen[name]}",
        f"data.path={data}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RULES[rule]}",
        "optimizer.eps=0.01",
        *overrides,
    ]


# Every layout with every optimizer, every model with every layout.
CASES = [
    (name, list(RULES)[(at + number) % 3], layout)
    for (number, name), (at, layout) in product(
        enumerate(["kinds", "ragged", "taker"]), enumerate(LAYOUTS)
    )
]


@pytest.fixture(scope="module")
def wanted(dataset):  # noqa: F811
    """Model and optimizer -> losses of plain PyTorch, and its tables after them."""
    both = dict.fromkeys((name, rule) for name, rule, _ in CASES)
    return {(name, rule): plain_losses(model(name, dataset, rule)) for name, rule in both}


def of_cases(data: Path, *overrides: str) -> list[list[str]]:
    return [
        model(name, data, rule, f"sharding.types=[{layout}]", *overrides)
        for name, rule, layout in CASES
    ]


@pytest.mark.parametrize(("world_size", "room"), [(1, 1.125), (2, 1.125), (2, 0.3)])
def test_it_trains_as_plain_pytorch(dataset, wanted, world_size, room):  # noqa: F811
    """With room for 0.3 of the rows of the first batch, every batch asks for more."""
    cases = of_cases(dataset, "sharding.exchange=rows")
    spread = 6.0 if room > 1 else 0.0
    for of_rank in run_distributed(sharded_with, world_size, room, spread, cases):
        for case, (losses, shards) in zip(CASES, of_rank, strict=True):
            expected, tables = wanted[case[:2]]
            assert losses == pytest.approx(expected, rel=1e-6), case
            assert losses[-1] != losses[0]
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                whole = tables[table][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, whole, rtol=2e-5, atol=2e-5, msg=str(case))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_and_vectors_have_the_same_bits_where_sums_have_one_order(dataset, world_size):  # noqa: F811
    """Between ranks, sharded tables add up sums of each rank: only what is looked up first is the same."""
    cases = [case for case in zip(CASES, of_cases(dataset), strict=True) if case[0][0] != "taker"]
    overrides = [
        [*case, f"sharding.exchange={exchange}"]
        for exchange in ("rows", "vectors")
        for _, case in cases
    ]
    found = run_distributed(sharded, world_size, overrides)[0]
    for ((_, _, layout), _), rows, vectors in zip(
        [each for each in cases], found[: len(cases)], found[len(cases) :], strict=True
    ):
        if world_size == 1 or layout == "data_parallel":
            assert rows[0] == vectors[0], layout
            for one, other in zip(rows[1], vectors[1], strict=True):
                assert torch.equal(one[3], other[3]), layout
        else:
            assert rows[0][0] == vectors[0][0], layout
            assert rows[0] == pytest.approx(vectors[0], rel=1e-6)
