"""Tables in host memory in a plan: chosen by the planner, refused with a number, with the rows that a step will fetch."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataloading.randomness import power_law
from nn.build import build_plan, open_source, planned_hardware
from nn.tiers.host_tier import ring_slots
from nn.tiers.slot_map import SlotMap
from nn.tiers.traffic import IdTraffic, expected_fetches, power_law_share, row_classes
from tests.helpers.composed import TINY, compose_config
from tests.helpers.datasets import CARDINALITY, write_clicks

GPU = [*TINY, "device=cuda", "sharding.host_gib=1", "data.synthetic.cardinalities=[90000,40,50000]"]


def planned(*overrides: str):
    config = compose_config(*GPU, *overrides)
    return build_plan(config, open_source(config), planned_hardware(config))[1]


def test_the_planner_moves_the_largest_tables_where_a_gpu_has_too_little_memory():
    gib = 8.2e6 / 2**30
    first, small, second = planned(f"sharding.hbm_gib={gib}")
    assert (first.tier, small.tier, second.tier) == ("host", "device", "device")
    # All rows of 8 float32 columns with Adagrad's state in host memory, some of them and a slot and a bit per row on the device.
    assert first.host_bytes_per_rank == (90_000 * 64,)
    assert first.bytes_per_rank == (first.cache_rows * (64 + 6) + 4 * 90_000 + 90_000 // 8,)
    assert sum(sum(row.bytes_per_rank) for row in (first, small, second)) <= 0.9 * 8.2e6
    assert first.fetched_rows > 0
    with pytest.raises(ValueError, match=r"keep large tables in host memory \(sharding\.tiers="):
        planned(f"sharding.hbm_gib={gib}", "sharding.tiers=[device]")


def test_tables_with_many_ids_per_row_stay_on_the_gpu():
    sizes = [
        "data.synthetic.cardinalities=[90000,40,90000,80000]",
        "data.multi_hot.hotness=[20,1,1,2]",
    ]
    # Two of three tables fit, and the expansions.
    rows = planned(f"sharding.hbm_gib={2.4e7 / 2**30}", *sizes)
    assert [row.tier for row in rows] == ["device", "device", "host", "device"]
    # A smaller table first, if it costs less than a larger one.
    rows = planned(f"sharding.hbm_gib={1.8e7 / 2**30}", *sizes)
    assert [row.tier for row in rows] == ["device", "device", "host", "host"]
    assert rows[2].fetched_rows < rows[3].fetched_rows


def test_an_arena_smaller_than_the_live_batches_is_refused_with_one_that_would_do():
    # 64 rows train while two times 128 are scored.
    table = "sharding.tables={{cat_2: {{tier: host, cache: {}}}}}"
    with pytest.raises(ValueError, match="may look up 320 different ones; set cache: ") as caught:
        planned("sharding.hbm_gib=1", table.format(0.006))
    least = re.search(r"set cache: ([\d.]+)", str(caught.value)).group(1)
    assert planned("sharding.hbm_gib=1", table.format(least))[2].cache_rows == 320


def test_the_expected_rows_of_a_dataset_are_those_of_its_counts(tmp_path):
    rows = 90_000
    table = "sharding.tables={{{}: {{tier: host, cache: 0.1}}}}"
    like, alike = (
        planned(
            f"data.synthetic.cardinalities=[{CARDINALITY},{rows}]",
            f"data.synthetic.exponent={exponent}",
            *("sharding.hbm_gib=1", table.format("cat_1")),
        )[1].fetched_rows
        for exponent in (1.05, 0)
    )
    stored = f"data.path={write_clicks(tmp_path / 'clicks', rows)}"
    command = (stored, "sharding.hbm_gib=1", table.format("item"))
    assert planned(*command)[1].fetched_rows == alike
    counts = np.diff(1e9 * power_law_share(rows, 1.05)(np.arange(rows + 1))).astype(np.int64)
    folder = tmp_path / "clicks" / "vocabulary"
    folder.mkdir()
    pq.write_table(pa.table({"id": np.arange(rows), "count": counts}), folder / "item.parquet")
    assert planned(*command)[1].fetched_rows == pytest.approx(like, rel=0.01)
    assert like < 0.7 * alike


@pytest.mark.parametrize(
    ("exponent", "drawn", "within"), [(1.05, 0, 0.05), (0.0, 0, 0.05), (1.05, 3, 0.15)]
)
def test_the_expected_rows_are_those_that_the_slot_map_fetches(exponent, drawn, within):
    rows, slots, batch = [40_000, 12_000], [4000, 1200], 256 // (1 + drawn)
    ring = max(ring_slots(sum(slots)), 2 * 2 * batch * (1 + drawn))
    slot_map = SlotMap(rows, slots, ring, torch.device("cpu"))
    generator, fetched = np.random.default_rng(1), []
    further = [generator.integers(0, count, (count, drawn)) for count in rows]
    for number in range(120):
        ids = []
        for count, base, more in zip(rows, (0, rows[0]), further, strict=True):
            own = power_law(generator.random(batch), count, exponent).astype(np.int64)
            ids.append(np.append(own, more[own].ravel()) + base)
        slot_map.release(1 << number % 2, 1 << number % 2)
        needed = torch.from_numpy(np.concatenate(ids)).int()
        _, moves, _ = slot_map.assign(needed, 1 << number % 2)
        fetched.append(0 if moves is None else len(moves.fetched_rows))
    fixed = [int(count * (1 - ring / sum(slots))) for count in slots]
    classes = [
        row_classes(
            IdTraffic(power_law_share(count, exponent), count, drawn), 0, count, first, batch
        )
        for count, first in zip(rows, fixed, strict=True)
    ]
    assert sum(expected_fetches(classes, ring)) == pytest.approx(np.mean(fetched[40:]), rel=within)
