"""The tables of the static path, sharded as planned, in memory of this rank.

TorchRec plans, and its `ShardedTensor` describes the shards to checkpoints. Memory, lookup and update are the project's own:
tables of one width and dtype are adjacent in one memory, so that plain torch makes one call for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig, data_type_to_dtype

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.new_rows import NewRows, RekeyedRows
from nn.distributed.process_group import Ranks, open_channel
from nn.embedding.declared_tables import id_counts, initial_bound, keyed_tables, lookups_of
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.multi_hot import MultiHot
from nn.embedding.optimizer import table_rule
from nn.embedding.torch_optimizer import table_optimizer
from nn.embedding.touched_rows import TouchedReplicas, TouchedRows
from nn.layers.initialization import fill_uniform_
from nn.ops.stochastic_rounding import rounding_key
from nn.sharding.placement import (
    Channels,
    ColumnShard,
    Placement,
    RankTables,
    RequestedTables,
    RowShard,
)
from nn.sharding.row_requests import BLOCK
from nn.sharding.tables import TableSettings, TableShard, TieredPlan, TouchedShard, asks_for_rows
from nn.tiers.host_tier import HostTier, TierCounts, TieredShard
from nn.tiers.new_rows import KeyedShard, RowResets
from nn.tiers.row_store import WEIGHT

ON_DEVICE, IN_HOST_MEMORY, ON_DISK = "device", "host", "disk"
"""Memories of the rows of a shard."""
FILLED_ROWS = 2**18
"""Rows of a table in host memory that a GPU fills at once."""


class ShardedTables:
    """All tables, sharded as planned, with the seed's weights.

    Args:
        declared: the tables as the model declares them.
        spec: feature spec of the dataset as stored.
        plan: TorchRec's plan for them.
        ranks: this process.
        settings: how they are trained.
        multi_hot: expansion of ids, on the ranks that hold the tables.

    Attributes:
        keys_of: the map that has the keys of a table for raw keys, by the name of the table.
        rekeyed: rows of tables for raw keys that got other keys, if rows are tracked.
        rank_tables: what `StaticEmbeddings` looks up and updates.
        tier: this rank's tables whose rows lie in host memory or on disk; None without any.
    """

    def __init__(
        self,
        declared: Sequence[EmbeddingBagConfig],
        spec: FeatureSpec,
        plan: TieredPlan,
        ranks: Ranks,
        settings: TableSettings,
        multi_hot: MultiHot,
    ) -> None:
        config = settings.optimizer
        self._declared = {table.name: table for table in declared}
        self._rule = table_rule(config.table_name)
        self._ranks = ranks
        self._seed = settings.seed
        seen = multi_hot.expanded_spec(spec)
        self._lookups = lookups_of(declared, seen)
        self._mean_hotness = {feature.name: feature.mean_hotness for feature in seen.categorical}
        num_vectors = [
            sum(lookup.num_vectors for lookup in self._lookups[name]) for name in self._declared
        ]
        first_vectors = accumulate(num_vectors, initial=0)
        self._first_vector = dict(zip(self._declared, first_vectors, strict=False))
        table_plan = plan.plan["embeddings"]
        self._shards: dict[str, list[ShardMetadata]] = {
            name: list(table_plan[name].sharding_spec.shards)
            for name in self._declared
            if table_plan[name].sharding_spec is not None
        }
        self._host_tables = plan.host_tables
        self._disk = settings.disk
        self._replicated = [name for name in self._declared if name not in self._shards]
        self._allocate()
        self.scalars = UpdateScalars(settings.optimizer, 1 / settings.loss_scale, ranks.device)
        self._replicas_optimizer = table_optimizer(self._replicas.values(), config)
        placement = self._placement(settings.tracks_rows)
        self._requested = placement.requested
        self.keys_of = keyed_tables(declared, spec)
        self._resets = RowResets(self._keyed_shards(), settings.seed)
        self._track(spec, placement, settings.tracks_rows)
        self.rank_tables = RankTables(
            placement=placement,
            widths=[
                table.embedding_dim
                for table, count in zip(declared, num_vectors, strict=True)
                for _ in range(count)
            ],
            # Of every batch.
            counts=cache(partial(id_counts, spec)),
            expansions=self._expansions(multi_hot, placement),
            config=config,
            scalars=self.scalars,
            tier=self.tier,
            dtype=settings.sent_dtype(ranks.device),
            ranks=ranks,
            channels=Channels(open_channel(ranks, "ids"), open_channel(ranks, "embeddings")),
            touched=self._touched,
        )

    def _track(self, spec: FeatureSpec, placement: Placement, tracks_rows: bool) -> None:
        """Begin to note the rows that change, if deltas are written."""
        self._touched: TouchedRows | None = None
        self._touched_replicas: TouchedReplicas | None = None
        self.rekeyed: RekeyedRows | None = None
        if tracks_rows:
            device = self._ranks.device
            self._touched = TouchedRows(placement.owned, device)
            self._touched_replicas = TouchedReplicas(
                [len(replica) for replica in self._replicas.values()], device
            )
            self.rekeyed = _rekeyed_rows(spec)

    @property
    def has_disk_tables(self) -> bool:
        """Return whether rows of any rank's tables lie on disk."""
        return any(table.is_on_disk for table in self._host_tables.values())

    @property
    def names(self) -> list[str]:
        """Names of the tables, as the model declares them."""
        return list(self._declared)

    def _allocate(self) -> None:
        """Allocate this rank's weights and optimizer state, and fill the weights with the seed's."""
        device = self._ranks.device
        own = [
            (name, shard) for name, rank, shard in self._placed_shards() if rank == self._ranks.rank
        ]
        own = self._in_order(own)
        self._own = own
        self._in_tier = [
            name in self._host_tables and shard.shard_sizes[0] > 0 for name, shard in own
        ]
        self._allocate_owned()
        self._allocate_tier()
        with ExitStack() as undo:
            undo.callback(self.close)
            shapes = [self._shape_of(name) for name in self._replicated]
            floats = [torch.float32] * len(shapes)
            replicas = _adjacent(shapes, [shape[1] for shape in shapes], floats, device)
            self._replicas = {
                name: nn.Parameter(replica)
                for name, replica in zip(self._replicated, replicas, strict=True)
            }
            self._fill()
            undo.pop_all()

    def _allocate_owned(self) -> None:
        """Allocate the shards of this rank; those of tables in host memory are left empty."""
        device = self._ranks.device
        shapes = [
            torch.Size((0 if is_in_tier else shard.shard_sizes[0], shard.shard_sizes[1]))
            for (_, shard), is_in_tier in zip(self._own, self._in_tier, strict=True)
        ]
        dtypes = [data_type_to_dtype(self._declared[name].data_type) for name, _ in self._own]
        kinds = [(shape[1], dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._weights = _adjacent(shapes, kinds, dtypes, device)
        states = {field.name: field.per_row for field in self._rule.states}
        floats = [torch.float32] * len(self._own)
        self._states = {
            name: _adjacent(
                [shape[:1] if per_row else shape for shape in shapes], kinds, floats, device
            )
            for name, per_row in states.items()
        }
        for tensors in self._states.values():
            for tensor in tensors:
                tensor.zero_()

    def _allocate_tier(self) -> None:
        """Allocate host memory and arenas of this rank's tables in host memory."""
        self.tier: HostTier | None = None
        self._tier_index = {
            index: place
            for place, index in enumerate(
                index for index, is_in_tier in enumerate(self._in_tier) if is_in_tier
            )
        }
        if not self._tier_index:
            return
        shards = []
        for index in self._tier_index:
            name, shard = self._own[index]
            (rows, columns), table = shard.shard_sizes, self._host_tables[name]
            dtype = data_type_to_dtype(self._declared[name].data_type)
            first_row = shard.shard_offsets[0]
            shards.append(
                TieredShard(
                    rows,
                    columns,
                    dtype,
                    table.slots(rows),
                    table.window,
                    first_row,
                    table.is_on_disk,
                )
            )
        disk = self._disk if any(shard.is_on_disk for shard in shards) else None
        self.tier = HostTier(shards, self._rule.states, self._ranks.device, disk)
        for index, place in self._tier_index.items():
            for name, host in self.tier.host_rows(place).items():
                of_name = self._weights if name == WEIGHT else self._states[name]
                of_name[index] = host

    def _fill(self) -> None:
        """Fill the weights with the seed's."""
        device = self._ranks.device
        for shard in self.shards():
            # Host memory of a GPU's tables is filled by the GPU, block by block.
            size = len(shard.weight) if shard.weight.device == device else FILLED_ROWS
            for first in range(0, len(shard.weight), size):
                rows = shard.weight[first : first + size]
                block = rows if rows.device == device else torch.empty_like(rows, device=device)
                fill_uniform_(
                    block,
                    seed=self._seed,
                    table=shard.table,
                    row_offset=shard.row_offset + first,
                    col_offset=shard.column_offset,
                    bound=initial_bound(self._declared[shard.table]),
                )
                if block is not rows:
                    rows.copy_(block)
        self.reload()

    def reload(self) -> None:
        """Take over rows that were changed in host memory; call it after `weights` or `optimizer_state` were written to."""
        if self.tier is not None:
            self.tier.reload()

    def _write_back(self) -> None:
        """Make the memory that `weights`, `optimizer_state` and `shards` return hold the current rows."""
        if self.tier is not None:
            self.tier.write_back()

    def _placed_shards(self) -> Iterator[tuple[str, int, ShardMetadata]]:
        """Yield table, rank and shard of all shards; a rank without rows of a row-wise table has an empty one.

        Every rank then sends vectors of the same row-wise tables.
        """
        for name, shards in self._shards.items():
            holders = set()
            for shard in shards:
                rank = None if shard.placement is None else shard.placement.rank()
                assert rank is not None, "TorchRec places every shard on a rank"
                holders.add(rank)
                yield name, rank, shard
            if self._is_row_wise(name):
                rows, columns = self._shape_of(name)
                for rank in sorted(set(range(self._ranks.world_size)) - holders):
                    yield name, rank, ShardMetadata([rows, 0], [0, columns])

    def _in_order(
        self, shards: "list[tuple[str, ShardMetadata]]"
    ) -> "list[tuple[str, ShardMetadata]]":
        """Sort the shards of a rank: row-wise ones last, requested ones behind them, wide ones first, which aligns columns.

        So requested tables of one width are adjacent in each memory. Alone, shards keep the model's order: then embeddings are
        one matrix.
        """
        if self._ranks.world_size == 1:
            return shards
        return sorted(
            shards,
            key=lambda entry: (
                self._is_row_wise(entry[0]),
                self._is_requested(entry[0]),
                -entry[1].shard_sizes[1],
            ),
        )

    def _is_row_wise(self, name: str) -> bool:
        return any(shard.shard_sizes[0] < self._shape_of(name)[0] for shard in self._shards[name])

    def _shape_of(self, name: str) -> torch.Size:
        table = self._declared[name]
        return torch.Size((table.num_embeddings, table.embedding_dim))

    def shards(self) -> Iterator[TableShard]:
        """Yield the shards of tables that this rank holds."""
        self._write_back()
        for (name, shard), weight in zip(self._own, self._weights, strict=True):
            if len(weight):
                yield TableShard(name, weight, *shard.shard_offsets)
        for name, replica in self._replicas.items():
            yield TableShard(name, replica.detach(), 0, 0)

    def touched_shards(self) -> list[TouchedShard]:
        """Return the shards that this rank writes into deltas, with the mask of their rows.

        Replicated tables have the same mask on all ranks; rank 0 writes them.

        Raises:
            AssertionError: rows are not tracked.
        """
        assert self._touched_replicas is not None
        self._write_back()
        owned = [
            TouchedShard(TableShard(name, weight, *shard.shard_offsets), mask)
            for (name, shard), weight, mask in zip(
                self._own, self._weights, self._touched_masks(), strict=True
            )
            if len(weight)
        ]
        if self._ranks.rank:
            return owned
        return owned + [
            TouchedShard(
                TableShard(name, replica.detach(), 0, 0), self._touched_replicas.of_table(at)
            )
            for at, (name, replica) in enumerate(self._replicas.items())
        ]

    def _touched_masks(self) -> Iterator[Tensor]:
        """Yield the mask of each of this rank's shards: of requested tables, a part of that of their group."""
        assert self._touched is not None
        of_width = {group.owned[0].weight.shape[1]: _masks_of(group) for group in self._requested}
        num_owned = 0
        for (name, _), weight in zip(self._own, self._weights, strict=True):
            if self._is_requested(name):
                yield next(of_width[weight.shape[1]])
            else:
                yield self._touched.of_table(num_owned)
                num_owned += 1

    def clear_touched(self) -> None:
        """Forget the rows that were updated so far."""
        requested = (touched for group in self._requested for touched in group.touched)
        for touched in (self._touched, *requested, self._touched_replicas):
            assert touched is not None
            touched.clear()

    @property
    def described(self) -> dict[str, tuple[int, int, str]]:
        """Rows, columns and dtype of every table, in the order of the model."""
        dtypes = {
            name: data_type_to_dtype(table.data_type) if name in self._shards else torch.float32
            for name, table in self._declared.items()
        }
        return {
            name: (*self._shape_of(name), str(dtype).removeprefix("torch."))
            for name, dtype in dtypes.items()
        }

    def _placement(self, tracks_rows: bool) -> Placement:
        """Return the tables that each rank looks up, wide ones first, or in the model's order for a single rank."""
        requested = [name for name in self._shards if self._is_requested(name)]
        by_rank: list[list[tuple[str, ShardMetadata]]] = [[] for _ in range(self._ranks.world_size)]
        for name, rank, shard in self._placed_shards():
            by_rank[rank].append((name, shard))
        owned_by_rank = [
            [
                ColumnShard(
                    self._lookups[name],
                    self._first_vector[name],
                    shard.shard_offsets[1],
                    shard.shard_sizes[1],
                    self._is_row_wise(name),
                )
                for name, shard in self._in_order(shards)
                if name not in requested
            ]
            for shards in by_rank
        ]
        owned = [
            self._local_table(index)
            for index, (name, _) in enumerate(self._own)
            if name not in requested
        ]
        replicated = [
            ColumnShard(self._lookups[name], self._first_vector[name], 0, self._shape_of(name)[1])
            for name in self._replicated
        ]
        replicas = [
            LocalTable(self._lookups[name], replica.detach(), {})
            for name, replica in self._replicas.items()
        ]
        groups = [
            self._requested_tables(
                [name for name in requested if self._shape_of(name)[1] == width],
                by_rank,
                tracks_rows,
            )
            for width in dict.fromkeys(self._shape_of(name)[1] for name in requested)
        ]
        return Placement(owned_by_rank, replicated, groups, owned, replicas)

    def _is_requested(self, name: str) -> bool:
        """Return whether the rows of a table are asked of their owners: it is row-wise, in shards of equally many rows."""
        if not self._is_row_wise(name):
            return False
        shards = [shard for shard in self._shards[name] if shard.shard_sizes[0]]
        rows = shards[0].shard_sizes[0]
        is_even = all(shard.shard_offsets[0] == i * rows for i, shard in enumerate(shards))
        return is_even and asks_for_rows(
            self._declared[name], self._mean_hotness, self._ranks.world_size
        )

    def _requested_tables(
        self,
        names: Sequence[str],
        by_rank: "Sequence[list[tuple[str, ShardMetadata]]]",
        tracks_rows: bool,
    ) -> RequestedTables:
        """Return row-wise tables of one width as a group."""
        bases: list[dict[str, int]] = []
        rows_by_rank = []
        for shards in by_rank:
            sizes = {
                name: shard.shard_sizes[0]
                for name, shard in self._in_order(shards)
                if name in names
            }
            starts = accumulate(sizes.values(), initial=0)
            bases.append(dict(zip(sizes, starts, strict=False)))
            rows_by_rank.append(sum(sizes.values()))
        row_shards = {
            name: [
                RowShard(rank, shard.shard_offsets[0], bases[rank][name])
                for rank, shards in enumerate(by_rank)
                for other, shard in shards
                if other == name and shard.shard_sizes[0]
            ]
            for name in names
        }
        shards_by_table = [
            sorted(row_shards[name], key=lambda shard: shard.first_row) for name in names
        ]
        members = [index for index, (name, _) in enumerate(self._own) if name in names]
        by_memory: dict[str, list[int]] = {}
        for index in members:
            by_memory.setdefault(self._memory_of(index), []).append(index)
        owned = [
            self._joined_table(indices, is_in_tier=memory != ON_DEVICE)
            for memory, indices in by_memory.items()
        ]
        memories = list(by_memory)
        return RequestedTables(
            [
                ColumnShard(
                    self._lookups[name], self._first_vector[name], 0, self._shape_of(name)[1]
                )
                for name in names
            ],
            shards_by_table,
            [max(shard.shard_sizes[0] for shard in self._shards[name]) for name in names],
            rows_by_rank,
            owned,
            [len(self._weights[index]) for index in members],
            [memories.index(self._memory_of(index)) for index in members],
            [TouchedRows([table], self._ranks.device) for table in owned] if tracks_rows else [],
        )

    def _memory_of(self, index: int) -> str:
        """Return where the rows of one of this rank's shards lie."""
        if not self._in_tier[index]:
            return ON_DEVICE
        return ON_DISK if self._host_tables[self._own[index][0]].is_on_disk else IN_HOST_MEMORY

    def _joined_table(self, indices: Sequence[int], *, is_in_tier: bool) -> LocalTable:
        """Return some of this rank's shards, which are adjacent in one memory, as a table of rows that are asked for."""
        lookups = (Lookup(BLOCK, 1),)
        if is_in_tier:
            assert self.tier is not None, "there are such tables"
            places = [self._tier_index[index] for index in indices]
            return self.tier.joined_table(
                places, LocalTable(lookups, self._weights[indices[0]], {}, first_row=0)
            )
        rows = sum(len(self._weights[index]) for index in indices)
        return LocalTable(
            lookups,
            _joined([self._weights[index] for index in indices], rows),
            {
                state: _joined([tensors[index] for index in indices], rows)
                for state, tensors in self._states.items()
            },
            first_row=0,
        )

    def _local_table(self, index: int) -> LocalTable:
        """Return a shard of this rank with the memory that is looked up and trained."""
        name, shard = self._own[index]
        table = LocalTable(
            self._lookups[name],
            self._weights[index],
            {state: tensors[index] for state, tensors in self._states.items()},
            shard.shard_offsets[1],
            rounding_key(self._seed, name),
            shard.shard_offsets[0] if self._is_row_wise(name) else None,
        )
        if self.tier is None or index not in self._tier_index:
            return table
        return self.tier.local_table(self._tier_index[index], table)

    def _expansions(self, multi_hot: MultiHot, placement: Placement) -> dict[str, Tensor]:
        """Return the further ids of each id, of the features that this rank looks up."""
        requested = [shard for group in placement.requested for shard in group.shards]
        tables: list[LocalTable | ColumnShard] = [*placement.owned, *requested, *placement.replicas]
        here = {lookup.feature for table in tables for lookup in table.lookups}
        return {
            feature: multi_hot.lookup_table(feature, self._ranks.device)
            for feature in multi_hot.hotness
            if feature in here
        }

    @property
    def replicated_shapes(self) -> list[torch.Size]:
        """Shapes of the replicated tables."""
        return [self._shape_of(name) for name in self._replicated]

    @property
    def replicated_names(self) -> list[str]:
        """Names of the replicated tables."""
        return list(self._replicated)

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count of the next update, which the pass reads; call it before that.

        Args:
            step: updates made so far.
            lr: learning rate.
        """
        self.scalars.stage(step, lr)
        if self._replicas_optimizer is not None:
            self._replicas_optimizer.prepare(step, lr)

    def update_replicated(self, gradients: Sequence[Tensor]) -> None:
        """Update the replicated tables.

        Args:
            gradients: sums over all ranks, in the order of `replicated_shapes`.
        """
        if self._replicas_optimizer is None:
            return
        if self._touched_replicas is not None:
            self._touched_replicas.add(gradients)
        for replica, gradient in zip(self._replicas.values(), gradients, strict=True):
            replica.grad = gradient
        self._replicas_optimizer.step()

    def _keyed_shards(self) -> list[KeyedShard]:
        """Return this rank's shards of tables for raw keys, in the order of their memory."""
        keys_of = self.keys_of

        def keyed(
            name: str, weight: Tensor, states: list[Tensor], offsets: list[int]
        ) -> KeyedShard:
            bound = initial_bound(self._declared[name])
            return KeyedShard(name, keys_of[name], weight, states, offsets[0], offsets[1], bound)

        owned = [
            keyed(name, weight, [of_all[index] for of_all in self._states.values()], offsets)
            for index, (name, weight, offsets) in enumerate(
                (name, weight, list(shard.shard_offsets))
                for (name, shard), weight in zip(self._own, self._weights, strict=True)
            )
            if name in keys_of and len(weight)
        ]
        optimizer = self._replicas_optimizer
        return owned + [
            keyed(
                name,
                replica.detach(),
                [] if optimizer is None else [*_tensors(optimizer.state[replica])],
                [0, 0],
            )
            for name, replica in self._replicas.items()
            if name in keys_of
        ]

    def write_new_rows(self, new_rows: Mapping[str, NewRows]) -> None:
        """Give rows of tables for raw keys to other keys, before the batch that has them is looked up."""
        self._resets.write(new_rows)
        if self.rekeyed is not None:
            self.rekeyed.add(new_rows)

    def train(self, mode: bool = True) -> None:
        """Count the traffic of tables in host memory in training only; lookups are the same in evaluation."""
        if self.tier is not None:
            self.tier.train(mode)

    def close(self) -> None:
        """Remove the files of tables on disk."""
        if self.tier is not None:
            self.tier.close()

    def host_traffic(self, steps: int) -> dict[str, float]:
        """Return the traffic of tables in host memory per step since the last call; all ranks must call it.

        Args:
            steps: since the last call.

        Returns:
            `tier_hit_rate`, of all ids; `tier_rows_in`, `tier_rows_out`, `tier_bytes_in` and `tier_bytes_out`, sums over ranks;
            `tier_ms`, of the host, and `tier_wait_ms`, of the step, means over ranks; and with tables on disk the same of the
            disk, as `tier_disk_rows_in` and
            `tier_disk_wait_ms`. Empty without such tables.
        """
        if not self._host_tables:
            return {}
        counts = TierCounts() if self.tier is None else self.tier.take_counts()
        names = [field.name for field in fields(counts)]
        values = torch.tensor([getattr(counts, name) for name in names], dtype=torch.float64)
        summed = self._ranks.all_reduce_sum(values.to(self._ranks.device)).tolist()
        total = dict(zip(names, summed, strict=True))
        hit_rate = 1 - total.pop("missing") / max(total.pop("ids"), 1)
        for name in ("ms", "wait_ms", "disk_wait_ms"):
            total[name] /= self._ranks.world_size
        if not self.has_disk_tables:
            total = {name: value for name, value in total.items() if "disk" not in name}
        return {"tier_hit_rate": hit_rate} | {
            f"tier_{name}": value / steps for name, value in total.items()
        }

    def weights(self) -> dict[str, Tensor]:
        """Return `<table>.weight` of every table: sharded tensors, or plain ones for replicated tables.

        Of tables in host memory it is that memory; call `reload` after writing to it.
        """
        self._write_back()
        return {
            f"{name}.weight": self._sharded(name, self._weights)
            if name in self._shards
            else self._replicas[name].detach()
            for name in self._declared
        }

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return `<table>.<state>` of every table, such as `cat_0.momentum1`, laid out as its weight; see `weights`."""
        self._write_back()
        state: dict[str, Tensor] = {}
        for name in self._declared:
            for field in self._rule.states:
                if name in self._shards:
                    state[f"{name}.{field.name}"] = self._sharded(
                        name, self._states[field.name], is_state=True, per_row=field.per_row
                    )
                else:
                    assert self._replicas_optimizer is not None, "there are replicas"
                    of_replica = self._replicas_optimizer.state[self._replicas[name]]
                    state[f"{name}.{field.name}"] = of_replica[field.name]
        return state

    def optimizer_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of `optimizer_state`."""
        return {
            f"{name}.{state}": shape
            for name in self._declared
            for state, shape in self._rule.state_shapes(self._shape_of(name)).items()
        }

    def _is_pinned(self, name: str) -> bool:
        """Return whether all rows of a table lie in pinned host memory."""
        table = self._host_tables.get(name)
        return table is not None and not table.is_on_disk and self._ranks.device.type == "cuda"

    def _sharded(
        self, name: str, tensors: Sequence[Tensor], *, is_state: bool = False, per_row: bool = False
    ) -> ShardedTensor:
        """Return this rank's shards of a table, or of its optimizer state, as a part of the complete one."""
        dims = 1 if per_row else 2
        shards = [
            ShardMetadata(
                shard.shard_offsets[:dims],
                shard.shard_sizes[:dims],
                _on_host(shard) if name in self._host_tables else shard.placement,
            )
            for shard in self._shards[name]
        ]
        position = {id(shard): index for index, shard in enumerate(self._shards[name])}
        local = [
            Shard(tensor, shards[position[id(shard)]])
            for (owner, shard), tensor in zip(self._own, tensors, strict=True)
            if owner == name and id(shard) in position
        ]
        dtype = data_type_to_dtype(self._declared[name].data_type)
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=self._shape_of(name)[:dims],
            tensor_properties=TensorProperties(
                dtype=torch.float32 if is_state else dtype,
                pin_memory=self._is_pinned(name),
            ),
        )
        return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)


