"""Export of a checkpoint to files for other programs, block by block, with memory independent of the table size.

npy          <table>.id.npy int64 [rows], <table>.weight.npy [rows, columns], and one file per optimizer state
safetensors  <table>.safetensors, with the same names
both         keys.safetensors: <table>.keys int64 [rows], the raw key of each row, 0 of rows without one
             dense.safetensors, dense_ema.safetensors and dense_optimizer.safetensors of the dense component
tf2          sparse/feature_<i>.npy and sparse/config.json: `nn.checkpoint.tf2`

Weights keep their dtype if the format has it. Otherwise they are converted to float32: bfloat16 in npy, both 16-bit dtypes
in tf2. `id` is the row's number in the table, as batches contain it. `export.json` lists the written files.

npy and safetensors are indexed like a checkpoint (`tensors.json`, `run.json`), so `checkpoint.restore` loads the directory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from configs.export_schema import ExportFormat
from configs.schema import Component
from dataloading.dataset.durable_files import new_output, require_absent, write_synced
from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.compatibility import is_weight, vocabulary_mismatch
from nn.checkpoint.directory import write_facts
from nn.checkpoint.saved import SavedModel
from nn.checkpoint.tensor_index import BLOCK_BYTES, DTYPES, FORMAT, INDEX_FILE
from nn.checkpoint.tf2 import CONFIG_FILE, FOLDER, tf2_config, tf2_file_name
from nn.export.array_files import Array, ArraySource, WrittenArray, write_npy, write_safetensors

RECORD_FILE = "export.json"
ID, VALUE = "id", "value"
# Tensors that are no tables': a file of each, the last of what a run has collected for its next record.
DENSE = ("dense", "dense_ema")
DENSE_OPTIMIZER = "dense_optimizer"
TRAINER = "trainer"
KEYS = "keys."


@dataclass(frozen=True, slots=True)
class Selection:
    tables: Sequence[str] = ()
    parts: Sequence[Component] = (Component.tables,)
    optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Exported:
    name: str
    tables: Sequence[str]
    tensors: Mapping[str, ArraySource]
    facts: dict[str, Any]


def export_tables(
    checkpoint: Path,
    output: Path,
    selection: Selection = Selection(),
    *,
    format: ExportFormat = ExportFormat.npy,
    fitted: Path | None = None,
) -> dict[str, Any]:
    """Export parts of a checkpoint to a new directory, which is complete or absent.

    `fitted`: dataset whose vocabularies give the raw values of the rows. Returns the content of `export.json`: `tables` has the
    names of the files by table, `dense` those of the dense component. Raises ValueError: `output` exists or another process
    writes it, the checkpoint or a table does not exist, a file cannot be read, or a vocabulary is of another table.
    """
    require_absent(output)
    saved = SavedModel.open(checkpoint, "checkpoint")
    index = saved.index
    unknown = [name for name in selection.tables if name not in index.tables]
    if unknown:
        raise ValueError(
            f"tables={list(selection.tables)}: {checkpoint} has no table {unknown[0]}, only {', '.join(index.tables)}"
        )
    exported = Exported(checkpoint.resolve().name, index.tables, index.tensors, saved.facts)
    return write_export(exported, output, selection, format=format, fitted=fitted)


def write_export(
    exported: Exported,
    output: Path,
    selection: Selection,
    *,
    format: ExportFormat,
    fitted: Path | None = None,
) -> dict[str, Any]:
    """Write an export to a new directory, which is complete or absent; see `export_tables`.

    Raises ValueError: `output` exists or another process writes it, a file cannot be read, or a vocabulary is of another table.
    """
    keyed = sorted({name.split(".")[1] for name in exported.tensors if name.startswith(KEYS)})
    if format is ExportFormat.tf2 and keyed:
        raise ValueError(
            f"format=tf2 has no place for the raw keys of table {keyed[0]}, without which its rows mean nothing; use npy or "
            "safetensors"
        )
    names = list(dict.fromkeys(selection.tables or exported.tables))
    names = names if Component.tables in selection.parts else []
    record: dict[str, Any] = {"checkpoint": exported.name, "format": format.name}
    with new_output(output) as unfinished:
        if format is ExportFormat.tf2:
            record["tables"] = _write_tf2(unfinished, exported)
        else:
            record |= _write(unfinished, exported, names, selection, format)
        if fitted is not None:
            _write_values(unfinished, exported, record["tables"], fitted)
        (unfinished / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    return record


def _write(
    directory: Path,
    index: Exported,
    tables: Sequence[str],
    selection: Selection,
    format: ExportFormat,
) -> dict[str, Any]:
    """Write tables and the dense component, and index them; return the names of the files."""
    record: dict[str, Any] = {"tables": {}}
    written: dict[str, WrittenArray] = {}
    for table in tables:
        arrays = _arrays(index, table, selection.optimizer)
        stem = file_stem(table)
        if format is ExportFormat.safetensors:
            of_table = write_safetensors(directory / f"{stem}.safetensors", arrays)
        else:
            of_table = {
                kind: write_npy(directory / f"{stem}.{file_stem(kind)}.npy", array)
                for kind, array in arrays.items()
            }
        record["tables"][table] = list(dict.fromkeys(array.file for array in of_table.values()))
        written |= {f"tables.{table}.{kind}": a for kind, a in of_table.items() if kind != ID}
    is_all = not selection.tables and set(selection.parts) == set(Component) and selection.optimizer
    kinds = DENSE + (DENSE_OPTIMIZER,) * selection.optimizer
    kinds = (kinds if Component.dense in selection.parts else ()) + (TRAINER,) * is_all
    for kind in ("keys",) * bool(tables) + kinds:
        prefix = f"{kind}."
        stored = {
            n.removeprefix(prefix): Array.of(t)
            for n, t in index.tensors.items()
            if n.startswith(prefix) and (prefix != KEYS or selection.optimizer or is_weight(n))
        }
        if stored:
            path = directory / f"{kind}.safetensors"
            of_kind = write_safetensors(path, stored)
            record.setdefault("keys" if prefix == KEYS else "dense", []).append(path.name)
            written |= {prefix + name: array for name, array in of_kind.items()}
    document = {
        "format": FORMAT,
        "tables": list(tables),
        "tensors": {name: array.entry for name, array in written.items()},
    }
    write_synced(directory / INDEX_FILE, json.dumps(document) + "\n")
    write_facts(directory, index.facts, sorted({INDEX_FILE, *(a.file for a in written.values())}))
    return record


def _arrays(index: Exported, table: str, optimizer: bool) -> dict[str, Array]:
    weight = _table(index, table)
    arrays = {ID: Array("int64", weight.size[:1], _ids(weight.size[0])), "weight": Array.of(weight)}
    for name, state in index.tensors.items():
        kind = name.removeprefix(f"tables.{table}.")
        if optimizer and kind not in (name, "weight") and "." not in kind:
            arrays[kind] = Array.of(state)
    return arrays


def _table(index: Exported, table: str) -> ArraySource:
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


def _write_values(
    directory: Path, index: Exported, written: dict[str, list[str]], fitted: Path
) -> None:
    """Write the raw values of the rows of tables; add the names of the files to `written`."""
    # Imported here, since only values need pyarrow.
    from nn.export.row_values import find_vocabularies, write_values

    found = find_vocabularies(fitted, list(written))
    problem = vocabulary_mismatch(index.facts, FeatureSpec.load_features(fitted).metadata)
    if problem is not None:
        raise ValueError(
            f"{index.name} {problem}; name the dataset that it was trained on instead of fitted={fitted}"
        )
    for table, vocabulary in found.items():
        name = f"{file_stem(table)}.{VALUE}.parquet"
        write_values(vocabulary, directory / name, table, _table(index, table).size[0])
        written[table].append(name)


def _write_tf2(directory: Path, index: Exported) -> dict[str, list[str]]:
    (directory / FOLDER).mkdir()
    written, sizes = {}, []
    for position, table in enumerate(index.tables):
        weight = _table(index, table)
        array = Array.of(weight)
        if weight.dtype in ("bfloat16", "float16"):
            array = array.as_float32()
        elif weight.dtype != "float32":
            raise ValueError(
                f"table {table} is {weight.dtype}, but the TF2 recipe reads float32 only; use format=npy or safetensors"
            )
        name = f"{FOLDER}/{tf2_file_name(position)}"
        write_npy(directory / name, array)
        written[table] = [name]
        sizes.append(weight.size)
    config = json.dumps(tf2_config(sizes), indent=4)
    (directory / FOLDER / CONFIG_FILE).write_text(config + "\n")
    return written
