"""Rows that the ranks of a group ask of one owner: each once, with the sum of its gradients in the order of the ranks."""

from types import SimpleNamespace

import pytest
import torch

from dataloading.dataset.batch_layout import NO_ID
from nn.sharding.merged_rows import MergedRows, of_asked
from nn.sharding.placement import RankTables

NUM_ROWS, COLUMNS = 9, 4
ASKED = [7, 2, NO_ID, 0, 2, 7, 8, NO_ID, 2, NO_ID, NO_ID, NO_ID]
"""Of three ranks, which have capacity for four rows each."""
CPU = torch.device("cpu")


@pytest.mark.parametrize(("capacity", "lacks"), [(6, False), (4, False), (3, True)])
def test_distinct_rows_have_the_sums_of_their_gradients(capacity, lacks):
    fields = [None] * 7 + [torch.float32, SimpleNamespace(device=CPU), None, None]
    tables = RankTables(*fields)
    merged = MergedRows(tables, len(ASKED), NUM_ROWS, capacity, COLUMNS)
    rows, position, order, overflows = merged.merge(torch.tensor(ASKED, dtype=torch.int32))
    kept = sorted(set(ASKED) - {NO_ID})[:capacity]
    assert rows.tolist() == kept + [NO_ID] * (capacity - len(kept))
    assert bool(overflows) == lacks
    there = [row if row in kept else NO_ID for row in ASKED]
    assert of_asked(rows, position, order).tolist() == there

    ids = merged.sums.take_sorted(position, position, order)
    random = torch.Generator().manual_seed(0)
    for _ in range(2):
        gradients = torch.randn(len(ASKED), COLUMNS, generator=random)
        wanted = torch.zeros(capacity, COLUMNS)
        for row, gradient in zip(ASKED, gradients, strict=True):
            if row in kept:
                wanted[kept.index(row)] += gradient
        assert torch.equal(merged.sums(ids, gradients), wanted)
