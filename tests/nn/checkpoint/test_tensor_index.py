"""Reading of tensors from files, in blocks of any size, and detection of changed bytes."""

import zlib
from itertools import product

import numpy as np
import pytest

from nn.checkpoint import tensor_index
from nn.checkpoint.tensor_index import Chunk, ChunkReader, StoredTensor


@pytest.fixture
def small_blocks(monkeypatch):
    """Set block and checksum sizes so that few numbers fill several, with borders inside rows."""
    monkeypatch.setattr(tensor_index, "BLOCK_BYTES", 48)
    monkeypatch.setattr(tensor_index, "CHECKSUM_BYTES", 100)


def written(path, array, offsets, start) -> Chunk:
    """Write a chunk at byte `start` of a file."""
    data = array.tobytes()
    with path.open("r+b" if path.exists() else "wb") as stream:
        stream.seek(start)
        stream.write(data)
    checksums = tuple(zlib.crc32(data[at : at + 100]) for at in range(0, len(data), 100))
    return Chunk(offsets, array.shape, path, start, checksums)


@pytest.mark.parametrize("block_bytes", [1, 40, 120, 10**6])
def test_chunks_of_any_shape_are_joined(tmp_path, small_blocks, block_bytes):
    complete = np.arange(30 * 6, dtype="<f4").reshape(30, 6)
    rows, columns = [slice(0, 7), slice(7, 7), slice(7, 30)], [slice(0, 2), slice(2, 6)]
    chunks = [
        written(tmp_path / f"{index}", complete[row, column], (row.start, column.start), 64)
        for index, (row, column) in enumerate(product(rows, columns))
    ]
    stored = StoredTensor("float32", (30, 6), tuple(reversed(chunks)))
    assert np.array_equal(np.concatenate(list(stored.blocks(block_bytes))), complete)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 4), (3, 4, 2)])
def test_tensors_of_any_shape_are_read(tmp_path, small_blocks, shape):
    array = np.arange(np.prod(shape, dtype=int), dtype="<i8").reshape(shape)
    chunk = written(tmp_path / "file", array, (0,) * len(shape), 0)
    read = list(StoredTensor("int64", shape, (chunk,)).blocks())
    assert sum(block.size for block in read) == array.size
    assert not read or np.array_equal(np.concatenate(read), np.atleast_1d(array))


@pytest.mark.parametrize(("first", "last"), [(0, None), (3, 20), (13, 14), (5, 5)])
def test_a_range_of_rows_is_read(tmp_path, small_blocks, first, last):
    array = np.arange(40 * 3, dtype="<f4").reshape(40, 3)
    reader = ChunkReader(written(tmp_path / "file", array, (0, 0), 8), "float32")
    read = list(reader.read(first, last))
    assert [row for row, _ in read] == [*range(first, 40 if last is None else last, 4)]
    values = np.concatenate([block for _, block in read]) if read else array[:0]
    assert np.array_equal(values, array[first:last])


@pytest.mark.parametrize("byte", [0, 99, 100, 250, 479])
def test_a_flipped_bit_is_found_when_its_checksum_block_is_read(tmp_path, small_blocks, byte):
    path = tmp_path / "file"
    array = np.arange(40 * 3, dtype="<f4").reshape(40, 3)
    reader = ChunkReader(written(path, array, (0, 0), 16), "float32")
    list(reader.read())
    data = bytearray(path.read_bytes())
    data[16 + byte] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="file has changed since it was written"):
        list(reader.read())
    # Rows 9 to 16, bytes 108 to 204, contain no complete checksum block.
    list(ChunkReader(reader._chunk, "float32").read(9, 17))
    begin = byte // 100 * 100 // 12
    with pytest.raises(ValueError, match="file has changed since it was written"):
        list(ChunkReader(reader._chunk, "float32").read(begin, min(begin + 10, 40)))


def test_a_truncated_file_is_named(tmp_path, small_blocks):
    path = tmp_path / "file"
    array = np.zeros((40, 3), "<f4")
    reader = ChunkReader(written(path, array, (0, 0), 0), "float32")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="file is truncated"):
        list(reader.read())
    assert len(list(reader.read(0, 36))) == 9
