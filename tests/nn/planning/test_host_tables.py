"""Tables in host memory in a plan: chosen by the planner, refused with a number, with the rows that a step will fetch."""

import re
from collections.abc import Sequence
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dataloading.randomness import power_law
from nn.build import build_plan, open_source, planned_hardware
from nn.tiers.host_tier import DiskSettings, HostTier, TieredShard, ring_slots
from nn.tiers.look_ahead import LookAhead
from nn.tiers.slot_map import SlotMap, TierIds
from nn.tiers.stager import PASS_BATCHES, Need
from nn.tiers.traffic import (
    LIVE_BATCHES,
    IdTraffic,
    expected_fetches,
    expected_reads,
    power_law_share,
    row_classes,
)
from tests.helpers.composed import TINY, compose_config
from tests.helpers.datasets import CARDINALITY, write_clicks

# Exponent, further rows per id, and rows for which host memory has room.
READS = [(1.05, 0, 5000), (0.0, 0, 5000), (1.05, 2, 8000), (1.05, 9, 11_000)]
GPU = [*TINY, "device=cuda", "sharding.host_gib=1", "data.synthetic.cardinalities=[90000,40,50000]"]


TWO_IN_HOST = "sharding.tables={cat_0: {tier: host, cache: 0.1}, cat_2: {tier: host, cache: 0.1}}"
ONE_WHOLE = "sharding.tables={cat_0: {tier: host, type: table_wise}}"
ON_DISK = [
    "sharding.tables={cat_0: {tier: disk, cache: 0.1}}",
    *("sharding.staged_gib=0.0035", "sharding.disk_path=/tables"),
]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # 5.5 MiB and 3.1 MiB with Adagrad's state.
        (
            ["sharding.hbm_gib=1", f"sharding.host_gib={4 / 1024}", TWO_IN_HOST],
            r"^host memory is too small: the tables that sharding.tables puts there or on disk take 0.0 GiB of it "
            r"\(cat_0 0.0 GiB, cat_2 0.0 GiB\), and 1 x 0.0 GiB are usable \(0.0 GiB per node less sharding.reserve=0.1\). "
            r"Either keep cat_0 on disk \({cat_0: {tier: disk}} in sharding.tables, and sharding.disk_path\), leave the tables "
            r"on the GPUs, where all fit \(tier: device\), choose an optimizer",
        ),
        (
            [f"sharding.hbm_gib={7 / 1024}", f"sharding.host_gib={4 / 1024}", TWO_IN_HOST],
            r"^host memory is too small: .*sharding.disk_path\), choose an optimizer with less state .*, store weights in 16 "
            r"bits .*, or use hosts with more memory \(sharding.host_gib",
        ),
        # A table on disk takes 8 bytes per row beside the rows that are staged.
        (
            [*ON_DISK, "sharding.hbm_gib=1", f"sharding.host_gib={4 / 1024}"],
            r"take 0.0 GiB of it \(cat_0 0.0 GiB\), and .* less sharding.reserve=0.1 and, per rank, "
            r"sharding.staged_gib=0.0035 for rows of tables on disk\). Either leave the tables on the GPUs, where all fit "
            r"\(tier: device\), lower sharding.staged_gib, or use hosts with more memory",
        ),
        # Each of two ranks has room for half of a table.
        (
            [
                "sharding.hbm_gib=1",
                "sharding.world_size=2",
                f"sharding.host_gib={8 / 1024}",
                ONE_WHOLE,
            ],
            r"^host memory is too small: .*, and 2 x 0.0 GiB are usable .*, shard cat_0 row_wise, ",
        ),
        # The devices are too small too.
        (
            [f"sharding.hbm_gib={1 / 1024}", f"sharding.host_gib={4 / 1024}", TWO_IN_HOST],
            r"^the tables do not fit: .*, and of host memory 0.0 GiB per node; .*keep cat_0 on disk",
        ),
    ],
)
def test_host_memory_that_is_short_is_named_with_what_helps(options, message):
    with pytest.raises(ValueError, match=message):
        planned(*options)


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


@pytest.mark.parametrize(("exponent", "drawn"), [(1.05, 0), (0.0, 0), (1.05, 3)])
def test_the_expected_rows_are_those_that_the_slot_map_fetches(exponent, drawn):
    rows, slots, batch = [40_000, 12_000], [4000, 1200], 256 // (1 + drawn)
    ring = max(ring_slots(sum(slots)), 2 * LIVE_BATCHES * batch * (1 + drawn))
    slot_map = SlotMap(rows, slots, ring, torch.device("cpu"))
    generator, fetched = np.random.default_rng(1), []
    further = [generator.integers(0, count, (count, drawn)) for count in rows]
    for number in range(120):
        ids = []
        for count, base, more in zip(rows, (0, rows[0]), further, strict=True):
            own = power_law(generator.random(batch), count, exponent).astype(np.int64)
            ids.append(np.append(own, more[own].ravel()) + base)
        pin = 1 << number % LIVE_BATCHES
        slot_map.release(pin, pin)
        needed = torch.from_numpy(np.concatenate(ids)).int()
        _, moves, _ = slot_map.assign(needed, pin)
        fetched.append(0 if moves is None else len(moves.fetched_rows))
    fixed = [int(count * (1 - ring / sum(slots))) for count in slots]
    classes = [
        row_classes(
            IdTraffic(power_law_share(count, exponent), count, drawn), 0, count, first, batch
        )
        for count, first in zip(rows, fixed, strict=True)
    ]
    assert sum(expected_fetches(classes, ring)) == pytest.approx(np.mean(fetched[40:]), rel=0.05)


@pytest.mark.parametrize(("exponent", "drawn", "places"), READS)
def test_the_expected_reads_are_those_of_a_tier(exponent, drawn, places, tmp_path):
    rows, slots, ids = 20_000, 4000, 128 * (1 + drawn)
    window = LIVE_BATCHES * ids
    shard = TieredShard(rows, 4, torch.float32, slots, window, is_on_disk=True)
    cpu = torch.device("cpu")
    tier = HostTier([shard], [], cpu, DiskSettings(tmp_path, places * 16))
    tier.reload()
    bounds = torch.tensor([[0], [rows], [0]], dtype=torch.int32).repeat(1, ids)
    group = TierIds(0, torch.arange(ids), *bounds)
    generator = np.random.default_rng(1)
    further = generator.integers(0, rows, (rows, drawn))

    class Batch:
        def __init__(self) -> None:
            own = power_law(generator.random(128), rows, exponent).astype(np.int64)
            self.ids = torch.from_numpy(np.append(own, further[own].ravel())).int()

        def to(self, device: torch.device) -> Self:
            return self

    class Announcer:
        def announce(self, batch: Batch) -> Need | None:
            return tier.announce(batch.ids, [group])

        def start_pass(self, needs: Sequence[Need]) -> None:
            tier.stager.start_pass(needs)

    read, live = [], []
    for batch, need in LookAhead((Batch() for _ in range(900)), Announcer(), cpu):
        live.append(tier.map(batch.ids, [group], need))
        if len(live) == 2:
            live.pop(0).release(is_trained=True)
        read.append(tier.take_counts().disk_rows_in)
    tier.close()
    ring = max(ring_slots(slots), window)
    traffic = IdTraffic(power_law_share(rows, exponent), rows, drawn)
    classes = [row_classes(traffic, 0, rows, slots - ring, 128)]
    (expected,) = expected_reads(classes, ring, places, PASS_BATCHES)
    assert expected == pytest.approx(np.mean(read[400:-32]), rel=0.1)
