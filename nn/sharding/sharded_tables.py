"""All tables, sharded as planned, in memory of this rank.

TorchRec plans. Memory, lookup and update are the project's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from dataloading.dataset.batch_layout import KEPT_LAYOUTS, id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.keys.rekeyed import Rekeyed, RekeyedRows
from nn.distributed.process_group import Ranks
from nn.distributed.sharded_tensor import Piece, ShardedTensor, State
from nn.embedding.declared_tables import handing_tables, initial_bound, keyed_tables
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.multi_hot import MultiHot
from nn.embedding.optimizer import table_rule
from nn.embedding.pretrained import FileRows
from nn.embedding.torch_optimizer import TableOptimizer
from nn.embedding.touched_rows import TouchedReplicas
from nn.layers.sequence_events import SequenceTables
from nn.sharding.owned_shard import OwnedShard, adjacent, allocate_shards, fill_shard
from nn.sharding.placement import Channels, ColumnShard, Placement, RankTables, place, track_rows
from nn.sharding.planned_tables import PlannedTable, planned_tables, shards_by_rank
from nn.sharding.rank_group import RankGroup
from nn.sharding.tables import TableSettings, TableShard, TieredPlan, TouchedShard
from nn.tiers.host_tier import TRAFFIC
from nn.tiers.initial_rows import InitialRows
from nn.tiers.row_resets import KeyedShard, RowResets
from nn.tiers.row_store import WEIGHT


class ShardedTables:
    """All tables, sharded as planned, with the seed's weights.

    `spec` is that of the dataset as stored. `keys_of` has, of tables for raw keys, the map that has their keys; `rekeyed` their
    rows that got other keys, if rows are tracked. `rank_tables` is what `ShardedLookup` looks up and updates; `tier` has this
    rank's tables whose rows lie in host memory or on disk.
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
        config, device = settings.optimizer, ranks.device
        self._rule = table_rule(config.table_name)
        self._ranks, self._seed = ranks, settings.seed
        tables = planned_tables(declared, multi_hot.expanded_spec(spec), plan)
        self._tables = {table.name: table for table in tables}
        self._rank_group = RankGroup.of(ranks, plan.num_ranks)
        by_rank = shards_by_rank(tables, self._rank_group.size)
        self._own, self.tier = allocate_shards(
            by_rank[self._rank_group.rank], self._rule.states, settings, device
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            self._replicas = self._allocate_replicas()
            self._fill()
            undo.pop_all()
        self.scalars = UpdateScalars(config, 1 / settings.loss_scale, device)
        trained = list(self._replicas.values())
        self._replicas_optimizer = TableOptimizer(trained, config) if trained else None
        replicas = [replica.detach() for replica in trained]
        placement = place(tables, by_rank, self._own, replicas, self.tier, settings.seed)
        self._placement = placement
        self.keys_of = keyed_tables(declared, spec)
        self._resets = RowResets(self._keyed_shards(), settings.seed)
        # Rows that change are noted if deltas are written.
        self._touched = self._touched_replicas = self.rekeyed = None
        if settings.tracks_rows:
            self._touched = track_rows(placement, self._own, device)
            self._touched_replicas = TouchedReplicas(list(map(len, replicas)), device)
            keyed = spec.dynamic_tables.items()
            rows = {name: spec.categorical[first].cardinality for name, (first, *_) in keyed}
            self.rekeyed = RekeyedRows(rows)
        self.rank_tables = RankTables(
            placement=placement,
            widths=[table.shape[1] for table in tables for _ in range(table.num_vectors)],
            # Of every batch.
            counts=lru_cache(KEPT_LAYOUTS)(partial(id_counts, spec)),
            sequences=SequenceTables(spec.sequences, handing_tables(declared, spec)),
            expansions=_expansions(multi_hot, placement, device),
            config=config,
            scalars=self.scalars,
            tier=self.tier,
            dtype=settings.sent_dtype(device),
            ranks=ranks,
            rank_group=self._rank_group,
            channels=Channels.open(ranks, self._rank_group, two_hops=plan.two_hops),
            touched=self._touched,
        )

    def _allocate_replicas(self) -> dict[str, nn.Parameter]:
        shapes = self.replicated_shapes
        floats = [torch.float32] * len(shapes)
        memories = adjacent(shapes, [shape[1] for shape in shapes], floats, self._ranks.device)
        names = [table.name for table in self._all() if not table.shards]
        return {name: nn.Parameter(of) for name, of in zip(names, memories, strict=True)}

    def _fill(self) -> None:
        """Fill the weights with the seed's, which are no memory's of tables on disk, or a file's."""
        for shard in self.shards():
            declared = self._tables[shard.table].declared
            if shard.initial is not None:
                continue
            if isinstance(declared.init_fn, FileRows):
                declared.init_fn(shard.weight, shard.row_offset, shard.column_offset)
            else:
                fill_shard(shard, initial_bound(declared), self._seed, self._ranks.device)
        for own in self._own:
            rows, weight = own.table.declared.init_fn, own.weight
            if own.initial is None or not isinstance(rows, FileRows):
                continue
            assert self.tier is not None, "it is on disk"
            assert own.tier_index is not None, "it is on disk"
            # The file is read once, in whatever order it has the rows.
            for part in rows.parts(weight.shape, weight.dtype, *own.metadata.shard_offsets):
                self.tier.fill(own.tier_index, *part)
        self.reload()

    @property
    def names(self) -> list[str]:
        return list(self._tables)

    @property
    def has_disk_tables(self) -> bool:
        """Return whether rows of any rank's tables lie on disk."""
        return any(table.host is not None and table.host.is_on_disk for table in self._all())

    @property
    def described(self) -> dict[str, tuple[int, int, str]]:
        """Rows, columns and dtype of every table, in the order of the model."""
        return {
            table.name: (*table.shape, str(table.dtype).removeprefix("torch."))
            for table in self._all()
        }

    @property
    def replicated_shapes(self) -> list[torch.Size]:
        return [table.shape for table in self._all() if not table.shards]

    def _all(self) -> list[PlannedTable]:
        return list(self._tables.values())

    def reload(self) -> None:
        """Take over rows that were changed in host memory; call it after `weights` or `optimizer_state` were written to."""
        if self.tier is not None:
            self.tier.reload()

    def _write_back(self) -> None:
        """Make the memory that `weights`, `optimizer_state` and `shards` return hold the current rows."""
        if self.tier is not None:
            self.tier.write_back()

    def shards(self) -> Iterator[TableShard]:
        self._write_back()
        for shard in self._own:
            if len(shard.weight):
                yield shard.described
        for name, replica in self._replicas.items():
            yield TableShard(name, replica.detach(), 0, 0)

    def touched_shards(self) -> list[TouchedShard]:
        """Return the shards that this rank writes into deltas, with the mask of their rows; rows must be tracked.

        Groups have the same masks; the first one writes. Replicated tables have the same mask on all ranks; rank 0 writes them.
        """
        assert self._touched_replicas is not None, "rows are tracked"
        if self._rank_group.number:
            return []
        self._write_back()
        touched = [
            TouchedShard(shard.described, shard.touched)
            for shard in self._own
            if len(shard.weight) and shard.touched is not None
        ]
        if self._ranks.rank == 0:
            for at, (name, replica) in enumerate(self._replicas.items()):
                mask = self._touched_replicas.of_table(at)
                touched.append(TouchedShard(TableShard(name, replica.detach(), 0, 0), mask))
        return touched

    def clear_touched(self) -> None:
        """Forget the rows that were updated so far."""
        requested = (touched for group in self._placement.requested for touched in group.touched)
        for touched in (self._touched, *requested, self._touched_replicas):
            assert touched is not None, "rows are tracked"
            touched.clear()

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count of the next update, which the pass reads; `step` updates were made so far."""
        self.scalars.write(step, lr)
        if self._replicas_optimizer is not None and not self._updates_replicated_in_pass:
            self._replicas_optimizer.prepare(step, lr)

    @property
    def _updates_replicated_in_pass(self) -> bool:
        return self._ranks.device.type == "cuda"

    def update_replicated_in_pass(self, gradients: Sequence[Tensor], is_good: Tensor) -> None:
        """Update the replicated tables on a GPU, unless `is_good` [1] is 0, by sums as `update_replicated_after_pass` takes."""
        if self._replicas_optimizer is not None and self._updates_replicated_in_pass:
            self._replicas_optimizer.step_by_kernels(gradients, self.scalars, is_good)

    def update_replicated_after_pass(self, gradients: Sequence[Tensor]) -> None:
        """Mark the rows of replicated tables that have gradients, and update them on CPUs.

        `gradients` are sums over all ranks, in the order of `replicated_shapes`.
        """
        if self._replicas_optimizer is None:
            return
        if self._touched_replicas is not None:
            self._touched_replicas.add(gradients)
        if self._updates_replicated_in_pass:
            return
        for replica, gradient in zip(self._replicas.values(), gradients, strict=True):
            replica.grad = gradient
        self._replicas_optimizer.step()

    def _keyed_shards(self) -> list[KeyedShard]:
        """Return this rank's shards of tables for raw keys, in the order of their memory."""

        def keyed(
            shard: TableShard, states: Iterable[Tensor], slots: Tensor | None = None
        ) -> KeyedShard:
            bound = initial_bound(self._tables[shard.table].declared)
            return KeyedShard(
                shard.table,
                self.keys_of[shard.table],
                shard.weight,
                [*states],
                shard.row_offset,
                shard.column_offset,
                bound,
                slots,
            )

        def owned(shard: OwnedShard) -> KeyedShard:
            if self.tier is None or shard.tier_index is None:
                return keyed(shard.described, shard.states.values())
            memories, slots = self.tier.arena(shard.tier_index)
            described = replace(shard.described, weight=memories.pop(WEIGHT))
            return keyed(described, memories.values(), slots)

        own = [
            owned(shard)
            for shard in self._own
            if shard.table.name in self.keys_of and len(shard.weight)
        ]
        optimizer = self._replicas_optimizer
        return own + [
            keyed(
                TableShard(name, replica.detach(), 0, 0),
                [] if optimizer is None else _tensors(optimizer.state[replica]),
            )
            for name, replica in self._replicas.items()
            if name in self.keys_of
        ]

    def write_rekeyed(self, rekeyed: Mapping[str, Rekeyed]) -> None:
        """Give rows of tables for raw keys to other keys, before the batch that has them is looked up, and when it has slots."""
        self._resets.write(rekeyed)
        if self.rekeyed is not None:
            self.rekeyed.add(rekeyed)

    def train(self, mode: bool = True) -> None:
        """Count the traffic of tables in host memory in training only; lookups are the same in evaluation."""
        if self.tier is not None:
            self.tier.train(mode)

    def close(self) -> None:
        """Remove the files of tables on disk."""
        if self.tier is not None:
            self.tier.close()

    def disk_bytes(self) -> tuple[int, int]:
        """Return the bytes that tables on disk take at most so far, and with all rows, over all ranks; all ranks must call it."""
        sizes = (0, 0) if self.tier is None else self.tier.disk_bytes()
        summed = torch.tensor(sizes, dtype=torch.float64, device=self._ranks.device)
        stored, full = self._ranks.all_reduce_sum(summed).tolist()
        return int(stored), int(full)

    def host_traffic(self, steps: int) -> dict[str, float]:
        """Return the traffic of tables in host memory per step since the last call; all ranks must call it.

        `tier_hit_rate` is of all ids; rows and bytes, such as `tier_rows_in`, are sums over ranks; `tier_ms`, of the host, and
        `tier_wait_ms`, of the step, are means over ranks. Tables on disk add the same of the disk, such as `tier_disk_rows_in`.
        Without such tables it is empty.
        """
        if all(table.host is None for table in self._all()):
            return {}
        counts = dict.fromkeys(TRAFFIC, 0.0) if self.tier is None else self.tier.take_counts()
        values = torch.tensor(list(counts.values()), dtype=torch.float64)
        summed = self._ranks.all_reduce_sum(values.to(self._ranks.device)).tolist()
        total = dict(zip(counts, summed, strict=True))
        hit_rate = 1 - total.pop("missing") / max(total.pop("ids"), 1)
        for name in ("ms", "wait_ms", "disk_wait_ms"):
            total[name] /= self._ranks.world_size
        if not self.has_disk_tables:
            total = {name: value for name, value in total.items() if "disk" not in name}
        return {"tier_hit_rate": hit_rate} | {
            f"tier_{name}": value / steps for name, value in total.items()
        }

    def weights(self) -> State:
        """Return `<table>.weight` of every table: sharded tensors, or plain ones for replicated tables.

        Of tables in host memory it is that memory; call `reload` after writing to it.
        """
        self._write_back()
        return {
            f"{table.name}.{WEIGHT}": self._sharded(table, WEIGHT, table.dtype)
            if table.shards
            else self._replicas[table.name].detach()
            for table in self._all()
        }

    def initial_rows(self) -> dict[str, InitialRows]:
        """Return the initial weights of all tables on disk, of which `weights` has the changes, by the same names."""
        return {
            f"{table.name}.{WEIGHT}": InitialRows(
                self._seed, table.name, initial_bound(table.declared)
            )
            for table in self._all()
            if table.host is not None and table.host.is_on_disk
        }

    def optimizer_state(self) -> State:
        """Return `<table>.<state>` of every table, such as `cat_0.momentum1`, laid out as its weight; see `weights`."""
        self._write_back()
        state: State = {}
        for table in self._all():
            for field in self._rule.states:
                name = f"{table.name}.{field.name}"
                if table.shards:
                    state[name] = self._sharded(table, field.name, torch.float32, field.per_row)
                else:
                    assert self._replicas_optimizer is not None, "there are replicas"
                    of_replica = self._replicas_optimizer.state[self._replicas[table.name]]
                    state[name] = of_replica[field.name]
        return state

    def optimizer_shapes(self) -> dict[str, torch.Size]:
        return {
            f"{table.name}.{state}": shape
            for table in self._all()
            for state, shape in self._rule.state_shapes(table.shape).items()
        }

    def _sharded(
        self, table: PlannedTable, part: str, dtype: torch.dtype, per_row: bool = False
    ) -> ShardedTensor:
        """Return this rank's shards of a table's weight or of an optimizer state as a part of the complete one."""
        dims = 1 if per_row else 2
        pieces = [
            Piece(
                tuple(shard.metadata.shard_offsets[:dims]),
                shard.weight if part == WEIGHT else shard.states[part],
            )
            for shard in self._own
            if shard.table is table and len(shard.weight)
        ]
        return ShardedTensor(table.shape[:dims], dtype, pieces)


def _expansions(
    multi_hot: MultiHot, placement: Placement, device: torch.device
) -> dict[str, Tensor]:
    """Return the further ids of each id, of the features that this rank looks up."""
    requested = [shard for group in placement.requested for shard in group.shards]
    tables: list[LocalTable | ColumnShard] = [*placement.owned, *requested, *placement.replicas]
    here = {lookup.feature for table in tables for lookup in table.lookups}
    return {
        feature: multi_hot.lookup_table(feature, device)
        for feature in multi_hot.hotness
        if feature in here
    }


def _tensors(state: Mapping[str, object]) -> Iterator[Tensor]:
    """Yield the tensors with a row per row of the table of an optimizer's state."""
    return (value for value in state.values() if isinstance(value, Tensor) and value.dim())