def _masks_of(group: RequestedTables) -> Iterator[Tensor]:
    """Yield the masks of the rows of requested tables on this rank."""
    firsts = [0] * len(group.owned)
    for rows, memory in zip(group.owned_rows, group.memories, strict=True):
        yield group.touched[memory].of_table(0)[firsts[memory] : firsts[memory] + rows]
        firsts[memory] += rows


def _on_host(shard: ShardMetadata) -> str:
    """Return the placement of a shard in host memory of its rank."""
    assert shard.placement is not None, "TorchRec places every shard on a rank"
    return f"rank:{shard.placement.rank()}/cpu"


def _tensors(state: Mapping[str, object]) -> Iterator[Tensor]:
    """Yield the tensors with a row per row of the table of an optimizer's state."""
    return (value for value in state.values() if isinstance(value, Tensor) and value.dim())


def _adjacent(
    shapes: Sequence[torch.Size],
    kinds: Sequence[object],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> list[Tensor]:
    """Allocate tensors; those of one kind, which have one dtype, lie one after the other in one memory."""
    tensors: list[Tensor] = [torch.empty(0)] * len(shapes)
    for kind in dict.fromkeys(kinds):
        members = [index for index, other in enumerate(kinds) if other == kind]
        sizes = [shapes[index].numel() for index in members]
        memory = torch.empty(sum(sizes), dtype=dtypes[members[0]], device=device)
        for index, flat in zip(members, memory.split(sizes), strict=True):
            tensors[index] = flat.view(shapes[index])
    return tensors


def _joined(tensors: Sequence[Tensor], rows: int) -> Tensor:
    """View tensors that lie one after the other in one memory as one, with the rows of all."""
    first = tensors[0]
    shape = (rows, *first.shape[1:])
    return first.as_strided(
        shape, torch.empty(shape, device="meta").stride(), first.storage_offset()
    )


def _rekeyed_rows(spec: FeatureSpec) -> RekeyedRows:
    """Return the tables for raw keys, of which no row has got another key."""
    tables = spec.dynamic_tables.items()
    return RekeyedRows({name: spec.categorical[first].cardinality for name, (first, *_) in tables})
