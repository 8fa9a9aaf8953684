"""Tables of a checkpoint, written to files block by block: memory does not grow with them.

npy          <table>.id.npy int64 [rows], <table>.weight.npy [rows, columns], and a file for each optimizer state
safetensors  <table>.safetensors, with the same names
tf2          sparse/feature_<i>.npy and sparse/config.json: `nn.checkpoint.tf2`

Weights keep their dtype, but where a format lacks it they become float32: bfloat16 in npy, both of 16 bits in tf2.
`id` is what a batch holds to look a row up: the row's number in the table. `export.json` says what was written.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np

from configs.export_schema import ExportFormat
from dataloading.durable_files import new_directory
from nn.checkpoint.tensor_index import (
    BLOCK_BYTES,
    DTYPES,
    StoredTensor,
    TensorIndex,
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
    """Something that each row of a table has.

    Attributes:
        dtype: a key of `DTYPES`.
        size: one number a dimension, rows first.
        blocks: its values, rows in order; read once.
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
    """Write tables to a new directory, which is whole or absent.

    Args:
        checkpoint: a `step_N` directory.
        output: made here.
        tables: names; none means all.
        format: of the files.
        optimizer: write optimizer state too.

    Returns:
        The files of each table.

    Raises:
        ValueError: `output` exists, there is no such checkpoint or table, or its files cannot be read.
    """
    if output.exists():
        raise ValueError(f"output={output} exists; name a new directory, or remove that one")
    try:
        index = read_index(checkpoint)
    except ValueError as error:
        raise ValueError(
            f"checkpoint={checkpoint} is not a checkpoint ({error}); name a step_N directory below a run's "
            "checkpoints/"
        ) from None
    unknown = [name for name in tables if name not in index.tables]
    if unknown:
        raise ValueError(
            f"tables={list(tables)}: {checkpoint} has no table {unknown[0]}, only {', '.join(index.tables)}"
        )
    write = {ExportFormat.npy: _write_npy, ExportFormat.safetensors: _write_safetensors}
    with new_directory(output, output.with_name(f".{output.name}.unfinished")) as unfinished:
        if format is ExportFormat.tf2:
            written = _write_tf2(unfinished, index)
        else:
            written = {
                name: write[format](unfinished, name, _columns(index, name, optimizer))
                for name in tables or index.tables
            }
        record = {"checkpoint": checkpoint.resolve().name, "format": format.name, "tables": written}
        (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    return written


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
            f"the checkpoint lists a table {table}, and has no weights [rows, columns] of it"
        )
    return weight


def _ids(rows: int) -> Iterator[np.ndarray]:
    rows_at_once = BLOCK_BYTES // DTYPES["int64"].itemsize
    for first in range(0, rows, rows_at_once):
        yield np.arange(first, min(first + rows_at_once, rows), dtype=DTYPES["int64"])


def file_stem(table: str) -> str:
    """Return what files of a table are called: its name, whatever is no letter, digit or one of `_-.~` as %XX."""
    return quote(table, safe="")


def _write_npy(directory: Path, table: str, columns: dict[str, Column]) -> list[str]:
    names = []
    for kind, column in columns.items():
        names.append(f"{file_stem(table)}.{file_stem(kind)}.npy")
        _write_array(directory / names[-1], column)
    return names


def _write_array(path: Path, column: Column) -> None:
    if column.dtype == "bfloat16":
        # numpy has none.
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
    """Return the same numbers of 16 bits as float32, which has them all."""

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
    """Write the format by hand: its own library wants all arrays in memory.

    Eight bytes with the length of the header, the header as JSON (padded, so that arrays begin at a multiple of eight),
    the arrays one after another. https://huggingface.co/docs/safetensors
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
                f"table {table} is {weight.dtype}, and the TF2 recipe reads float32 only"
            )
        name = f"{FOLDER}/{tf2_file_name(position)}"
        _write_array(directory / name, column)
        written[table] = [name]
        sizes.append(weight.size)
    config = json.dumps(tf2_config(sizes), indent=4)
    (directory / FOLDER / CONFIG_FILE).write_text(config + "\n")
    return written
