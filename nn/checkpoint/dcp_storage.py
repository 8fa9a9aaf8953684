"""Storage of torch.distributed.checkpoint: bare arrays in one file per rank, and an index in JSON (`nn.checkpoint.tensor_index`).

Torch's own writer pickles its index, wraps each array in a zip archive, keeps no checksum that it compares, and loses
the errors of its helper threads, so that a full disk would leave a checkpoint that looks complete. Its reader loads every
chunk completely from which a rank needs a row.
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dataloading.dataset.durable_files import sync_descriptor, write_synced
from nn.checkpoint.holes import crc32_of, stored_pages
from nn.checkpoint.staging import in_file
from nn.checkpoint.tensor_index import (
    CHECKSUM_BYTES,
    FORMAT,
    INDEX_FILE,
    SPARSE_FORMAT,
    THREADS,
    ChunkReader,
    StoredTensor,
)
from nn.ops.host_copy import HostCopy
from nn.tiers.initial_rows import InitialRows
from nn.tiers.table_file import pages_of, reserve_pages

ALIGNMENT = 64
"""Bytes; arrays begin at multiples of it, so that they can be mapped into memory."""


class FileRange(NamedTuple):
    """Location of a chunk: file, first byte, and one CRC-32 per block."""

    file: str
    start: int
    crc32: list[int]


class DcpWriter(dcp.StorageWriter):
    """Writer of `rank_<rank>.bin` on every rank and `tensors.json` on rank 0, synced.

    `initial` has the weights whose changes tensors are, by name. What lies in files with holes is written with holes.
    """

    def __init__(
        self, directory: Path, tables: Sequence[str], initial: Mapping[str, InitialRows]
    ) -> None:
        self._directory = directory
        self._tables, self._initial = list(tables), initial

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks; OSError, as of a full disk, leaves the file incomplete."""
        path = self._directory / plan.storage_data
        results, jobs, start = [], [], 0
        with closing(ArrayFile(path)) as file, ThreadPoolExecutor(THREADS) as pool:
            for item in plan.items:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor), (
                    f"{item.index.fqn}: a checkpoint holds tensors only"
                )
                array = value.detach().contiguous()
                write = file.write
                if in_file(array):
                    write, start = file.write_sparse, -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                blocks = list(array_blocks(array, start))
                writing = [pool.submit(write, *block) for block in blocks]
                jobs.append((item.index, array.nbytes, start, writing))
                start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            for index, num_bytes, begin, writing in jobs:
                file_range = FileRange(path.name, begin, [write.result() for write in writing])
                results.append(WriteResult(index, num_bytes, file_range))
            file.sync()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index on rank 0 after every rank has written its chunks."""
        file_ranges = {
            result.index: result.storage_data for rank_results in results for result in rank_results
        }
        tensors: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
            chunks = []
            for chunk in stored.chunks:
                file_range = file_ranges[dcp.metadata.MetadataIndex(name, chunk.offsets)]
                shape = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                chunks.append(shape | file_range._asdict())
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
            if name in self._initial:
                tensors[name]["initial"] = asdict(self._initial[name])
        form = SPARSE_FORMAT if self._initial else FORMAT
        index = {"format": form, "tables": self._tables, "tensors": tensors}
        write_synced(self._directory / INDEX_FILE, json.dumps(index) + "\n")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory on every rank; a network file system may not show that of another host yet."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            SavePlan(plan.items, storage_data=f"rank_{rank:05}.bin", planner_data=plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    # The constructor has the directory and the tables, and no state is kept between saves.
    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is None


class ArrayFile:
    """File that several threads write at disjoint ranges; a new one, or an empty one."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, block: Tensor, start: int) -> int:
        """Write a flat block of a tensor at byte `start` and return its CRC-32."""
        data = in_host_memory(block).view(torch.uint8).numpy().data
        self._write(data, start)
        return zlib.crc32(data)

    def write_sparse(self, block: Tensor, start: int) -> int:
        """Write a flat block of a mapped file as `write`, without pages that are zero, but for its last one."""
        data = block.view(torch.uint8).numpy()
        source = os.open(str(block.untyped_storage().filename), os.O_RDONLY)
        try:
            stored = stored_pages(source, int(block.storage_offset()) * block.itemsize, len(data))
        finally:
            os.close(source)
        for first, end in stored:
            firsts = range(first, end, mmap.PAGESIZE)
            whole = data[first : end - (end - first) % mmap.PAGESIZE]
            is_written = np.append(whole.reshape(-1, mmap.PAGESIZE).any(axis=1), True)[
                : len(firsts)
            ]
            is_written[-1] |= end == len(data)
            edges = np.flatnonzero(np.diff(is_written, prepend=False, append=False))
            for begin, stop in (first + edges.reshape(-1, 2) * mmap.PAGESIZE).tolist():
                self._write(data[begin : min(stop, end)].data, start + begin)
        return crc32_of(stored, lambda first, end: data[first:end])

    def _write(self, data: memoryview, start: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], start + written)

    def sync(self) -> None:
        """Make the bytes survive a power cut."""
        sync_descriptor(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def in_host_memory(block: Tensor) -> Tensor:
    """Return a tensor, or a copy through pinned memory: one of other pages takes a lock that launches of other threads need."""
    if block.device.type != "cuda":
        return block
    try:
        copied = HostCopy(block)
    except RuntimeError:  # the limit of locked memory is too low
        return block.cpu()
    return copied.read()


def array_blocks(array: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
    """Yield (block, first byte in the file) of an array that begins at byte `start`."""
    if not array.numel():
        return
    for block in array.view(-1).split(CHECKSUM_BYTES // array.itemsize):
        yield block, start
        start += block.nbytes


class DcpReader(dcp.StorageReader):
    """Reader of the rows that this rank holds; rounds values of another dtype, and leaves rows that a table has grown by.

    `initial` has the weights whose changes the targets are, by name.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        sizes: Mapping[str, torch.Size],
        initial: Mapping[str, InitialRows],
    ) -> None:
        self._tensors, self._initial = tensors, initial
        self._sizes = sizes
        self._chunks = {
            (name, chunk.offsets): chunk
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self._tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            size = self._sizes.get(name, torch.Size(tensor.size))
            described[name] = TensorStorageMetadata(properties, size, chunks)
        return Metadata(described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        def position(item: ReadItem) -> tuple[str, int]:
            chunk = self._chunks[_key(item)]
            return chunk.file.name, chunk.start

        for item in sorted(plan.items, key=position):
            target = planner.resolve_tensor(item).detach()
            self._read(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, target: torch.Tensor) -> None:
        chunk, dtype = self._chunks[_key(item)], self._tensors[item.storage_index.fqn].dtype
        first, *columns = item.storage_offsets or (0,)
        count, *widths = item.lengths or (1,)
        where = tuple(slice(at, at + width) for at, width in zip(columns, widths, strict=True))
        rows = target if target.dim() else target.view(1)
        initial = self._initial.get(item.storage_index.fqn)
        # The same changes are not computed twice.
        as_stored = initial == chunk.initial and getattr(torch, dtype) is target.dtype
        reader = ChunkReader(chunk, dtype, as_stored=as_stored)
        for row, block in reader.read(first, first + count):
            values = torch.from_numpy(block).view(getattr(torch, dtype))[(slice(None), *where)]
            out = rows[row - first : row - first + len(block)]
            if not in_file(target):
                out.copy_(values)
                continue
            values = values.to(out.dtype).contiguous()
            if initial is not None and not as_stored:
                first_row = chunk.offsets[0] + row
                numbers = torch.arange(first_row, first_row + len(values))
                initial.toggle(values, numbers, chunk.offsets[1] + columns[0])
            _copy_changes(values, out)

    # The constructor has the index, and no state is kept between loads.
    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return checkpoint_id is None


def _copy_changes(values: Tensor, out: Tensor) -> None:
    """Copy rows to those of a mapped file, which keeps its holes where they are equal; OSError: its disk is full."""
    count, file = len(values), Path(str(out.untyped_storage().filename))
    bits = [of.contiguous().view(count, -1).view(torch.uint8) for of in (values, out)]
    differs = (bits[0] != bits[1]).any(dim=1)
    numbers = int(out.storage_offset()) + differs.nonzero().view(-1).numpy() * out.stride(0)
    pages = np.unique(pages_of(numbers * out.itemsize, values[:1].nbytes))
    # A page without room would end the process.
    descriptor = os.open(file, os.O_RDWR)
    try:
        reserve_pages(descriptor, pages)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        os.close(descriptor)
    out[differs] = values[differs]


def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    index = item.storage_index
    assert index.offset is not None, f"{index.fqn}: every chunk has an offset"
    return index.fqn, tuple(index.offset)
