"""Tables in mapped files: a file that exceeds memory is served, of every dtype, and one that is too short is refused."""

import os

import numpy as np
import pytest
import torch

from serving.inference.tables import MappedTable
from serving.manifest import SCALED, TABLE_BITS, Table

COLUMNS = 16


@pytest.mark.parametrize("dtype", TABLE_BITS)
def test_a_table_larger_than_memory_is_looked_up(tmp_path, dtype):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    row_bytes = COLUMNS * TABLE_BITS[dtype] // 8
    table = Table("t", 2 * memory // row_bytes, COLUMNS, "sum", ["f"])
    (tmp_path / "tables").mkdir()
    (tmp_path / table.scale_file).touch()
    os.truncate(tmp_path / table.scale_file, 4 * table.rows)
    # Sparse: the first and the last row alone take space.
    numbers = torch.arange(COLUMNS).to(
        {"fp32": torch.float32, "bf16": torch.bfloat16}.get(dtype, torch.int8)
    )
    if dtype == "int4":
        numbers = torch.arange(COLUMNS) % 15 - 7
        pairs = (numbers + 8).view(-1, 2)
        stored = (pairs[:, 0] + 16 * pairs[:, 1]).to(torch.uint8)
    else:
        stored = numbers
    with (tmp_path / table.file).open("wb") as stream:
        stream.truncate(table.rows * row_bytes)
        stream.seek(-row_bytes, os.SEEK_END)
        stream.write(stored.view(torch.uint8).numpy().tobytes())
    with (tmp_path / table.scale_file).open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(np.float32(0.5).tobytes())
    found = MappedTable(tmp_path, table, dtype).rows(torch.tensor([0, table.rows - 1]))
    last = numbers * (0.5 if dtype in SCALED else 1.0)
    assert found.tolist() == [[0.0] * COLUMNS, last.tolist()]
    os.truncate(tmp_path / table.file, table.rows * row_bytes - 1)
    with pytest.raises(ValueError, match="greater than file size"):
        MappedTable(tmp_path, table, dtype)
