"""All-to-alls with known sizes: from rank to rank, or in two hops, the first within a node.

In two hops, a rank gives what goes to ranks of one local number to the rank of its own node that has it. That one joins what it
is given, and sends each other node one message. So a rank speaks with the others of its node and with one rank of each other
node, and all ranks of a node send equally much of what one of them has for all ranks. What arrives has the bits and the order
of one hop.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nn.distributed.process_group import Ranks, open_channel

# W: ranks, L: ranks of a node, N: nodes


class OneHop:
    """Sends every rank of a communicator its message."""

    def __init__(self, channel: dist.ProcessGroup | None) -> None:
        self._channel = channel

    def __call__(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        """Send `sent_sizes` of `sent` to the ranks, in their order, and fill `received` with what they send, as many as given."""
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self._channel)


def has_two_hops(ranks: Ranks) -> bool:
    """Return whether there are several nodes of several ranks."""
    return 1 < ranks.local_world_size < ranks.world_size


class TwoHops:
    """Sends within the node first; `name` is that of its communicators, which all ranks open."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._rank, self._in_node = ranks.rank, ranks.local_world_size
        firsts = range(0, ranks.world_size, self._in_node)
        nodes = [list(range(first, first + self._in_node)) for first in firsts]
        peers = [list(of_number) for of_number in zip(*nodes, strict=True)]
        self._node = nodes[self._rank // self._in_node]
        self._nodes, self._peers = nodes, peers
        self._within = OneHop(open_channel(ranks, f"{name} within nodes", nodes))
        self._between = OneHop(open_channel(ranks, f"{name} between nodes", peers))

    def __call__(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> None:
        """Send as in one hop; all messages must have the size of their sender, or all that of their receiver."""
        # Equal messages to all are those of a sender. So a rank knows the sizes of messages between others.
        is_of_sender = len(set(sent_sizes)) == 1

        def size(sender: int, receiver: int) -> int:
            return received_sizes[sender] if is_of_sender else sent_sizes[receiver]

        own = self._peers[self._rank % self._in_node]
        parts = sent.split(sent_sizes)
        arrived = _joined_on_arrival(
            self._within,
            [[parts[rank] for rank in of_number] for of_number in self._peers],
            [[size(sender, peer) for peer in own] for sender in self._node],
        )
        self._between(
            received,
            arrived,
            [sum(size(sender, self._rank) for sender in node) for node in self._nodes],
            [sum(size(sender, peer) for sender in self._node) for peer in own],
        )


AllToAll = OneHop | TwoHops


def _joined_on_arrival(
    within: OneHop, parts: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
) -> Tensor:
    """Send each rank of the node its `parts`; return what arrives, `sizes` [L][N] of each, in the order of the receivers."""
    sent = torch.cat([part for of_rank in parts for part in of_rank])
    received_sizes = [sum(of_sender) for of_sender in sizes]
    received = sent.new_empty(sum(received_sizes), *sent.shape[1:])
    within(received, sent, received_sizes, [sum(map(len, of_rank)) for of_rank in parts])
    blocks = [
        block.split(list(of_sender))
        for block, of_sender in zip(received.split(received_sizes), sizes, strict=True)
    ]
    return torch.cat([part for of_receiver in zip(*blocks, strict=True) for part in of_receiver])
