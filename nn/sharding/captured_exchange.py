"""The id exchange recorded once as a CUDA graph: collective, order of arrival and expansion start with one call."""

from collections.abc import Callable

import torch
from torch import Tensor

from nn.ops.cuda_graph import WARM_UP_PASSES
from nn.sharding.id_all_to_all import LocalIds


class CapturedIdAllToAll:
    """Sends the ids of whole batches to their tables, on the stream that is current when it is made.

    Launched one by one, its handful of operations took the host 1 ms a step, half of a step on four GPUs.

    Args:
        send: to record: this rank's ids, feature after feature, to ids at their tables.
        ids: example; shape and dtype are then fixed.
    """

    def __init__(self, send: Callable[[Tensor], LocalIds], ids: Tensor) -> None:
        self._send = send
        self._input = ids.clone()
        for _ in range(WARM_UP_PASSES):
            send(self._input)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: the loader's threads go on allocating pinned memory meanwhile.
        with torch.cuda.graph(
            self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            arrived = send(self._input)
        self._arrived = LocalIds(arrived.owned, arrived.replicated, self._release)
        self._is_held = False
        self._released = torch.cuda.Event()

    def __call__(self, ids: Tensor) -> LocalIds:
        """Exchange the next ids."""
        if self._is_held:
            # Two feeds at a time: an evaluation while the next training batch waits.
            return self._send(ids)
        self._is_held = True
        torch.cuda.current_stream().wait_event(self._released)
        self._input.copy_(ids, non_blocking=True)
        self._graph.replay()
        return self._arrived

    def close(self) -> None:
        """Free the recording, whoever still knows this object: NCCL waits for it when its group is closed."""
        self._graph.reset()
        del self._send, self._arrived  # the tables' memory

    def _release(self) -> None:
        """What arrived may be overwritten, once the current stream has come here."""
        self._released.record()
        self._is_held = False
