"""Export of a checkpoint's tables to files, block by block, with memory independent of the table size.

npy          <table>.id.npy int64 [rows], <table>.weight.npy [rows, columns], and one file per optimizer state
safetensors  <table>.safetensors, with the same names
tf2          sparse/feature_<i>.npy and sparse/config.json: `nn.checkpoint.tf2`

Weights keep their dtype if the format has it. Otherwise they are converted to float32: bfloat16 in npy, both 16-bit dtypes
in tf2. `id` is the row's number in the table, as batches contain it. `export.json` lists the written files.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np

from configs.export_schema import ExportFormat
from dataloading.dataset.durable_files import (
    clear_leftovers,
    hold,
    new_directory,
    partial_sibling,
)
from nn.checkpoint.tensor_index import (
    BLOCK_BYTES,
    DTYPES,
    StoredTensor,
    TensorIndex,
    UnreadableError,
    blocks,
    read_index,
)
from nn.checkpoint.tf2 import CONFIG_FILE, FOLDER, tf2_config, tf2_file_name

RECORD_FILE = "export.json"
ID = "id"
SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class Column:
    """Weights, ids or one optimizer state of all rows of a table.

    Attributes:
        dtype: a key of `DTYPES`.
        size: one number per dimension, rows first.
        blocks: values in the order of rows; can be iterated once.
    """

    dtype: str
    size: tuple[int, ...]
    blocks: Iterable[np.ndarray]


def export_tables(
    checkpoint: Path,
    output: Path,
    tables: Sequence[str] = (),
    *,
    format: ExportFormat = ExportFormat.npy,
    optimizer: bool = True,
) -> dict[str, list[str]]:
    """Export tables to a new directory, which is complete or absent.

    Args:
        checkpoint: a `step_N` directory.
        output: directory to create.
        tables: names of tables; empty for all.
        format: format of the files.
        optimizer: export optimizer state too.

    Returns:
        The names of the files by table.

    Raises:
        ValueError: `output` exists or another process writes it, the checkpoint or a table does not exist, or a file
            cannot be read.
    """
    _check_output(output)
    try:
        index = read_index(checkpoint)
    except UnreadableError:
        raise
    except ValueError as error:
        raise ValueError(
            f"checkpoint={checkpoint} is not a checkpoint ({error}); name a step_N directory in a run's "
            "checkpoints/"
        ) from None
    unknown = [name for name in tables if name not in index.tables]
    if unknown:
        raise ValueError(
            f"tables={list(tables)}: {checkpoint} has no table {unknown[0]}, only {', '.join(index.tables)}"
        )
    with hold(output, f"is writing {output}") as alone:
        _check_output(output)  # again: another process may have written it meanwhile
        if alone:
            clear_leftovers(output)
        with new_directory(output, partial_sibling(output)) as unfinished:
            written = _write_tables(unfinished, index, tables or index.tables, format, optimizer)
            name = checkpoint.resolve().name
            record = {"checkpoint": name, "format": format.name, "tables": written}
            (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    return written


def _check_output(output: Path) -> None:
    if os.path.lexists(output):
        raise ValueError(f"output={output} exists; name a new directory, or remove that one")


def _write_tables(
    directory: Path,
    index: TensorIndex,
    tables: Sequence[str],
    format: ExportFormat,
    optimizer: bool,
) -> dict[str, list[str]]:
    """Write the files of `tables` to `directory`; return their names by table."""
    if format is ExportFormat.tf2:
        return _write_tf2(directory, index)
    write = {ExportFormat.npy: _write_npy, ExportFormat.safetensors: _write_safetensors}[format]
    return {name: write(directory, name, _columns(index, name, optimizer)) for name in tables}


def _columns(index: TensorIndex, table: str, optimizer: bool) -> dict[str, Column]:
    weight = _table(index, table)
    columns = {
        ID: Column("int64", weight.size[:1], _ids(weight.size[0])),
        "weight": Column(weight.dtype, weight.size, blocks(weight)),
    }
    for name, state in index.tensors.items():
        kind = name.removeprefix(f"tables.{table}.")
        if optimizer and kind not in (name, "weight") and "." not in kind:
            columns[kind] = Column(state.dtype, state.size, blocks(state))
    return columns


def _table(index: TensorIndex, table: str) -> StoredTensor:
    weight = index.tensors.get(f"tables.{table}.weight")
    if weight is None or len(weight.size) != 2:
        raise ValueError(
            f"the checkpoint lists table {table} but has no weights [rows, columns] for it; copy it again, or use another "
            "checkpoint"
        )
    return weight


def _ids(rows: int) -> Iterator[np.ndarray]:
    rows_at_once = BLOCK_BYTES // DTYPES["int64"].itemsize
    for first in range(0, rows, rows_at_once):
        yield np.arange(first, min(first + rows_at_once, rows), dtype=DTYPES["int64"])


def file_stem(table: str) -> str:
    """Return the table's name for use in file names: characters except letters, digits and `_-.~` become %XX."""
    return quote(table, safe="")


