"""Files of a checkpoint's tensors: bare arrays in one file per rank, and an index in JSON (`nn.checkpoint.tensor_index`).

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
import torch.distributed as dist
from torch import Tensor

from dataloading.dataset.durable_files import sync_descriptor, write_synced
from nn.checkpoint.holes import crc32_of, stored_pages
from nn.checkpoint.staging import in_file
from nn.checkpoint.tensor_index import (
    CHECKSUM_BYTES,
    FORMAT,
    INDEX_FILE,
    SPARSE_FORMAT,
    THREADS,
    Chunk,
    ChunkReader,
    StoredTensor,
)
from nn.distributed.process_group import HostChannel
from nn.distributed.sharded_tensor import State, pieces_of
from nn.ops.host_copy import HostCopy
from nn.tiers.initial_rows import InitialRows
from nn.tiers.table_file import pages_of, reserve_pages

ALIGNMENT = 64
"""Bytes; arrays begin at multiples of it, so that they can be mapped into memory."""


class Part(NamedTuple):
    name: str
    size: tuple[int, ...]  # of the complete tensor
    offsets: tuple[int, ...]  # of the part's first element in it
    tensor: Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.name, self.offsets


def parts_of(state: State) -> list[Part]:
    return [
        Part(name, tuple(value.shape), *piece)
        for name, value in state.items()
        for piece in pieces_of(value)
    ]


def write_tensors(
    directory: Path,
    state: State,
    tables: Sequence[str],
    initial: Mapping[str, InitialRows],
    channel: HostChannel,
) -> None:
    """Write `rank_<rank>.bin` on every rank and `tensors.json` on rank 0, synced; ValueError on all if one cannot.

    `initial` has the weights whose changes tensors are, by name. What lies in files with holes is written with holes.
    """
    parts, rank = parts_of(state), dist.get_rank(channel.group)
    described = {
        part.name: {
            "dtype": str(part.tensor.dtype).removeprefix("torch."),
            "size": list(part.size),
            "chunks": [],
        }
        for part in parts
    }
    sizes = [(part.key, part.tensor.nbytes) for part in parts]
    of_ranks = channel.gather((sizes, described))
    own = _shared_out([sizes for sizes, _ in of_ranks])[rank]
    chunks: list[tuple[str, dict[str, Any]]] = []
    problem = None
    try:
        # On every rank: a network file system may not show that of another host yet.
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{rank:05}.bin"
        chunks = write_arrays(path, [part for part in parts if part.key in own])
    except Exception as error:
        problem = str(error)
    outcomes = channel.gather((problem, chunks))
    problem = _first_problem([problem for problem, _ in outcomes])
    if problem is None and rank == 0:
        tensors = {name: of for _, described in of_ranks for name, of in described.items()}
        for _, chunks in outcomes:
            for name, chunk in chunks:
                tensors[name]["chunks"].append(chunk)
        for name in initial.keys() & tensors.keys():
            tensors[name]["initial"] = asdict(initial[name])
        form = SPARSE_FORMAT if initial else FORMAT
        index = {"format": form, "tables": list(tables), "tensors": tensors}
        try:
            write_synced(directory / INDEX_FILE, json.dumps(index) + "\n")
        except OSError as error:
            problem = str(error)
    if (problem := channel.broadcast(problem)) is not None:
        raise ValueError(problem)


def _shared_out(held: Sequence[Sequence[tuple[Any, int]]]) -> list[set[Any]]:
    """Return the parts that each rank writes, of those that it holds: one that several hold goes to whom has least to write."""
    holders: dict[Any, list[int]] = {}
    for rank, of_rank in enumerate(held):
        for key, _ in of_rank:
            holders.setdefault(key, []).append(rank)
    sizes = {key: num_bytes for of_rank in held for key, num_bytes in of_rank}
    totals = [0] * len(held)
    shares: list[set[Any]] = [set() for _ in held]
    for key, ranks in holders.items():
        least = min(ranks, key=totals.__getitem__)
        totals[least] += sizes[key]
        shares[least].add(key)
    return shares


def write_arrays(path: Path, parts: Sequence[Part]) -> list[tuple[str, dict[str, Any]]]:
    """Write a rank's file; return each part's name and chunk in the index. OSError, as of a full disk, leaves it incomplete."""
    jobs, start = [], 0
    with closing(ArrayFile(path)) as file, ThreadPoolExecutor(THREADS) as pool:
        for part in parts:
            array, write = part.tensor.contiguous(), file.write
            if in_file(array):
                write, start = file.write_sparse, -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            writing = [pool.submit(write, *block) for block in array_blocks(array, start)]
            jobs.append((part, start, writing))
            start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        chunks = []
        for part, begin, writing in jobs:
            chunk = {
                "offsets": list(part.offsets),
                "sizes": list(part.tensor.shape),
                "file": path.name,
                "start": begin,
                "crc32": [write.result() for write in writing],
            }
            chunks.append((part.name, chunk))
        file.sync()
    return chunks


def _first_problem(problems: Sequence[str | None]) -> str | None:
    """Return the problem of the lowest rank that has one, with its number unless it is rank 0."""
    found = ((rank, problem) for rank, problem in enumerate(problems) if problem is not None)
    rank, problem = next(found, (0, None))
    return f"rank {rank}: {problem}" if rank else problem


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


def read_tensors(
    state: State, tensors: Mapping[str, StoredTensor], initial: Mapping[str, InitialRows]
) -> None:
    """Read what this rank holds, in place; rounds values of another dtype, and leaves rows that a table has grown by.

    `initial` has the weights whose changes the targets are, by name. ValueError on all ranks if one cannot.
    """
    jobs = [
        (chunk, part, overlap)
        for part in parts_of(state)
        for chunk in tensors[part.name].chunks
        if (overlap := _overlap(chunk, part))
    ]
    problem = None
    try:
        for chunk, part, overlap in sorted(jobs, key=lambda job: (job[0].file.name, job[0].start)):
            _read(chunk, part, overlap, tensors[part.name].dtype, initial.get(part.name))
    except Exception as error:
        problem = str(error)
    problems = [problem]
    if dist.is_initialized():
        problems *= dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if (problem := _first_problem(problems)) is not None:
        raise ValueError(problem)


def _overlap(chunk: Chunk, part: Part) -> list[tuple[int, int]]:
    """Return begin and end, in each dimension of the tensor, of what a chunk has of a part; empty if that is nothing."""
    sides = zip(chunk.offsets, chunk.sizes, part.offsets, part.tensor.shape, strict=True)
    box = [(max(a, b), min(a + stored, b + own)) for a, stored, b, own in sides] or [(0, 1)]
    return box if all(begin < end for begin, end in box) else []


def _read(
    chunk: Chunk,
    part: Part,
    overlap: list[tuple[int, int]],
    dtype: str,
    initial: InitialRows | None,
) -> None:
    (first, last), *columns = overlap
    of_chunk, *chunk_columns = chunk.offsets or (0,)
    of_part, *part_columns = part.offsets or (0,)
    rows = part.tensor if part.tensor.dim() else part.tensor.view(1)
    target = rows[(slice(first - of_part, last - of_part), *_slices(columns, part_columns))]
    where = (slice(None), *_slices(columns, chunk_columns))
    # The same changes are not computed twice.
    as_stored = initial == chunk.initial and getattr(torch, dtype) is target.dtype
    reader = ChunkReader(chunk, dtype, as_stored=as_stored)
    for row, block in reader.read(first - of_chunk, last - of_chunk):
        values = torch.from_numpy(block).view(getattr(torch, dtype))[where]
        begin = of_chunk + row
        out = target[begin - first : begin - first + len(block)]
        if not in_file(target):
            out.copy_(values)
            continue
        values = values.to(out.dtype).contiguous()
        if initial is not None and not as_stored:
            initial.toggle(values, torch.arange(begin, begin + len(values)), columns[0][0])
        _copy_changes(values, out)


def _slices(columns: Sequence[tuple[int, int]], offsets: Sequence[int]) -> list[slice]:
    pairs = zip(columns, offsets, strict=True)
    return [slice(begin - offset, end - offset) for (begin, end), offset in pairs]


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
