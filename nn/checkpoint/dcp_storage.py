"""Storage of torch.distributed.checkpoint: bare arrays in one file per rank, and an index in JSON (`nn.checkpoint.tensor_index`).

Torch's own writer pickles its index, wraps each array in a zip archive, keeps no checksum that it compares, and loses
the errors of its helper threads, so that a full disk would leave a checkpoint that looks complete. Its reader takes
every chunk that a rank needs a row of into memory, all of it.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

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
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dataloading.dataset.durable_files import sync_descriptor, write_synced
from nn.checkpoint.tensor_index import (
    CHECKSUM_BYTES,
    FORMAT,
    INDEX_FILE,
    ChunkReader,
    StoredTensor,
)

ALIGNMENT = 64
"""Bytes: arrays begin at its multiples, so that they can be mapped into memory."""
THREADS = 4


class FileRange(NamedTuple):
    """Location of a chunk: file, first byte, and one CRC-32 per block."""

    file: str
    start: int
    crc32: list[int]


class DcpWriter(dcp.StorageWriter):
    """Writes `rank_<rank>.bin` on every rank and `tensors.json` on rank 0, synced.

    Args:
        directory: made if missing.
        tables: their names, in the order of the features, for the index.
    """

    def __init__(self, directory: Path, tables: Sequence[str]) -> None:
        self._directory = directory
        self._tables = list(tables)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks.

        Raises:
            OSError: no room, for one; the file is then incomplete.
        """
        path = self._directory / plan.storage_data
        results, jobs, start = [], [], 0
        with closing(_File(path)) as file, ThreadPoolExecutor(THREADS) as pool:
            for item in plan.items:
                value = planner.resolve_data(item)
                assert isinstance(value, Tensor), (
                    f"{item.index.fqn}: a checkpoint holds tensors only"
                )
                array = value.detach().contiguous()
                blocks = list(_blocks(array, start))
                jobs.append((item, start, [pool.submit(file.write, *block) for block in blocks]))
                start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            for item, begin, writing in jobs:
                place = FileRange(path.name, begin, [write.result() for write in writing])
                results.append(WriteResult(item.index, _num_bytes(item), place))
            file.sync()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index; called on rank 0 when every rank has written."""
        places = {result.index: result.storage_data for rank in results for result in rank}
        tensors: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata), f"{name} is no tensor"
            chunks = []
            for chunk in stored.chunks:
                place = places[dcp.metadata.MetadataIndex(name, chunk.offsets)]
                shape = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                chunks.append(shape | place._asdict())
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
        index = {"format": FORMAT, "tables": self._tables, "tensors": tensors}
        write_synced(self._directory / INDEX_FILE, json.dumps(index) + "\n")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, on every rank: on a network file system another host's may not be visible yet."""
        self._directory.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file."""
        return [
            SavePlan(plan.items, storage_data=f"rank_{rank:05}.bin", planner_data=plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one save to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All is known already."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """None is given."""
        return checkpoint_id is None


class _File:
    """A file that several threads write at once, each in its place."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, block: Tensor, start: int) -> int:
        """Write a flat piece of a tensor from byte `start` on and return its CRC-32."""
        data = block.cpu().view(torch.uint8).numpy().data
        crc32, written = zlib.crc32(data), 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], start + written)
        return crc32

    def sync(self) -> None:
        sync_descriptor(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _blocks(array: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
    """Yield (piece, first byte in the file) of an array that begins at byte `start`."""
    if not array.numel():
        return
    flat = array.view(-1)
    if not len(flat):
        return
    for piece in flat.split(CHECKSUM_BYTES // array.itemsize):
        yield piece, start
        start += piece.nbytes


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class DcpReader(dcp.StorageReader):
    """Reads, of each tensor, the rows that this rank holds; what is stored in another dtype is rounded to the nearest.

    Args:
        tensors: what is stored, by name.
        sizes: what each is loaded into; larger than stored in the first dimension where a table has grown, whose
            further rows are then left as they are.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], sizes: Mapping[str, torch.Size]
    ) -> None:
        self._tensors = tensors
        self._sizes = sizes
        self._chunks = {
            (name, chunk.offsets): chunk
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Say which chunks there are."""
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
        """Read what a plan asks for, in the order of the files."""

        def place(item: ReadItem) -> tuple[str, int]:
            chunk = self._chunks[_key(item)]
            return chunk.file.name, chunk.start

        for item in sorted(plan.items, key=place):
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
        for row, block in ChunkReader(chunk, dtype).read(first, first + count):
            values = torch.from_numpy(block).view(getattr(torch, dtype))
            rows[row - first : row - first + len(block)] = values[(slice(None), *where)]

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next."""

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """The index is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """None is given."""
        return checkpoint_id is None


def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    index = item.storage_index
    assert index.offset is not None, f"{index.fqn}: every chunk has an offset"
    return index.fqn, tuple(index.offset)
