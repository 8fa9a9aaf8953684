"""A checkpoint as a model directory: it scores as the step that trained it, for every model and dtype, or is refused."""

import io
import json
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.built_in import MODELS
from configs.serving_schema import Device, ModelExportConfig, TableType
from nn.build import open_source
from nn.checkpoint.tensor_index import read_index
from nn.embedding.declared_tables import embedding_columns
from nn.models.registry import build_dense, declared_tables
from serving.export import report
from serving.exporting import proof, run
from serving.exporting.dense import check_aoti, export_dense, export_onnx, load_aoti, load_onnx
from serving.inference.dense import check_archive, load_dense
from serving.inference.tables import MappedTable
from serving.inference.versions import load_version
from serving.manifest import (
    AOTI,
    DENSE,
    ERROR,
    MACHINE_CODE,
    MANIFEST,
    ONNX,
    TABLE_BITS,
    Manifest,
    ModelError,
)
from tests.helpers import sequence_models
from tests.helpers.composed import TINY, compose_config, ranks_of_cpu, tiny
from tests.helpers.distributed import run_distributed
from tests.helpers.forks import python
from tests.helpers.gpus import needs_gpus
from tests.nn.models.test_family_training import CASES, NORMALISED, two_labels  # noqa: F401
from tests.nn.training.test_ragged import dataset as ragged_data  # noqa: F401
from tests.nn.training.test_ragged import overrides_of as ragged_case
from tests.serving.handmade_model import write_model
from tests.serving.served_models import export, save_run, served_scores

KINDS = [
    *TINY,
    "model.name=tests.nn.models.test_kinds_of_tables:Kinds",
    "data.synthetic.hotness=[3,1,2,5,1]",
]
# Through the complete path: tables without pooling and shared ones, buffers, several tasks.
COMPLETE = ["din with dice", "mmoe of two tasks", *(f"normalised {name}" for name in NORMALISED)]
# Their dense components alone.
DENSE_ONLY = [
    *("wide_deep", "deepfm", "embedding_mlp of positions", "finalmlp", "parallel masknet"),
    *("wukong", "shared_bottom of two tasks", "ple of two tasks"),
    *("rankmixer of experts", "fcn", "autoint", "xdeepfm", "esmm"),
    *("pepnet of two tasks", "star of two tasks"),
]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).reshape(len(logits), -1)


def save_runs(directory: Path, cases: dict[str, list[str]]) -> dict[str, tuple[Path, np.ndarray]]:
    """Train several runs in one process group."""
    with ranks_of_cpu():
        return {name: save_run(directory / name, case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, two_labels, ragged_data):  # noqa: F811
    """Return the checkpoint and the logits of the test split of every case."""
    cases = {name: CASES[name].overrides(two_labels) for name in COMPLETE}
    cases["dlrm"] = [*TINY, "train.ema_decay=0.5"]
    cases["bf16"] = [
        *TINY,
        "model.embedding_dtype=bf16",
        "tasks={label: {keep_rate: 0.1, positive_weight: 5}}",
    ]
    directory = tmp_path_factory.mktemp("runs")
    cases["ragged"] = ragged_case(ragged_data, "adagrad", "planned")
    found = save_runs(directory, cases)
    ranks = run_distributed(save_runs, 2, directory / "two ranks", {"kinds": KINDS})
    (path, first), (_, second) = (found["kinds"] for found in ranks)
    # Each rank has half of each batch.
    both = np.concatenate([first.reshape(2, -1), second.reshape(2, -1)], axis=1)
    return found | {"kinds on two ranks": (path, both.reshape(-1))}


def test_the_cases_have_every_model():
    named = {CASES[name].name for name in COMPLETE + DENSE_ONLY} | {"dlrm", "dcnv2"}
    named |= set(sequence_models.MODELS)  # in test_sequences.py
    assert named == set(MODELS)


@pytest.fixture(scope="module")
def models(runs, tmp_path_factory) -> dict[str, Path]:
    """Return the model directory of every case, and one of bf16."""
    folder = tmp_path_factory.mktemp("models")
    for name, (checkpoint, _) in runs.items():
        export(checkpoint, folder / name)
    export(runs["kinds on two ranks"][0], folder / "narrow", dtype=TableType.bf16)
    return {name: folder / name for name in [*runs, "narrow"]}


@pytest.fixture(scope="module")
def model(models) -> Path:
    return models["dlrm"]


def test_models_score_as_their_training_step(runs, models):
    for name, (checkpoint, logits) in runs.items():
        manifest = Manifest.read(models[name])
        assert manifest.proof["largest_difference"] <= 1e-6, name
        wanted = sigmoid(logits - np.log(50) if name == "bf16" else logits)
        scores = served_scores(models[name], checkpoint)
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=1e-6, err_msg=name)
        assert np.unique(scores).size > 10, name


