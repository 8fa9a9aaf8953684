"""A small model directory made by hand: every kind of lookup, two outputs, keep rates; and rows for it."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from serving.exporting.dense import export_dense, export_onnx
from serving.exporting.tables import quantize
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import MANIFEST, Feature, Manifest, Output, Table, describe_files

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
        if dtype == "int8":
            rows, scales = quantize(rows)
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
