"""A new version of a model directory: the one before it, with the rows and the dense component of deltas.

Tables are copied, and changed rows are written into the copies as an export writes them: float32, rounded to bfloat16, or
integers with a scale of their own. So the files of the tables are those of an export of the checkpoint that the deltas lead to.
Tables that have grown on a later day get its rows, and the model the vocabularies of that day.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from configs.messages import shown
from dataloading.dataset.durable_files import new_output, write_synced
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import FORGOTTEN
from nn.checkpoint.compatibility import AVERAGE
from nn.deltas.chain import open_chain
from nn.deltas.delta import CHAIN, Delta, chain_of
from nn.deltas.scaled_rows import quantize
from nn.deltas.table_rows import ChangedRows, check_key_rows, converted, dequantized
from serving.exporting.dense import save_program
from serving.exporting.from_rows import PREFIX
from serving.exporting.proof import BATCH_ROWS, DIVERGED, LIMITS, compared
from serving.exporting.proof_rows import read_proof_rows
from serving.exporting.raw_values import VOCABULARY, write_raw_values
from serving.exporting.unrounded import UnroundedTable, unrounded_tables
from serving.inference.dense import load_dense, load_program
from serving.inference.key_rows import KeyRows, write_key_rows
from serving.inference.model import ServedModel
from serving.inference.tables import DTYPES, NUMPY_DTYPES, MappedTables
from serving.inference.versions import load_version
from serving.manifest import (
    AOTI,
    DENSE,
    MANIFEST,
    ONNX,
    SCALED,
    VOCABULARIES,
    Feature,
    KeyFile,
    Manifest,
    Table,
    describe_files,
)
from serving.versions import Deciding


def apply_deltas(
    base: Path, deltas: Sequence[str], output: Path, fitted: str | None = None
) -> tuple[Manifest, list[Delta]]:
    """Write the model directory that deltas make of another one; it is complete or absent.

    `base`: a model directory of a run with deltas. `deltas`: in order; a directory of deltas stands for all of them after the
    base. `fitted`: dataset of the day that the deltas lead to; None: of that of the base, and no table has grown. Returns its
    manifest, and the deltas. Raises ValueError: the base is damaged, a delta cannot be used or does not follow, `fitted` is of
    another day, or is missing where a table has grown; one line.
    """
    manifest = Manifest.read(base)
    link = chain_of(manifest.source)
    if link is None:
        raise ValueError(
            f"model={base} was exported from a run without deltas; train with checkpoint.delta_every=N and export a checkpoint"
        )
    chain = open_chain(link, deltas, str(base))
    manifest.verify(base)
    spec = None if fitted is None else FeatureSpec.load(Path(fitted))
    if spec is not None and spec.fingerprint() != chain[-1].facts["feature_spec"]:
        raise ValueError(
            f"fitted={fitted} has other features than the day that {chain[-1].path} was trained on; name the dataset of that day"
        )
    with new_output(output) as unfinished:
        return _write(base, manifest, chain, spec, unfinished), chain


def _write(
    base: Path,
    manifest: Manifest,
    chain: Sequence[Delta],
    spec: FeatureSpec | None,
    directory: Path,
) -> Manifest:
    new_raw = spec is not None and manifest.raw is not None
    of_keys = {file.name for file in manifest.keys.values()}
    for name in manifest.files:
        # The others would be of the old weights, of the old vocabularies, or of evicted keys.
        is_old = name in of_keys or (new_raw and name.startswith(f"{VOCABULARY}/"))
        if name not in (DENSE, ONNX, AOTI) and not is_old:
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base / name, directory / name)
    values: dict[str, Any] = {}
    split, proof_rows = read_proof_rows(base, manifest)
    unrounded = unrounded_tables(base, manifest, proof_rows)
    for table in manifest.tables:
        rows, exact = table.rows, unrounded[table.name]
        for delta in chain:
            rows = _apply(directory, manifest.dtype, exact, rows, delta, may_grow=spec is not None)
    values["tables"] = [replace(t, rows=chain[-1].tables[t.name].rows) for t in manifest.tables]
    values["keys"] = _apply_keys(base, manifest, chain, directory)
    if spec is not None:
        values["categorical"] = [
            Feature(f.name, f.cardinality, f.hotness) for f in spec.categorical
        ]
        if new_raw:
            facts = chain[-1].facts | {FORGOTTEN: manifest.source.get(FORGOTTEN, {})}
            values["raw"] = write_raw_values(directory, str(spec.root), spec, facts)
    prefix = PREFIX if manifest.handed_out else ""
    _write_dense(base / DENSE, directory / DENSE, chain[-1], prefix)
    last = chain[-1]
    changed = {
        "checkpoint": f"step_{last.end.step}",
        "step": last.end.step,
        "feature_spec": last.facts["feature_spec"],
        CHAIN: last.facts[CHAIN],
        VOCABULARIES: last.facts.get(VOCABULARIES, {}),
    }
    values["source"] = manifest.source | changed
    unproved = replace(manifest, **values)
    # The operations of the dense component are the base's, whose own proof compares them with the code of the model; rows that
    # no delta has changed are the base's too.
    dense = load_dense(directory / DENSE)
    wanted = ServedModel(unproved, MappedTables(directory, unproved, unrounded), dense)
    served = ServedModel(unproved, MappedTables(directory, unproved), dense)
    starts = range(0, len(proof_rows), BATCH_ROWS)
    parts = [proof_rows.part(i, i + BATCH_ROWS) for i in starts]
    pairs = ((wanted.scores(part), served.scores(part)) for part in parts)
    proof = compared(pairs, split, manifest.dtype, LIMITS[manifest.dtype])
    values["proof"] = {"of": manifest.identity, "version": base.name, **asdict(proof)}
    written = replace(manifest, **values, files=describe_files(directory))
    write_synced(directory / MANIFEST, written.to_json())
    # As a server would, before it is a version.
    decided = Deciding(base.name, base, manifest)
    load_version(directory, directory.name, decided, verify=False)
    return written


def _apply(
    directory: Path, dtype: str, exact: UnroundedTable, rows: int, delta: Delta, *, may_grow: bool
) -> int:
    """Write the changed rows of a table into its file, which has `rows` rows; return how many it has then."""
    table = exact.declared
    change = delta.tables.get(table.name)
    if change is None or change.rows < rows or change.columns != table.columns:
        got = f"{change.rows:,} rows, {change.columns} columns" if change else "no such table"
        raise ValueError(
            f"deltas: {delta.path}: table {table.name} of the model has {rows:,} rows, {table.columns} columns, and the delta "
            f"{got}; name deltas of the same model"
        )
    if change.rows > rows and not may_grow:
        raise ValueError(
            f"deltas: {delta.path}: table {table.name} has grown from {rows:,} to {change.rows:,} rows; set fitted=DIR, the "
            "dataset of that day"
        )
    weights, scales = opened_table(directory, dtype, table, change.rows)
    num_new = 0
    changed = ChangedRows.of_table(delta, table.name)
    if changed.integers not in (None, dtype):
        raise ValueError(
            f"deltas: {delta.path}: rows of table {table.name} are {changed.integers}, and the tables of the model {dtype}; "
            f"begin at an export with dtype={changed.integers}, or train with checkpoint.delta_dtype=table"
        )
    for ids, stored, of_rows in changed.stored_before(change.rows):
        num_new += int(np.count_nonzero(ids >= rows))
        if of_rows is None:
            values = np.ascontiguousarray(converted(stored, changed.dtype, "float32"))
        else:
            values = dequantized(stored, of_rows, table.columns)
        if not np.isfinite(values).all():
            raise ValueError(
                f"deltas: {delta.path}: a row of table {table.name} is not finite: {DIVERGED}"
            )
        exact.update(ids, values)
        if scales is not None and of_rows is not None:
            weights[ids], scales[ids] = stored, of_rows
        elif scales is not None:
            quantized, new_scales = quantize(torch.from_numpy(values), dtype)
            weights[ids], scales[ids] = quantized.numpy(), new_scales.numpy()
        else:
            rounded = torch.from_numpy(values).to(DTYPES[dtype])
            weights[ids] = rounded.view(torch.uint8).numpy().view(weights.dtype)
    changed.check_end()
    for mapped in (weights, scales):
        if mapped is not None:
            mapped.flush()
    if num_new != change.rows - rows:
        raise ValueError(
            f"deltas: {delta.path}: table {table.name} has grown to {change.rows:,} rows, and {num_new:,} of the "
            f"{change.rows - rows:,} new ones are in the delta; copy the deltas again"
        )
    return change.rows


def _apply_keys(
    base: Path, manifest: Manifest, chain: Sequence[Delta], directory: Path
) -> dict[str, KeyFile]:
    """Write the rows of raw keys after the deltas; return their files by feature."""
    files = {}
    for file in dict.fromkeys(manifest.keys.values()):
        table = unquote(Path(file.name).stem)
        sizes = [f.cardinality for f in manifest.categorical if manifest.keys.get(f.name) == file]
        check_key_rows(table, sizes[-1], chain)
        num_rows = chain[-1].keys[table].rows
        keys = KeyRows(base / file.name, file.count, num_rows).by_row(num_rows)
        for delta in chain:
            changed = ChangedRows.of_keys(delta, table)
            for rows, values in changed.before(num_rows):
                keys[rows] = values
            changed.check_end()
        files[file] = write_key_rows(directory, table, keys)
    return {feature: files[file] for feature, file in manifest.keys.items()}


def opened_table(
    directory: Path, dtype: str, table: Table, rows: int
) -> tuple[np.memmap, np.memmap | None]:
    """Map the files of a table to write them, grown to `rows` rows: its weights, and its scales if it has any."""
    path, scales = directory / table.file, None
    os.truncate(path, rows * table.row_bytes(dtype))
    if dtype in SCALED:
        os.truncate(directory / table.scale_file, rows * 4)
        scales = np.memmap(directory / table.scale_file, "<f4", "r+", shape=(rows,))
    kind = np.dtype(NUMPY_DTYPES[DTYPES[dtype]])
    shape = (rows, table.row_bytes(dtype) // kind.itemsize)
    return np.memmap(path, kind, "r+", shape=shape), scales


def _write_dense(source: Path, target: Path, delta: Delta, prefix: str) -> None:
    """Write the dense component, whose weights' names have a prefix, with those of a delta: their average, if it has one."""
    program, stored = load_program(source), delta.dense
    for name, value in program.state_dict.items():
        name = name.removeprefix(prefix)
        tensor = stored.get(f"{AVERAGE}{name}") or stored.get(f"dense.{name}")
        if tensor is None or tensor.size != tuple(value.shape):
            got = "nothing" if tensor is None else list(tensor.size)
            raise ValueError(
                f"deltas: {delta.path} has {got} for the weight {shown(name)}, and the model wants {list(value.shape)}; name "
                "deltas of the same model"
            )
        with torch.no_grad():
            value.copy_(torch.from_numpy(tensor.array()))
    save_program(program, target)
