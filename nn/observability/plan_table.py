"""Terminal output of a plan: the largest tables, sums of the others, the balance over ranks, the memory of GPUs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from rich.console import Console

from configs.messages import first_of
from configs.schema import Config
from nn.observability.layout import bare_table, grid, print_columns, ranges
from nn.planning.exchange import Link
from nn.planning.host_tables import disk_row_bytes, fetched_bytes, link_ms
from nn.planning.memory_estimate import RankMemory
from nn.planning.plan import Hardware, TablePlan, lookups_by_rank
from nn.tiers.read_ahead import READ_AHEAD_BATCHES

MIB = 1 << 20
GIB = 1 << 30
MOST_LINES = 8
"""A plan of more tables is folded."""
LARGEST = 5
"""Tables that a folded plan names."""
GIB_FROM = 100_000 * MIB
"""Total from which on a plan is in GiB, where MiB have six digits."""


@dataclass(frozen=True, slots=True)
class BesidePlan:
    # where all tables are listed, for a plan that is folded; empty if nowhere
    complete_in: str = ""
    # the ranks that send most per step within a node and between nodes; empty if that was not counted
    links: Sequence[Link] = ()
    # least time of a step, to compare with that of the link to host memory; None if it was not counted
    floor_ms: float | None = None
    # what the directory of tables on disk has room for; None without such tables
    disk_room: str | None = None
    has_gpus: bool = False  # whether to add the times of GPUs' links
    groups: int = 1  # of ranks, which hold the same tables
    # whether the run would go on if a node were lost; None on one node
    without_a_node: str | None = None


def print_hardware(console: Console, config: Config, hardware: Hardware) -> None:
    per_rank = hardware.bytes_per_rank
    usable = per_rank * (1 - config.sharding.reserve)
    nodes = hardware.world_size // hardware.local_world_size
    lines = {
        "plan for": f"{hardware.world_size} x {hardware.device_type} on {nodes} "
        + ("node" if nodes == 1 else "nodes"),
        "memory": f"{per_rank / GIB:,.1f} GiB per rank, {usable / GIB:,.1f} GiB of it for tables",
        "optimizer": f"{config.model.embedding_dtype.value} tables {config.effective_optimizer.table_name}",
    }
    console.print(config.recipe, style="bold")
    print_columns(console, grid(lines))


def print_rates(
    console: Console, within: tuple[float, float] | None, between: tuple[float, float] | None
) -> None:
    """Print measured rates of the links in GB/s, and microseconds of a message, as options."""
    options = " ".join(
        f"sharding.{link}_gb_s={measured[0]:.3g} sharding.{link}_us={measured[1]:.3g}"
        for link, measured in (("within", within), ("between", between))
        if measured is not None
    )
    print_columns(console, grid({"measured": f"{options}, by an all-to-all of these ranks"}))


def _lines(tables: Sequence[TablePlan]) -> Iterator[tuple[str, list[TablePlan]]]:
    """Yield name and tables of each line: a table, or of many the largest, and the others of each sharding and kernel."""
    if len(tables) <= MOST_LINES:
        yield from ((table.table, [table]) for table in tables)
        return
    ordered = sorted(tables, key=lambda table: -sum(table.bytes_per_rank))
    yield from ((table.table, [table]) for table in ordered[:LARGEST])

    def kind(table: TablePlan) -> tuple[str, str]:
        return table.sharding, table.kernel

    for _, found in groupby(sorted(ordered[LARGEST:], key=kind), kind):
        others = list(found)
        yield f"{len(others)} others" if len(others) > 1 else others[0].table, others


def print_plan(
    console: Console, rows: Sequence[TablePlan], world_size: int, beside: "BesidePlan | None" = None
) -> None:
    """Print the placement of tables and the balance over ranks.

    `world_size`: number of ranks of a group, including ranks without a table.
    """
    beside = beside or BesidePlan()
    bytes_of = Counter(dict.fromkeys(range(world_size), 0))
    for row in rows:
        bytes_of.update(dict(zip(row.ranks, row.bytes_per_rank, strict=True)))
        bytes_of.update(dict.fromkeys(row.ranks, row.expansion_bytes))
    expanded = sum(row.expansion_bytes * len(row.ranks) for row in rows)
    printed = list(_lines(rows))
    unit = "GiB" if bytes_of.total() >= GIB_FROM else "MiB"
    table = bare_table(["table"], ["rows", "dim", "hotness"])
    for name in ("sharding", "kernel"):
        table.add_column(name, no_wrap=True)
    table.add_column("rank", overflow="fold")
    for name in [unit, *(["expansion"] if expanded else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, some in printed:
        sizes = [sum(sum(row.bytes_per_rank) for row in some)]
        if expanded:
            sizes.append(sum(row.expansion_bytes * len(row.ranks) for row in some))
        table.add_row(
            name,
            f"{sum(row.num_embeddings for row in some):,}",
            _span([row.embedding_dim for row in some]),
            _span([row.hotness for row in some]),
            some[0].sharding,
            some[0].kernel,
            ranges([rank for row in some for rank in row.ranks]),
            *(_number(size, unit) for size in sizes),
        )
    size = _number(bytes_of.total() - expanded, unit)
    lines = {"total": f"{size} {unit}, weights and optimizer state of {len(rows)} tables"}
    if expanded:
        lines["expansion"] = f"{_number(expanded, unit)} {unit}, id expansion of one-hot features"
    lines |= _host_lines(rows, beside)
    if any(row.kernel == "dense" for row in rows):
        lines["kernel"] = "fused: updated within the backward pass; dense: updated after it"
    in_rows = [row for row in rows if row.exchange == "rows"]
    if in_rows:
        lines["rows"] = (
            f"each distinct one of a batch once, instead of vectors, of {_names(in_rows)}"
        )
    lines |= _node_lines(beside, world_size)
    lines |= _balance(rows, bytes_of, unit)
    lines |= _exchange_lines(beside.links, has_gpus=beside.has_gpus)
    if len(printed) < len(rows) and beside.complete_in:
        lines["all tables"] = beside.complete_in
    console.print()
    print_columns(console, table)
    console.print()
    print_columns(console, grid(lines))
    console.print()


def _node_lines(beside: BesidePlan, world_size: int) -> dict[str, str]:
    """Return the lines of groups of ranks, and of a run of several nodes."""
    lines = {}
    if beside.groups > 1:
        lines["groups"] = (
            f"{beside.groups} of {world_size} ranks hold these tables each, and exchange the gradients of their rows"
        )
    if beside.without_a_node:
        lines["less a node"] = beside.without_a_node
    return lines


def _balance(rows: Sequence[TablePlan], bytes_of: Counter[int], unit: str) -> dict[str, str]:
    """Return the lines of several ranks: the fullest one beside the mean."""
    world_size, total = len(bytes_of), bytes_of.total()
    fullest, most = max(bytes_of.items(), key=lambda item: item[1])
    lines = {}
    if world_size > 1 and total:
        mean = total / world_size
        lines["per rank"] = (
            f"at most {_number(most, unit)} {unit} (rank {fullest}), mean {_number(mean, unit)} {unit}, "
            f"imbalance {most / mean:.2f}"
        )
        lookups = lookups_by_rank(rows, world_size)
        busiest, most_lookups = max(enumerate(lookups), key=lambda item: item[1])
        mean = sum(lookups) / world_size
        # Features without any id have no lookups.
        imbalance = f", imbalance {most_lookups / mean:.2f}" if mean else ""
        lines["lookups"] = (
            f"per sample at most {most_lookups:,.1f} (rank {busiest}), mean {mean:,.1f}{imbalance}"
        )
    return lines


def _exchange_lines(links: Sequence[Link], *, has_gpus: bool) -> dict[str, str]:
    """Return a line per kind of link: what the rank sends that sends most over it, and the time that it takes."""
    lines = {}
    for link in links:
        unit, size_of_unit = ("MB", 1e6) if link.num_bytes >= 1e6 else ("kB", 1e3)
        terms = ", ".join(f"{name} {size / size_of_unit:,.1f}" for name, size in link.sent.items())
        time = ""
        if has_gpus:
            rates = f"{link.gb_s:g} GB/s and {link.us:g} us a message"
            time = f"; {link.messages:,} messages; {link.ms:,.2f} ms at {rates}"
        lines[link.name] = (
            f"a rank sends at most {link.num_bytes / size_of_unit:,.1f} {unit} per step (rank {link.rank}): {terms}{time}"
        )
    return lines


def _host_lines(rows: Sequence[TablePlan], beside: BesidePlan) -> dict[str, str]:
    """Return the lines of tables in host memory and on disk: size, rows on the device, and what a step exchanges with them.

    The least time of a step follows that of the link, with which it is compared.
    """
    tables = [row for row in rows if row.has_arena]
    if not tables:
        return {}
    in_host = [row for row in tables if row.tier == "host"]
    on_disk = [row for row in tables if row.tier == "disk"]
    fetched = sum(row.fetched_rows for row in tables)
    moved = sum(fetched_bytes(row) for row in tables)
    lines = {}
    if in_host:
        size = sum(sum(row.host_bytes_per_rank) for row in in_host)
        lines["host memory"] = (
            f"{size / GIB:,.1f} GiB of {_names(in_host)}; {_device_room(in_host)}"
        )
    if on_disk:
        size = sum(sum(row.disk_bytes_per_rank) for row in on_disk)
        read = sum(row.staged_rows for row in on_disk)
        moved_bytes = sum(row.staged_rows * disk_row_bytes(row) for row in on_disk)
        lines["disk"] = f"{size / GIB:,.1f} GiB of {_names(on_disk)}; {_device_room(on_disk)}"
        lines["read ahead"] = (
            f"of {READ_AHEAD_BATCHES} steps about {read:,.0f} rows read from disk and at most as many written, "
            f"{moved_bytes / 1e6:,.1f} MB each way"
        )
    if beside.disk_room is not None:
        lines["disk room"] = beside.disk_room
    lines["per step"] = (
        f"about {fetched:,.0f} rows fetched and at most as many returned, {moved / 1e6:,.1f} MB each way; "
        f"{link_ms(tables):,.2f} ms of the link between host and device"
    )
    if beside.floor_ms is not None:
        lines["step"] = (
            f"at least {beside.floor_ms:,.2f} ms beside it, by its products and bytes at the rates of an H200; a bound, not "
            "measured"
        )
    return lines


def _device_room(tables: Sequence[TablePlan]) -> str:
    shards = [len(row.ranks) if row.sharding == "column_wise" else 1 for row in tables]
    stored = sum(row.num_embeddings * count for row, count in zip(tables, shards, strict=True))
    cached = sum(row.cache_rows for row in tables)
    return f"room on the device for {cached:,} of {stored:,} rows ({cached / stored:.1%})"


def _names(tables: Sequence[TablePlan]) -> str:
    return first_of([row.table for row in tables], MOST_LINES)


def print_ways(console: Console, ways: Mapping[str, Sequence[Link] | str]) -> None:
    """Print what ways to share the tables send per step, or why one cannot be, and the one of least time."""
    lines = {}
    for way, links in ways.items():
        if isinstance(links, str):
            lines[way] = links
            continue
        sent = [
            f"{x.num_bytes / 1e6:,.2f} MB {x.name} in {x.messages:,} messages {x.ms:,.2f} ms"
            for x in links
        ]
        lines[way] = f"{', '.join(sent)}: {_ms(links):,.2f} ms"
    times = {way: _ms(links) for way, links in ways.items() if not isinstance(links, str)}
    if len(times) > 1:
        least = min(times, key=times.__getitem__)
        lines["less"] = (
            f"{least}, by {max(times.values()) - times[least]:,.2f} ms per step, without what runs beside it"
        )
    print_columns(console, grid(lines))
    console.print()


def _ms(links: Sequence[Link]) -> float:
    return sum(link.ms for link in links)


def print_memory(
    console: Console, ranks: Sequence[RankMemory], hbm_bytes: int, chunks: int | None = None
) -> None:
    """Print the estimated peak memory of the fullest GPU, with a warning if it exceeds the GPU's memory.

    `hbm_bytes`: memory of one GPU in bytes. `chunks`: of a batch, with which it would fit.
    """
    fullest = max(ranks, key=lambda rank: rank.total)
    components = [
        f"{name.replace('_', ' ')} {size / GIB:,.1f}"
        for name, size in asdict(fullest).items()
        if size / GIB >= 0.05
    ]
    lines = {
        "GPU memory": f"{fullest.total / GIB:,.1f} of {hbm_bytes / GIB:,.1f} GiB at its peak on rank "
        f"{ranks.index(fullest)}: {', '.join(components)}"
    }
    if fullest.total > hbm_bytes:
        lines["too much"] = (
            "the tables fit, but the tables with the training step do not: "
            + (f"set train.accumulate={chunks}, " if chunks else "")
            + "lower train.batch_size or raise sharding.reserve"
        )
    print_columns(console, grid(lines))
    console.print()


def _number(num_bytes: float, unit: str) -> str:
    size = num_bytes / (GIB if unit == "GiB" else MIB)
    return f"{size:,.1f}" if size >= 0.05 or size == 0 else "<0.1"


def _span(numbers: Sequence[float]) -> str:
    """Format numbers as the smallest and the largest: `1-10`; those that are equal once."""
    ends = dict.fromkeys(
        f"{number:,.1f}".removesuffix(".0") for number in (min(numbers), max(numbers))
    )
    return "-".join(ends)
