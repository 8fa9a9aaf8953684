"""A pass recorded once as a CUDA graph and replayed for every whole batch."""

from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from nn.sharding.id_all_to_all import LocalIds

WARM_UP_PASSES = 3


class Pass(Protocol):
    """A function of the device's queues: same shapes, same addresses, no word to the host."""

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [B]."""

    def without_updates(self) -> AbstractContextManager:
        """Within it `run` computes all and changes nothing."""


class CudaGraph:
    """A pass as a CUDA graph, collectives included.

    Args:
        plain: the pass to record; its runs before the recording change nothing. What it makes at its first run it keeps.
        ids: example; shapes and dtypes are then fixed.
        numerical: example.
        labels: example.
        beside: another recording, never replayed while this one is: they use the same memory in turn.
    """

    def __init__(
        self,
        plain: Pass,
        ids: LocalIds,
        numerical: Tensor,
        labels: Tensor,
        *,
        beside: "CudaGraph | None" = None,
    ) -> None:
        # The recording knows addresses only, so whatever memory the pass owns must live as long.
        self._plain = plain
        self._inputs = [each.clone() for each in _tensors(ids, numerical, labels)]
        owned, replicated, *rest = self._inputs
        arguments = (LocalIds(owned, replicated), *rest)
        stream = _stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), plain.without_updates():
            # Compilation, cuBLAS workspaces and NCCL's connections are made outside of the recording.
            for _ in range(WARM_UP_PASSES):
                plain.run(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        # Thread-local: the loader's threads go on allocating pinned memory meanwhile.
        with torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            self._logits = plain.run(*arguments)

    def run(self, ids: LocalIds, numerical: Tensor, labels: Tensor) -> Tensor:
        """Replay the pass on new inputs; the logits are overwritten by the next call."""
        for mine, given in zip(self._inputs, _tensors(ids, numerical, labels), strict=True):
            mine.copy_(given, non_blocking=True)
        if ids.release is not None:
            ids.release()
        self._graph.replay()
        return self._logits

    def close(self) -> None:
        """Free the recording, whoever still knows this object: NCCL waits for it when its group is closed."""
        self._graph.reset()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: the allocator reuses memory on the stream that it was used on."""
    return torch.cuda.Stream(device)


def _tensors(ids: LocalIds, numerical: Tensor, labels: Tensor) -> list[Tensor]:
    return [ids.owned, ids.replicated, numerical, labels]
