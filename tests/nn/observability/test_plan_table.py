"""The printed plan: a line per table, many tables folded, one unit, and a width of 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from nn.observability.plan_table import BesidePlan, print_plan
from nn.planning.exchange import Link, busiest_links
from nn.planning.plan import TablePlan

MIB = 1 << 20


def console_of(width: int = 80) -> Console:
    return Console(
        file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False
    )


def printed(console: Console) -> str:
    return console.file.getvalue()


def row(table: str, ranks: tuple[int, ...], mib: float) -> TablePlan:
    each = int(mib * MIB / len(ranks))
    return TablePlan(
        table, 10_000_000, 128, 1.0, "data_parallel", "dense", ranks, (each,) * len(ranks)
    )


def test_the_plan_fits_80_columns_with_every_cell_whole():
    console = console_of(80)
    wide = row("cat_10.bin", (0, 1, 2, 3, 6), 145_000)
    print_plan(console, [wide], world_size=8)
    (line,) = [line for line in printed(console).splitlines() if "cat_10" in line]
    assert line.split() == [
        *("cat_10.bin", "10,000,000", "128", "1", "data_parallel", "dense"),
        *("0-3,", "6", "141.6"),
    ]


def test_the_plan_sums_up_what_the_ranks_hold():
    console = console_of(100)
    rows = [row("a", (0, 1), 4), row("b", (1,), 6), row("tiny", (2,), 0.001)]
    print_plan(console, rows, world_size=4)
    text = printed(console)
    assert "<0.1" in text
    assert "total     10.0 MiB, weights and optimizer state of 3 tables" in text
    # Ranks 2 and 3 hold next to nothing, and still count in the mean.
    assert "at most 8.0 MiB (rank 1), mean 2.5 MiB, imbalance 3.20" in text


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_the_plan_explains_the_dense_kernel_where_there_is_one(kernel):
    console = console_of(100)
    print_plan(console, [replace(row("a", (0,), 1), kernel=kernel)], world_size=1)
    legend = "fused: updated within the backward pass; dense: updated after it"
    assert (legend in printed(console)) == (kernel == "dense")


def test_the_plan_sums_up_lookups_and_what_expands_ids():
    console = console_of(100)
    hot, cold = row("hot", (0, 1), 4), row("cold", (1,), 2)
    hot = replace(hot, hotness=10.0, expansion_bytes=3 * MIB)
    print_plan(console, [hot, cold], world_size=2)
    lines = printed(console).splitlines()
    assert [line.split()[-2:] for line in lines if "000,000" in line] == [
        ["4.0", "6.0"],
        ["2.0", "0.0"],
    ]
    assert "total      6.0 MiB, weights and optimizer state of 2 tables" in lines
    assert "expansion  6.0 MiB, id expansion of one-hot features" in lines
    assert "per rank   at most 7.0 MiB (rank 1), mean 6.0 MiB, imbalance 1.17" in lines
    assert "lookups    per sample at most 6.0 (rank 1), mean 5.5, imbalance 1.09" in lines


def test_a_single_rank_has_no_imbalance():
    console = console_of()
    print_plan(console, [row("a", (0,), 4)], world_size=1)
    assert "imbalance" not in printed(console)


def lines_of(rows: list[TablePlan], complete_in: str = "", width: int = 80) -> list[str]:
    console = console_of(width)
    print_plan(console, rows, 4, BesidePlan(complete_in))
    return [line.rstrip() for line in printed(console).splitlines()]


def test_many_tables_are_folded_to_the_largest_and_a_sum_per_kind():
    fused = [
        TablePlan(f"t{n}", 10 * n, 8 * (1 + n % 2), n, "table_wise", "fused", (n % 4,), (n * MIB,))
        for n in range(1, 21)
    ]
    dense = [row(f"d{n}", (0, 1, 2, 3), 0.4) for n in range(3)]
    lines = lines_of([*fused, *dense, row("row_wise", (1, 3), 0.2)], "run/plan.json")
    start = next(n for n, line in enumerate(lines) if line.startswith("──")) + 1
    assert [line.split()[0] for line in lines[start : start + 5]] == [
        *("t20", "t19", "t18", "t17", "t16")
    ]
    assert [line.split() for line in lines[start + 5 : start + 7]] == [
        ["4", "others", "40,000,000", "128", "1", "data_parallel", "dense", "0-3", "1.4"],
        ["15", "others", "1,200", "8-16", "1-15", "table_wise", "fused", "0-3", "120.0"],
    ]
    assert "all tables  run/plan.json" in lines
    assert sum("211.4 MiB, weights and optimizer state of 24 tables" in line for line in lines) == 1


def test_few_tables_are_printed_in_their_order():
    lines = lines_of([row(f"t{n}", (0,), n + 1) for n in range(8)], "run/plan.json")
    assert [line.split()[0] for line in lines if line.startswith("t") and "10,000,000" in line] == [
        f"t{n}" for n in range(8)
    ]
    assert not [line for line in lines if "plan.json" in line]


def test_sizes_are_in_gib_where_mib_have_six_digits():
    below, above = (lines_of([row("a", (0, 1), mib)]) for mib in (99_999, 100_000))
    assert any(line.endswith("99,999.0") for line in below)
    assert any(line.endswith(" GiB") for line in above)
    assert any(line.startswith("total     97.7 GiB") for line in above)
    assert any("at most 48.8 GiB (rank 0), mean 24.4 GiB" in line for line in above)


def test_what_is_sent_stands_below_the_plan_with_times_for_gpus():
    exchange = [
        (
            Link("within a node", 0, {"ids": 1e6, "embeddings": 393e6}, 394, 0, 1),
            Link("between nodes", 0, {"ids": 0.0, "embeddings": 100e6}, 50, 0, 2),
        ),
        (
            Link("within a node", 1, {"ids": 2e6, "embeddings": 3e6}, 394, 0, 1),
            Link("between nodes", 1, {"ids": 50e6, "embeddings": 100e6}, 50, 1000, 2),
        ),
    ]
    texts = []
    for has_gpus in (True, False):
        console = console_of(200)
        beside = BesidePlan(links=busiest_links(exchange), has_gpus=has_gpus)
        print_plan(console, [row("a", (0, 1), 4)], 2, beside)
        texts.append(" ".join(printed(console).split()))
    within = (
        "within a node a rank sends at most 394.0 MB per step (rank 0): ids 1.0, embeddings 393.0"
    )
    between = (
        "between nodes a rank sends at most 150.0 MB per step (rank 1): ids 50.0, embeddings 100.0"
    )
    assert f"{within}; 0 messages; 1.00 ms at 394 GB/s and 1 us a message" in texts[0]
    assert f"{between}; 1,000 messages; 5.00 ms at 50 GB/s and 2 us a message" in texts[0]
    assert within in texts[1]
    assert between in texts[1]
    assert " ms at " not in texts[1]


def test_the_lines_of_tables_in_host_memory_and_on_disk_follow_one_another():
    gib = 2**30
    in_host = replace(
        row("a", (0,), 4),
        **{"sharding": "table_wise", "kernel": "fused", "tier": "host", "cache_rows": 2_500_000},
        **{"host_bytes_per_rank": (5 * gib,), "fetched_rows": 1234.4, "memories": 2},
    )
    on_disk = replace(
        row("b", (0, 1), 4),
        **{"sharding": "column_wise", "kernel": "fused", "tier": "disk", "cache_rows": 500_000},
        **{"disk_bytes_per_rank": (gib, gib), "fetched_rows": 2000, "staged_rows": 4000},
    )
    # Rows of 537 and, of each half, of 107 bytes.
    lines = [
        "total        12.0 MiB, weights and optimizer state of 3 tables",
        "host memory  5.0 GiB of a; room on the device for 2,500,000 of 10,000,000 rows (25.0%)",
        "disk         2.0 GiB of b; room on the device for 500,000 of 20,000,000 rows (2.5%)",
        "read ahead   of 16 steps about 4,000 rows read from disk and at most as many written, 0.4 MB each way",
        "disk room    /tables has room",
        "per step     about 3,234 rows fetched and at most as many returned, 0.9 MB each way; 0.13 ms of the link between host "
        "and device",
        "step         at least 1.50 ms beside it, by its products and bytes at the rates of an H200; a bound, not measured",
        "kernel       fused: updated within the backward pass; dense: updated after it",
        "per rank     at most ",
        "lookups      per sample at most ",
    ]
    console = console_of(200)
    tables = [in_host, on_disk, row("c", (0, 1), 4)]
    print_plan(console, tables, 2, BesidePlan(floor_ms=1.5, disk_room="/tables has room"))
    found = printed(console).split("\n\n")[1]
    for line, expected in zip(found.splitlines(), lines, strict=True):
        assert line.startswith(expected)
    console = console_of(200)
    print_plan(console, [on_disk], 2)
    assert "host memory" not in printed(console)
    assert "step  " not in printed(console).split("per step")[1]
