"""TorchRec's sharded tables behind a few plain calls.

The dynamic path trains them, where `nn.sharding.tables.static_blocker` has a reason: ragged features and row-wise
tables. `start_input_dist` and `finish_input_dist` send a batch's ids to the ranks that own the tables, FBGEMM looks
them up (`look_up`), and `output_dist` sends the embeddings to the ranks of their rows. `update` changes the tables:
FBGEMM inside its backward pass, and the same optimizer right after it for replicated tables and for tables without a
fused kernel. World size 1 takes the same path.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from configs.schema import OptimizerConfig
from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec
from nn.distributed.process_group import Ranks
from nn.embedding.collection import embeddings_of
from nn.embedding.declared_tables import initial_bound
from nn.embedding.id_expansion import expand_jagged
from nn.embedding.multi_hot import MultiHot
from nn.embedding.optimizer import table_rule
from nn.embedding.torch_optimizer import table_optimizer
from nn.layers.initialization import fill_uniform_
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.sharding.planner import TableSharder
from nn.sharding.tables import TableSettings, TableShard


@dataclass(slots=True)
class Exchange:
    """A batch's ids in TorchRec's `input_dist`, from the ranks that read them to the ranks that own their tables.

    Attributes:
        context: TorchRec's record of the batch.
        pending: TorchRec's awaitable of the ids, later the ids.
    """

    context: Any
    pending: Any

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the arrived ids from being reused before `stream` is done with it."""
        self.context.record_stream(stream)
        self.pending.record_stream(stream)


class ShardedEmbeddings:
    """All tables, sharded as planned, with the seed's weights.

    Args:
        embeddings: the unsharded tables on the meta device, optimizer registered.
        spec: feature spec of the dataset.
        plan: TorchRec's plan for them.
        ranks: this process.
        settings: how they are trained.
        multi_hot: expansion of ids, on the ranks that hold the tables.
        static_blocker: the reason for the dynamic path.
    """

    replicated_shapes: Sequence[torch.Size] = ()

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        spec: FeatureSpec,
        plan: ShardingPlan,
        ranks: Ranks,
        settings: TableSettings,
        multi_hot: MultiHot,
        static_blocker: str,
    ) -> None:
        config = settings.optimizer
        is_bf16 = settings.sent_dtype(ranks.device) is torch.bfloat16
        self.static_blocker: str | None = static_blocker
        self._rule = table_rule(config.table_name)
        self._config = config
        self._ranks = ranks
        self._seed = settings.seed
        self._multi_hot = multi_hot
        declared = embeddings.embedding_bag_configs()
        self.features = [table.feature_names[0] for table in declared]
        self._bounds = {table.name: initial_bound(table) for table in declared}
        self.names = list(self._bounds)
        table_plan = plan.plan["embeddings"]
        self._feature_ranks = {
            table.feature_names[0]: table_plan[table.name].ranks for table in declared
        }
        self.module = _sharder(config, is_bf16).shard(
            embeddings,
            table_plan,
            ShardingEnv.from_process_group(dist.group.WORLD),
            ranks.device,
        )
        self._kernels = [
            kernel
            for lookup in self.module._lookups
            for kernel in lookup.modules()
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen)
        ]
        self._dense_tables = [
            table for table, sharding in table_plan.items() if sharding.compute_kernel == "dense"
        ]
        dense = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if name.split(".")[-2] in self._dense_tables and parameter.numel()
        }
        self._dense_names = list(dense)
        self.dense_optimizer = table_optimizer(dense.values(), config)
        self._fill_uniform()

    def _fill_uniform(self) -> None:
        """Fill this rank's shards with the seed's weights."""
        for shard in self.shards():
            fill_uniform_(
                shard.weight,
                seed=self._seed,
                table=shard.table,
                row_offset=shard.row_offset,
                col_offset=shard.column_offset,
                bound=self._bounds[shard.table],
            )

    def shards(self) -> Iterator[TableShard]:
        """Yield the shards of tables that this rank holds."""
        for name, value in self.module.state_dict().items():
            table = name.split(".")[-2]
            if isinstance(value, ShardedTensor):
                for shard in value.local_shards():
                    row, column = shard.metadata.shard_offsets
                    yield TableShard(table, shard.tensor, row, column)
            else:
                yield TableShard(table, value, 0, 0)

    def start_input_dist(self, batch: Batch) -> Exchange:
        """Start TorchRec's `input_dist` of a batch: send the numbers of ids."""
        context = self.module.create_context()
        return Exchange(context, self.module.input_dist(context, batch.ids))

    def finish_input_dist(self, exchange: Exchange) -> None:
        """Send the ids, and expand them where they arrive; the host waits until it knows their number."""
        arrived = exchange.pending.wait().wait()
        exchange.pending = KJTList([expand_jagged(ids, self.expansions) for ids in arrived])

    @cached_property
    def expansions(self) -> dict[str, Tensor]:
        """Further ids of each id, of the features that this rank looks up."""
        return {
            feature: self._multi_hot.lookup_table(feature, self._ranks.device)
            for feature in self._multi_hot.hotness
            if self._ranks.rank in (self._feature_ranks[feature] or ())
        }

    def look_up(self, exchange: Exchange) -> list[Tensor]:
        """Look the ids up on this rank and return one tensor per group of tables, differentiable back to the tables."""
        return self.module.compute(exchange.context, exchange.pending)

    def output_dist(self, context: Any, lookups: list[Tensor]) -> PooledEmbeddings:
        """Send looked-up embeddings to the ranks of their samples: [B, F, D], features in the spec's order."""
        return embeddings_of(self.module.output_dist(context, lookups).wait(), self.features)

    def update(self, lookups: list[Tensor], gradients: list[Tensor]) -> None:
        """Update the tables by the gradients of what was looked up."""
        learning = [
            (looked_up, gradient)
            for looked_up, gradient in zip(lookups, gradients, strict=True)
            # A rank without a table of this group has no lookup to learn from.
            if looked_up.requires_grad
        ]
        if learning:
            outputs, received = zip(*learning, strict=True)
            torch.autograd.backward(list(outputs), list(received))
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count of the next update; call it before the forward pass.

        Args:
            step: updates made so far.
            lr: learning rate.
        """
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad(set_to_none=True)
            self.dense_optimizer.prepare(step, lr)

    def prepare_fused_update(self, step: int, lr: float) -> None:
        """Set the same numbers in FBGEMM's kernels, which costs host time.

        FBGEMM counts forward passes, evaluation included, and uses the count for Adam's bias correction: it is set to the
        number of updates.
        """
        for kernel in self._kernels:
            kernel.set_learning_rate(lr)
            if self._rule.uses_step:
                kernel.iter_cpu.fill_(step)
                kernel.iter.fill_(step)

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation."""
        self.module.train(mode)

    def weights(self) -> dict[str, Tensor]:
        """Return `<table>.weight` of every table: sharded tensors, or plain ones for replicated tables."""
        return {
            f"{name.split('.')[-2]}.weight": value
            for name, value in self.module.state_dict().items()
        }

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return `<table>.<state>` of every table, such as `cat_0.momentum1`, laid out as its weight."""
        state = {}
        names = {field.fused_name or field.name: field.name for field in self._rule.states}
        for parameter, values in self.module.fused_optimizer.state_dict()["state"].items():
            table = parameter.split(".")[-2]
            for name, value in values.items():
                state[f"{table}.{names[name.split('.')[-1]]}"] = value
        return state | self._dense_state()

    def optimizer_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `optimizer_state`, for tables that only other ranks hold too."""
        return {
            name.removesuffix("weight") + state: shape
            for name, weight in self.weights().items()
            for state, shape in self._rule.state_shapes(weight.shape).items()
        }

    def _dense_state(self) -> dict[str, Tensor]:
        """Return the state of tables that are not fused; their parameter is this rank's shard."""
        if self.dense_optimizer is None:
            return {}
        weights = self.weights()
        parameters = self.dense_optimizer.param_groups[0]["params"]
        by_table = {
            name.split(".")[-2]: self.dense_optimizer.state[parameter]
            for name, parameter in zip(self._dense_names, parameters, strict=True)
        }
        state: dict[str, Tensor] = {}
        for table in self._dense_tables:
            weight = weights[f"{table}.weight"]
            for field in self._rule.states:
                name = f"{table}.{field.name}"
                if isinstance(weight, ShardedTensor):
                    local = by_table[table][field.name] if table in by_table else None
                    state[name] = _like_weight(weight, local, per_row=field.per_row)
                else:
                    state[name] = by_table[table][field.name]
        return state


