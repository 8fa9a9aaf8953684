"""Of files with holes only what is stored is read; checksums are those of all bytes."""

import os
import zlib
from mmap import PAGESIZE
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from nn.checkpoint.holes import crc32_of, stored_pages
from nn.checkpoint.tensor_files import ArrayFile

PAGES = 3000
NUM_BYTES = PAGES * PAGESIZE + 100


@pytest.fixture
def file():
    """A file in whose 3,000 pages five have data, one of them zeros; a file system in memory would not do."""
    with TemporaryDirectory(dir="/var/tmp") as directory:
        path = f"{directory}/table"
        with open(path, "wb") as stream:
            stream.truncate(NUM_BYTES)
            for page in (0, 7, 8, 1999, 2500):
                stream.seek(page * PAGESIZE)
                stream.write(bytes(PAGESIZE) if page == 1999 else bytes([page % 251 + 1]) * 3000)
        os.sync()
        yield path


@pytest.mark.parametrize("start", [0, 500])
@pytest.mark.parametrize("num_bytes", [1, PAGESIZE, 8 * PAGESIZE, NUM_BYTES - 500])
def test_a_block_has_its_checksum_from_what_is_stored(file, start, num_bytes):
    whole, num_read = Path(file).read_bytes()[start : start + num_bytes], 0

    def read(first: int, end: int) -> bytes:
        nonlocal num_read
        num_read += end - first
        return whole[first:end]

    descriptor = os.open(file, os.O_RDONLY)
    stored = stored_pages(descriptor, start, num_bytes)
    os.close(descriptor)
    assert crc32_of(stored, read) == zlib.crc32(whole)
    # Each of the five lies on two pages of a block that begins between pages; then there is the last one.
    assert num_read <= min(num_bytes, 12 * PAGESIZE)


def test_a_block_is_written_with_its_holes_and_without_pages_of_zeros(file):
    table = torch.from_file(file, shared=True, size=NUM_BYTES // 4, dtype=torch.float32)[125:]
    target = os.path.join(os.path.dirname(file), "copy")
    copy = ArrayFile(target)
    wanted = table.view(torch.uint8).numpy().tobytes()
    assert copy.write_sparse(table, PAGESIZE) == zlib.crc32(wanted)
    copy.sync()
    copy.close()
    assert Path(target).read_bytes()[PAGESIZE:] == wanted
    assert 512 * os.stat(target).st_blocks <= 12 * PAGESIZE
