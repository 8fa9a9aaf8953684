"""A function of tensors, recorded once as a CUDA graph and replayed for every further input."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

WARM_UP_PASSES = 3

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


class CudaGraph(Generic[Outputs]):
    """A function as a CUDA graph, collectives included.

    Args:
        function: launches work on the device only, always with the same shapes and addresses; the host reads nothing back.
            What it allocates at its first call and uses again it must keep.
        inputs: examples; shapes and dtypes are then fixed.
        stream: to record on; None for the one that all such recordings of a device share.
        warm_up: entered for the calls before the recording, which must leave no trace.
        beside: another recording, never replayed while this one is: they use the same memory in turn.

    Attributes:
        outputs: of the latest replay, overwritten by the next one.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        stream: torch.cuda.Stream | None = None,
        warm_up: AbstractContextManager | None = None,
        beside: "CudaGraph | None" = None,
    ) -> None:
        # The recording knows addresses only, so whatever memory the function owns must live as long.
        self._function: Callable[..., Outputs] | None = function
        self._inputs: list[Tensor] = [given.clone() for given in inputs]
        current = torch.cuda.current_stream()
        stream = _shared_stream(torch.cuda.current_device()) if stream is None else stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream), nullcontext() if warm_up is None else warm_up:
            # Compilation, cuBLAS workspaces and NCCL's connections are made outside of the recording.
            for _ in range(WARM_UP_PASSES):
                function(*self._inputs)
        current.wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside._graph.pool()
        # Thread-local: the loader's threads continue to allocate pinned memory meanwhile.
        with torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        ):
            self.outputs: Outputs | None = function(*self._inputs)

    def load(self, *inputs: Tensor) -> None:
        """Queue the copy of new inputs; once the current stream is past it, their memory may be used again."""
        for recorded, given in zip(self._inputs, inputs, strict=True):
            recorded.copy_(given, non_blocking=True)

    def replay(self) -> Outputs:
        """Queue the function on the inputs loaded last; its outputs are overwritten by the next call."""
        assert self.outputs is not None, "the recording is closed"
        self._graph.replay()
        return self.outputs

    def close(self) -> None:
        """Release the recording and its memory, even while this object is referenced: NCCL waits for it at its own end."""
        self._graph.reset()
        self._function = self.outputs = None
        self._inputs = []


@cache
def _shared_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: the allocator reuses memory on the stream that it was used on."""
    return torch.cuda.Stream(device)
