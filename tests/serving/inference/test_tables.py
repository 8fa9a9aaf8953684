"""Tables in mapped files: a file that exceeds memory is served, of every dtype, and one that is too short is refused.

Processes that map one file share its memory.
"""

import mmap
import multiprocessing as mp
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from serving.inference.tables import MappedTable
from serving.manifest import SCALED, TABLE_BITS, Table

COLUMNS = 16
PROCESSES = 3


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


def memory_of_reader(directory: Path, table: Table, dtype: str, all_have_read) -> dict[str, int]:
    """Read a row of every page; return the process's bytes of the file, and what it has grown by beside, when all have."""
    found = MappedTable(directory, table, dtype)
    before = memory("RssAnon", "/proc/self/status")
    of_page = mmap.PAGESIZE // table.row_bytes(dtype)
    for ids in torch.arange(0, table.rows, of_page).split(1 << 13):
        found.rows(ids)
    all_have_read.wait(60)
    maps = Path("/proc/self/smaps").read_text()
    (of_file,) = re.findall(rf"^[^\n]*{re.escape(table.file)}\n.*?VmFlags", maps, re.M | re.S)
    values = {
        name: 1024 * int(re.search(rf"^{name}: +(\d+)", of_file, re.M)[1])
        for name in ("Rss", "Pss", "Anonymous")
    }
    all_have_read.wait(60)
    return values | {"beside": memory("RssAnon", "/proc/self/status") - before}


def memory(name: str, path: str) -> int:
    return 1024 * int(re.search(rf"^{name}:\s+(\d+)", Path(path).read_text(), re.M)[1])


@pytest.mark.parametrize("dtype", TABLE_BITS)
def test_processes_that_serve_one_table_have_it_in_memory_once(tmp_path, dtype):
    table = Table("t", 1 << 22, COLUMNS, "sum", ["f"])
    num_bytes = table.rows * COLUMNS * TABLE_BITS[dtype] // 8
    (tmp_path / "tables").mkdir()
    for file, size in ((table.file, num_bytes), (table.scale_file, 4 * table.rows)):
        (tmp_path / file).touch()
        os.truncate(tmp_path / file, size)
    context = mp.get_context("forkserver")
    with context.Manager() as manager, context.Pool(PROCESSES) as pool:
        all_have_read = manager.Barrier(PROCESSES)
        arguments = [(tmp_path, table, dtype, all_have_read)] * PROCESSES
        found = pool.starmap(memory_of_reader, arguments, chunksize=1)
    assert min(of["Rss"] for of in found) > 0.9 * num_bytes
    assert sum(of["Pss"] for of in found) <= 1.01 * num_bytes
    assert [of["Anonymous"] for of in found] == [0] * PROCESSES
    assert max(of["beside"] for of in found) < num_bytes / 2
