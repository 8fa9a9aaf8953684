"""Rows that requests ask for move to the GPU, and no score changes; Triton interprets here."""

import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from serving.gpu import lookup, row_cache
from serving.gpu.model import GpuModel
from serving.gpu.row_cache import RowCache
from serving.gpu.tables import all_places
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import Manifest
from tests.helpers.gpus import needs_gpus
from tests.serving.handmade_model import TABLE_BYTES, some_rows, write_model
from tests.serving.served_models import serving, tensor

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpus(1))]
BATCHES = 20


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def model(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / request.param, request.param)


def near(rows: Rows, first: int, count: int) -> Rows:
    """Return rows whose ids of "three" and "list", of 300, are `count` ones from `first` on."""
    ids = rows.ids.clone()
    ids[:, 1:4] = first + ids[:, 1:4] % count
    own = rows.ragged["list"]
    changed = RaggedIds(first + own.values % count, own.lengths)
    return Rows(rows.numerical, ids, rows.ragged | {"list": changed}, rows.keep_rates)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fetched_from", [1, lookup.FETCHED_FROM])
def test_rows_move_to_where_they_are_asked_for_and_no_score_changes(
    model, device, fetched_from, monkeypatch
):
    monkeypatch.setattr(lookup, "FETCHED_FROM", fetched_from)
    monkeypatch.setattr(row_cache, "REST", 0)
    torch.set_float32_matmul_precision("highest")
    load = {"max_batch": 48, "table_bytes": TABLE_BYTES[model.name], "device": device}
    moving = GpuModel.load(model, Manifest.read(model), **load)
    monkeypatch.setattr(RowCache, "learn", lambda *_: None)
    still = GpuModel.load(model, Manifest.read(model), **load)
    monkeypatch.undo()
    monkeypatch.setattr(row_cache, "REST", 0)
    (table,) = [table for table in moving._tables if table.cold is not None]
    stored = [of.clone() for of in (table.hot, table.cold) if of is not None]
    shares = []
    # Requests change twice.
    for first in (200, 0, 120):
        for seed in range(BATCHES):
            before = moving.sampled.lookups, moving.sampled.hits
            rows = near(some_rows(20, 6, seed), first, 30)
            learn = RowCache.learn
            found = moving.scores(rows)
            monkeypatch.setattr(RowCache, "learn", lambda *_: None)
            assert found.equal(still.scores(rows))
            monkeypatch.setattr(RowCache, "learn", learn)
            lookups, hits = moving.sampled.lookups, moving.sampled.hits
            shares.append((hits - before[1]) / (lookups - before[0]))
        assert np.mean(shares[-5:]) == 1, "30 rows fit"
    assert shares[0] == 0
    assert shares[2 * BATCHES] < 0.5
    # Every row is at the place that is said to be its own.
    places = table.places.long().cpu()
    assert places.sort().values.equal(torch.arange(300))
    assert table.places.data_ptr() == all_places(moving._tables).data_ptr()
    now = torch.cat([table.hot.cpu(), table.cold])
    assert now[places].equal(torch.cat([stored[0].cpu(), stored[1]]))


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_samples_take_a_fiftieth_of_the_time(model, monkeypatch):
    gpu = GpuModel.load(
        model, Manifest.read(model), max_batch=32, table_bytes=TABLE_BYTES["fp32"], device="cpu"
    )
    clock = iter(np.r_[10.0, 10.5, np.arange(11.0, 60.0)])
    monkeypatch.setattr(row_cache.time, "monotonic", lambda: next(clock))
    counted = []
    for seed in range(25):
        gpu.scores(some_rows(2, 2, seed))
        counted.append(gpu.sampled.lookups)
    # A sample of half a second at second 10; the next one is due 24.5 seconds after its end.
    assert len(set(counted)) == 1
    assert counted[0] > 0
    gpu.scores(some_rows(2, 2))
    assert gpu.sampled.lookups > counted[0]


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
def test_a_sample_has_rows_of_every_request_of_a_batch(model):
    gpu = GpuModel.load(
        model, Manifest.read(model), max_batch=48, table_bytes=TABLE_BYTES["fp32"], device="cpu"
    )
    requests = [near(some_rows(1, 2, seed), 200, 30) for seed in range(40)]
    asked = [rows.ids[:, 1:4].numel() + len(rows.ragged["list"].values) for rows in requests]
    gpu.scores(*requests)
    assert gpu.sampled.lookups == sum(asked)


def inputs_of(rows: Rows) -> list[dict]:
    """Return the inputs of a request, as JSON."""
    found = [
        tensor("numerical", "FP32", rows.numerical.tolist()),
        tensor("ids", "INT64", rows.ids.tolist()),
    ]
    for name, own in rows.ragged.items():
        ids = pad_sequence(own.values.split(own.lengths.tolist()), True, -1)
        found.append(tensor(name, "INT64", ids.tolist()))
    return found


@pytest.mark.parametrize("model", ["fp32"], indirect=True)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("one_lookup_at_a_time")
def test_answers_keep_their_bits_while_rows_move_and_a_version_is_loaded(
    model, device, tmp_path, monkeypatch
):
    """Every answer is that of a model without moves, and the metrics say where the rows were."""
    torch.set_float32_matmul_precision("highest")
    root, next_one = tmp_path / "models", tmp_path / "next"
    for path in (root / "1", next_one):
        shutil.copytree(model, path)
    for file in (next_one / "tables").iterdir():
        file.write_bytes(np.flip(np.fromfile(file, np.float32)).tobytes())
    load = partial(GpuModel.load, max_batch=32, table_bytes=TABLE_BYTES["fp32"], device=device)
    # No rates: a request without them.
    requests = [near(some_rows(20, 6, 2 * seed), 200, 30) for seed in range(BATCHES)]
    with monkeypatch.context() as without:
        without.setattr(RowCache, "learn", lambda *_: None)
        still = {"1": load(root / "1", Manifest.read(model))}
        still["2"] = load(next_one, Manifest.read(model))
        wanted = {name: [of.scores(rows) for rows in requests] for name, of in still.items()}
    monkeypatch.setattr(row_cache, "REST", 0)
    monkeypatch.setattr("serving.run.model_loader", lambda *_: load)
    asked = {"1": 0, "2": 0}
    with serving(root, verify=False, poll_s=0.05) as client:
        started = time.monotonic()
        while asked["2"] < 2 * BATCHES:
            assert time.monotonic() < started + 60, asked
            number = sum(asked.values()) % BATCHES
            status, answer = client.infer(inputs_of(requests[number]), "m")
            assert status == 200, answer
            version = answer["model_version"]
            scores = np.float32([output["data"] for output in answer["outputs"]]).T
            assert np.array_equal(scores, wanted[version][number].numpy()), version
            asked[version] += 1
            if asked["1"] == BATCHES:
                next_one.rename(root / "2")
        sampled = client.service._models[0].current.model.sampled
        text = client.call("/metrics")[1].decode()
    assert asked["1"] >= BATCHES
    for name, count in (("lookups", sampled.lookups), ("hits", sampled.hits)):
        assert f'serving_sampled_{name}_total{{model="m"}} {float(count)}' in text
    # Of the second version alone, whose first batches had none of these rows on the GPU.
    assert 0.5 < sampled.hits / sampled.lookups < 1
