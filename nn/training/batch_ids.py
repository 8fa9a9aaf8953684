"""Ids of a batch in the fixed shapes of a step: padding rows, and a capacity for the ids of ragged features."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataloading.batch import Batch
from nn.distributed.process_group import HostChannel, Ranks
from nn.embedding.id_blocks import NO_ID
from nn.sharding.sharded_tables import ShardedTables
from nn.training.slow_batch_warning import SlowBatchWarning

# B: rows of this rank


class BatchIds:
    """Ids of batches as one flat tensor, feature after feature, for `ShardedLookup.send_ids`.

    A feature of fixed hotness has [B, hotness] ids; a padding row has the id 0, which every table has. A ragged feature has as
    many ids as its capacity, those that the batch does not use `NO_ID`, and the length of each row.
    """

    def __init__(self, tables: ShardedTables, ranks: Ranks) -> None:
        self._counts, self._groups = tables.rank_tables.counts, tables.rank_tables.sequences.groups
        self._is_ragged = any(not count.hotness for count in self._counts(1, 0).values())
        # All ranks must take the same capacity, and the host knows the numbers of ids, so that no GPU waits.
        needs_channel = self._is_ragged and ranks.world_size > 1
        self._channel = HostChannel() if needs_channel else None
        self._warn = SlowBatchWarning(ranks)

    def doublings(self, batch: Batch) -> int:
        """Return how often the capacities must be doubled for the batch of every rank; all ranks must call it."""
        if not self._is_ragged:
            return 0
        used = dict(zip(batch.ids.keys(), batch.ids.length_per_key(), strict=True))
        doublings = 0
        while any(
            used[name] > count.capacity
            for name, count in self._counts(len(batch.labels), doublings).items()
            if not count.hotness
        ):
            doublings += 1
        if self._channel is not None:
            doublings = int(self._channel.maximum([doublings])[0])
        if doublings:
            self._warn(
                "a batch has more ids of ragged features than the captured step has room for"
            )
        return doublings

    def flat(self, batch: Batch, doublings: int) -> Tensor:
        """Return the ids of a batch, on its device."""
        values, rows = batch.ids.values(), len(batch.labels)
        if not self._is_ragged and batch.num_valid == rows:
            return values
        counts = self._counts(rows, doublings)
        lengths = batch.ids.lengths().view(len(counts), rows)
        pieces: list[Tensor] = []
        blocks = values.split(list(batch.ids.length_per_key()))
        for ids, length, count in zip(blocks, lengths, counts.values(), strict=True):
            missing = count.capacity - len(ids)
            pieces.append(ids)
            if missing:
                pieces.append(ids.new_full((missing,), 0 if count.hotness else NO_ID))
            if not count.hotness:
                pieces.append(length.to(ids.dtype))
        return torch.cat(pieces)

    def with_padded_events(self, batch: Batch, doublings: int) -> Batch:
        """Return the batch with the numbers of events in fixed shapes too: zeros up to the capacity of their group's ids."""
        if not batch.events:
            return batch
        counts = self._counts(len(batch.labels), doublings)
        capacities = [
            counts[group.features[0]].capacity for group in self._groups for _ in group.numbers
        ]
        padded = (
            pad(values, (0, capacity - len(values)))
            for values, capacity in zip(batch.events, capacities, strict=True)
        )
        return replace(batch, events=tuple(padded))
