"""Files of one delta: a file of arrays per rank, and their index, which rank 0 writes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataloading.dataset.durable_files import write_synced
from nn.checkpoint.tensor_files import ArrayFile, array_blocks, in_host_memory
from nn.checkpoint.tensor_index import FORMAT, INDEX_FILE
from nn.deltas.delta import TableChange
from nn.deltas.row_ids import encode_ids
from nn.deltas.scaled_rows import quantize

PIECE_ROWS = 1 << 20
"""Rows of a GPU that are copied to the host at a time."""


@dataclass(frozen=True, slots=True)
class TakenRows:
    """Rows of a shard that changed.

    `row_offset`: first row of the shard in the table. `ids`: numbers of the rows in the shard, int64 [n], n > 0. `rows`: [n,
    columns]. `integers`: int8 or int4, as which they are written, with scales; None as they are.
    """

    table: str
    position: int
    row_offset: int
    column_offset: int
    ids: Tensor
    rows: Tensor
    integers: str | None = None


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """An array of one rank: a part of a tensor.

    `key`: its position among the parts of the tensor: first row, first column.
    """

    tensor: str
    key: tuple[int, int]
    size: tuple[int, ...]
    dtype: str
    file: str
    start: int
    crc32: list[int]


def write_part(
    path: Path,
    taken: Sequence[TakenRows],
    further: Mapping[str, Tensor],
    stream: "torch.cuda.Stream | None",
) -> list[WrittenPart]:
    """Write the file of this rank.

    `stream`: for copies from a GPU; None on a CPU. Raises OSError: it cannot be written.
    """
    parts: list[WrittenPart] = []
    start = 0
    with closing(ArrayFile(path)) as file:
        on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
        with on_stream:
            for name, key, value in _arrays(taken, further):
                checksums = [file.write(*block) for block in array_blocks(value, start)]
                dtype = str(value.dtype).removeprefix("torch.")
                parts.append(
                    WrittenPart(name, key, tuple(value.shape), dtype, path.name, start, checksums)
                )
                start += value.nbytes
        file.sync()
    return parts


def _arrays(
    taken: Sequence[TakenRows], further: Mapping[str, Tensor]
) -> Iterable[tuple[str, tuple[int, int], Tensor]]:
    for one in taken:
        key = (one.row_offset, one.column_offset)
        rows = one.rows
        if one.integers is not None:
            # On the host, where an export makes them too; training does not wait for it.
            pieces = (in_host_memory(piece) for piece in one.rows.split(PIECE_ROWS))
            parts = zip(*(quantize(piece, one.integers) for piece in pieces), strict=True)
            rows, scales = map(torch.cat, parts)
            yield f"tables.{one.table}.scale", key, scales
        yield f"tables.{one.table}.weight", key, rows
        if not one.column_offset:
            ids = in_host_memory(one.ids).numpy() + one.row_offset
            yield f"tables.{one.table}.ids", key, torch.from_numpy(encode_ids(ids))
    for name, value in further.items():
        yield name, (0, 0), value.contiguous()


def write_index(directory: Path, tables: Sequence[str], parts: Iterable[WrittenPart]) -> None:
    """Write `tensors.json`: parts of a table follow each other in the order of its rows."""
    by_tensor: dict[str, list[WrittenPart]] = defaultdict(list)
    for part in parts:
        by_tensor[part.tensor].append(part)
    tensors = {name: _entry(sorted(of, key=lambda p: p.key)) for name, of in by_tensor.items()}
    document = {"format": FORMAT, "tables": list(tables), "tensors": tensors}
    write_synced(directory / INDEX_FILE, json.dumps(document) + "\n")


def _entry(parts: Sequence[WrittenPart]) -> dict[str, Any]:
    chunks, first, rows, row_offset = [], 0, 0, parts[0].key[0]
    size = list(parts[0].size)
    for part in parts:
        if part.key[0] != row_offset:
            first, row_offset = rows, part.key[0]
        offsets = [0] * len(part.size)
        if size:
            offsets[0] = first
            size[0] = rows = first + part.size[0]
        if len(size) == 2 and len(parts) > 1:
            offsets[1] = part.key[1]
            size[1] = max(size[1], part.key[1] + part.size[1])
        location = {"file": part.file, "start": part.start, "crc32": part.crc32}
        chunks.append({"offsets": offsets, "sizes": list(part.size)} | location)
    return {"dtype": parts[0].dtype, "size": size, "chunks": chunks}


def changes(
    tables: Mapping[str, tuple[int, int, str]],
    parts: Iterable[WrittenPart],
    retired: Mapping[str, np.ndarray],
) -> dict[str, TableChange]:
    counts: dict[str, int] = defaultdict(int)
    for part in parts:
        if (
            part.tensor.endswith(".weight")
            and part.tensor.startswith("tables.")
            and not part.key[1]
        ):
            counts[part.tensor.removeprefix("tables.").removesuffix(".weight")] += part.size[0]
    return {
        name: TableChange(rows, columns, dtype, counts[name], len(retired.get(name, ())))
        for name, (rows, columns, dtype) in tables.items()
    }
