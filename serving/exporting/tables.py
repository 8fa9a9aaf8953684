"""Tables of a checkpoint to mapped files, block by block: memory does not depend on the size of a table."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nn.checkpoint.tensor_index import StoredTensor, TensorIndex
from nn.deltas.scaled_rows import quantize
from nn.deltas.table_rows import converted
from serving.inference.tables import DTYPES, dequantized
from serving.manifest import SCALED, Table


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
    rows, largest = {}, 0.0
    for table in tables:
        stored, numbers = _stored(index, table), wanted[table.name]
        rows[table.name], error = _write(directory, table, stored, dtype, numbers)
        largest = max(largest, error)
    return rows, largest


def _stored(index: TensorIndex, table: Table) -> StoredTensor:
    tensor = index.tensors.get(f"tables.{table.name}.weight")
    if tensor is None:
        raise ValueError(f"the checkpoint has no table {table.name}; it is of another model")
    is_float = tensor.dtype in ("float32", "float16", "bfloat16")
    if tensor.size != (table.rows, table.columns) or not is_float:
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
        for numbers in stored.blocks():
            # Wider than what is stored, so exact.
            block = torch.from_numpy(converted(numbers, stored.dtype, "float32"))
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
