"""The way of a batch through a step: its ids are sent and its rows fetched ahead, then it is trained or evaluated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from configs.schema import Config
from dataloading.batch import Batch
from dataloading.keys.rekeyed import Rekeyed
from dataloading.loader import Loader
from nn.sharding.batch_rows import BatchRows
from nn.sharding.local_ids import LocalIds
from nn.sharding.placement import RankTables
from nn.sharding.request_capacity import RequestCapacity
from nn.sharding.sharded_tables import ShardedTables
from nn.tiers.read_ahead import Need
from nn.training.captured_pass import LaunchedPass
from nn.training.pass_context import PassContext
from nn.training.shared_capacity import SharedCapacity, SlowBatchWarning
from nn.training.step_builder import StepBuilder


class StepRunner:
    """Exchange of ids, and passes over batches; all ranks must call the methods alike.

    `builder` makes what batches of a size need; `request_capacity` is for the distinct rows of a batch, and for the events of
    its parts. `num_launched` are trained batches whose pass was no CUDA graph.
    """

    def __init__(
        self, tables: ShardedTables, context: PassContext, config: Config, *, capture: bool
    ) -> None:
        self.tables = tables
        self._context = context
        self.builder = StepBuilder(tables, context, config, capture=capture)
        self._capacity = SharedCapacity(tables, context.ranks)
        self._ids_are_here = _arrive_as_they_are(tables.rank_tables)
        self._no_ids = torch.empty(0, dtype=torch.int32, device=context.ranks.device)
        self.request_capacity = RequestCapacity(tables.rank_tables, context.chunk_rows)
        self._warn = SlowBatchWarning(context.ranks)
        # Of torch itself: in C++ it finds the current stream, for which `torch.cuda` takes longer than for the wait.
        self._is_started = torch.Event(context.ranks.device)
        self.num_launched = 0

    def measure(self, loader: Loader) -> None:
        """Set the capacity for distinct rows of a loader's full batches, unless it is set, or their first one tells as much."""
        batches = (self._capacity.of(loader.batch(step)) for step in loader.spread_steps())
        device = self._context.ranks.device
        ids = (batch.flat_ids.to(device) for batch in batches if not batch.layout.doublings)
        size = loader.batch_size // self._context.ranks.world_size
        self.request_capacity.measure(size, ids)

    def announce(self, batch: Batch) -> Need | None:
        """Send the ids of a batch that comes later; return the rows on disk that this rank needs for it."""
        rows = self._send(self._capacity.of(batch))
        lookup = self.builder.lookup(len(batch.labels), rows.ids.capacity)
        need = lookup.needed_rows(rows.ids)
        rows.ids_are_read()
        return need

    def read_ahead(self, needs: Sequence[Need | None]) -> None:
        """Start to read rows from disk, which `announce` has returned."""
        own = [need for need in needs if need is not None]
        if own and self.tables.tier is not None and self.tables.tier.read_ahead is not None:
            self.tables.tier.read_ahead.start(own)

    def start(
        self, batch: Batch, need: Need | None = None, turn: int | None = None
    ) -> tuple[Batch, BatchRows]:
        """Send the ids of a batch on the device to their tables, and fetch the rows of those in host memory.

        `need` is the result of `announce`, if it was called. Batches whose memory is used again have the `turn` 0 or 1, on all
        ranks the same. Returns the batch with the capacity that all ranks have.
        """
        batch = self._capacity.of(batch)
        rows = self._send(batch, turn)
        self._fetch(batch, rows, need)
        return batch, rows

    def wait_for(self, stream: torch.cuda.Stream) -> None:
        """Let the current stream wait for the one on which batches are started."""
        if self.tables.tier is not None:
            self.tables.tier.wait_for(stream)
        else:
            self._is_started.record(stream)
            self._is_started.wait()

    def train(
        self, batch: Batch, rows: BatchRows, rekeyed: Mapping[str, Rekeyed] | None = None
    ) -> Tensor:
        """Run the pass, and return the logits, [B] or [B, T], which the next step overwrites.

        `rekeyed` are those of tables for raw keys that get another key with this batch.
        """
        rows = self._fitting(batch, rows)
        with rows.used(is_trained=self._context.update_tables):
            if rekeyed is not None:
                rows.arrive()
                self.tables.write_rekeyed(rekeyed)
            training = self.builder.training(batch, rows, is_full=self._is_full(batch))
            self.num_launched += isinstance(training, LaunchedPass)
            return training.run(rows, batch)

    def predict(self, batch: Batch, rows: BatchRows) -> Tensor:
        """Return the logits, [B] or [B, T]; the next call overwrites them."""
        rows = self._fitting(batch, rows)
        with rows.used(is_trained=False):
            return self.builder.forward(batch, rows).run(rows, batch)

    def _is_full(self, batch: Batch) -> bool:
        return batch.global_valid == batch.layout.rows * self._context.ranks.world_size

    def _send(self, batch: Batch, turn: int | None = None) -> BatchRows:
        ids = batch.flat_ids
        if batch.layout.doublings or not self._is_full(batch):
            return self._send_exactly(batch)
        if self._ids_are_here:
            # The ids are those of the batch, so there is nothing to release.
            return BatchRows(LocalIds(ids, self._no_ids), release=lambda: None, turn=turn)
        size = len(batch.labels)
        return self.builder.exchanged(size, self.request_capacity.usual(size, ids), ids, turn)

    def _send_exactly(self, batch: Batch) -> BatchRows:
        """Send the ids of an unusual batch, with a capacity for them alone."""
        size, ids, doublings = len(batch.labels), batch.flat_ids, batch.layout.doublings
        num_valid = None if self._is_full(batch) else batch.global_valid
        capacity = self.request_capacity.exact(size, ids, doublings, num_valid)
        return BatchRows(self.builder.lookup(size, capacity).send_ids(ids, num_valid)[0])

    def _fetch(self, batch: Batch, rows: BatchRows, need: Need | None = None) -> None:
        """Fetch the rows of tables in host memory; their ids become slots."""
        if self.tables.tier is not None:
            lookup = self.builder.lookup(len(batch.labels), rows.ids.capacity)
            rows.keep(lookup.hold_rows(rows.ids, need))

    def _fitting(self, batch: Batch, rows: BatchRows) -> BatchRows:
        """Return rows that fit: those given, or, if a rank asked for more than its capacity, others."""
        if not rows.overflow():
            return rows
        self._warn(
            "a batch asks for more distinct rows of tables, or a part of it has more events, than the captured step has room for"
        )
        rows.ids_are_read()
        sent = self._send_exactly(batch)
        if self.tables.tier is not None:
            # Rows move on the prefetcher's stream otherwise.
            self._synchronize()
            self._fetch(batch, sent)
            self._synchronize()
        return sent

    def _synchronize(self) -> None:
        if self._context.ranks.device.type == "cuda":
            torch.cuda.synchronize()


def _arrive_as_they_are(tables: RankTables) -> bool:
    """Return whether the ids of a batch are those of the lookups: of one rank's tables, in their order, and not expanded."""
    counts = tables.counts(1, ())
    looked_up = [lookup.feature for table in tables.placement.owned for lookup in table.lookups]
    return (
        tables.ranks.world_size == 1
        # Of tables in host memory they become slots.
        and tables.tier is None
        and not tables.placement.replicas
        and not tables.placement.requested
        and not tables.expansions
        and all(count.hotness for count in counts.values())
        and list(dict.fromkeys(looked_up)) == list(counts)
    )
