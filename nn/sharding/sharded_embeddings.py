"""TorchRec's sharded tables behind a few plain calls.

If all shapes are known, and always for 16-bit weights, `nn.sharding.static_embeddings` looks the tables up and updates
them, in the same memory. Otherwise TorchRec does. `start_input_dist` and `finish_input_dist` send a batch's ids to the
ranks that own the tables, FBGEMM looks them up (`look_up`), and `output_dist` sends the embeddings to the ranks of their
rows. `update` changes the tables: FBGEMM inside its backward pass, and the same optimizer right after it for replicated
tables and for tables without a fused kernel. World size 1 takes the same path.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from configs.schema import Amp, OptimizerConfig
from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec
from nn.distributed.process_group import Ranks, open_channel
from nn.embedding.collection import embeddings_of
from nn.embedding.id_expansion import expand_jagged
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.multi_hot import MultiHot
from nn.embedding.optimizer import TableRule, table_rule
from nn.embedding.torch_optimizer import TableOptimizer
from nn.layers.initialization import fill_uniform_
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.ops.stochastic_rounding import rounding_key
from nn.sharding.planner import TableSharder
from nn.sharding.static_embeddings import Channels, ColumnShard, Placement, RankTables

RAGGED = 0
"""Hotness of a ragged feature; the static step, which needs the hotness, does not support ragged features."""


@dataclass(frozen=True, slots=True)
class TableShard:
    """A shard of a table on this rank; `weight` [rows, columns] is the memory that is trained."""

    table: str
    weight: Tensor
    row_offset: int
    column_offset: int


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


def register_optimizer(embeddings: EmbeddingBagCollection, rule: TableRule) -> None:
    """Set the optimizer of the unsharded tables, so that the planner counts its state.

    TorchRec's own helper would also create an optimizer per table, and passes arguments by torch's names, some of which
    FBGEMM does not accept (`betas`).
    """
    for table in embeddings.parameters():
        table._optimizer_classes = [rule.planner_class]


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


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return this rank's shards of a tensor that may be sharded."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor]


class ShardedEmbeddings:
    """All tables, sharded as planned, with the seed's weights.

    Args:
        embeddings: the unsharded tables on the meta device, optimizer registered.
        spec: feature spec of the dataset.
        plan: TorchRec's plan for them.
        ranks: this process.
        settings: how they are trained.
        multi_hot: expansion of ids, on the ranks that hold the tables.
    """

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        spec: FeatureSpec,
        plan: ShardingPlan,
        ranks: Ranks,
        settings: TableSettings,
        multi_hot: MultiHot,
    ) -> None:
        config = settings.optimizer
        # With fp16, gradients are divided by the loss scale before they are sent, and fp16 would lose the small ones. So
        # embeddings and gradients are sent in fp32, and only bf16 halves the all-to-all.
        is_bf16 = ranks.device.type == "cuda" and settings.amp is Amp.bf16
        self._rule = table_rule(config.table_name)
        self._config = config
        self._ranks = ranks
        self._seed = settings.seed
        self._hotness = {feature.name: feature.hotness or RAGGED for feature in spec.categorical}
        self._multi_hot = multi_hot
        self._dtype = torch.bfloat16 if is_bf16 else torch.float32
        declared = embeddings.embedding_bag_configs()
        self.features = [table.feature_names[0] for table in declared]
        self._rows = {table.name: table.num_embeddings for table in declared}
        self._dim = declared[0].embedding_dim
        self.names = list(self._rows)
        table_plan = plan.plan["embeddings"]
        self._kernels_of_tables = {table.compute_kernel for table in table_plan.values()}
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
        self.dense_optimizer = _table_optimizer(dense, config)
        self._channels = Channels(open_channel(ranks, "ids"), open_channel(ranks, "embeddings"))
        self.scalars = UpdateScalars(config, 1 / settings.loss_scale, ranks.device)
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
                bound=self._rows[shard.table] ** -0.5,
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
    def static_blocker(self) -> str | None:
        """The reason why shapes or addresses are not known before the run, or None."""
        if RAGGED in self._hotness.values():
            return "ragged features"
        if not all(
            isinstance(sharding, (DpPooledEmbeddingSharding, BaseTwEmbeddingSharding))
            for sharding in self.module._embedding_shardings
        ):
            return "row-wise tables"
        if not self._kernels_of_tables <= {"fused", "dense"}:
            return "tables in host memory"
        return None

    @cached_property
    def rank_tables(self) -> RankTables:
        """This rank's tables, for `StaticEmbeddings`."""
        return RankTables(
            placement=self.placement,
            features=self.features,
            hotness=self._hotness,
            expansions=self.expansions,
            embedding_dim=self._dim,
            config=self._config,
            scalars=self.scalars,
            dtype=self._dtype,
            ranks=self._ranks,
            channels=self._channels,
        )

    @cached_property
    def expansions(self) -> dict[str, Tensor]:
        """Further ids of each id, of the features that this rank looks up."""
        here = {part.feature for part in (*self.placement.owned, *self.placement.replicated)}
        return {
            feature: self._multi_hot.lookup_table(feature, self._ranks.device)
            for feature in self._multi_hot.hotness
            if feature in here
        }

    @cached_property
    def placement(self) -> Placement:
        """The tables that each rank looks up, in the order in which TorchRec has grouped them."""
        weights, states = self.weights(), self.optimizer_state()
        looked_up = self._hotness | self._multi_hot.hotness
        owned_by_rank: list[list[ColumnShard]] = [[] for _ in range(self._ranks.world_size)]
        owned, replicated, replicated_tables = [], [], []
        for sharding in self.module._embedding_shardings:
            if isinstance(sharding, DpPooledEmbeddingSharding):
                for table in sharding.embedding_tables():
                    (feature,) = table.feature_names
                    weight = weights[f"{table.name}.weight"].detach()
                    replicated.append(LocalTable(feature, looked_up[feature], weight, {}))
                    replicated_tables.append(table.name)
                continue
            for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
                for table in (table for group in groups for table in group.embedding_tables):
                    (feature,) = table.feature_names
                    column = table.local_metadata.shard_offsets[1]
                    owned_by_rank[rank].append(ColumnShard(feature, column, table.local_cols))
                    if rank == self._ranks.rank:
                        weight = _shard_at(weights[f"{table.name}.weight"], column)
                        state = {
                            name: _shard_at(states[f"{table.name}.{name}"], column)
                            for name in self._rule.state_names
                        }
                        key = rounding_key(self._seed, table.name)
                        owned.append(
                            LocalTable(feature, looked_up[feature], weight, state, column, key)
                        )
        if self._ranks.world_size == 1:
            # Nothing is sent, so any order is right: in the model's order all embeddings are one matrix.
            order = sorted(
                range(len(owned)),
                key=lambda index: (
                    self.features.index(owned[index].feature),
                    owned_by_rank[0][index].first_column,
                ),
            )
            owned = [owned[index] for index in order]
            owned_by_rank = [[owned_by_rank[0][index] for index in order]]
        return Placement(owned_by_rank, owned, replicated, replicated_tables)

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
        self.scalars.set(step, lr)
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad(set_to_none=True)
            for group in self.dense_optimizer.param_groups:
                group["lr"] = lr
            if self._rule.uses_step:
                for state in self.dense_optimizer.state.values():
                    state["iter"].fill_(step)

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

    def update_replicated(self, gradients: Sequence[Tensor]) -> None:
        """Update the replicated tables.

        Args:
            gradients: sums over all ranks, in the order of `placement.replicated`.
        """
        if not self.placement.replicated:
            return
        assert self.dense_optimizer is not None, "replicated tables are not fused"
        parameters = {
            name.split(".")[-2]: parameter
            for name, parameter in zip(
                self._dense_names, self.dense_optimizer.param_groups[0]["params"], strict=True
            )
        }
        for table, gradient in zip(self.placement.replicated_tables, gradients, strict=True):
            parameters[table].grad = gradient
        self.dense_optimizer.step()

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


def _table_optimizer(
    dense: Mapping[str, nn.Parameter], config: OptimizerConfig
) -> TableOptimizer | None:
    """Return the optimizer of the tables that FBGEMM does not update, or None if this rank has none."""
    if not dense:
        return None
    return TableOptimizer(dense.values(), config)


def _shard_at(tensor: Tensor, first_column: int) -> Tensor:
    """Return this rank's shard of a table, or of its optimizer state, that starts at a column."""
    assert isinstance(tensor, ShardedTensor), "only replicated tables are plain tensors"
    shards = tensor.local_shards()
    if len(shards) == 1:
        return shards[0].tensor.detach()
    (shard,) = [shard for shard in shards if shard.metadata.shard_offsets[1] == first_column]
    return shard.tensor.detach()


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
