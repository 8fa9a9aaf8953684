"""`mode=plan`: the plan of the tables and, for GPUs, the memory of a step.

It opens a process group if it was launched on the ranks that it plans for, whose links are measured then, or on several nodes.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from configs.schema import Config
from dataloading.dataset.source import Source
from nn.build import checked_plan, id_share, model_spec, planned_device, planned_hardware
from nn.checks import check_chunks, open_checked
from nn.distributed.link_rates import measured_rates
from nn.distributed.process_group import (
    launched_world,
    process_group,
    process_rank,
    ranks_from_environment,
)
from nn.observability.console import make_console, make_logger
from nn.observability.model_summary import print_model
from nn.observability.plan_table import (
    print_hardware,
    print_memory,
    print_plan,
    print_rates,
    print_ways,
)
from nn.observability.run_directory import write_model, write_plan
from nn.planning.exchange import Link, busiest_links, planned_exchange
from nn.planning.memory_estimate import RankMemory, plan_memory
from nn.planning.plan import Hardware, TablePlan, replicated_tables
from nn.session import beside_plan, dense_states, describe
from nn.step_floor import floor_of


def show_plan(config: Config, config_yaml: str) -> None:
    """Plan for the requested ranks, and print the plan; with `run_dir` write it there too."""
    source, console = open_checked(config), make_console(process_rank())
    device, (world_size, in_node), asked = planned_device(config), launched_world(), config.sharding
    here = device if torch.cuda.is_available() else "cpu"
    is_here = here == device and asked.world_size in (None, world_size)
    is_here = is_here and asked.local_world_size in (None, in_node)
    rates = None
    if in_node < world_size or (is_here and world_size > 1):
        # Before the plan, which a node of other ranks would refuse alone.
        ranks = ranks_from_environment(here)
        with process_group(ranks):
            rates = measured_rates(ranks) if is_here else None
    hardware = planned_hardware(config)
    _, rows, disk_room = checked_plan(config, source, hardware)
    print_hardware(console, config, hardware)
    if rates is not None:
        print_rates(console, *rates)
    run_dir = None if config.run_dir is None else Path(config.run_dir)
    floor_ms = None
    if hardware.device_type == "cuda" and any(row.has_arena for row in rows):
        spec, share_of = model_spec(config, source), partial(id_share, config, source)
        floor = floor_of(config, spec, hardware.world_size, share_of, replicated_tables(rows))
        floor_ms = floor.ms
    beside = beside_plan(config, source, rows, hardware, disk_room, run_dir, floor_ms)
    print_plan(console, rows, hardware.table_ranks, beside)
    if hardware.world_size > hardware.local_world_size:
        print_ways(console, _ways(config, source, hardware, rows))
    memory = []
    description = describe(config, source, make_logger(console))
    if description is not None:
        print_model(console, description)
    if hardware.device_type == "cuda":
        size, states = hardware.world_size, dense_states(config)
        needed = partial(
            plan_memory, spec=source.spec, plan=rows, world_size=size, dense_states=states
        )
        memory = needed(config)
        fits = max(rank.total for rank in memory) <= hardware.hbm_bytes
        chunks = None if fits else fitting_chunks(config, hardware, needed)
        print_memory(console, memory, hardware.hbm_bytes, chunks)
    if run_dir is not None and process_rank() == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_plan(run_dir, rows, memory)
        if description is not None:
            write_model(run_dir, description)


def fitting_chunks(
    config: Config, hardware: Hardware, needed: Callable[[Config], list[RankMemory]]
) -> int | None:
    """Return the least power of two of chunks (`train.accumulate`) with which a step fits the GPUs.

    None if none does, or if the options or the model take complete batches only.
    """
    most = config.train.batch_size // hardware.world_size
    for power in range(1, most.bit_length()):
        other = deepcopy(config)
        try:
            other.train = replace(config.train, accumulate=2**power)
            check_chunks(other)
        except ValueError:
            return None
        if max(rank.total for rank in needed(other)) <= hardware.hbm_bytes:
            return 2**power
    return None


def _ways(
    config: Config, source: Source, hardware: Hardware, planned: Sequence[TablePlan]
) -> dict[str, Sequence[Link] | str]:
    """Return what is sent where all ranks share the tables, in one or two hops, and where those of a node do.

    `planned` are the tables of `hardware`, whose way is among them.
    """
    world_size, in_node = hardware.world_size, hardware.local_world_size
    plans: dict[int, Sequence[TablePlan]] = {hardware.table_ranks: planned}
    ways: dict[str, Sequence[Link] | str] = {}
    for size, two_hops in (
        (world_size, False),
        (world_size, True),
        (in_node, False),
        (hardware.table_ranks, False),
    ):
        way = "two hops" if two_hops else "one group" if size == world_size else f"groups of {size}"
        if way in ways or (two_hops and in_node == 1):
            continue
        other = deepcopy(config)
        # One group of all ranks is named by its size too, beside two hops.
        other.sharding.group_size, other.sharding.two_hops = size, two_hops
        others = planned_hardware(other)
        try:
            if size not in plans:
                _, plans[size], _ = checked_plan(other, source, others)
        except ValueError as error:
            ways[way] = f"cannot be: {error}"
        else:
            exchange = planned_exchange(other, source.spec, plans[size], others)
            ways[way] = busiest_links(exchange)
    return ways
