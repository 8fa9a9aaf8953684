"""A model on a GPU scores as on a CPU: every kind of lookup and dtype, with rows in host memory; Triton interprets here."""

import shutil
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.models.dlrm import DLRM
from nn.models.options import DLRMOptions
from serving.exporting.dense import export_dense
from serving.gpu import lookup
from serving.gpu import model as gpu_model
from serving.gpu.fused_interaction import fuse_dot_interactions
from serving.gpu.model import GpuModel
from serving.inference.dense import load_program
from serving.inference.model import ServedModel
from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.versions import Versions
from serving.manifest import DENSE, Feature, Manifest, ModelError
from tests.helpers.gpus import needs_gpus, needs_one_gpu
from tests.helpers.specs import sized_spec
from tests.serving.handmade_model import TABLE_BYTES, some_rows, write_model


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def model(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / request.param, request.param)


def check(model: Path, device: str, *, all_hot: bool = True) -> None:
    manifest = Manifest.read(model)
    cpu = ServedModel.load(model)
    for table_bytes in (
        *([None] if all_hot else []),
        TABLE_BYTES[manifest.dtype],
    ):
        gpu = GpuModel.load(model, manifest, max_batch=48, table_bytes=table_bytes, device=device)
        # The second batch is larger than the largest, and has more ids of ragged features than there is room for.
        for seed, (count, longest) in enumerate([(5, 3), (60, 40), (1, 0), (33, 5)]):
            rows = some_rows(count, longest, seed)
            torch.testing.assert_close(gpu.scores(rows), cpu.scores(rows), rtol=2e-5, atol=2e-5)


def test_scores_are_those_of_the_cpu(model):
    check(model, "cpu")


def test_cold_rows_that_are_fetched_in_their_order_give_the_same_scores(model, monkeypatch):
    monkeypatch.setattr(lookup, "FETCHED_FROM", 1)
    check(model, "cpu", all_hot=False)


@needs_one_gpu
@pytest.mark.parametrize("fetched_from", [1, lookup.FETCHED_FROM])
def test_scores_of_a_gpu_are_those_of_the_cpu(model, monkeypatch, fetched_from):
    monkeypatch.setattr(lookup, "FETCHED_FROM", fetched_from)
    # A training run in this process allows TF32.
    torch.set_float32_matmul_precision("highest")
    check(model, "cuda")


OUTSIDE = (300, 2**31 - 1, -1, -(2**31))


def check_outside(model: Path, device: str, monkeypatch) -> None:
    """Look up rows that no table has, also by the fetch of cold rows: they count as zeros, whatever they are."""
    manifest, rows = Manifest.read(model), some_rows(20, 5, 2)
    for fetched_from in (1, lookup.FETCHED_FROM):
        monkeypatch.setattr(lookup, "FETCHED_FROM", fetched_from)
        size = TABLE_BYTES[manifest.dtype]
        gpu = GpuModel.load(model, manifest, max_batch=48, table_bytes=size, device=device)
        good, found = gpu.scores(rows), []
        for outside in OUTSIDE:
            ids = rows.ids.clone()
            ids[::3] = outside
            ragged = {
                name: RaggedIds(torch.full_like(own.values, outside), own.lengths)
                for name, own in rows.ragged.items()
            }
            found.append(gpu.scores(Rows(rows.numerical, ids, ragged)))
        assert all(scores.equal(found[0]) for scores in found)
        assert found[0].isfinite().all()
        assert not found[0].equal(good)
        assert gpu.scores(rows).equal(good), "the device works on"


@pytest.mark.parametrize("model", ["fp32", "int8"], indirect=True)
def test_rows_outside_their_tables_are_read_nowhere(model, monkeypatch):
    check_outside(model, "cpu", monkeypatch)


@needs_one_gpu
def test_rows_outside_their_tables_are_read_nowhere_on_a_gpu(model, monkeypatch):
    torch.set_float32_matmul_precision("highest")
    check_outside(model, "cuda", monkeypatch)


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_ids_of_more_than_31_bits_are_refused(model):
    manifest = Manifest.read(model)
    wide = replace(manifest, categorical=[Feature("one", 2**31 + 1, 1)])
    with pytest.raises(ModelError, match="has ids of more than 31 bits; serve it with device=cpu"):
        GpuModel.load(model, wide, max_batch=32, device="cpu")


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpus(1))])
@pytest.mark.usefixtures("one_lookup_at_a_time")
def test_a_version_with_its_hot_rows_is_swapped_in_under_load(model, tmp_path, device):
    """Every answer is that of the version it names, and the memory of the old one is freed."""
    root, next_one, rows = tmp_path / "models", tmp_path / "next", some_rows(9, 3)
    for path in (root / "1", next_one):
        shutil.copytree(model, path)
    for file in (next_one / "tables").iterdir():
        file.write_bytes(np.flip(np.fromfile(file, np.float32)).tobytes())
    paths = {"1": root / "1", "2": next_one}
    wanted = {name: ServedModel.load(path).scores(rows) for name, path in paths.items()}
    assert (wanted["1"] - wanted["2"]).abs().max() > 0.01
    load = partial(GpuModel.load, max_batch=32, table_bytes=TABLE_BYTES["fp32"], device=device)
    versions = Versions(root, print, load=load, verify=False)
    served = versions.current.model
    assert isinstance(served, GpuModel)
    tables = served._tables
    assert any(table.cold is not None for table in tables)
    memory = [weakref.ref(table.hot) for table in tables]
    memory += [weakref.ref(table.cold) for table in tables if table.cold is not None]
    del tables, served
    asked, wrong, is_over = Counter(), [], threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            version = versions.current
            difference = float((version.model.scores(rows) - wanted[version.name]).abs().max())
            asked[version.name] += 1
            if difference > 2e-5:
                wrong.append((version.name, difference))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        while not asked["1"]:
            time.sleep(0.01)
        next_one.rename(root / "2")
        assert versions.update()
        before = asked["2"]
        while asked["2"] < before + 2:
            time.sleep(0.01)
    finally:
        is_over.set()
        thread.join()
    assert wrong == []
    assert set(asked) == {"1", "2"}
    assert [found() for found in memory] == [None] * len(memory)


def test_a_model_is_captured_on_a_stream_that_no_other_has(monkeypatch):
    """Also behind a version that was refused while it was captured."""

    class OnStream:
        def __init__(self) -> None:
            self._stream = gpu_model._free_stream(torch.device("cuda"))
            gpu_model._models.add(self)

    monkeypatch.setattr(gpu_model, "_models", weakref.WeakSet())
    monkeypatch.setattr(gpu_model, "_capture_stream", lambda device, number: number)
    serving = OnStream()
    refused = OnStream()
    assert (serving._stream, refused._stream) == (0, 1)
    del refused
    following = OnStream()
    assert following._stream == 1
    del serving
    assert OnStream()._stream == 0


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_a_dense_component_of_bfloat16_casts_its_weights_once(model):
    manifest, rows = Manifest.read(model), some_rows(20, 3)
    gpu = GpuModel.load(model, manifest, max_batch=32, dense_dtype=torch.bfloat16, device="cpu")
    got, wanted = gpu.scores(rows), ServedModel.load(model).scores(rows)
    assert not got.equal(wanted)
    torch.testing.assert_close(got, wanted, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("num_numerical", [3, 0])
def test_a_dot_interaction_is_the_kernel_of_training(tmp_path, num_numerical):
    options = DLRMOptions(embedding_dim=8, bottom_mlp=[8], top_mlp=[4, 1])
    model = DLRM(options, sized_spec(num_numerical, 3)).eval()
    export_dense(tmp_path, model, num_numerical, 24)
    module = load_program(tmp_path / DENSE).module()
    # Without a bottom vector the operations are those of torch.
    fuse_dot_interactions(module, torch.device("cpu"))
    fused = [node for node in module.graph.nodes if node.name.startswith("fused")]
    assert len(fused) == bool(num_numerical)
    assert ("bmm" in module.code) == (not num_numerical)
    numerical, embeddings = torch.randn(5, num_numerical), torch.randn(5, 24)
    with torch.inference_mode():
        wanted, got = model(numerical, embeddings), module(numerical, embeddings)
    torch.testing.assert_close(got, wanted)
