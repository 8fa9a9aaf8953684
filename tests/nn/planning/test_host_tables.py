"""Tables in host memory in a plan: chosen by the planner, refused with a number, with the rows that a step will fetch."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.schema import Config
from dataloading.randomness import power_law
from nn.build import build_plan, open_source, planned_hardware
from nn.planning.host_tables import (
    disk_row_bytes,
    fetched_bytes,
    link_ms,
)
from nn.planning.plan import TablePlan
from nn.tiers.host_tier import DiskSettings, HostTier, TieredShard, ring_slots
from nn.tiers.initial_rows import InitialRows
from nn.tiers.read_ahead import READ_AHEAD_BATCHES, Need
from nn.tiers.slot_map import SlotMap, TierIds
from nn.tiers.traffic import (
    LIVE_BATCHES,
    Classes,
    IdTraffic,
    expected_fetches,
    expected_reads,
    power_law_share,
    row_classes,
)
from nn.training.look_ahead import LookAhead
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.datasets import CARDINALITY, write_clicks
from tests.helpers.runs import jsonl

# Exponent, further rows per id, and rows for which host memory has room.
READS = [(1.05, 0, 5000), (0.0, 0, 5000), (1.05, 2, 8000), (1.05, 9, 11_000)]
GPU = [*TINY, "device=cuda", "sharding.host_gib=1", "data.synthetic.cardinalities=[90000,40,50000]"]


TWO_IN_HOST = "sharding.tables={cat_0: {tier: host, cache: 0.1}, cat_2: {tier: host, cache: 0.1}}"
ONE_WHOLE = "sharding.tables={cat_0: {tier: host, type: table_wise}}"
ON_DISK = [
    "sharding.tables={cat_0: {tier: disk, cache: 0.1}}",
    *("sharding.read_ahead_gib=0.0035", "sharding.disk_path=/tables"),
]
BOTH_ON_DISK = [
    "sharding.tables={cat_0: {tier: disk, cache: 0.1}, cat_2: {tier: disk, cache: 0.1}}",
    *("sharding.read_ahead_gib=0.0001", "sharding.disk_path=/tables"),
]
LARGE_CACHE = "sharding.tables={cat_0: {tier: disk, cache: 0.9}}"


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
            r"Either keep cat_0 on disk \({cat_0: {tier: disk}} in sharding.tables, and sharding.disk_path\), leave tables on "
            r"the GPUs \(tier: device\), choose an optimizer",
        ),
        (
            [f"sharding.hbm_gib={7 / 1024}", f"sharding.host_gib={4 / 1024}", TWO_IN_HOST],
            r"^host memory is too small: .*\(tier: device\), choose an optimizer with less state .*, store weights in 16 "
            r"bits .*, or use hosts with more memory \(sharding.host_gib",
        ),
        # A table on disk takes 8 bytes per row beside the rows that are read ahead.
        (
            [*ON_DISK, "sharding.hbm_gib=1", f"sharding.host_gib={4 / 1024}"],
            r"take 0.0 GiB of it \(cat_0 0.0 GiB\), and .* less sharding.reserve=0.1 and, per rank, "
            r"sharding.read_ahead_gib=0.0035 for rows of tables on disk\). Either leave tables on the GPUs "
            r"\(tier: device\), lower sharding.read_ahead_gib, or use hosts with more memory",
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
        # All are on disk already.
        (
            [*BOTH_ON_DISK, f"sharding.hbm_gib={3 / 1024}", f"sharding.host_gib={0.5 / 1024}"],
            r"^host memory is too small: .* for rows of tables on disk\). .*, or use hosts with more memory \(sharding.host_gib",
        ),
        # The rows that a table on disk keeps on the device are too many.
        (
            [
                *("sharding.hbm_gib=0.001", "sharding.host_gib=1", "sharding.read_ahead_gib=0.01"),
                *("sharding.disk_path=/tables", LARGE_CACHE),
            ],
            r"^the tables do not fit: .*, keep cat_2 on disk .*, lower cache of cat_0 in sharding.tables, or raise",
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


@pytest.mark.parametrize(("exponent", "drawn", "buffer_rows"), READS)
def test_the_expected_reads_are_those_of_a_tier(exponent, drawn, buffer_rows, tmp_path):
    rows, slots, ids = 20_000, 4000, 128 * (1 + drawn)
    live_rows = LIVE_BATCHES * ids
    shard = TieredShard(rows, 4, torch.float32, slots, live_rows, initial=InitialRows(1, "t", 0.1))
    cpu = torch.device("cpu")
    tier = HostTier([shard], [], cpu, DiskSettings(tmp_path, buffer_rows * 16))
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

        def read_ahead(self, needs: Sequence[Need]) -> None:
            tier.read_ahead.start(needs)

    read, live = [], []
    for batch, need in LookAhead((Batch() for _ in range(900)), Announcer(), cpu):
        live.append(tier.map(batch.ids, [group], need))
        if len(live) == 2:
            live.pop(0).release(is_trained=True)
        read.append(tier.take_counts()["disk_rows_in"])
    tier.close()
    ring = max(ring_slots(slots), live_rows)
    traffic = IdTraffic(power_law_share(rows, exponent), rows, drawn)
    classes = [row_classes(traffic, 0, rows, slots - ring, 128)]
    (expected,) = expected_reads(classes, ring, buffer_rows, READ_AHEAD_BATCHES)
    assert expected == pytest.approx(np.mean(read[400:-32]), rel=0.1)


def tiered(
    name: str, columns: int, ranks: tuple[int, ...], fetched: float, **options: Any
) -> TablePlan:
    """Return a table of 1,000 rows in host memory, with a float32 state per element."""
    row_bytes = 2 * 4 * columns
    column_wise = options.get("sharding") == "column_wise"
    of_rank = 1000 * row_bytes // len(ranks)
    plan = {
        "sharding": "table_wise",
        "tier": "host",
        "host_bytes_per_rank": (of_rank,) * len(ranks),
    }
    assert column_wise or row_bytes * 1000 == of_rank * len(ranks)
    plan |= {"fetched_rows": fetched, "memories": 2, "kernel": "fused", "ranks": ranks}
    plan |= {"bytes_per_rank": (1,) * len(ranks)} | options
    return TablePlan(table=name, num_embeddings=1000, embedding_dim=columns, hotness=1, **plan)


def test_the_link_moves_all_bytes_and_finds_all_rows_both_ways():
    # 550 narrow rows: a page is looked up for the weights and for the state of each, on the way there and back.
    narrow = tiered("narrow", 8, (0,), 550)
    assert link_ms([narrow]) == pytest.approx(2 * 2 * 550 / 55e3)
    assert link_ms([replace(narrow, memories=1)]) == pytest.approx(2 * 550 / 55e3)
    # 950 rows of 4,096 bytes.
    wide = tiered("wide", 512, (1,), 950)
    assert link_ms([wide]) == pytest.approx(2 * 950 * 4096 / 76e6)
    # Links work at the same time, and one of them for all its tables.
    assert link_ms([narrow, wide]) == pytest.approx(link_ms([wide]))
    beside = tiered("beside", 8, (1,), 19_000)
    rows_of_both = 2 * 2 * (950 + 19_000) / 55e3
    assert link_ms([narrow, wide, beside]) == pytest.approx(rows_of_both)
    # Two ranks have half of the rows, or of the columns, each.
    halves = tiered("halves", 8, (0, 1), 1100, sharding="row_wise")
    assert link_ms([halves]) == pytest.approx(link_ms([narrow]))
    columns = tiered("columns", 512, (0, 1), 1900, sharding="column_wise")
    assert fetched_bytes(columns) == 1900 * 2048
    assert link_ms([columns]) == pytest.approx(2 * 2 * 950 / 55e3)
    assert link_ms([]) == 0


def test_rows_on_disk_have_the_bytes_of_their_shards():
    whole = tiered("whole", 8, (0,), 10, host_bytes_per_rank=(), tier="disk", staged_rows=160)
    whole = replace(whole, disk_bytes_per_rank=(64_000,), journal_rows=30)
    assert whole.staged_rows * disk_row_bytes(whole) == 160 * 64
    assert whole.journal_rows * disk_row_bytes(whole) == 30 * 64
    assert fetched_bytes(whole) == 10 * 64
    halves = replace(
        whole, sharding="column_wise", ranks=(0, 1), disk_bytes_per_rank=(32_000, 32_000)
    )
    assert halves.staged_rows * disk_row_bytes(halves) == 160 * 32
    assert disk_row_bytes(tiered("host", 8, (0,), 10)) == 0


def test_the_plan_has_the_ring_and_the_places_of_the_tier(tmp_path, monkeypatch):
    on_disk = [
        *(
            *TINY,
            "data.synthetic.cardinalities=[9000,40,7,300,5000]",
            f"sharding.disk_path={tmp_path}",
        ),
        "sharding.tables={cat_0: {tier: disk, cache: 0.1}, cat_4: {tier: disk, cache: 0.1}}",
        "optimizer.embedding_name=adagrad",
    ]
    seen: list[tuple[int, int]] = []

    def see(
        classes: Sequence[Classes], ring: int, buffer_rows: int, group_batches: int
    ) -> list[float]:
        seen.append((ring, buffer_rows))
        return [0.0] * len(classes)

    def config_with(gib: float) -> Config:
        return compose_config(*on_disk, f"sharding.read_ahead_gib={gib}")

    # 14,000 rows of 64 bytes. 64 rows train while two times 128 are scored: 320 of each table in the ring, and live.
    small = config_with(5e-5)
    message = (
        r"^sharding.read_ahead_gib=5e-05 has room for 838 rows of cat_0 and others with tier: disk, and the device and the "
        r"batches at work may need 1,280; set sharding.read_ahead_gib=0.0001 or more, or lower cache"
    )
    with pytest.raises(ValueError, match=message):
        build_plan(small, open_source(small), planned_hardware(small))
    monkeypatch.setattr("nn.planning.host_tables.expected_reads", see)
    with ranks_of_cpu():
        built = build(config_with(1e-4))
        tier = built.step.tables.tier
        built.step.close()
    (group,) = tier._groups
    assert seen == [(640, 1677)]
    assert len(group.disk_store.host_rows.items[0]) == 1677
    # The first rows that keep their slots are rounded down for each table.
    assert group.map.num_ring in (640, 641)


@pytest.mark.doors
def test_a_run_moves_what_its_plan_expects(tmp_path):
    """Rows fetched by two tables, and rows from disk of one of them."""
    run = tmp_path / "run"
    ended = run_command(
        *TINY,
        *("data.synthetic.cardinalities=[20000,40,7,300,9000]", "optimizer.embedding_name=adagrad"),
        "sharding.tables={cat_0: {tier: disk, cache: 0.15}, cat_4: {tier: host, cache: 0.1}}",
        *(
            f"sharding.disk_path={tmp_path / 'disk'}",
            f"sharding.read_ahead_gib={5000 * 64 / 2**30}",
        ),
        *("data.synthetic.train_rows=51200", "log.every=100", "eval.per_epoch=1"),
        *("data.multi_hot.hotness=[3,1,1,1,1]", "checkpoint.save=false", "log.loggers=[]"),
        f"run_dir={run}",
    )
    assert ended.exit_code == 0, ended.err
    plan = json.loads((run / "plan.json").read_text())
    # Behind the steps in which rows come for the first time.
    records = [record for record in jsonl(run / "metrics.jsonl") if record.get("step", 0) > 400]
    records = [record for record in records if "tier_rows_in" in record]
    assert len(records) == 4

    def measured(name: str) -> float:
        return sum(record[name] for record in records) / len(records)

    assert sum(table["fetched_rows"] for table in plan) == pytest.approx(
        measured("tier_rows_in"), rel=0.2
    )
    expected = sum(table["staged_rows"] for table in plan) / READ_AHEAD_BATCHES
    assert expected == pytest.approx(measured("tier_disk_rows_in"), rel=0.2)
    # Rows leave at the rate at which others come, once all have changed.
    assert 0.5 < measured("tier_disk_rows_out") / measured("tier_disk_rows_in") < 1.1
    for way in ("in", "out"):
        assert measured(f"tier_disk_bytes_{way}") == 64 * measured(f"tier_disk_rows_{way}")
        assert measured(f"tier_bytes_{way}") == 64 * measured(f"tier_rows_{way}")
    assert 0 <= measured("tier_disk_wait_ms") <= measured("tier_ms")
