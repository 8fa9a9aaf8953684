"""Tables of every kind, sharded over one and two ranks, against plain PyTorch of the same model.

The model looks features up in several tables, shares tables, has widths from 1, and pools by sum, mean and not at all.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import PoolingType

from configs.schema import ModelConfig
from nn.build import open_source
from nn.embedding.declared_tables import (
    embedding_columns,
    hands_out_rows,
    one_table_per_feature,
)
from nn.embedding.torch_optimizer import TableOptimizer
from nn.layers.initialization import initialise_dense
from nn.layers.pooled_embeddings import join
from nn.models.model import Model
from nn.models.ranking_model import RankingModel
from nn.models.registry import build_dense, declared_tables
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed

HERE = "tests.nn.models.test_kinds_of_tables"
NUM_STEPS = 6


@dataclass(kw_only=True, slots=True)
class KindsOptions(ModelConfig):
    """Options of the model."""


class Kinds(Model):
    """A hidden layer over tables of every kind."""

    Options = KindsOptions

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_columns, 5)
        self.last = nn.Linear(5, 1)

    @classmethod
    def tables(cls, options, spec):
        first, second, third, *rest = one_table_per_feature(options, spec)
        rows = max(second.num_embeddings, third.num_embeddings)
        return [
            replace(
                second,
                num_embeddings=rows + 1,
                feature_names=[*second.feature_names, *third.feature_names],
                pooling=PoolingType.NONE,
            ),
            replace(first, pooling=PoolingType.MEAN, weight_init_max=0.3),
            *(
                replace(table, embedding_dim=4 + 4 * (index % 2))
                for index, table in enumerate(rest)
            ),
            *one_table_per_feature(options, spec, columns=1, prefix="wide_"),
        ]

    @classmethod
    def build(cls, options, spec):
        return cls(len(spec.numerical) + embedding_columns(cls.tables(options, spec), spec))

    def forward(self, numerical, embeddings):
        return self.last(torch.tanh(self.hidden(join(numerical, embeddings)))).squeeze(1).float()


def case(rule: str, lr: float, *overrides: str) -> list[str]:
    return [
        *TINY,
        f"model.name={HERE}:Kinds",
        "data.synthetic.hotness=[3,1,2,5,1]",
        f"optimizer.name={rule}",
        f"optimizer.lr={lr}",
        "optimizer.eps=0.01",
        *overrides,
    ]


LAYOUTS = {
    "planned": [],
    "replicated": ["sharding.types=[data_parallel]"],
    "columns": ["sharding.tables={cat_1: column_wise, cat_3: column_wise}"],
    "rows": ["sharding.types=[row_wise]"],
    "mixed": ["sharding.tables={cat_1: row_wise, cat_3: column_wise, wide_cat_2: row_wise}"],
    "bf16_tables": ["model.embedding_dtype=bf16"],
    "bf16_rows": ["model.embedding_dtype=bf16", "sharding.types=[row_wise]"],
}
RULES = {"sgd": 0.3, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.01}
# Each layout with states per element and, where it may be, with one per row; adagrad or adam stands for both.
LAYOUTS_OF = {
    "sgd": ["planned", "columns", "bf16_tables", "bf16_rows"],
    "adagrad": ["rows", "mixed", "planned"],
    "rowwise_adagrad": ["planned", "replicated", "rows"],
    "adam": ["replicated", "mixed", "columns"],
}
CASES = {
    f"{rule}-{layout}": case(rule, RULES[rule], *LAYOUTS[layout])
    for rule, layouts in LAYOUTS_OF.items()
    for layout in layouts
}


def plain_losses(overrides: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of plain PyTorch, and the tables after them."""
    config = compose_config(*overrides)
    with ranks_of_cpu():
        built = build(config)
        spec = open_source(config).spec
        declared = declared_tables(config.model, spec)
        handed_out = [table.name for table in declared if hands_out_rows(table, spec)]
        model = RankingModel(declared, build_dense(config.model, spec), config.seed, handed_out)
        initialise_dense(model.dense, config.seed)
        model.dense.load_state_dict(built.step.dense.state_dict())
        chosen = config.effective_optimizer
        tables = TableOptimizer(model.tables.values(), chosen)
        dense = type(built.step.dense_optimizer)(
            model.dense.parameters(),
            **{
                key: value
                for key, value in built.step.dense_optimizer.defaults.items()
                if key in ("lr", "eps", "betas")
            }
            | {"lr": chosen.lr},
        )
        losses = []
        for batch in built.train_loader.batches(0, NUM_STEPS):
            valid = slice(batch.num_valid)
            loss = binary_cross_entropy_with_logits(model(batch)[valid], batch.labels[valid])
            tables.zero_grad()
            dense.zero_grad()
            loss.backward()
            tables.step()
            dense.step()
            losses.append(loss.item())
        return losses, {name: table.detach() for name, table in model.tables.items()}


def sharded(cases: list[list[str]]) -> list[tuple[list[float], list]]:
    """Return losses and this rank's shards of the tables after them, per case."""
    results = []
    with ranks_of_cpu():
        for overrides in cases:
            built = build(compose_config(*overrides))
            losses = built.train(0, NUM_STEPS)
            shards = [
                (shard.table, shard.row_offset, shard.column_offset, shard.weight.float().clone())
                for shard in built.step.tables.shards()
            ]
            results.append((losses, shards))
    return results


@pytest.fixture(scope="module")
def plain():
    return {rule: plain_losses(case(rule, lr)) for rule, lr in RULES.items()}


def test_sharded_tables_of_every_kind_train_as_plain_pytorch(plain):
    for of_rank in run_distributed(sharded, 2, list(CASES.values())):
        for name, (losses, shards) in zip(CASES, of_rank, strict=True):
            wanted, tables = plain[name.partition("-")[0]]
            is_16_bit = "bf16" in name
            assert losses == pytest.approx(wanted, rel=1e-2 if is_16_bit else 1e-6), name
            assert losses[-1] != losses[0]
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                expected = tables[table][row : row + rows, column : column + columns]
                tolerance = 2e-2 if is_16_bit else 2e-5
                torch.testing.assert_close(weight, expected, rtol=tolerance, atol=tolerance)
