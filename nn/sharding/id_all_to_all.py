"""The id exchange with known shapes: one all-to-all with constant splits; the host reads nothing back.

Each rank is sent the same number of ids of each table in every full batch: those of a ragged feature are filled up to its
capacity, and followed by the lengths of its rows. So the order of sending and the order after arrival are two index
tensors, made once.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import IdCount, first_ids
from nn.distributed.all_to_all import AllToAll
from nn.ops.cuda_graph import CudaGraph
from nn.sharding.batch_rows import BatchRows
from nn.sharding.local_ids import LocalIds


class IdAllToAll:
    """All-to-all of the ids of full batches.

    `owned_by_rank` has the features that each rank looks up, each once, in its order; a feature may go to several ranks.
    `counts` are in the order of the batch.
    """

    def __init__(
        self,
        owned_by_rank: Sequence[Sequence[str]],
        replicated: Sequence[str],
        counts: Mapping[str, IdCount],
        *,
        batch_size: int,
        rank: int,
        device: torch.device,
        channel: AllToAll,
    ) -> None:
        self._world_size = len(owned_by_rank)
        self._channel = channel
        sizes = {name: count.sent_size(batch_size) for name, count in counts.items()}
        starts = first_ids(counts, batch_size)
        local = {name: torch.arange(starts[name], starts[name] + sizes[name]) for name in sizes}
        self._send_sizes = [sum(sizes[name] for name in names) for names in owned_by_rank]
        self._receive_sizes = [self._send_sizes[rank]] * self._world_size
        self._send_index = _on(device, [local[name] for names in owned_by_rank for name in names])
        self._replicated_index = _on(device, [local[name] for name in replicated])

        # One block per rank arrives, feature after feature; the lookup reads one block per feature, rank after rank: first
        # the ids, then the lengths of a ragged feature. A single rank's ids are in that order already.
        blocks, offset = [], 0
        for name in owned_by_rank[rank] if self._world_size > 1 else ():
            capacity = counts[name].capacity
            for first, end in ((0, capacity), (capacity, sizes[name])):
                for source in range(self._world_size):
                    start = source * self._send_sizes[rank] + offset
                    blocks.append(torch.arange(start + first, start + end))
            offset += sizes[name]
        self._arrival_index = _on(device, blocks)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Exchange the ids of a full batch, this rank's, feature after feature; return owned and replicated ones."""
        sent = ids.index_select(0, self._send_index)
        owned = sent
        if self._world_size > 1:
            received = ids.new_empty(sum(self._receive_sizes))
            self._channel(received, sent, self._receive_sizes, self._send_sizes)
            owned = received.index_select(0, self._arrival_index)
        return owned, ids.index_select(0, self._replicated_index)


Send = Callable[[Tensor], tuple[LocalIds, Tensor | None]]


class CapturedIdAllToAll:
    """The id exchange as two CUDA graphs that batches take in turns, on the stream that is current when they are built.

    A pass may so read ids where they are, while the next batch's arrive. Launched one by one, its operations took 1 ms of host
    time per step, half of a step on four GPUs.

    `send` returns the ids, and the flag that they do not fit, if that can be; an example of ids fixes shape and dtype.
    """

    def __init__(self, send: Send, ids: Tensor) -> None:
        self._send = send
        self._places = _IdPlace(send, ids), _IdPlace(send, ids)
        self._latest = 0

    def __call__(self, ids: Tensor, turn: int | None) -> BatchRows:
        """Exchange the ids of a batch in the memory of its turn, 0 or 1; of a batch that has none, where no turn was before."""
        place = self._places[1 - self._latest if turn is None else turn]
        if place.is_held:
            # Two prefetchers are active: evaluation runs while the next training batch waits.
            return BatchRows(*self._send(ids))
        if turn is not None:
            self._latest = turn
        return place.exchanged(ids, turn)

    def close(self) -> None:
        """Release the CUDA graphs, even while their ids are referenced."""
        for place in self._places:
            place.close()
        # The tables' memory.
        del self._send


class _IdPlace:
    """The graph of an exchange, and the memory where its ids arrive."""

    def __init__(self, send: Send, ids: Tensor) -> None:
        self.is_held = False
        self._released = torch.cuda.Event()
        results: list[tuple[LocalIds, Tensor | None]] = []

        def exchange(ids: Tensor) -> Tensor:
            # After the capture its tensors are the graph's.
            results[:] = [send(ids)]
            # Here and not in the pass, which would wait for a copy of each tensor.
            return results[0][0].joined()

        # Not beside the other place: what this graph overwrites may be where the other one's ids have arrived.
        self._graph: CudaGraph[Tensor] = CudaGraph(
            exchange, ids, stream=torch.cuda.current_stream()
        )
        assert self._graph.outputs is not None, "the graph is open"
        example, self._flag = results.pop()
        self._arrived = example.of_memory(self._graph.outputs)

    def exchanged(self, ids: Tensor, turn: int | None) -> BatchRows:
        self.is_held = True
        torch.cuda.current_stream().wait_event(self._released)
        self._graph.load(ids)
        self._graph.replay()
        return BatchRows(self._arrived, self._flag, self._release, turn)

    def close(self) -> None:
        self._graph.close()
        del self._arrived, self._flag

    def _release(self) -> None:
        """Let the next exchange overwrite the ids, once the current stream has reached this point."""
        self._released.record()
        self.is_held = False


def _on(device: torch.device, blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *blocks]).to(device)
