"""Tables of a checkpoint to mapped files, block by block: memory does not depend on the size of a table."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nn.checkpoint.tensor_index import StoredTensor, TensorIndex, blocks
from serving.inference.tables import DTYPES, dequantized
from serving.manifest import SCALED, Table

STORED = {"float32", "float16", "bfloat16"}
LEVELS = {"int8": range(127, 111, -1), "int4": range(7, 4, -1)}
"""Integers that the largest number of a row may become."""
NARROW = 64
"""Most columns of a row for which all levels are tried."""
QUANTIZED = 1 << 16
"""Numbers that are compared at a time, which fit a core's cache."""


def write_tables(
    directory: Path,
    tables: list[Table],
    index: TensorIndex,
    dtype: str,
    wanted: Mapping[str, np.ndarray],
) -> tuple[dict[str, Tensor], float]:
    """Write the tables of a model; return some of their rows as they are in the checkpoint, and the largest error of a number.

    `wanted`: numbers of the rows to return by table, ascending, int64. Raises ValueError: a table is missing or of another
    shape, or a file of the checkpoint is damaged.
    """
    (directory / "tables").mkdir()
    written = {
        table.name: _write(directory, table, _stored(index, table), dtype, wanted[table.name])
        for table in tables
    }
    rows = {name: rows for name, (rows, _) in written.items()}
    return rows, max((error for _, error in written.values()), default=0.0)


def _stored(index: TensorIndex, table: Table) -> StoredTensor:
    tensor = index.tensors.get(f"tables.{table.name}.weight")
    if tensor is None:
        raise ValueError(f"the checkpoint has no table {table.name}; it is of another model")
    if tensor.size != (table.rows, table.columns) or tensor.dtype not in STORED:
        raise ValueError(
            f"table {table.name} of the checkpoint is {tensor.dtype} {list(tensor.size)}, and the model declares "
            f"{[table.rows, table.columns]}"
        )
    return tensor


def _write(
    directory: Path, table: Table, stored: StoredTensor, dtype: str, wanted: np.ndarray
) -> tuple[Tensor, float]:
    kept = torch.empty(len(wanted), table.columns)
    first, error = 0, 0.0
    scale = (directory / table.scale_file).open("xb") if dtype in SCALED else None
    with (directory / table.file).open("xb") as stream:
        for block in _float_blocks(stored):
            begin, end = np.searchsorted(wanted, (first, first + len(block)))
            kept[begin:end] = block[wanted[begin:end] - first]
            if not block.isfinite().all():
                row = int((~block.isfinite()).any(1).nonzero()[0])
                raise ValueError(
                    f"table {table.name}, row {first + row:,}, has a number that is not finite; the training has diverged: "
                    "export an earlier checkpoint, or train with a smaller optimizer.embedding_lr"
                )
            first += len(block)
            near = block
            if scale is not None:
                integers, scales = quantize(block, dtype)
                scale.write(scales.numpy().data)
                stream.write(integers.numpy().data)
                near = dequantized(integers, scales, table.columns)
            else:
                near = block.to(DTYPES[dtype])
                stream.write(near.view(torch.uint8).numpy().data)
            error = max(error, float((near - block).abs().max()))
    if scale is not None:
        scale.close()
    return kept, error


def _float_blocks(stored: StoredTensor) -> Iterator[Tensor]:
    """Yield the rows of a table as float32; wider than what is stored is exact."""
    for block in blocks(stored):
        if stored.dtype == "bfloat16":
            yield torch.from_numpy(block.view(np.int16)).view(torch.bfloat16).float()
        else:
            yield torch.from_numpy(block.astype(np.float32))


def quantize(rows: Tensor, dtype: str = "int8") -> tuple[Tensor, Tensor]:
    """Return rows [R, D] as int8, or int4 as `dequantized` takes it, and the scale of each, float32 [R].

    The largest number of a row becomes one of `LEVELS`: the one that leaves the smallest squared error, with the scale that
    suits its integers best. At 16 columns the root mean square error is 0.8 times, at 64 columns 0.93 times, that of rows whose
    largest number becomes 127. The wider a row, the less its levels differ, so int8 rows of more than `NARROW` columns take 127.
    """
    columns = rows.shape[1]
    is_int4 = dtype == "int4"
    levels = LEVELS[dtype][: None if is_int4 or columns <= NARROW else 1]
    parts = [_quantize(part, levels) for part in rows.split(max(1, QUANTIZED // max(1, columns)))]
    integers = torch.cat([part for part, _ in parts])
    if is_int4:
        pairs = torch.nn.functional.pad(integers + 8, (0, columns % 2)).to(torch.uint8)
        integers = pairs[:, ::2] | pairs[:, 1::2] << 4
    return integers, torch.cat([scales for _, scales in parts])


def _quantize(rows: Tensor, levels: Sequence[int]) -> tuple[Tensor, Tensor]:
    # Columns first: sums over few columns are then sums of vectors. In double precision, in which products with integers and
    # their sums are exact, so that they do not depend on the rows beside one.
    columns = rows.t().contiguous().double()
    largest = columns.abs().amax(dim=0)
    units = columns / torch.where(largest == 0, 1.0, largest)
    best, level = torch.zeros_like(largest), torch.full_like(largest, levels[0])
    for candidate in levels:
        explained, _ = _explained(columns, (units * candidate).round_())
        is_better = explained > best
        best = torch.where(is_better, explained, best)
        level = torch.where(is_better, float(candidate), level)
    integers = (units * level).round_()
    _, scales = _explained(columns, integers)
    return integers.t().to(torch.int8).contiguous(), scales.float()


def _explained(columns: Tensor, integers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of each row's square that its integers explain, and the scale with which they do, [R] each."""
    along, square = (integers * columns).sum(dim=0), (integers * integers).sum(dim=0)
    scales = along / torch.where(square == 0, 1.0, square)
    return along * scales, scales