def _sharder(config: OptimizerConfig, is_bf16: bool) -> TableSharder:
    """Return a sharder that uses FBGEMM's fused kernel of the optimizer.

    Without a fused kernel all tables take the dense kernel, which has no optimizer of its own.
    """
    fused = table_rule(config.table_name).fbgemm
    return TableSharder(
        fused_params=({} if fused is None else {"optimizer": fused})
        | {
            "learning_rate": config.table_lr,
            "eps": config.eps,
            "beta1": config.beta1,
            "beta2": config.beta2,
            "output_dtype": SparseType.BF16 if is_bf16 else SparseType.FP32,
            # FBGEMM has no bf16 cache on GPUs, and refuses bf16 tables for that reason although they need no cache.
            "cache_precision": SparseType.FP32,
            # The loader has checked all ids; FBGEMM's check would take a tenth of a step.
            "bounds_check_mode": BoundsCheckMode.NONE,
        }
    )


def _like_weight(weight: ShardedTensor, local: Tensor | None, *, per_row: bool) -> ShardedTensor:
    """Return a rank's state as shards like those of its table's weight, float32.

    Args:
        weight: of the table.
        local: [its rows, its columns], or [its rows] with `per_row`, whose table is not column-wise.
        per_row: whether the state has one number per row.
    """
    dims = 1 if per_row else 2
    metadata = weight.metadata()
    shards = [
        replace(
            shard,
            shard_offsets=shard.shard_offsets[:dims],
            shard_sizes=shard.shard_sizes[:dims],
        )
        for shard in metadata.shards_metadata
    ]
    local_shards = [
        shards[metadata.shards_metadata.index(shard.metadata)] for shard in weight.local_shards()
    ]
    # If a table has fewer rows than ranks, the last ranks hold a shard without rows, which has no optimizer.
    if local is None:
        states = [
            torch.empty(shard.shard_sizes, device=weight.local_shards()[0].tensor.device)
            for shard in local_shards
        ]
    else:
        states = local.view(-1).split([math.prod(shard.shard_sizes) for shard in local_shards])
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [
            Shard(state.view(shard.shard_sizes), shard)
            for state, shard in zip(states, local_shards, strict=True)
        ],
        replace(
            metadata,
            shards_metadata=shards,
            size=metadata.size[:dims],
            tensor_properties=replace(metadata.tensor_properties, dtype=torch.float32),
        ),
    )
