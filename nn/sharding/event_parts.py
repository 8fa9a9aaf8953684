"""Events of what the dense component takes at once: of a batch, or of its parts (`train.accumulate`)."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dataloading.dataset.batch_layout import Doublings, first_ids
from nn.sharding.local_ids import PartCapacity
from nn.sharding.placement import RankTables


class EventParts:
    """Counts of events by sequence group, of parts of `part_rows` of a rank's `batch_size` samples."""

    def __init__(
        self, tables: RankTables, batch_size: int, part_rows: int, doublings: Doublings = ()
    ) -> None:
        counts = tables.counts(batch_size, doublings)
        starts = first_ids(counts, batch_size)
        firsts = [group.features[0] for group in tables.sequences.groups]
        self._lengths = [starts[name] + counts[name].capacity for name in firsts]
        self._batch_size, self._part_rows = batch_size, part_rows

    def most(self, ids: Tensor) -> Tensor:
        """Return the events of the part that has most of each group, int64 [groups], of a batch's ids."""
        lengths = torch.stack([ids.narrow(0, at, self._batch_size) for at in self._lengths]).long()
        in_parts = pad(lengths, (0, -self._batch_size % self._part_rows))
        return in_parts.unflatten(1, (-1, self._part_rows)).sum(2).amax(1)


class PartRoom:
    """Room of a captured step for `events` of a part, by feature of sequence groups."""

    def __init__(
        self, tables: RankTables, batch_size: int, capacity: PartCapacity, doublings: Doublings
    ) -> None:
        groups = zip(tables.sequences.groups, capacity.most, strict=True)
        self.events = {feature: most for group, most in groups for feature in group.features}
        self._parts = EventParts(tables, batch_size, capacity.rows, doublings)
        self._limits = torch.tensor(capacity.most, device=tables.ranks.device)

    def is_exceeded(self, ids: Tensor) -> Tensor:
        """Return whether a part of a batch with these ids has more events, bool [1]."""
        return (self._parts.most(ids) > self._limits).any().view(1)
