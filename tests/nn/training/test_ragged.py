"""Ragged features in the step, against plain PyTorch: at any fill of their capacity, and beyond it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, PoolingType

from configs.schema import ModelConfig, TableDtype
from dataloading.dataset import batch_layout
from dataloading.dataset.batch_layout import NO_ID, IdCount
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from nn.distributed.process_group import Ranks
from nn.embedding.declared_tables import embedding_columns, one_table_per_feature
from nn.embedding.id_blocks import id_blocks, with_positions
from nn.layers.pooled_embeddings import join
from nn.models.model import Model
from nn.sharding import request_capacity
from nn.training.shared_capacity import SharedCapacity, SlowBatchWarning
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed
from tests.nn.models.test_kinds_of_tables import plain_losses, sharded

HERE = "tests.nn.training.test_ragged"


@dataclass(kw_only=True, slots=True)
class RaggedOptions(ModelConfig):
    """Options of the model."""


class RaggedModel(Model):
    """A linear layer over ragged lookups: summed, averaged, in a shared table and in a second one."""

    Options = RaggedOptions

    def __init__(self, num_columns: int) -> None:
        super().__init__()
        self.last = nn.Linear(num_columns, 1)

    @classmethod
    def tables(cls, options, spec):
        genres, item, _, pair = one_table_per_feature(options, spec)
        return [
            replace(item, feature_names=["item", "tags"], num_embeddings=300),
            replace(genres, pooling=PoolingType.MEAN),
            replace(pair, embedding_dim=4),
            *one_table_per_feature(options, spec, columns=1, features=["genres"], prefix="wide_"),
        ]

    @classmethod
    def build(cls, options, spec):
        tables = cls.tables(options, spec)
        num_columns = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        return cls(len(spec.numerical) + num_columns)

    def forward(self, numerical, embeddings):
        return self.last(join(numerical, embeddings)).squeeze(1).float()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("ragged") / "dataset")


def written(root: Path, longest: int = 0) -> Path:
    """Write two ragged features, some of whose rows are empty, a two-hot and a single-hot one; 197 rows for training.

    The first 32 rows have `longest` tags each, and the others none, if it is not 0.
    """
    features = [
        CategoricalFeature.of("genres", 19, None),
        CategoricalFeature.of("item", 300),
        CategoricalFeature.of("tags", 300, None),
        CategoricalFeature.of("pair", 50, 2),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(root, categorical=features, numerical=("n", "m")) as directory:
        for split, rows in (("train", 197), ("test", 64)):
            lengths = {
                "genres": generator.integers(0, 4, rows),
                "tags": generator.geometric(0.3, rows) - 1,
            }
            if longest:
                lengths["tags"] = np.where(np.arange(rows) < 32, longest, 0)
            ids = {name: generator.integers(0, 19, count.sum()) for name, count in lengths.items()}
            directory[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=generator.random(rows) < 0.4,
                ids=ids
                | {
                    "pair": generator.integers(0, 50, (rows, 2)),
                    "item": generator.integers(0, 300, rows),
                },
                lengths=lengths,
            )
    return root


LAYOUTS = {
    "planned": [],
    "rows": ["sharding.types=[row_wise]"],
    "replicated": ["sharding.types=[data_parallel]"],
    "mixed": ["sharding.tables={genres: row_wise, item: table_wise, pair: data_parallel}"],
}
RULES = {"adagrad": 0.05, "adam": 0.01}
# tests/nn/training/test_train_step.py trains ragged features with Adagrad in each sharding.
CASES = list(zip(["adagrad", "adam", "adam", "adagrad"], LAYOUTS, strict=True))


def overrides_of(dataset: Path, rule: str, layout: str) -> list[str]:
    return [
        *TINY,
        f"model.name={HERE}:RaggedModel",
        f"data.path={dataset}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RULES[rule]}",
        "optimizer.eps=0.01",
        *LAYOUTS[layout],
    ]


@pytest.fixture(scope="module")
def wanted(dataset) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses of plain PyTorch, and the tables after them, by optimizer."""
    return {rule: plain_losses(overrides_of(dataset, rule, "planned")) for rule in RULES}


def sharded_with(capacity: float, spread: float, cases: list[list[str]]) -> list:
    batch_layout.CAPACITY, batch_layout.SPREAD = capacity, spread
    # The same share of the rows of row-wise tables that a batch asks for.
    request_capacity.RESERVE, request_capacity.SPREAD = capacity, spread
    return sharded(cases)


@pytest.mark.parametrize(
    ("world_size", "capacity", "spread"),
    [(1, 1.125, 6.0), (1, 0.3, 0.0), (2, 0.3, 0.0), (2, 9.0, 0.0)],
)
def test_it_trains_as_plain_pytorch_at_any_fill(dataset, wanted, world_size, capacity, spread):
    """With 0.3 of the expected ids every batch takes a larger capacity; with 9 times of them most positions are empty."""
    cases = [overrides_of(dataset, *case) for case in CASES]
    results = run_distributed(sharded_with, world_size, capacity, spread, cases)
    for of_rank in results:
        for (rule, layout), (losses, shards) in zip(CASES, of_rank, strict=True):
            expected_losses, tables = wanted[rule]
            assert losses == pytest.approx(expected_losses, rel=1e-6), (rule, layout)
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                expected = tables[table][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, expected, rtol=2e-5, atol=2e-5)


