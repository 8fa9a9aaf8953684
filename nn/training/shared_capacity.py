"""The capacity for ragged ids of a batch, which all ranks must have alike."""

from dataloading.batch import Batch
from dataloading.dataset.batch_layout import BatchLayout
from nn.distributed.process_group import HostChannel, Ranks
from nn.sharding.sharded_tables import ShardedTables
from nn.training.slow_batch_warning import SlowBatchWarning


class SharedCapacity:
    """Gives batches the capacity of the rank whose batch has most ids."""

    def __init__(self, tables: ShardedTables, ranks: Ranks) -> None:
        self._counts = tables.rank_tables.counts
        self._ragged = [name for name, count in self._counts(1, ()).items() if not count.hotness]
        # The host knows the numbers of ids, so that no GPU waits.
        self._channel = HostChannel() if self._ragged and ranks.world_size > 1 else None
        self._warn = SlowBatchWarning(ranks)

    def of(self, batch: Batch) -> Batch:
        """Return the batch, or a copy with larger capacities; all ranks must call it."""
        layout = batch.layout
        doublings = layout.doublings
        if self._channel is not None:
            most = self._channel.maximum([*(doublings or [0] * len(self._ragged))])
            doublings = tuple(map(int, most)) if any(most) else ()
        if doublings:
            over = [name for name, each in zip(self._ragged, doublings, strict=True) if each]
            self._warn(
                f"a batch has more ids of {', '.join(over)} than the captured step has room for"
            )
        assert layout.counts == self._counts(layout.rows, layout.doublings), "of the step's dataset"
        if doublings == layout.doublings:
            return batch
        return batch.in_layout(BatchLayout.of(layout.spec, layout.rows, doublings))
