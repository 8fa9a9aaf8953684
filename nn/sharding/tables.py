"""Settings of the training of tables, and their shards on a rank."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingPlan

from configs.schema import Amp, OptimizerConfig, ShardingType
from nn.tiers.host_tier import DiskSettings
from nn.tiers.initial_rows import InitialRows

ROWS_CUT = (ShardingType.row_wise.value, ShardingType.table_row_wise.value)
"""Layouts that shard a table by rows: over all ranks, or over those of one node."""


@dataclass(frozen=True, slots=True)
class HostTable:
    """A table whose rows lie in host memory or on disk.

    `cache` is the fraction of a shard's rows for which a rank has room on its device, `live_rows` the distinct rows that the live
    batches may look up, at most those of a shard.
    """

    cache: float
    live_rows: int
    is_on_disk: bool = False

    def slots(self, rows: int) -> int:
        """Return the rows of a shard for which there is room on the device."""
        return min(rows, math.ceil(self.cache * rows))


@dataclass
class TieredPlan(ShardingPlan):
    """TorchRec's plan, the tables in host memory or on disk by name, and those whose distinct rows are sent (`row_tables`).

    It is for a group of `num_ranks`; other groups of as many hold the same tables. With `two_hops` ids, embeddings and
    gradients go within the node first (`nn.distributed.all_to_all`).
    """

    host_tables: dict[str, HostTable] = field(default_factory=dict)
    row_tables: frozenset[str] = frozenset()
    num_ranks: int = 1
    two_hops: bool = False


@dataclass(frozen=True, slots=True)
class TableShard:
    """A shard of a table on this rank; `weight` [rows, columns] is the memory that is trained.

    With `initial` it has the changes of these weights.
    """

    table: str
    weight: Tensor
    row_offset: int
    column_offset: int
    initial: InitialRows | None = None

    def rows(self, ids: Tensor) -> Tensor:
        """Return a copy of the weights of some rows, int64 [n]: [n, columns]."""
        # Of a GPU's table in host memory or on disk the mask of its rows is on the GPU.
        ids = ids.to(self.weight.device)
        rows = self.weight[ids]
        if self.initial is not None:
            self.initial.toggle(rows, ids + self.row_offset, self.column_offset)
        return rows


@dataclass(frozen=True, slots=True)
class TouchedShard:
    """A shard of a table on this rank, and the mask of its rows that were updated, uint8 [rows]; both are views."""

    shard: TableShard
    touched: Tensor


@dataclass(frozen=True, slots=True)
class TableSettings:
    """Settings of the training of tables.

    With `amp` bf16, embeddings are sent between GPUs in bf16 too. Gradients that arrive have the factor `loss_scale`. The seed
    is for initial weights, and the rounding of 16-bit ones; `tracks_rows` marks the rows that updates change, for deltas.
    """

    optimizer: OptimizerConfig
    amp: Amp
    loss_scale: float
    seed: int
    tracks_rows: bool = False
    disk: DiskSettings | None = None

    def sent_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of embeddings and gradients in the all-to-all.

        With fp16, gradients are divided by the loss scale before they are sent, and fp16 would lose the small ones. So
        embeddings and gradients are sent in fp32, and only bf16 halves the all-to-all.
        """
        is_bf16 = device.type == "cuda" and self.amp is Amp.bf16
        return torch.bfloat16 if is_bf16 else torch.float32
