"""Batch: its interface for TorchRec, and padding that touches no table.

pytest tests/dataloading/test_batch.py
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dataloading.batch import Batch, fixed_layout, jagged


def fixed(num_valid: int = 3, padded_to: int = 4) -> tuple[Tensor, KeyedJaggedTensor]:
    """Return ids of one one-hot and one two-hot feature."""
    values = torch.arange(3 * num_valid, dtype=torch.int32)
    return values, fixed_layout(("a", "b"), (1, 2), num_valid, padded_to, torch.int32).jagged(
        values
    )


def batch_of(ids: KeyedJaggedTensor, shared: bool) -> Batch:
    layout = fixed_layout(("a", "b"), (1, 2), 3, 4, torch.int32) if shared else None
    return Batch(torch.ones(4, 2), torch.zeros(4), ids, num_valid=3, global_valid=5, layout=layout)


def test_a_layout_gives_each_row_its_ids_and_padding_none():
    values, ids = fixed()
    assert ids.keys() == ["a", "b"]
    assert ids["a"].lengths().tolist() == [1, 1, 1, 0]
    assert ids["b"].lengths().tolist() == [2, 2, 2, 0]
    assert ids["b"].to_dense()[1].tolist() == values[5:7].tolist()
    assert ids["b"].to_dense()[3].tolist() == []


def test_nothing_is_left_for_torchrec_to_read_back():
    values, ids = fixed()
    bare = KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=ids.lengths())
    assert (ids._stride, ids._length_per_key, ids._offset_per_key) == (4, [3, 6], [0, 3, 9])
    assert ids._offsets.tolist() == bare.offsets().tolist()
    assert (bare.stride(), bare.length_per_key(), bare.offset_per_key()) == (4, [3, 6], [0, 3, 9])


def test_offsets_of_ragged_ids_come_from_their_lengths():
    lengths = torch.tensor([1, 0, 2, 1], dtype=torch.int32)
    ids = jagged(("a", "b"), torch.arange(4, dtype=torch.int32), lengths, None, [1, 3])
    assert ids["b"].offsets().tolist() == [0, 2, 3]
    assert ids.offset_per_key() == [0, 1, 4]


def test_full_batches_share_one_layout():
    assert fixed_layout(("a",), (1,), 8, 8, torch.int32) is fixed_layout(
        ("a",), (1,), 8, 8, torch.int32
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("move", ["to", "pin_memory"])
def test_a_moved_batch_is_the_same_batch(shared, move):
    if move == "pin_memory" and not torch.cuda.is_available():
        pytest.skip("pinning needs a GPU")
    batch = batch_of(fixed()[1], shared)
    moved = batch.to(torch.device("cpu")) if move == "to" else batch.pin_memory()
    assert (moved.num_valid, moved.global_valid) == (3, 5)
    assert torch.equal(moved.numerical, batch.numerical)
    assert torch.equal(moved.labels, batch.labels)
    assert torch.equal(moved.ids.values(), batch.ids.values())
    assert torch.equal(moved.ids.lengths(), batch.ids.lengths())
    assert moved.ids._length_per_key == [3, 6]


@pytest.mark.parametrize("shared", [True, False])
def test_a_batch_moves_to_another_device(shared):
    moved = batch_of(fixed()[1], shared).to(torch.device("meta"))
    tensors = (
        moved.numerical,
        moved.labels,
        moved.ids.values(),
        moved.ids.lengths(),
        moved.ids.offsets(),
    )
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_a_shared_layout_is_copied_to_a_device_once():
    first, second = (batch_of(fixed()[1], True).to(torch.device("meta")) for _ in range(2))
    assert first.ids.lengths() is second.ids.lengths()
    assert first.ids.values() is not second.ids.values()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shared", [True, False])
def test_a_pinned_batch_travels_without_waiting_and_is_recorded(shared):
    stream = torch.cuda.Stream()
    batch = batch_of(fixed()[1], shared).pin_memory()
    assert batch.numerical.is_pinned()
    assert batch.ids.values().is_pinned()
    with torch.cuda.stream(stream):
        moved = batch.to(torch.device("cuda"), non_blocking=True)
    moved.record_stream(torch.cuda.current_stream())
    stream.synchronize()
    assert moved.ids.values().tolist() == batch.ids.values().tolist()


@pytest.mark.parametrize("num_numerical", [2, 0])
def test_a_batch_in_one_memory_moves_with_it(num_numerical):
    batch = replace(batch_of(fixed()[1], True), weights=torch.rand(4))
    batch = replace(batch, numerical=torch.rand(4, num_numerical))
    packed = batch.in_one_memory()
    moved = packed.at(packed.memory.clone())
    packed.memory.zero_()
    assert not packed.labels.any()
    for copy in (moved, moved.at(batch.packed_as(moved))):
        assert copy.ids.values().tolist() == batch.ids.values().tolist()
        for ours, wanted in zip(copy.columns, batch.columns, strict=True):
            assert torch.equal(ours, wanted)


def test_padding_rows_touch_no_table_row():
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=4, num_embeddings=9, feature_names=[name]
        )
        for name in "ab"
    ]
    collection = EmbeddingBagCollection(tables=tables)
    _, ids = fixed(num_valid=1, padded_to=4)
    pooled = collection(ids).to_dict()
    (pooled["a"].sum() + pooled["b"].sum()).backward()
    assert not pooled["a"][1:].any()
    touched = [
        table.weight.grad.abs().sum(1).nonzero().flatten().tolist()
        for table in collection.embedding_bags.values()
    ]
    assert touched == [[0], [1, 2]]