@pytest.mark.parametrize("name", [*DENSE_ONLY, "dcnv2"])
@pytest.mark.doors
def test_every_dense_component_is_exported_for_any_number_of_rows(name, two_labels, tmp_path):  # noqa: F811
    case = tiny("dcnv2") if name == "dcnv2" else CASES[name].overrides(two_labels)
    config = compose_config(*case)
    spec = open_source(config).spec
    dense = build_dense(config.model, spec).eval().requires_grad_(False)
    columns = embedding_columns(declared_tables(config.model, spec), spec)
    export_dense(tmp_path, dense, len(spec.numerical), columns)
    forward = load_dense(tmp_path / DENSE)
    export_onnx(tmp_path, dense, len(spec.numerical), columns)
    by_onnx = load_onnx(tmp_path)
    for rows in (1, 2, 7):
        inputs = torch.randn(rows, len(spec.numerical)), torch.randn(rows, columns)
        if name == "star of two tasks":
            domain = spec.numerical.index(config.model.domain)
            inputs[0][:, domain] = torch.arange(rows) % config.model.domains
        torch.testing.assert_close(forward(*inputs), dense(*inputs), rtol=0, atol=1e-6)
        torch.testing.assert_close(by_onnx(*inputs), dense(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.doors
def test_onnx_is_proven(runs, tmp_path, monkeypatch):
    manifest = export(runs["dlrm"][0], tmp_path / "model", onnx=True)
    assert ONNX in manifest.files
    proof = manifest.proof["onnx"]
    assert proof["largest_difference"] <= proof["limit"] == 2e-5
    assert proof["rows"] == manifest.proof["rows"]
    assert [line.split()[0] for line in report(manifest)] == ["model", "tables", "proof", "onnx"]
    monkeypatch.setattr(run, "export_onnx", lambda *_: None)
    monkeypatch.setattr(
        run, "load_onnx", lambda _: lambda numerical, _: torch.zeros(len(numerical))
    )
    with pytest.raises(ValueError, match="differ"):
        export(runs["dlrm"][0], tmp_path / "wrong", onnx=True)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.doors
def test_an_onnx_file_that_cannot_be_loaded_is_refused(tmp_path):
    class Squeezes(torch.nn.Module):
        def forward(self, numerical: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
            # Torch squeezes no dimension of several columns, and ONNX refuses to.
            return (numerical.sum(1, keepdim=True) + embeddings).squeeze(1)

    export_onnx(tmp_path, Squeezes(), 3, 4)
    with pytest.raises(
        ValueError, match=r"onnx=true: ONNX Runtime .* cannot load the dense component"
    ):
        load_onnx(tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize(
    ("device", "limit"),
    [
        (Device.cpu, 1e-6),
        pytest.param(
            Device.cuda,
            2e-5,
            marks=[
                *needs_gpus(1),
                # Torch 2.11's loader dies of code for an H200.
                pytest.mark.xfail(raises=ValueError, reason="torch cannot load its own code"),
            ],
        ),
    ],
)
@pytest.mark.doors
def test_machine_code_computes_the_same(runs, device, limit, tmp_path, monkeypatch):
    # A quarter of the time, and no process for other compilations.
    fast = {
        "aot_inductor.precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "compile_threads": 1,
    }
    # Torch asks Python what the CPU can, and our own loader whether it can load.
    monkeypatch.setattr(sys, "executable", python())
    # A training run in this process allows TF32.
    torch.set_float32_matmul_precision("highest")
    with torch._inductor.config.patch(fast):
        manifest = export(runs["dlrm"][0], tmp_path / "model", aoti=device)
    found = manifest.proof[MACHINE_CODE]
    assert (found["rows"], found["limit"]) == (manifest.proof["rows"], limit)
    assert found["largest_difference"] <= limit
    compiled = load_aoti(tmp_path / "model", device)
    forward = load_dense(tmp_path / "model" / DENSE)
    for rows in (1, 5):
        inputs = torch.randn(rows, 3), torch.randn(rows, manifest.num_columns)
        torch.testing.assert_close(compiled(*inputs), forward(*inputs), rtol=limit, atol=limit)


def test_machine_code_that_differs_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "export_aoti", lambda *_: None)
    monkeypatch.setattr(run, "load_aoti", lambda *_: lambda numerical, _: numerical.sum(1))
    with pytest.raises(ValueError, match=r"differs from the training path by"):
        export(runs["dlrm"][0], tmp_path / "model", aoti=Device.cpu)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", "..", "x y", "", "ä", ".x"])
def test_names_that_no_address_can_have_are_refused(name):
    with pytest.raises(ValueError, match="want letters, digits"):
        ModelExportConfig(checkpoint="checkpoints/best", output="model", name=name)


def test_machine_code_of_a_missing_gpu_is_refused():
    with pytest.raises(ValueError, match="aoti=cuda: no GPU was found"):
        check_aoti(Device.cuda)


def test_machine_code_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python())
    (tmp_path / AOTI).write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"aoti=cpu: torch .* cannot load what its compiler has"):
        load_aoti(tmp_path, Device.cpu)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_narrow_tables_score_nearly_the_same(runs, models, dtype, tmp_path):
    checkpoint, logits = runs["kinds on two ranks"]
    path = models["narrow"] if dtype == "bf16" else tmp_path / "model"
    if dtype != "bf16":
        export(checkpoint, path, dtype=TableType[dtype])
    manifest = Manifest.read(path)
    found = served_scores(path, checkpoint)
    difference = np.abs(found - sigmoid(logits)).max()
    assert 1e-6 < difference <= proof.LIMITS[dtype]
    assert manifest.proof["largest_difference"] == pytest.approx(difference, abs=1e-6)
    sizes = {name: state.bytes for name, state in manifest.files.items()}
    table = manifest.tables[1]
    assert sizes[table.file] * 8 == table.rows * table.columns * TABLE_BITS[dtype]
    stored = read_index(checkpoint).tensors[f"tables.{table.name}.weight"].array()
    served = MappedTable(path, table, dtype).rows(torch.arange(table.rows)).numpy()
    assert 0 < np.abs(served - stored).max() <= manifest.proof[ERROR] * (1 + 1e-6)


def test_narrow_ragged_tables_are_pooled_as_wide_ones(runs, tmp_path):
    checkpoint, logits = runs["ragged"]
    export(checkpoint, tmp_path / "model", dtype=TableType.int8)
    found = served_scores(tmp_path / "model", checkpoint)
    np.testing.assert_allclose(found, sigmoid(logits), rtol=0, atol=2e-3)


def test_an_export_that_differs_is_refused_and_leaves_nothing(runs, tmp_path, monkeypatch):
    monkeypatch.setitem(proof.LIMITS, "int8", 1e-7)
    with pytest.raises(
        ValueError,
        match=r"differs from the training path by .* export with dtype=bf16 or dtype=fp32",
    ):
        export(runs["dlrm"][0], tmp_path / "model", dtype=TableType.int8)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_left_alone(runs, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"output=.*model exists"):
        export(runs["dlrm"][0], tmp_path / "model")


def test_other_features_and_damaged_checkpoints_are_refused(runs, ragged_data, tmp_path):  # noqa: F811
    checkpoint = runs["dlrm"][0]
    with pytest.raises(ValueError, match="has other features than the dataset"):
        export(checkpoint, tmp_path / "model", data_path=str(ragged_data))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        export(tmp_path, tmp_path / "model")
    damaged = tmp_path / "step_2"
    shutil.copytree(checkpoint, damaged)
    chunk = read_index(damaged).tensors["tables.cat_1.weight"].chunks[0]
    data = bytearray(chunk.file.read_bytes())
    data[chunk.start + 7] ^= 1
    chunk.file.write_bytes(data)
    with pytest.raises(ValueError, match="has changed since it was written"):
        export(damaged, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_fit_that_cannot_be_served_is_refused_before_tables_are_written(
    runs,
    ragged_data,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(run, "write_tables", lambda *_: pytest.fail("tables were written"))
    with pytest.raises(ValueError, match=str(ragged_data)):
        export(runs["dlrm"][0], tmp_path / "model", fitted=str(ragged_data))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["dense.pt2", "tables/cat_1.bin"])
def test_a_damaged_model_is_refused(model, name, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    file = tmp_path / "model" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match="SHA-256 differs"):
        load_version(tmp_path / "model", "1", None)
    file.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="bytes instead of"):
        load_version(tmp_path / "model", "1", None)
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        load_version(tmp_path / "model", "1", None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_version_whose_score_is_not_finite_does_not_serve(value, tmp_path):
    """The proof cannot be the only guard: versions come from other programs and older exports too."""
    path = write_model(tmp_path / "1", "fp32")
    manifest = Manifest.read(path)
    weights = np.memmap(path / manifest.tables[1].file, "<f4", "r+")
    weights[:16] = value
    weights.flush()
    with pytest.raises(ModelError, match=r"scores a row of zeros as .*nan.*, want finite numbers"):
        load_version(path, "1", None, verify=False)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"tables": []},
        {"dtype": "fp64"},
        {"files": {"../x": {"bytes": 1, "sha256": "0"}}},
        {"categorical": [{"name": "cat_0", "cardinality": -1, "hotness": 1}]},
        {"outputs": "all"},
        {"raw": True},
        {"source": []},
    ],
)
def test_a_manifest_of_another_kind_is_refused(model, change, tmp_path):
    document = json.loads((model / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(document | change))
    with pytest.raises(
        ModelError, match=r"is no manifest of a model: .*; name what serving.export wrote"
    ):
        Manifest.read(tmp_path)


def test_nothing_in_a_model_is_a_pickle(model):
    for path in model.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"pickle" not in data.replace(b'"use_pickle": false', b""), path
        assert not data.startswith(b"\x80"), path


class Masked(torch.nn.Module):
    def forward(self, numerical, embeddings):
        shown = embeddings.masked_fill(embeddings < 0, float("-inf")).clamp(max=float("inf"))
        return shown.softmax(1)[:, 0] + numerical[:, 0].clamp(-0.5)


def test_infinite_numbers_of_a_program_are_those_of_the_export(tmp_path):
    export_dense(tmp_path, Masked(), 1, 3)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 7):
        numerical = torch.randn(rows, 1, generator=generator)
        embeddings = torch.randn(rows, 3, generator=generator)
        embeddings[:, 1] = 0.5  # not all of a row are masked
        found = load_dense(tmp_path / DENSE)(numerical, embeddings)
        assert torch.equal(found, Masked()(numerical, embeddings))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("models/model.json", b"torch.ops.aten.relu.default", b"torch.hub.load_state_dict__"),
        *(
            ("models/model.json", b"torch.ops.aten.relu.default", b"torch.ops.aten." + other)
            # A file's name, what Python gives every object, and an operation of TorchScript alone.
            for other in (b"from_file.default", b"__dict__.update", b"_dir.sort", b"save.default")
        ),
        ("models/model.json", b"Symbol(", b"eval__("),
        ("models/model.json", b"builtins.tuple", b"subprocess.run"),
        ("data/weights/model_weights_config.json", b'"use_pickle": false', b'"use_pickle": true '),
        ("data/sample_inputs/model.pt", b"", b"a pickle"),
        ("data/other", None, b"more"),
    ],
)
def test_what_torch_would_execute_of_an_archive_is_refused(model, name, old, new):
    data = (model / DENSE).read_bytes()
    check_archive(data)
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(changed, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.partition("/")[2] == name:
                assert old is not None
                assert old in content
                content = new if not old else content.replace(old, new, 1)
            target.writestr(entry, content)
        if old is None:
            target.writestr(f"dense/{name}", new)
    with pytest.raises(ValueError, match=r"it (holds|calls|has)|its inputs are"):
        check_archive(changed.getvalue())
