"""Batch: one memory laid out for a step, its features as TorchRec has them, and padding that touches no table.

pytest tests/dataloading/test_batch.py
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from dataloading.batch import Batch
from dataloading.dataset.batch_layout import NO_ID, BatchLayout, IdCount
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from dataloading.dataset.source import BatchTarget, Columns
from dataloading.dataset.split_files import SplitFiles

SPEC = FeatureSpec(
    Path("none"),
    ("n", "m"),
    np.dtype(np.float32),
    (RowColumn("label"),),
    (
        CategoricalFeature.of("a", 9),
        CategoricalFeature.of("b", 9, 2),
        CategoricalFeature("h", 9, np.dtype(np.int8), None, 1.5),
    ),
    {"train": SplitFiles(10)},
    {},
    weight=RowColumn("weight", dtype=np.dtype(np.float32)),
    sequences=(SequenceGroup("events", ("h",), 5, (EventColumn("value", np.dtype(np.float32)),)),),
)


def batch_of(num_valid: int = 3, rows: int = 4, lengths: tuple[int, ...] = (2, 0, 3)) -> Batch:
    made: list[Tensor] = []

    def allocate(num_bytes: int) -> np.ndarray:
        made.append(torch.full((num_bytes,), 85, dtype=torch.uint8))
        return made[0].numpy()

    num_ids = [num_valid, 2 * num_valid, sum(lengths)]
    columns = Columns.empty(SPEC, num_valid, num_ids, BatchTarget(rows, allocate))
    columns.numerical[:num_valid] = np.arange(2 * num_valid).reshape(-1, 2)
    columns.labels[:num_valid] = 1
    for first, ids in zip((0, 0, 4), columns.ids, strict=True):
        ids[:] = np.arange(first, first + len(ids)) % 9
    columns.lengths[2][:num_valid] = lengths
    columns.events[0][:] = np.arange(len(columns.events[0])) + 0.5
    columns.weights[:num_valid] = 2
    columns.global_rows[:] = np.arange(rows)[::-1]
    return Batch(made[0], columns.layout, num_valid, 5)


def contents(batch: Batch) -> list:
    of_rows = batch.numerical, batch.labels, batch.weights, batch.global_rows
    tensors = (*of_rows, batch.ids.values(), *batch.events)
    return [*(tensor.tolist() for tensor in tensors), batch.ids.lengths().tolist()]


def test_a_batch_has_its_rows_and_set_padding():
    batch = batch_of()
    assert batch.ids.keys() == ["a", "b", "h"]
    assert batch.numerical.tolist() == [[0, 1], [2, 3], [4, 5], [0, 0]]
    assert (batch.labels.tolist(), batch.weights.tolist()) == ([1, 1, 1, 0], [2, 2, 2, 0])
    assert batch.ids["a"].lengths().tolist() == [1, 1, 1, 0]
    assert batch.ids["b"].to_dense()[1].tolist() == [2, 3]
    assert batch.ids["h"].lengths().tolist() == [2, 0, 3, 0]
    assert batch.ids["h"].values().tolist() == [4, 5, 6, 7, 8]
    assert batch.ids["h"].offsets().tolist() == [0, 2, 2, 5, 5]
    assert batch.ids.values().dtype == batch.ids.lengths().dtype == torch.int32
    (values,) = batch.events
    assert values.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_flat_ids_and_events_are_those_of_a_step():
    batch = batch_of()
    room = batch.layout.counts["h"].capacity
    assert batch.layout.counts["b"] == IdCount(2, 8)
    wanted = [0, 1, 2, 0] + [0, 1, 2, 3, 4, 5, 0, 0] + [4, 5, 6, 7, 8] + [NO_ID] * (room - 5)
    assert batch.flat_ids.tolist() == [*wanted, 2, 0, 3, 0]
    assert batch.flat_events[0].tolist() == [0.5, 1.5, 2.5, 3.5, 4.5] + [0] * (room - 5)


def test_a_larger_capacity_keeps_the_batch():
    batch = batch_of()
    layout = BatchLayout.of(SPEC, 4, (2,))
    larger = batch.in_layout(layout)
    assert contents(larger) == contents(batch)
    assert layout.counts["h"].capacity == 4 * batch.layout.counts["h"].capacity
    assert not larger.flat_events[0][5:].any()
    more = 3 * batch.layout.counts["h"].capacity
    flat = batch.flat_ids.tolist()
    assert larger.flat_ids.tolist() == [*flat[:-4], *[NO_ID] * more, *flat[-4:]]


def test_the_layout_grows_with_the_ids():
    room = batch_of().layout.counts["h"].capacity
    found = {count: batch_of(3, 4, (0, 0, count)).layout.doublings for count in (0, room, room + 1)}
    assert found == {0: (), room: (), room + 1: (1,)}


@pytest.mark.parametrize("num_ids", range(0, 90, 7))
def test_each_ragged_feature_grows_by_itself(num_ids):
    ragged = SPEC.categorical[2]
    spec = replace(SPEC, categorical=(ragged, SPEC.categorical[0], replace(ragged, name="g")))
    usual = BatchLayout.of(spec, 4).counts["g"].capacity
    layout = BatchLayout.holding(spec, 4, [3, 4, num_ids])
    capacity = layout.counts["g"].capacity
    assert capacity >= num_ids
    assert capacity == usual or capacity < 2 * num_ids
    assert layout.counts["h"].capacity == usual
    assert layout.doublings == ((0, round(np.log2(capacity / usual))) if capacity > usual else ())


def test_a_moved_batch_is_the_same_batch():
    batch = batch_of()
    moved = batch.at(batch.memory.clone())
    wanted = contents(batch)
    batch.memory.zero_()
    assert contents(moved) == wanted
    assert (moved.num_valid, moved.global_valid) == (3, 5)
    assert batch.to(torch.device("meta")).flat_ids.device.type == "meta"


def test_columns_for_no_step_have_no_padding():
    columns = Columns.empty(SPEC, 3, [3, 6, 5])
    assert [len(ids) for ids in columns.ids] == [3, 6, 5]
    assert (columns.numerical.shape, len(columns.lengths[2]), len(columns.events[0])) == (
        (3, 2),
        3,
        5,
    )


@pytest.mark.parametrize("num_valid", [1, 0])
def test_padding_rows_touch_no_table_row(num_valid):
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=4, num_embeddings=9, feature_names=[name]
        )
        for name in "ab"
    ]
    collection = EmbeddingBagCollection(tables=tables)
    pooled = collection(batch_of(num_valid, 4, (0,) * num_valid).ids).to_dict()
    (pooled["a"].sum() + pooled["b"].sum()).backward()
    assert not pooled["a"][num_valid:].any()
    touched = [
        table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
        for table in collection.embedding_bags.values()
    ]
    assert touched == ([[0], [0, 1]] if num_valid else [[], []])