def test_positions_tell_where_samples_begin_and_whose_an_id_is():
    """Two ranks of three rows each, with room for five ids."""
    ids = [[7, 8, 9, NO_ID, NO_ID], [4, 5, 6, 2, 1]]
    lengths = [[2, 0, 1], [0, 4, 1]]
    arrived = torch.tensor([*ids[0], *ids[1], *lengths[0], *lengths[1]], dtype=torch.int32)
    made = with_positions(arrived, [5], 2, 3)
    block = id_blocks({"a": IdCount(0, 5)}, 2, 3)["a"]
    assert block.size == len(made)
    assert made.dtype == torch.int32
    assert made[:10].tolist() == [*ids[0], *ids[1]]
    starts = made[block.first_start : block.first_start + 6].tolist()
    assert starts == [0, 2, 2, 5, 5, 9]
    assert made[block.first_length : block.first_length + 6].tolist() == [2, 0, 1, 0, 4, 1]
    samples = made[block.first_sample :].tolist()
    assert samples[:3] == [0, 0, 2]
    assert samples[5:] == [4, 4, 4, 4, 5]


def test_a_batch_beyond_the_capacity_is_reported(dataset, monkeypatch):
    monkeypatch.setattr(batch_layout, "CAPACITY", 0.1)
    monkeypatch.setattr(batch_layout, "SPREAD", 0.0)
    reasons: list[str] = []
    monkeypatch.setattr(
        "nn.training.shared_capacity.SlowBatchWarning", lambda ranks: reasons.append
    )
    sharded([overrides_of(dataset, "adagrad", "planned")])
    assert set(reasons) == {
        "a batch has more ids of genres, tags than the captured step has room for"
    }


def grown(overrides: list[str]) -> tuple[list, list[tuple[int, ...]], set[str]]:
    """Return the results of a training, the doublings of its batches on this rank, and what was warned of."""
    found, reasons = [], set()
    of = SharedCapacity.of

    def noted(self, batch):
        batch = of(self, batch)
        found.append(batch.layout.doublings)
        return batch

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SharedCapacity, "of", noted)
        patched.setattr("nn.training.shared_capacity.SlowBatchWarning", lambda ranks: reasons.add)
        return sharded([overrides]), found, reasons


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_feature_beyond_its_capacity_grows_alone_on_all_ranks(tmp_path, world_size):
    """The tags of the first batch of an epoch, which rank 0 of two has."""
    data = written(tmp_path / "uneven", longest=24)
    overrides = [*overrides_of(data, "adagrad", "mixed"), "data.shuffle_block=0"]
    expected, tables = plain_losses(overrides)
    for results, doublings, reasons in run_distributed(grown, world_size, overrides):
        [(losses, shards)] = results
        assert losses == pytest.approx(expected, rel=1e-6)
        first = (0, world_size)
        assert doublings[:5] == [first, (), (), (), first]
        assert reasons == {"a batch has more ids of tags than the captured step has room for"}
        for table, row, column, weight in shards:
            rows, columns = weight.shape
            wanted = tables[table][row : row + rows, column : column + columns]
            torch.testing.assert_close(weight, wanted, rtol=2e-5, atol=2e-5)


def test_the_report_is_given_once_by_one_rank_and_not_on_cpus(caplog):
    warn = SlowBatchWarning(Ranks(0, 0, 1, 1, torch.device("cuda")))
    warn("a batch has more ids than there is room for")
    warn("a batch has more ids than there is room for")
    SlowBatchWarning(Ranks(1, 1, 2, 2, torch.device("cuda", 1)))("rank 0 says it")
    SlowBatchWarning(Ranks(0, 0, 1, 1, torch.device("cpu")))("no step is captured")
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "a batch has more ids than there is room for"
    ]


def test_rows_of_16_bits_are_not_handed_out(dataset):
    from nn.build import open_source
    from nn.embedding.declared_tables import check_tables
    from tests.helpers.composed import compose_config

    config = compose_config(*overrides_of(dataset, "adagrad", "planned"))
    spec = open_source(config).spec
    tables = RaggedModel.tables(config.model, spec)
    assert embedding_columns(tables, spec)
    config.model.embedding_dtype = TableDtype.bf16
    tables = [replace(table, data_type=DataType.BF16) for table in tables]
    tables[1] = replace(tables[1], pooling=PoolingType.NONE)
    with pytest.raises(ValueError, match="table 'genres' hands out its rows, which are float32"):
        check_tables(tables, config.model, spec)
