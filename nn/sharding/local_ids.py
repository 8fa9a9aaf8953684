"""Ids of a batch where they are looked up."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import Doublings

ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class PartCapacity:
    """The events of each sequence group, `most`, for which a part of `rows` samples of a batch has room."""

    rows: int
    most: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Numbers of ids and rows that fit into a batch's exchange; a step is captured with the capacity that `is_usual`.

    `doublings` is how often the capacity of each ragged feature is doubled, usually empty; `requests` has, of each group of
    requested tables, the rows that a rank can ask of each owner, and `merged` the distinct ones that a group of ranks can; empty
    where no owner merges them. `parts` has the events of the batch, or of its parts; None: as many as its layout has room for.
    """

    doublings: Doublings = ()
    requests: tuple[tuple[int, ...], ...] = ()
    merged: tuple[tuple[int, ...], ...] = ()
    parts: PartCapacity | None = None
    is_usual: bool = True


@dataclass(frozen=True, slots=True)
class RequestedIds:
    """A batch's ids of requested tables.

    K: ids of all lookups of a rank's samples, W: ranks of a group, G: groups

    Attributes:
        local: positions of the rows of this rank's samples, as the lookups read them.
        keys: the same positions sorted, [K].
        order: position of each before sorting, [K].
        asked: rows that a group asks of this rank's tables on the device, those of all groups, [G * capacity here]; without
            such tables empty.
        merged_keys: sorted positions of the rows that the group's ranks ask for among the distinct ones,
            [W * capacity here]; empty where no owner merges them.
        merged_order: position of each before sorting.
    """

    local: Tensor
    keys: Tensor
    order: Tensor
    asked: Tensor
    merged_keys: Tensor
    merged_order: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class LocalIds:
    """Ids of a global batch on the ranks that look them up.

    `owned` are in the order of the ranks within a feature (`nn.embedding.id_blocks`), behind them those that become slots
    (`nn.tiers.slot_ids`); `requested` are those of each group of requested tables. If all lie in one `memory`, uint8, that is
    copied at once.
    """

    owned: Tensor
    replicated: Tensor
    requested: tuple[RequestedIds, ...] = ()
    capacity: Capacity = Capacity()
    memory: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        requested = (tensor for ids in self.requested for tensor in ids.tensors)
        return self.owned, self.replicated, *requested

    def joined(self) -> Tensor:
        """Return all tensors in one memory, for `of_memory`: their own, or a copy."""
        if self.memory is not None:
            return self.memory
        size = sum(_room(tensor) for tensor in self.tensors)
        memory = torch.empty(size, dtype=torch.uint8, device=self.owned.device)
        for place, tensor in zip(self.of_memory(memory).tensors, self.tensors, strict=True):
            place.copy_(tensor)
        return memory

    def of_memory(self, memory: Tensor) -> "LocalIds":
        """Return the same kind of ids in a memory that `joined` has made."""
        places, first = [], 0
        for tensor in self.tensors:
            place = memory[first : first + tensor.nbytes].view(tensor.dtype)
            places.append(place.view(tensor.shape))
            first += _room(tensor)
        owned, replicated, *rest = places
        size = len(fields(RequestedIds))
        requested = tuple(
            RequestedIds(*rest[first : first + size]) for first in range(0, len(rest), size)
        )
        return LocalIds(owned, replicated, requested, self.capacity, memory)


def _room(tensor: Tensor) -> int:
    """Return the bytes of a tensor, rounded up so that kernels may read the next one in their largest words."""
    return (tensor.nbytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES
