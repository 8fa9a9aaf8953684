"""Events of sequence groups in the step, against plain PyTorch: at any fill of their capacity, and beyond it."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from torchrec.modules.embedding_configs import PoolingType

from configs.schema import ModelConfig
from dataloading.batch import Batch
from dataloading.batch_reader import BatchReader
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from dataloading.dataset.source import DerivedSource
from nn.build import open_source
from nn.embedding import declared_tables
from nn.embedding.declared_tables import embedding_columns, one_table_per_feature
from nn.embedding.torch_optimizer import TableOptimizer
from nn.models.model import Model
from nn.sharding import request_capacity
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed

HERE = "tests.nn.training.test_sequences"
NUM_STEPS = 6
LONGEST = 9
FLOAT = np.dtype(np.float32)
GROUPS = (
    SequenceGroup(
        "history",
        ("hist_item", "hist_genre"),
        LONGEST,
        (EventColumn("hist_time", np.dtype(np.int64)), EventColumn("hist_rating", FLOAT)),
        "hist_time",
    ),
    SequenceGroup("cart", ("cart_item",), LONGEST, (EventColumn("cart_price", FLOAT),)),
)


@dataclass(kw_only=True, slots=True)
class EventOptions(ModelConfig):
    """Options of the model."""


class Events(Model):
    """A candidate, and events weighted by their numbers, their places and their likeness to it."""

    Options = EventOptions

    def __init__(self, num_columns: int, columns: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(1, 0.1, LONGEST))
        self.by_number = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))
        self.mix = nn.Linear(columns, columns)
        self.last = nn.Linear(num_columns + 3 * columns, 1)

    @classmethod
    def tables(cls, options, spec):
        item, genre, pair = one_table_per_feature(options, spec)
        return [
            pair,
            *(replace(table, pooling=PoolingType.NONE) for table in (item, genre)),
        ]

    @classmethod
    def build(cls, options, spec):
        columns = embedding_columns(cls.tables(options, spec), spec)
        return cls(len(spec.numerical) + columns, options.embedding_dim)

    def likes(self, rows: Tensor, candidate: Tensor, place: Tensor, *numbers: Tensor) -> Tensor:
        """Return what each event adds to its sample."""
        gain = sum(weight * value for weight, value in zip(self.by_number, numbers, strict=False))
        likeness = (rows * candidate).sum(1)
        return rows.tanh() * ((1 + gain + likeness) * self.places[place])[:, None]

    def forward(self, numerical, embeddings):
        candidate = embeddings.distinct_rows("item", "item").by_id()
        taken = [numerical, embeddings.matrix(), candidate]
        for name in ("history", "cart"):
            found = embeddings.sequence(name)
            rows = sum(rows.by_id() for rows in found.rows.values())
            if name == "history":
                # A product over rows, of which the captured step has as many as its capacity.
                rows = rows + embedding(
                    found.rows["hist_genre"].positions, self.mix(found.rows["hist_genre"].rows)
                )
            samples, starts = found.samples.long(), found.starts.long()
            place = torch.arange(len(samples), device=samples.device) - starts[samples]
            likes = self.likes(
                rows,
                candidate[samples],
                place.clamp(0, LONGEST - 1),
                *found.numbers.values(),
            )
            each = torch.arange(LONGEST, device=samples.device)
            at = torch.where(each < found.lengths[:, None], starts[:, None] + each, len(likes))
            padded = torch.cat([likes, torch.zeros_like(likes[:1])])
            taken.append(embedding(at, padded).sum(1))
        return self.last(torch.cat(taken, 1)).squeeze(1).float()


def plain_logits(dense: Events, tables: dict[str, Tensor], batch: Batch) -> Tensor:
    """Return the logits of the model, sample after sample."""
    numbers = {name: column for name, column in zip(COLUMNS, batch.events, strict=True)}
    found = []
    for row in range(len(batch.labels)):
        ids = {
            name: values.values()[values.offsets()[row] : values.offsets()[row + 1]].long()
            for name, values in batch.ids.to_dict().items()
        }
        events = slice(*batch.ids["hist_item"].offsets()[row : row + 2])
        carts = slice(*batch.ids["cart_item"].offsets()[row : row + 2])
        candidate = tables["item"][ids["item"]]
        genres = tables["hist_genre"][ids["hist_genre"]]
        history = tables["item"][ids["hist_item"]] + genres + dense.mix(genres)
        cart = tables["item"][ids["cart_item"]]
        of_history = (numbers[name][events] for name in COLUMNS[:2])
        likes = dense.likes(history, candidate, torch.arange(len(history)), *of_history)
        of_cart = dense.likes(
            cart, candidate, torch.arange(len(cart)), numbers["cart_price"][carts]
        )
        pair = tables["pair"][ids["pair"]].sum(0, keepdim=True)
        parts = [
            batch.numerical[row][None],
            pair,
            candidate,
            likes.sum(0)[None],
            of_cart.sum(0)[None],
        ]
        found.append(dense.last(torch.cat(parts, 1)).squeeze())
    return torch.stack(found)


COLUMNS = [column.name for group in GROUPS for column in group.numbers]


class WithGroups(DerivedSource):
    """Rows whose ragged features are events."""

    def __init__(self, source) -> None:
        super().__init__(source)
        self.spec = replace(self.spec, sequences=GROUPS)

    def read(self, *args):
        return self._source.read(*args)


def with_events(make):
    """Return `BatchReader._as_batch` with numbers of events, which follow from their ids."""

    def as_batch(self, *args) -> Batch:
        batch = make(self, *args)
        item, cart = (batch.ids[name].values().float() for name in ("hist_item", "cart_item"))
        return replace(batch, events=(item.sin(), item.cos(), cart.sin()))

    return as_batch


def built(overrides: list[str]) -> Built:
    config = compose_config(*overrides)
    return build(config, WithGroups(open_source(config)))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """197 rows for training; some rows have no events."""
    root = tmp_path_factory.mktemp("sequences") / "dataset"
    features = [
        CategoricalFeature.of("item", 300),
        replace(CategoricalFeature.of("hist_item", 300, None), table="item"),
        CategoricalFeature.of("hist_genre", 19, None),
        replace(CategoricalFeature.of("cart_item", 300, None), table="item"),
        CategoricalFeature.of("pair", 50, 2),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(root, categorical=features, numerical=("n", "m")) as directory:
        for split, rows in (("train", 197), ("test", 64)):
            history = np.minimum(generator.geometric(0.3, rows) - 1, LONGEST)
            lengths = {
                "hist_item": history,
                "hist_genre": history,
                "cart_item": generator.integers(0, 4, rows),
            }
            sizes = {"hist_item": 300, "hist_genre": 19, "cart_item": 300}
            directory[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=generator.random(rows) < 0.4,
                ids={
                    name: generator.integers(0, sizes[name], count.sum())
                    for name, count in lengths.items()
                }
                | {
                    "item": generator.integers(0, 300, rows),
                    "pair": generator.integers(0, 50, (rows, 2)),
                },
                lengths=lengths,
            )
    return root


RULES = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.01}
LAYOUTS = {
    "table_wise": ["sharding.types=[table_wise]"],
    "row_wise": ["sharding.types=[row_wise]"],
    "replicated": ["sharding.types=[data_parallel]"],
    "mixed": ["sharding.tables={item: row_wise, hist_genre: data_parallel, pair: table_wise}"],
}
CASES = [
    *zip(["sgd", "adagrad", "adam", "adagrad"], LAYOUTS, strict=True),
    ("adam", "row_wise"),
    ("sgd", "replicated"),
]


def overrides_of(data: Path, rule: str, layout: str, *others: str) -> list[str]:
    return [
        *TINY,
        f"model.name={HERE}:Events",
        f"data.path={data}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RULES[rule]}",
        "optimizer.eps=0.01",
        *LAYOUTS[layout],
        *others,
    ]


def plain(overrides: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of plain PyTorch, and the tables after them."""
    with ranks_of_cpu(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchReader, "_as_batch", with_events(BatchReader._as_batch))
        run = built(overrides)
        tables = {
            name: nn.Parameter(value.local_shards()[0].tensor.clone())
            for name, value in (
                (name.removesuffix(".weight"), value)
                for name, value in run.step.tables.weights().items()
            )
        }
        dense = Events.build(run.config.model, run.source.spec)
        dense.load_state_dict(run.step.dense.state_dict())
        chosen = run.config.effective_optimizer
        known = run.step.dense_optimizer.defaults
        options = {key: known[key] for key in ("eps", "betas") if key in known}
        updates = [
            TableOptimizer(tables.values(), chosen),
            type(run.step.dense_optimizer)(dense.parameters(), **options, lr=chosen.lr),
        ]
        losses = []
        for batch in run.train_loader.batches(0, NUM_STEPS):
            valid = slice(batch.num_valid)
            logits = plain_logits(dense, tables, batch)
            loss = binary_cross_entropy_with_logits(logits[valid], batch.labels[valid])
            for update in updates:
                update.zero_grad()
            loss.backward()
            for update in updates:
                update.step()
            losses.append(loss.item())
        return losses, {name: table.detach() for name, table in tables.items()}