def _write_npy(directory: Path, table: str, columns: dict[str, Column]) -> list[str]:
    names = []
    for kind, column in columns.items():
        names.append(f"{file_stem(table)}.{file_stem(kind)}.npy")
        _write_array(directory / names[-1], column)
    return names


def _write_array(path: Path, column: Column) -> None:
    if column.dtype == "bfloat16":
        # numpy has no bfloat16.
        column = _as_float32(column)
    with path.open("xb") as stream:
        header = {
            "descr": DTYPES[column.dtype].str,
            "fortran_order": False,
            "shape": column.size,
        }
        np.lib.format.write_array_header_1_0(stream, header)
        _write_blocks(stream, column.blocks)


def _as_float32(column: Column) -> Column:
    """Convert 16-bit numbers to float32, which is exact."""

    def widened() -> Iterator[np.ndarray]:
        for block in column.blocks:
            if column.dtype == "bfloat16":
                yield (block.astype(np.uint32) << 16).view(np.float32)
            else:
                yield block.astype(np.float32)

    return Column("float32", column.size, widened())


def _write_blocks(stream: BinaryIO, arrays: Iterable[np.ndarray]) -> None:
    for array in arrays:
        stream.write(np.ascontiguousarray(array).data)


def _write_safetensors(directory: Path, table: str, columns: dict[str, Column]) -> list[str]:
    """Write a safetensors file without its library, which needs all arrays in memory.

    The format is eight bytes with the length of the header, the header as JSON, and the arrays one after another. The
    header is padded, so that arrays start at a multiple of eight bytes. https://huggingface.co/docs/safetensors
    """
    header, end = {}, 0
    for kind, column in columns.items():
        start = end
        end += int(np.prod(column.size)) * DTYPES[column.dtype].itemsize
        header[kind] = {
            "dtype": SAFETENSORS_DTYPES[column.dtype],
            "shape": list(column.size),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    name = f"{file_stem(table)}.safetensors"
    with (directory / name).open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for column in columns.values():
            _write_blocks(stream, column.blocks)
    return [name]


def _write_tf2(directory: Path, index: TensorIndex) -> dict[str, list[str]]:
    (directory / FOLDER).mkdir()
    written, sizes = {}, []
    for position, table in enumerate(index.tables):
        weight = _table(index, table)
        column = Column(weight.dtype, weight.size, blocks(weight))
        if weight.dtype in ("bfloat16", "float16"):
            column = _as_float32(column)
        elif weight.dtype != "float32":
            raise ValueError(
                f"table {table} is {weight.dtype}, but the TF2 recipe reads float32 only; use format=npy or safetensors"
            )
        name = f"{FOLDER}/{tf2_file_name(position)}"
        _write_array(directory / name, column)
        written[table] = [name]
        sizes.append(weight.size)
    config = json.dumps(tf2_config(sizes), indent=4)
    (directory / FOLDER / CONFIG_FILE).write_text(config + "\n")
    return written
