"""A served model with tables of an experiment's sizes and random numbers, and rows with uniform ids.

A share of hot rows is that of the bytes of all tables on the GPU; the other rows are read from pinned host memory.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config
from nn.build import open_source
from nn.deltas.scaled_rows import quantize
from nn.embedding.declared_tables import embedding_columns
from nn.models.registry import build_dense, declared_tables
from serving.exporting.dense import export_dense
from serving.gpu.dense import dense_on
from serving.gpu.model import GpuModel
from serving.gpu.tables import hot_rows, to_device
from serving.inference.dense import load_dense, load_program
from serving.inference.model import ServedModel
from serving.inference.model_rows import Rows
from serving.inference.tables import DTYPES
from serving.manifest import DENSE, Feature, Manifest, Output, Table

BLOCK_ROWS = 1 << 15
"""Distinct rows of a table; the others repeat them."""
CHECKED_ROWS = 1024
DENSE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RepeatedTable:
    """A table that repeats a block of random rows, so that a table of any size is written at the speed of memory."""

    def __init__(self, declared: Table, dtype: str) -> None:
        self.declared, self.dtype = declared, DTYPES[dtype]
        self._block = torch.randn(min(BLOCK_ROWS, declared.rows), declared.columns) * 0.1
        self._scale, self.scale = None, None
        if dtype == "int8":
            self._block, self._scale = quantize(self._block)
            repeats = -(-declared.rows // len(self._block))
            self.scale = self._scale.repeat(repeats)[: declared.rows]
        self._block = self._block.to(self.dtype)

    def read(self, first: int, target: Tensor) -> None:
        """Copy the rows from `first` on to `target`."""
        done = 0
        while done < len(target):
            start = (first + done) % len(self._block)
            part = self._block[start : start + len(target) - done]
            target[done : done + len(part)].copy_(part)
            done += len(part)

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, float32."""
        positions = ids.long() % len(self._block)
        rows = self._block[positions].float()
        return rows if self._scale is None else rows * self._scale[positions][:, None]


def prepare(args: argparse.Namespace, config: Config, folder: Path) -> tuple[GpuModel, ServedModel]:
    """Return the model to measure and its reference; `args` are those of `in_process`."""
    started = time.perf_counter()
    config.data.synthetic.cardinalities = [
        max(1, rows // args.shrink) for rows in config.data.synthetic.cardinalities
    ]
    spec = open_source(config).spec
    declared = declared_tables(config.model, spec)
    tables = [
        Table(t.name, t.num_embeddings, t.embedding_dim, "sum", list(t.feature_names))
        for t in declared
    ]
    manifest = Manifest(
        name=config.model.name,
        model=config.model.name,
        numerical=list(spec.numerical),
        categorical=[Feature(f.name, f.cardinality, f.hotness) for f in spec.categorical],
        keep_rate=None,
        outputs=[Output("label", True)],
        dtype=args.dtype,
        tables=tables,
    )
    torch.manual_seed(1)
    dense = build_dense(config.model, spec).eval().requires_grad_(False)
    export_dense(folder, dense, len(spec.numerical), embedding_columns(declared, spec))
    stored = [RepeatedTable(table, args.dtype) for table in tables]
    reference = ServedModel(manifest, _lookup(manifest, stored), load_dense(folder / DENSE), None)
    num_bytes = sum(t.rows * t.row_bytes(args.dtype) for t in tables)
    scales = 4 * sum(table.rows for table in tables) if args.dtype == "int8" else 0
    budget = int(num_bytes * args.hot_share) + scales
    counts = hot_rows(tables, args.dtype, budget)
    device = torch.device(args.device)
    dtype = DENSE_TYPES[args.dense]
    program = load_program(folder / DENSE)
    model = GpuModel(
        manifest,
        to_device(stored, counts, device),
        dense_on(program, device, dtype),
        None,
        max(*args.batches, CHECKED_ROWS),
        dtype,
        {},
    )
    print(
        f"{args.experiment}: {len(tables)} tables of {args.dtype}, {num_bytes / 2**30:.1f} GiB, {sum(counts):,} of "
        f"{sum(t.rows for t in tables):,} rows hot, dense {args.dense}; ready after {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return model, reference


def _lookup(manifest: Manifest, stored: list[RepeatedTable]) -> Callable[[Rows], list[Tensor]]:
    columns = manifest.id_slices()

    def look_up(rows: Rows) -> list[Tensor]:
        found = [
            table.rows(rows.ids[:, columns[name]].reshape(-1))
            for table in stored
            for name in table.declared.features
        ]
        return [torch.cat(found, dim=1)]

    return look_up


def some_rows(manifest: Manifest, count: int, seed: int) -> Rows:
    """Return rows with uniform ids, as a request of int32 ids gives them."""
    generator = np.random.default_rng(seed)
    highest = np.array([feature.cardinality for feature in manifest.fixed])
    ids = generator.integers(0, highest, (count, len(highest)), dtype=np.int32)
    numerical = generator.normal(size=(count, len(manifest.numerical))).astype(np.float32)
    return Rows(torch.from_numpy(numerical), torch.from_numpy(ids))