@pytest.fixture(scope="module")
def wanted(dataset):
    return {rule: plain(overrides_of(dataset, rule, "table_wise")) for rule in RULES}


def trained(cases: list[list[str]], reserve: float = 1.125, spread: float = 6.0) -> list:
    """Return losses, logits of an evaluation, and this rank's shards of the tables, of each case."""
    declared_tables.CAPACITY, declared_tables.SPREAD = reserve, spread
    request_capacity.RESERVE, request_capacity.SPREAD = reserve, spread
    found = []
    with ranks_of_cpu(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchReader, "_as_batch", with_events(BatchReader._as_batch))
        for overrides in cases:
            run = built(overrides)
            losses = run.train(0, NUM_STEPS)
            shards = [
                (shard.table, shard.row_offset, shard.column_offset, shard.weight.clone())
                for shard in run.step.tables.shards()
            ]
            found.append((losses, shards))
            run.step.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "reserve", "spread"), [(1, 1.125, 6.0), (2, 1.125, 6.0), (2, 0.3, 0.0)]
)
def test_it_trains_as_plain_pytorch_at_any_fill(dataset, wanted, world_size, reserve, spread):
    """With 0.3 of the expected ids every batch takes a larger capacity."""
    chunks = [
        ("adagrad", "mixed", "train.accumulate=2"),
        ("adam", "replicated", "train.accumulate=3"),
    ]
    cases = [*CASES, *chunks]
    all_overrides = [overrides_of(dataset, *case) for case in cases]
    for of_rank in run_distributed(trained, world_size, all_overrides, reserve, spread):
        for case, (losses, shards) in zip(cases, of_rank, strict=True):
            expected, tables = wanted[case[0]]
            assert losses == pytest.approx(expected, rel=1e-6), case
            assert losses[-1] != losses[0]
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                whole = tables[table][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, whole, rtol=2e-5, atol=2e-5, msg=str(case))
