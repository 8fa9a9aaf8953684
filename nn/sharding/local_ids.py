"""Ids of a batch where they are looked up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from nn.ops.host_copy import HostCopy
from nn.tiers.live_batches import Hold


@dataclass(frozen=True, slots=True)
class Room:
    """Numbers for which a batch's exchange has room.

    Attributes:
        level: of the capacities of ragged features; 0 is the usual one.
        requests: of each group of requested tables, rows that a rank can ask of each owner.
        is_usual: whether it is that of most batches, whose step is captured.
    """

    level: int = 0
    requests: tuple[tuple[int, ...], ...] = ()
    is_usual: bool = True


@dataclass(frozen=True, slots=True)
class RequestedIds:
    """A batch's ids of requested tables.

    K: ids of all lookups of a rank's samples, W: ranks

    Attributes:
        local: positions of the rows of this rank's samples, as the lookups read them.
        keys: the same positions sorted, [K].
        order: position of each before sorting, [K].
        asked: rows that all ranks ask of this one's tables on the device, [W * room here]; without such tables empty.
    """

    local: Tensor
    keys: Tensor
    order: Tensor
    asked: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class LocalIds:
    """Ids of a global batch on the ranks that look them up.

    Attributes:
        owned: ids of this rank's tables, feature after feature, in the order of the ranks (`nn.embedding.id_blocks`); behind
            them those that become slots (`nn.tiers.slot_ids`).
        replicated: ids of the replicated tables, feature after feature.
        requested: ids of each group of requested tables.
        room: numbers for which they have room.
        lacks_room: whether any rank has more than that, bool [1]; None if it cannot have.
        release: if their memory is reused: call it once their last use is queued, on the stream of that use.
        hold: of the rows that the ids need, if tables lie in host memory.
    """

    owned: Tensor
    replicated: Tensor
    requested: tuple[RequestedIds, ...] = ()
    room: Room = Room()
    lacks_room: HostCopy | None = None
    release: Callable[[], None] | None = None
    hold: Hold | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, as inputs of a CUDA graph."""
        requested = (tensor for ids in self.requested for tensor in ids.tensors)
        return self.owned, self.replicated, *requested

    def of_tensors(self, tensors: Sequence[Tensor]) -> "LocalIds":
        """Return the same kind of ids with other tensors."""
        owned, replicated, *rest = tensors
        size = len(fields(RequestedIds))
        requested = tuple(
            RequestedIds(*rest[first : first + size]) for first in range(0, len(rest), size)
        )
        return replace(
            self, owned=owned, replicated=replicated, requested=requested, release=None, hold=None
        )

    def rows_arrive(self) -> None:
        """Let the current stream wait for the rows of tables in host memory, before it looks the ids up."""
        if self.hold is not None:
            self.hold.arrive()

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from being reused before `stream` is done with it."""
        if self.release is not None:
            return
        for tensor in self.tensors:
            tensor.record_stream(stream)
