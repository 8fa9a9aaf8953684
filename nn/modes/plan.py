"""`mode=plan`: the plan of the tables and, for GPUs, the memory of a step; it opens no process group."""

from functools import partial
from pathlib import Path

from configs.schema import Config
from nn.build import checked_plan, id_share, model_spec, planned_hardware
from nn.checks import open_checked
from nn.distributed.process_group import process_rank
from nn.observability.console import make_console, make_logger
from nn.observability.model_summary import print_model
from nn.observability.plan_table import BesidePlan, print_hardware, print_memory, print_plan
from nn.observability.records import PLAN
from nn.observability.run_directory import write_model, write_plan
from nn.planning.exchange import planned_exchange
from nn.planning.memory_estimate import plan_memory
from nn.planning.plan import replicated_tables
from nn.session import dense_states, describe
from nn.step_floor import floor_of


def show_plan(config: Config, config_yaml: str) -> None:
    """Plan for the requested ranks, and print the plan; with `run_dir` write it there too."""
    source, console = open_checked(config), make_console(process_rank())
    hardware = planned_hardware(config)
    _, rows, disk_room = checked_plan(config, source, hardware)
    print_hardware(console, config, hardware)
    plan_json = None if config.run_dir is None else Path(config.run_dir) / PLAN
    listed = "run_dir=DIR writes them to DIR/plan.json" if plan_json is None else str(plan_json)
    floor_ms = None
    if hardware.device_type == "cuda" and any(row.has_arena for row in rows):
        spec, share_of = model_spec(config, source), partial(id_share, config, source)
        floor = floor_of(config, spec, hardware.world_size, share_of, replicated_tables(rows))
        floor_ms = floor.ms
    exchange = planned_exchange(config, source.spec, rows, hardware)
    has_gpus = hardware.device_type == "cuda"
    beside = BesidePlan(listed, exchange, floor_ms, disk_room, has_gpus=has_gpus)
    print_plan(console, rows, hardware.table_ranks, beside)
    memory = []
    description = describe(config, source, make_logger(console))
    if description is not None:
        print_model(console, description)
    if hardware.device_type == "cuda":
        memory = plan_memory(config, source.spec, rows, hardware.world_size, dense_states(config))
        print_memory(console, memory, hardware.hbm_bytes)
    if plan_json is not None and process_rank() == 0:
        plan_json.parent.mkdir(parents=True, exist_ok=True)
        write_plan(plan_json.parent, rows, memory)
        if description is not None:
            write_model(plan_json.parent, description)
