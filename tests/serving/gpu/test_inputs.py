"""The rows of tables that a GPU holds, and the block in which the inputs of a batch lie there."""

import pytest
import torch

from serving.gpu.inputs import InputLayout
from serving.gpu.model import padded_sizes
from serving.gpu.tables import hot_rows
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import Feature, Manifest
from tests.serving.handmade_model import TABLES


def layout_of(num_rows: int, *ragged: str, keep_rate: str | None = None) -> InputLayout:
    features = [Feature("fixed", 9, 2), *(Feature(name, 200, None) for name in ragged)]
    values = {"name": "m", "model": "m", "outputs": [], "tables": [], "dtype": "fp32"}
    values |= {"numerical": ["a"], "categorical": features, "keep_rate": keep_rate}
    return InputLayout(Manifest(**values), num_rows)


def test_small_tables_are_complete_before_large_ones():
    row = 16 * 4
    assert hot_rows(TABLES[:2], "fp32", 400 * row) == [300, 40]
    places = 4 * 300
    assert hot_rows(TABLES[:2], "fp32", 140 * row + places) == [100, 40], "places count"
    assert hot_rows(TABLES[:2], "fp32", 3 * row + 4 * 340) == [1, 1]
    assert hot_rows(TABLES[:2], "int8", 4 * 340 + 4 * 340 + 50 * 16) == [25, 25], "scales count"
    with pytest.raises(ValueError, match="table_gib: the tables need more than"):
        hot_rows(TABLES, "fp32", row)
    with pytest.raises(ValueError, match="tables of int4 are served on CPUs; export with"):
        hot_rows(TABLES, "int4", 400 * row)


def test_padded_rows_look_up_id_0_and_no_ragged_ids():
    layout = layout_of(4, "r")
    block = torch.full((layout.first_value + 3,), 99, dtype=torch.int32)
    ragged = {"r": RaggedIds(torch.tensor([7, 8, 9]), torch.tensor([1, 2]))}
    rows = Rows(torch.zeros(2, 1), torch.tensor([[1, 2], [3, 4]]), ragged)
    assert layout.fill(block, [rows]) == len(block)
    assert layout.ids(block).tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert block[layout.first_start("r") :].tolist() == [0, 1, 3, 3, 3, 7, 8, 9]
    assert padded_sizes(48) == [32, 48]
    assert padded_sizes(16) == [16]


def test_parts_lie_in_a_block_as_their_joined_rows_do():
    layout = layout_of(8, "r", "s", keep_rate="rate")
    parts = []
    for seed, count in enumerate((2, 1, 3)):
        ids = {
            name: RaggedIds(
                torch.arange(count * (seed + k)) + 50 * k, torch.full((count,), seed + k)
            )
            for k, name in enumerate("rs")
        }
        rates = torch.rand(count) if seed == 1 else None
        parts.append(Rows(torch.rand(count, 1), torch.randint(9, (count, 2)), ids, rates))
    blocks = [torch.full((layout.first_value + 40,), 1, dtype=torch.int32) for _ in range(2)]
    sizes = [layout.fill(blocks[0], parts), layout.fill(blocks[1], [Rows.joined(parts)])]
    assert sizes[0] == sizes[1] == layout.first_value + 7 + 13
    assert blocks[0].equal(blocks[1])
