"""The id exchange when every shape is known before the run: one all-to-all with constant splits, no word to the host.

With fixed hotness each rank owns the same number of ids of each table in every full batch. So where each id goes, and
where it lies after it has arrived, are two index tensors made once. TorchRec's own `input_dist` sends the lengths first
and waits on the host to learn them, every step.

Only whole batches of fixed hotness and tables that are whole, cut by columns or replicated qualify; anything else takes
TorchRec's way. Both ways end in the same `KJTList`, which the first whole batch proves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import KJTList


@dataclass(frozen=True, slots=True)
class Group:
    """Features whose tables share a way of sharding, as TorchRec looks them up together.

    Attributes:
        owned: features looked up on this rank, in TorchRec's order.
        owned_by_rank: features that each rank looks up; None for replicated tables, which stay at home.
    """

    owned: tuple[str, ...]
    owned_by_rank: tuple[tuple[str, ...], ...] | None


class StaticExchange:
    """Sends the ids of whole batches to their tables.

    Args:
        groups: TorchRec's groups of tables, in its order.
        hotness: feature -> ids a row, in the order of the batch.
        batch_size: rows of this rank, B.
        rank: this rank.
        world_size: ranks, W.
        dtype: of the ids, and of the lengths and offsets made for them.
        device: where the ids are.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        hotness: dict[str, int],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = {name: batch_size * each for name, each in hotness.items()}
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        home = {name: torch.arange(starts[name], starts[name] + sizes[name]) for name in sizes}

        travelling = [group for group in groups if group.owned_by_rank is not None]
        sent = [
            [name for group in travelling for name in group.owned_by_rank[to]]
            for to in range(world_size)
        ]
        self._send_sizes = [sum(sizes[name] for name in names) for names in sent]
        self._receive_sizes = [self._send_sizes[rank]] * world_size
        self._send_index = _on(device, [home[name] for names in sent for name in names])

        # Where in the received buffer a feature's ids from each rank start; features follow each other as sent.
        received = [(group, name) for group in travelling for name in group.owned_by_rank[rank]]
        arrival: dict[tuple[int, int], int] = {}
        offset = 0
        for position, (_, name) in enumerate(received):
            for source in range(world_size):
                arrival[position, source] = source * self._send_sizes[rank] + offset
            offset += sizes[name]

        self._parts: list[_Part] = []
        position = 0
        for group in groups:
            blocks = []
            for name in group.owned:
                if group.owned_by_rank is None:
                    blocks.append(home[name])
                    continue
                for source in range(world_size):
                    start = arrival[position, source]
                    blocks.append(torch.arange(start, start + sizes[name]))
                position += 1
            stride = batch_size * (1 if group.owned_by_rank is None else world_size)
            self._parts.append(
                _Part(
                    index=_on(device, blocks),
                    replicated=group.owned_by_rank is None,
                    layout=_layout(group.owned, hotness, stride, dtype, device),
                )
            )
        self._world_size = world_size

    def __call__(self, ids: Tensor) -> KJTList:
        """Exchange the ids of a whole batch.

        Args:
            ids: this rank's, feature after feature, [sum of B * hotness].

        Returns:
            The ids to look up here: B rows of replicated tables, B * W rows of the others.
        """
        sent = ids.index_select(0, self._send_index)
        if self._world_size == 1:
            received = sent
        else:
            received = ids.new_empty(sum(self._receive_sizes))
            dist.all_to_all_single(received, sent, self._receive_sizes, self._send_sizes)
        return KJTList(
            [
                part.layout((ids if part.replicated else received).index_select(0, part.index))
                for part in self._parts
            ]
        )


@dataclass(frozen=True, slots=True)
class _Part:
    index: Tensor
    replicated: bool
    layout: Any


def _on(device: torch.device, blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *blocks]).to(device)


def _layout(
    names: Sequence[str],
    hotness: dict[str, int],
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return a function that puts ids under constant lengths, all that TorchRec may ask for already known."""
    length_per_key = [stride * hotness[name] for name in names]
    offset_per_key = list(accumulate(length_per_key, initial=0))
    lengths = torch.cat(
        [
            torch.empty(0, dtype=dtype),
            *(torch.full((stride,), hotness[name], dtype=dtype) for name in names),
        ]
    )
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=dtype)]).to(device)
    lengths = lengths.to(device)

    def put(values: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys=list(names),
            values=values,
            lengths=lengths,
            offsets=offsets,
            stride=stride,
            length_per_key=list(length_per_key),
            offset_per_key=list(offset_per_key),
        )

    return put
