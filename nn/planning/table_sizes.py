"""Bytes of tables, of arenas, and of the memory that a rank has for them."""

from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype

from configs.schema import ShardingConfig
from nn.embedding.optimizer import TableRule
from nn.planning.plan import Hardware
from nn.sharding.tables import HostTable

FP32_BYTES = 4
ID_BYTES = 4


def table_bytes(
    num_embeddings: int, embedding_dim: int, rule: TableRule, *, weight_bytes: int = FP32_BYTES
) -> int:
    """Return weight and optimizer bytes of a table, or of one shard of it; `weight_bytes` is that of one weight."""
    row_bytes = embedding_dim * (weight_bytes + rule.bytes_per_element) + rule.bytes_per_row
    return num_embeddings * row_bytes


def arena_bytes(
    num_rows: int, table: HostTable, columns: int, rule: TableRule, *, weight_bytes: int
) -> int:
    """Return the device memory of a shard whose rows lie in host memory or on disk: slots, and the map of rows to them."""
    slots = table.slots(num_rows)
    of_slots = table_bytes(slots, columns, rule, weight_bytes=weight_bytes)
    # A slot and a bit per row, the buffer row of rows on disk, and per slot a row, the batches that need it, and
    # whether it has changed.
    of_rows = (4 + 4 * table.is_on_disk) * num_rows + num_rows // 8
    return of_slots + of_rows + (4 + 1 + 1) * slots


def bytes_of(table: EmbeddingBagConfig, rule: TableRule) -> int:
    return table_bytes(
        table.num_embeddings, table.embedding_dim, rule, weight_bytes=weight_bytes_of(table)
    )


def device_bytes(table: EmbeddingBagConfig, rule: TableRule, host_table: HostTable | None) -> int:
    """Return what a table takes of the devices: all its rows, or an arena."""
    if host_table is None:
        return bytes_of(table, rule)
    return arena_bytes(
        table.num_embeddings,
        host_table,
        table.embedding_dim,
        rule,
        weight_bytes=weight_bytes_of(table),
    )


def weight_bytes_of(table: EmbeddingBagConfig) -> int:
    return data_type_to_dtype(table.data_type).itemsize


def usable_bytes(hardware: Hardware, config: ShardingConfig) -> int:
    """Return the memory per rank that tables may fill."""
    return int(hardware.bytes_per_rank * (1 - config.reserve))


def usable_host_bytes(hardware: Hardware, config: ShardingConfig) -> int:
    return int(hardware.host_bytes // hardware.local_world_size * (1 - config.reserve))
