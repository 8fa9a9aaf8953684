"""A new version of a model directory: the one before it, with the rows and the dense component of deltas.

Tables are copied, and changed rows are written into the copies as an export writes them: float32, rounded to bfloat16, or int8
with a scale of their own. So the files of the tables are those of an export of the checkpoint that the deltas lead to.
"""

import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from configs.messages import shown
from dataloading.dataset.documents import read_regular
from dataloading.dataset.durable_files import (
    clear_leftovers,
    hold,
    new_directory,
    partial_sibling,
    write_synced,
)
from nn.checkpoint.compatibility import AVERAGE
from nn.checkpoint.tensor_index import blocks
from nn.deltas.chain import open_chain
from nn.deltas.delta import CHAIN, Delta, chain_of
from nn.deltas.table_rows import ChangedRows, converted
from serving.exporting.tables import quantize
from serving.inference.dense import check_archive
from serving.inference.versions import load_version
from serving.manifest import AOTI, DENSE, MANIFEST, ONNX, Manifest, Table, describe_files

NUMPY_DTYPES = {"fp32": "<f4", "bf16": "<u2", "int8": "i1"}


def apply_deltas(base: Path, deltas: Sequence[str], output: Path) -> tuple[Manifest, list[Delta]]:
    """Write the model directory that deltas make of another one; it is complete or absent.

    Args:
        base: a model directory of a run with deltas.
        deltas: in order; a directory of deltas stands for all of them after the base.
        output: directory to create.

    Returns:
        Its manifest, and the deltas.

    Raises:
        ValueError: the base is damaged, a delta cannot be used or does not follow, or a table has grown; one line.
    """
    manifest = Manifest.read(base)
    link = chain_of(manifest.source)
    if link is None:
        raise ValueError(
            f"model={base} was exported from a run without deltas; train with checkpoint.delta_every=N and export a checkpoint"
        )
    chain = open_chain(link, deltas, str(base))
    manifest.verify(base)
    with hold(output, f"is writing {output}") as alone:
        if os.path.lexists(output):
            raise ValueError(f"output={output} exists; name a new directory, or remove that one")
        if alone:
            clear_leftovers(output)
        with new_directory(output, partial_sibling(output)) as unfinished:
            return _write(base, manifest, chain, unfinished), chain


def _write(base: Path, manifest: Manifest, chain: Sequence[Delta], directory: Path) -> Manifest:
    for name in manifest.files:
        # The others would be of the old weights.
        if name not in (DENSE, ONNX, AOTI):
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(base / name, directory / name)
    for table in manifest.tables:
        for delta in chain:
            _apply(directory, manifest.dtype, table, delta)
    _write_dense(base / DENSE, directory / DENSE, chain[-1])
    written = _described(base, manifest, chain[-1], directory)
    write_synced(directory / MANIFEST, written.to_json())
    # As a server would, before it is a version.
    load_version(directory, directory.name, manifest.interface(), verify=False)
    return written


def _described(base: Path, manifest: Manifest, last: Delta, directory: Path) -> Manifest:
    values = {name: getattr(manifest, name) for name in Manifest.__slots__}
    state = last.facts[CHAIN]
    changed = {"checkpoint": f"step_{last.end.step}", "step": last.end.step, CHAIN: state}
    values["source"] = manifest.source | changed
    values["proof"] = {"of": manifest.identity, "version": base.name, **manifest.proof}
    return Manifest(**values | {"files": describe_files(directory)})


def _apply(directory: Path, dtype: str, table: Table, delta: Delta) -> None:
    """Write the changed rows of a table into its file."""
    change = delta.tables.get(table.name)
    if change is None or (change.rows, change.columns) != (table.rows, table.columns):
        got = (
            "no such table" if change is None else f"{change.rows:,} rows, {change.columns} columns"
        )
        raise ValueError(
            f"deltas: {delta.path}: table {table.name} of the model has {table.rows:,} rows, {table.columns} columns, and the "
            f"delta {got}; export a checkpoint of the larger model"
        )
    changed = ChangedRows(delta, table.name)
    weights = np.memmap(
        directory / table.file, NUMPY_DTYPES[dtype], "r+", shape=(table.rows, table.columns)
    )
    scales = None
    if dtype == "int8":
        scales = np.memmap(directory / table.scale_file, "<f4", "r+", shape=(table.rows,))
    for ids, rows in changed.before(table.rows):
        rows = np.ascontiguousarray(converted(rows, changed.dtype, "float32"))
        if dtype == "bf16":
            weights[ids] = torch.from_numpy(rows).to(torch.bfloat16).view(torch.uint16).numpy()
        elif scales is not None:
            quantized, of_rows = quantize(torch.from_numpy(rows))
            weights[ids], scales[ids] = quantized.numpy(), of_rows.numpy()
        else:
            weights[ids] = rows
    changed.check_end()
    for mapped in (weights, scales):
        if mapped is not None:
            mapped.flush()


def _write_dense(source: Path, target: Path, delta: Delta) -> None:
    """Write the dense component with the weights of a delta: their average, if it has one."""
    data = read_regular(source)
    check_archive(data)
    program = torch.export.load(io.BytesIO(data))
    stored = delta.dense
    for name, value in program.state_dict.items():
        tensor = stored.get(f"{AVERAGE}{name}") or stored.get(f"dense.{name}")
        if tensor is None or tensor.size != tuple(value.shape):
            got = "nothing" if tensor is None else list(tensor.size)
            raise ValueError(
                f"deltas: {delta.path} has {got} for the weight {shown(name)}, and the model wants {list(value.shape)}; name "
                "deltas of the same model"
            )
        array = np.concatenate(list(blocks(tensor))).reshape(tensor.size)
        with torch.no_grad():
            value.copy_(torch.from_numpy(array))
    program.example_inputs = None
    program._guards_code = []
    torch.export.save(program, target)
