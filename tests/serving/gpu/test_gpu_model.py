"""A model on a GPU scores as on a CPU: every kind of lookup and dtype, with rows in host memory; Triton interprets here."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from serving.exporting.dense import export_dense
from serving.exporting.tables import quantize
from serving.gpu.inputs import InputLayout
from serving.gpu.model import GpuModel, padded_sizes
from serving.gpu.tables import hot_rows
from serving.inference.model import ServedModel
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import MANIFEST, Feature, Manifest, Output, Table, describe_files
from tests.helpers.gpus import needs_one_gpu

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
        return self.out(hidden).float()


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def model(request, tmp_path_factory) -> Path:
    """Return a model directory with every kind of lookup and two outputs."""
    path = tmp_path_factory.mktemp("model") / request.param
    (path / "tables").mkdir(parents=True)
    torch.manual_seed(1)
    for table in TABLES:
        rows = torch.randn(table.rows, table.columns)
        if request.param == "bf16":
            rows = rows.bfloat16().view(torch.int16)
        if request.param == "int8":
            rows, scales = quantize(rows)
            scales.numpy().tofile(path / table.scale_file)
        rows.numpy().tofile(path / table.file)
    outputs = [Output("click", True, -0.5), Output("price", False)]
    values = {"name": "m", "model": "m", "numerical": ["a", "b"], "categorical": FEATURES}
    values |= {"keep_rate": "rate", "outputs": outputs, "dtype": request.param, "tables": TABLES}
    columns = Manifest(**values).num_columns
    export_dense(path, Dense(2 + columns), 2, columns)
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


def check(model: Path, device: str) -> None:
    manifest = Manifest.read(model)
    cpu = ServedModel.load(model)
    for table_bytes in (None, 9_000 if manifest.dtype == "int8" else 10_000):
        gpu = GpuModel.load(model, manifest, max_batch=48, table_bytes=table_bytes, device=device)
        # The second batch is larger than the largest, and has more ids of ragged features than there is room for.
        for seed, (count, longest) in enumerate([(5, 3), (100, 40), (1, 0), (33, 5)]):
            rows = some_rows(count, longest, seed)
            torch.testing.assert_close(gpu.scores(rows), cpu.scores(rows), rtol=2e-5, atol=2e-5)


def test_scores_are_those_of_the_cpu(model):
    check(model, "cpu")


@needs_one_gpu
def test_scores_of_a_gpu_are_those_of_the_cpu(model):
    check(model, "cuda")


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_a_dense_component_of_bfloat16_casts_its_weights_once(model):
    manifest, rows = Manifest.read(model), some_rows(20, 3)
    gpu = GpuModel.load(model, manifest, max_batch=32, dense_dtype=torch.bfloat16, device="cpu")
    got, wanted = gpu.scores(rows), ServedModel.load(model).scores(rows)
    assert not got.equal(wanted)
    torch.testing.assert_close(got, wanted, rtol=0.03, atol=0.03)


def test_small_tables_are_complete_before_large_ones():
    row = 16 * 4
    assert hot_rows(TABLES[:2], "fp32", 400 * row) == [300, 40]
    assert hot_rows(TABLES[:2], "fp32", 140 * row) == [100, 40]
    assert hot_rows(TABLES[:2], "fp32", 3 * row) == [1, 1]
    assert hot_rows(TABLES[:2], "int8", 4 * 340 + 50 * 16) == [25, 25], "scales count"
    with pytest.raises(ValueError, match="table_gib: the tables need more than"):
        hot_rows(TABLES, "fp32", row)


def test_padded_rows_look_up_id_0_and_no_ragged_ids():
    layout = InputLayout(4, 1, 2, False, ("r",))
    block = torch.full((layout.first_value + 3,), 99, dtype=torch.int32)
    ragged = {"r": RaggedIds(torch.tensor([7, 8, 9]), torch.tensor([1, 2]))}
    rows = Rows(torch.zeros(2, 1), torch.tensor([[1, 2], [3, 4]]), ragged)
    assert layout.fill(block, rows) == len(block)
    assert layout.ids(block).tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert block[layout.first_start("r") :].tolist() == [0, 1, 3, 3, 3, 7, 8, 9]
    assert padded_sizes(48) == [32, 48]
    assert padded_sizes(16) == [16]
