"""The errors of tables that do not fit, with all that would help."""

import math
from collections.abc import Sequence

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.messages import first_line, first_of
from configs.options import MOST_RANKS
from configs.schema import ShardingType, Tier
from nn.embedding.optimizer import TableRule, less_state
from nn.planning.host_tables import DISK_ROW_BYTES, read_ahead_bytes
from nn.planning.plan_problem import PlanProblem
from nn.planning.table_sizes import (
    FP32_BYTES,
    bytes_of,
    device_bytes,
    usable_bytes,
    usable_host_bytes,
    weight_bytes_of,
)

GIB = 2**30
MORE_HOST_MEMORY = (
    "use hosts with more memory (sharding.host_gib if that of this machine does not count)"
)


def does_not_fit(problem: PlanProblem, error: Exception) -> str:
    """Return the refusal of tables that exceed the memory of the devices, or of devices and hosts together."""
    config, hardware, chosen = problem.config, problem.hardware, problem.chosen
    tables = problem.embeddings.embedding_bag_configs()
    sizes = {
        table.name: device_bytes(table, problem.rule, chosen.get(table.name))
        + problem.expansion_bytes[table.name]
        for table in tables
    }
    state = f"{problem.rule.name} state"
    if problem.expansion_bytes:
        state += " and the expansion of their ids"
    usable = usable_bytes(hardware, config)
    total = sum(sizes.values())
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
    listed = ", ".join(f"{name} {sizes[name] / GIB:.1f} GiB" for name in largest)
    cuts = (ShardingType.row_wise, ShardingType.column_wise)
    forbidden = [kind.value for kind in cuts if kind not in config.types]
    several = hardware.table_ranks > 1
    remedies = []
    if not several or sizes[largest[0]] <= usable or len(forbidden) < len(cuts):
        # The total may fit so many ranks although a single table does not fit any of them.
        enough = max(math.ceil(total / max(usable, 1)), hardware.table_ranks + 1)
        if enough <= MOST_RANKS:
            may_grow = hardware.group_size and enough <= hardware.world_size
            more = "set sharding.group_size to" if may_grow else "start"
            remedies.append(f"{more} {enough} ranks or more")
    if several and forbidden:
        remedies.append(f"add {' or '.join(forbidden)} to sharding.types")
    remedies += _smaller_rows(tables, problem.rule)
    if Tier.host not in config.tiers and hardware.device_type == "cuda":
        remedies.append("keep large tables in host memory (sharding.tiers=[device,host])")
    remedies.append("lower model.embedding_dim")
    beside = ""
    if Tier.host in config.tiers and hardware.device_type == "cuda":
        of_disk = any(table.is_on_disk for table in chosen.values()) * read_ahead_bytes(config)
        in_host = usable_host_bytes(hardware, config) - of_disk
        in_host = max(in_host, 0) * hardware.local_world_size
        beside = f", and of host memory {in_host / GIB:.1f} GiB per node"
        remedies.append(MORE_HOST_MEMORY)
        of_device = [name for name in sizes if name not in chosen or not chosen[name].is_on_disk]
        if of_device:
            remedies.append(_on_disk(max(of_device, key=sizes.__getitem__)))
        arenas = [name for name in largest if name in chosen]
        if arenas:
            remedies.append(f"lower cache of {' and '.join(arenas)} in sharding.tables")
    return (
        f"the tables do not fit: with {state} they take {total / GIB:.1f} GiB, and {hardware.table_ranks} x {usable / GIB:.1f} "
        f"GiB are usable ({hardware.bytes_per_rank / GIB:.1f} GiB per rank less sharding.reserve={config.reserve:g}){beside}; "
        f"the largest are {listed}. {_either([*remedies, 'raise the frequency limit of the dataset'])}. TorchRec's planner: "
        f"{first_line(error)}"
    )


def lacks_host_memory(problem: PlanProblem) -> str:
    """Return the refusal of overrides for whose tables host memory is too small, where the devices have room."""
    config, hardware, chosen = problem.config, problem.hardware, problem.chosen
    tables = problem.embeddings.embedding_bag_configs()
    sizes = {
        table.name: DISK_ROW_BYTES * table.num_embeddings
        if chosen[table.name].is_on_disk
        else bytes_of(table, problem.rule)
        for table in tables
        if table.name in chosen
    }
    in_host = [name for name in sizes if not chosen[name].is_on_disk]
    of_disk = read_ahead_bytes(config) * (len(in_host) < len(chosen))
    usable = max(usable_host_bytes(hardware, config) - of_disk, 0)
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
    remedies = [_on_disk(max(in_host, key=sizes.__getitem__))] if in_host else []
    remedies.append("leave tables on the GPUs (tier: device)")
    if of_disk:
        remedies.append("lower sharding.read_ahead_gib")
    if hardware.table_ranks > 1 and sizes[largest[0]] > usable:
        remedies.append(f"shard {largest[0]} row_wise")
    remedies += [*(_smaller_rows(tables, problem.rule) if in_host else ()), MORE_HOST_MEMORY]
    listed = first_of([f"{name} {sizes[name] / GIB:.1f} GiB" for name in largest], most=3)
    read_ahead = f" and, per rank, sharding.read_ahead_gib={config.read_ahead_gib:g} for rows of tables on disk"
    return (
        f"host memory is too small: the tables that sharding.tables puts there or on disk take "
        f"{sum(sizes.values()) / GIB:.1f} GiB of it ({listed}), and {hardware.table_ranks} x {usable / GIB:.1f} GiB are "
        f"usable ({hardware.host_bytes / GIB:.1f} GiB per node less sharding.reserve={config.reserve:g}"
        f"{read_ahead * bool(of_disk)}). {_either(remedies)}"
    )


def _either(remedies: Sequence[str]) -> str:
    *first, last = remedies
    return f"Either {', '.join(first)}, or {last}" if first else f"{last[0].upper()}{last[1:]}"


def _on_disk(table: str) -> str:
    return f"keep {table} on disk ({{{table}: {{tier: disk}}}} in sharding.tables, and sharding.disk_path)"


def _smaller_rows(tables: Sequence[EmbeddingBagConfig], rule: TableRule) -> list[str]:
    remedies = []
    if less_state(rule):
        names = " or ".join(less_state(rule))
        remedies.append(f"choose an optimizer with less state (optimizer.embedding_name={names})")
    if all(weight_bytes_of(table) == FP32_BYTES for table in tables):
        remedies.append("store weights in 16 bits (model.embedding_dtype=bf16)")
    return remedies
