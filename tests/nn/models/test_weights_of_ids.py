"""Ids with weights, trained, against plain PyTorch with `EmbeddingBag` and `per_sample_weights`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag

from configs.schema import EventPooling
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.distributed.sharded_tensor import local_tensors, pieces_of
from nn.models.registry import declared_tables
from tests.helpers.composed import build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed

STEPS, LONGEST, TAGS, LR = 4, 7, 4000, 0.3
GROUP = SequenceGroup("tags", ("tag",), LONGEST, (EventColumn("weight", np.dtype(np.float32)),))
LAYOUTS = {
    "table_wise": ["sharding.types=[table_wise]"],
    "row_wise": ["sharding.types=[row_wise]"],
    "data_parallel": ["sharding.types=[data_parallel]"],
    "beside column_wise": ["sharding.tables={user: column_wise, tag: row_wise}"],
    "exchange of rows": ["sharding.types=[table_wise]", "sharding.exchange=rows"],
    "chunks": ["sharding.types=[row_wise]", "train.accumulate=3"],
    "host": ["sharding.tables={tag: {type: row_wise, tier: host, cache: 0.6}}"],
    "disk": ["sharding.tables={tag: {type: table_wise, tier: disk, cache: 0.6}}"],
}


def write_tags(root: Path, *, bad: tuple[int, float] | None = None) -> Path:
    """Write rows with 0 to 7 tags, of which some have weight 0; `bad`: a tag and its weight."""
    random = np.random.default_rng(1)
    features = [CategoricalFeature.of("tag", TAGS, None), CategoricalFeature.of("user", 40)]
    with write_dataset(
        root, categorical=features, numerical=("n",), numerical_dtype="float32", sequences=[GROUP]
    ) as directory:
        for split, rows in (("train", 229), ("test", 64)):
            lengths = np.minimum(random.geometric(0.3, rows) - 1, LONGEST)
            tags = random.integers(0, TAGS, lengths.sum()) % random.integers(1, TAGS, lengths.sum())
            weights = random.random(len(tags)) * (random.random(len(tags)) < 0.9)
            if bad is not None and split == "train":
                weights[bad[0]] = bad[1]
            directory[split].append(
                numerical=random.normal(size=(rows, 1)),
                labels=random.random(rows) < 0.4,
                ids={"tag": tags, "user": random.integers(0, 40, rows)},
                lengths={"tags": lengths},
                events={"weight": weights},
            )
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_tags(tmp_path_factory.mktemp("tags") / "data")


def overrides(data: Path, how: EventPooling, *others: str) -> list[str]:
    return [
        "model.name=embedding_mlp",
        "model.embedding_dim=8",
        "model.hidden=[8]",
        "model.event_weights={tags: weight}",
        f"model.sequence_pooling={how.value}",
        f"data.path={data}",
        "train.batch_size=64",
        "eval.batch_size=64",
        "optimizer.name=sgd",
        f"optimizer.lr={LR}",
        f"sharding.disk_path={data.parent / 'disk'}",
        "device=cpu",
        "log.pictures=false",
        *others,
    ]


Found = tuple[list[float], dict[str, list[tuple[int, int, Tensor]]]]


def trained(cases: list[list[str]]) -> list[Found]:
    """Return losses, and this rank's parts of the tables with their first row and column, of each case."""
    results = []
    with ranks_of_cpu():
        for case in cases:
            built = build(compose_config(*case))
            losses, parts = built.train(0, STEPS), dict[str, list]()
            for name, value in built.step.tables.weights().items():
                shards = [(*offsets, tensor.clone()) for offsets, tensor in pieces_of(value)]
                parts[name.removesuffix(".weight")] = shards
            for own in built.step.tables.shards():
                if own.initial is not None:  # the state has changes of it
                    rows = own.rows(torch.arange(len(own.weight)))
                    parts[own.table] = [(own.row_offset, own.column_offset, rows)]
            built.step.close()
            results.append((losses, parts))
    return results


def plain(case: list[str]) -> tuple[list[float], dict[str, Tensor]]:
    """Train the tables by `embedding_bag` and the dense component on one device, with torch's autograd."""
    with ranks_of_cpu():
        built = build(compose_config(*case))
        config, dense = built.config, built.step.dense.model
        tables = {
            name.removesuffix(".weight"): nn.Parameter(local_tensors(value)[0].clone())
            for name, value in built.step.tables.weights().items()
        }
        optimizer = torch.optim.SGD([*tables.values(), *dense.parameters()], lr=LR)
        losses = []
        for batch in built.train_loader.batches(0, STEPS):
            valid, vectors = slice(batch.num_valid), []
            for table in declared_tables(config.model, built.source.spec):
                (feature,) = table.feature_names
                of = batch.feature(feature)
                offsets, weights = of.lengths().long().cumsum(0) - of.lengths(), None
                if feature == "tag":
                    (weights,) = batch.events
                    if config.model.sequence_pooling is EventPooling.mean:
                        mass = torch.segment_reduce(weights, "sum", lengths=of.lengths().long())
                        sample = torch.repeat_interleave(of.lengths().long())
                        weights = weights / mass.where(mass > 0, 1)[sample]
                ids = of.values().long()
                vectors.append(
                    embedding_bag(
                        ids, tables[table.name], offsets, mode="sum", per_sample_weights=weights
                    )
                )
            optimizer.zero_grad()
            logits = dense(batch.numerical, torch.cat(vectors, 1))
            loss = binary_cross_entropy_with_logits(logits[valid], batch.labels[valid])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        built.step.close()
    return losses, {name: table.detach() for name, table in tables.items()}


@pytest.mark.parametrize("how", [EventPooling.sum, EventPooling.mean])
def test_it_trains_as_embedding_bag_with_weights(data, how):
    losses, tables = plain(overrides(data, how))
    cases = [overrides(data, how, *layout) for layout in LAYOUTS.values()]
    for world_size in (1, 2):
        for of_rank in run_distributed(trained, world_size, cases):
            for name, (own, parts) in zip(LAYOUTS, of_rank, strict=True):
                np.testing.assert_allclose(own, losses, rtol=1e-6, atol=1e-6, err_msg=name)
                for table, shards in parts.items():
                    for row, column, part in shards:
                        rows, columns = part.shape
                        wanted = tables[table][row : row + rows, column : column + columns]
                        torch.testing.assert_close(part, wanted, rtol=1e-6, atol=1e-6)


def test_a_negative_weight_is_named_where_it_is_read(tmp_path):
    root = write_tags(tmp_path / "data", bad=(3, -0.25))
    with ranks_of_cpu():
        built = build(compose_config(*overrides(root, EventPooling.sum)))
        with pytest.raises(
            ValueError,
            match=r"^'weight': an event has -0.25 at row \d+ of .*weight.bin; want a weight that is not neg",
        ):
            for _ in built.train_loader.batches(0, 4):
                pass
        built.step.close()
        # Without the option it is a number like others.
        without = [o for o in overrides(root, EventPooling.sum) if "event_weights" not in o]
        built = build(compose_config(*without))
        assert len(built.train(0, 4)) == 4
        built.step.close()
