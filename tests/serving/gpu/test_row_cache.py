"""Rows that requests ask for move to the GPU, and no score changes; Triton interprets here."""

from pathlib import Path

import numpy as np
import pytest
import torch

from serving.gpu import lookup, row_cache
from serving.gpu.model import GpuModel
from serving.gpu.row_cache import RowCache
from serving.gpu.tables import all_places
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import Manifest
from tests.helpers.gpus import needs_gpus
from tests.serving.handmade_model import TABLE_BYTES, some_rows, write_model

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
