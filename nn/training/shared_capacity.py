"""The capacity for ragged ids of a batch, which all ranks must have alike, and the warning that one does not fit the step."""

import logging

from dataloading.batch import Batch
from dataloading.dataset.batch_layout import BatchLayout
from nn.distributed.process_group import HostChannel, Ranks
from nn.sharding.sharded_tables import ShardedTables


class SlowBatchWarning:
    """Says once, on rank 0, why batches are launched operation by operation; says nothing on CPUs, where no step is captured."""

    def __init__(self, ranks: Ranks) -> None:
        self._is_due = ranks.is_rank0 and ranks.device.type == "cuda"

    def __call__(self, reason: str) -> None:
        """Warn, unless this warning has been given before. `reason`: "a batch has more ... than ..."."""
        if not self._is_due:
            return
        self._is_due = False
        logging.getLogger(__name__).warning(
            f"{reason}; such batches are trained operation by operation, which is slower. If their ids or lengths follow "
            "their order, set data.shuffle_block"
        )


class SharedCapacity:
    """Gives batches the capacity of the rank whose batch has most ids."""

    def __init__(self, tables: ShardedTables, ranks: Ranks) -> None:
        self._counts = tables.rank_tables.counts
        self._ragged = [name for name, count in self._counts(1, ()).items() if not count.hotness]
        # The host knows the numbers of ids, so that no GPU waits.
        self._channel = HostChannel() if self._ragged and ranks.world_size > 1 else None
        self._warn = SlowBatchWarning(ranks)
        self._checked: BatchLayout | None = None

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
        if layout is not self._checked:
            counts = self._counts(layout.rows, layout.doublings)
            assert layout.counts == counts, "of the step's dataset"
            self._checked = layout
        if doublings == layout.doublings:
            return batch
        return batch.in_layout(BatchLayout.of(layout.spec, layout.rows, doublings))
