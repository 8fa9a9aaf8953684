"""The tables of a run, whichever path trains them: their settings, their shards, and what decides on the path."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.types import ShardingPlan

from configs.schema import Amp, OptimizerConfig, ShardingType
from dataloading.dataset.feature_spec import FeatureSpec

ROWS_CUT = (ShardingType.row_wise.value, ShardingType.table_row_wise.value)


@dataclass(frozen=True, slots=True)
class TableShard:
    """A shard of a table on this rank; `weight` [rows, columns] is the memory that is trained."""

    table: str
    weight: Tensor
    row_offset: int
    column_offset: int


@dataclass(frozen=True, slots=True)
class TableSettings:
    """Settings of the training of tables.

    Attributes:
        optimizer: options of the optimizers; those of tables are used.
        amp: precision of the dense component; with bf16, embeddings are sent between GPUs in bf16 too.
        loss_scale: factor on the gradients that arrive.
        seed: of the initial weights, and of the rounding of 16-bit ones.
    """

    optimizer: OptimizerConfig
    amp: Amp
    loss_scale: float
    seed: int

    def sent_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of embeddings and gradients in the all-to-all.

        With fp16, gradients are divided by the loss scale before they are sent, and fp16 would lose the small ones. So
        embeddings and gradients are sent in fp32, and only bf16 halves the all-to-all.
        """
        is_bf16 = device.type == "cuda" and self.amp is Amp.bf16
        return torch.bfloat16 if is_bf16 else torch.float32


class Tables(Protocol):
    """This rank's part of all tables."""

    static_blocker: str | None
    names: list[str]

    @property
    def replicated_shapes(self) -> Sequence[torch.Size]:
        """Shapes of the replicated tables whose gradients join the all-reduce of the dense gradients."""

    def shards(self) -> Iterator[TableShard]:
        """Yield the shards that this rank holds."""

    def weights(self) -> dict[str, Tensor]:
        """Return `<table>.weight` of every table: sharded tensors, or plain ones for replicated tables."""

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return `<table>.<state>` of every table, such as `cat_0.momentum1`, laid out as its weight."""

    def optimizer_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `optimizer_state`, for tables that only other ranks hold too."""

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation."""


def static_blocker(spec: FeatureSpec, plan: ShardingPlan) -> str | None:
    """Return the reason why shapes or addresses are not known before the run, or None."""
    if any(feature.hotness is None for feature in spec.categorical):
        return "ragged features"
    tables = plan.plan["embeddings"].values()
    if any(table.sharding_type in ROWS_CUT for table in tables):
        return "row-wise tables"
    if any(table.compute_kernel not in ("fused", "dense") for table in tables):
        return "tables in host memory"
    return None


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return this rank's shards of a tensor that may be sharded."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]
