"""A small model directory made by hand: every kind of lookup, two outputs, keep rates; and rows for it."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nn.deltas.scaled_rows import quantize
from serving.exporting.dense import export_dense, export_onnx
from serving.inference.key_rows import write_key_rows
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import MANIFEST, SCALED, Feature, Manifest, Output, Table, describe_files
from serving.vocabulary import write_vocabulary

FEATURES = [
    *(Feature("one", 40, 1), Feature("three", 300, 3), Feature("list", 300, None)),
    *(Feature("several", 17, 2), Feature("narrow", 9, 1), Feature("tags", 9, None)),
]
TABLES = [
    Table("shared", 300, 16, "sum", ["three", "list"]),
    Table("own", 40, 16, "sum", ["one"]),
    Table("positions", 17, 16, "none", ["several"]),
    Table("narrow", 9, 4, "mean", ["narrow", "tags"]),
]

TABLE_BYTES = {"fp32": 8_832, "bf16": 5_016, "int8": 4_572}
"""Of all tables on a GPU that has 60 of the 300 rows of "shared", and all others."""


class Dense(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(columns, 8), nn.Linear(8, 2)

    def forward(self, numerical: Tensor, embeddings: Tensor) -> Tensor:
        hidden = self.hidden(torch.cat([numerical, embeddings], dim=1)).relu()
        # 0, and no number where the square of one is infinite.
        overflow = (numerical * numerical).sum(dim=1, keepdim=True) * 0.0
        return (self.out(hidden) + overflow).float()


def write_model(path: Path, dtype: str, *, onnx: bool = False) -> Path:
    """Write the model directory; return its path."""
    (path / "tables").mkdir(parents=True)
    torch.manual_seed(1)
    for table in TABLES:
        rows = torch.randn(table.rows, table.columns)
        if dtype == "bf16":
            rows = rows.bfloat16().view(torch.int16)
        if dtype in SCALED:
            rows, scales = quantize(rows, dtype)
            scales.numpy().tofile(path / table.scale_file)
        rows.numpy().tofile(path / table.file)
    outputs = [Output("click", True, -0.5), Output("price", False)]
    values = {"name": "m", "model": "m", "numerical": ["a", "b"], "categorical": FEATURES}
    values |= {"keep_rate": "rate", "outputs": outputs, "dtype": dtype, "tables": TABLES}
    columns = Manifest(**values).num_columns
    dense = Dense(2 + columns).eval()
    export_dense(path, dense, 2, columns)
    if onnx:
        export_onnx(path, dense, 2, columns)
    manifest = Manifest(**values, files=describe_files(path))
    (path / MANIFEST).write_text(manifest.to_json())
    return path


def some_rows(count: int, longest: int, seed: int = 0) -> Rows:
    generator = np.random.default_rng(seed)
    fixed = [f for f in FEATURES if f.hotness is not None]
    ids = [generator.integers(0, f.cardinality, (count, f.hotness)) for f in fixed]
    ragged = {}
    for feature in FEATURES:
        if feature.hotness is None:
            lengths = torch.from_numpy(generator.integers(0, longest + 1, count))
            values = generator.integers(0, feature.cardinality, int(lengths.sum()))
            ragged[feature.name] = RaggedIds(torch.from_numpy(values), lengths)
    numerical = torch.from_numpy(generator.normal(size=(count, 2)).astype(np.float32))
    rates = torch.from_numpy(generator.uniform(0.1, 1, count).astype(np.float32))
    matrix = torch.from_numpy(np.concatenate(ids, axis=1))
    return Rows(numerical, matrix, ragged, rates if seed % 2 else None)


def write_raw_model(path: Path) -> Path:
    """Write the model directory with raw values of every kind, a key of each second row of table `own`; return its path."""
    write_model(path, "fp32")
    document = json.loads((path / MANIFEST).read_text())
    (path / "vocabulary").mkdir()
    of = {"shared": 299, "positions": 16, "narrow": 8}
    files = {table: (f"vocabulary/{table}.bin", size) for table, size in of.items()}
    for table, (file, size) in files.items():
        write_vocabulary(path / file, [[f"{table} {number}" for number in range(size)]])
    keys = np.where(np.arange(40) % 2, np.arange(40) + 1000, 0)
    document["keys"] = {"one": asdict(write_key_rows(path, "own", keys))}
    numerical = {"transforms": ["minmax", {"fill": 0}], "fitted": [[0.0, 1.0], []]}
    table_of = {feature: table.name for table in TABLES for feature in table.features}
    document["raw"] = {
        "columns": {"a": 1, "b": 1} | {feature.name: 1 for feature in FEATURES},
        "missing": [],
        "is_text": {"a": False, "b": False} | {feature.name: True for feature in FEATURES},
        "float16": False,
        "numerical": [{"name": name, "column": name, **numerical} for name in "ab"],
        "categorical": [
            {
                "name": feature.name,
                "column": feature.name,
                "cross": [],
                "separator": "" if feature.hotness == 1 else "|",
                "list": False,
                "buckets": None,
                "is_key": feature.name == "one",
                "vocabulary": files.get(table_of[feature.name]),
            }
            for feature in FEATURES
        ],
        "history": [],
    }
    return write_manifest(path, document)


def write_manifest(path: Path, document: dict) -> Path:
    """Write a manifest with the right checksums of all files; return the path of the directory."""
    files = {name: asdict(state) for name, state in describe_files(path).items()}
    (path / MANIFEST).write_text(json.dumps(document | {"files": files}))
    return path
