"""Tables of a checkpoint to mapped files, block by block: memory does not depend on the size of a table."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nn.checkpoint.tensor_index import StoredTensor, TensorIndex, blocks
from serving.manifest import Table

STORED = {"float32", "float16", "bfloat16"}


def write_tables(
    directory: Path,
    tables: list[Table],
    index: TensorIndex,
    dtype: str,
    wanted: Mapping[str, np.ndarray],
) -> dict[str, Tensor]:
    """Write the tables of a model, and return some of their rows as they are in the checkpoint.

    Args:
        directory: of the model.
        tables: to write.
        index: of the checkpoint.
        dtype: of the files: fp32, bf16 or int8.
        wanted: numbers of the rows to return by table, ascending, int64.

    Raises:
        ValueError: a table is missing or of another shape, or a file of the checkpoint is damaged.
    """
    (directory / "tables").mkdir()
    return {
        table.name: _write(directory, table, _stored(index, table), dtype, wanted[table.name])
        for table in tables
    }


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
) -> Tensor:
    kept = torch.empty(len(wanted), table.columns)
    first = 0
    scale = (directory / table.scale_file).open("xb") if dtype == "int8" else None
    with (directory / table.file).open("xb") as stream:
        for block in _float_blocks(stored):
            begin, end = np.searchsorted(wanted, (first, first + len(block)))
            kept[begin:end] = block[wanted[begin:end] - first]
            first += len(block)
            if scale is not None:
                block, scales = quantize(block)
                scale.write(scales.numpy().data)
            elif dtype == "bf16":
                block = block.to(torch.bfloat16).view(torch.int16)
            stream.write(block.numpy().data)
    if scale is not None:
        scale.close()
    return kept


def _float_blocks(stored: StoredTensor) -> Iterator[Tensor]:
    """Yield the rows of a table as float32; wider than what is stored is exact."""
    for block in blocks(stored):
        if stored.dtype == "bfloat16":
            yield torch.from_numpy(block.view(np.int16)).view(torch.bfloat16).float()
        else:
            yield torch.from_numpy(block.astype(np.float32))


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as int8 and the scale of each, float32: the largest number of a row becomes 127."""
    scales = rows.abs().amax(dim=1) / 127
    steps = rows / torch.where(scales == 0, 1.0, scales)[:, None]
    return steps.round().clamp(-127, 127).to(torch.int8), scales
