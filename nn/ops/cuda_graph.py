"""CUDA graph of a function of tensors: captured once, replayed for every further input."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from nn.ops.stream_waits import stream_for

WARM_UP_PASSES = 3

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])


class CudaGraph(Generic[Outputs]):
    """CUDA graph of a function, collectives included.

    `function`: launches work on the device only, always with the same shapes and addresses; the host reads nothing back. It
    must keep the memory that it allocates at its first call and uses again. `inputs`: examples; they fix shapes and dtypes, or,
    `in_place`, are the memory that it reads. `warm_ups`: calls before the capture, none where the function is captured again.
    `stream`: stream of the capture; None for the stream that the captures of a device share. `beside`: another graph with
    which this one shares its memory pool; the two are never replayed at the same time. `outputs`: of the latest replay,
    overwritten by the next one.
    """

    def __init__(
        self,
        function: Callable[..., Outputs],
        *inputs: Tensor,
        stream: torch.cuda.Stream | None = None,
        warm_up: AbstractContextManager | None = None,
        beside: "CudaGraph | None" = None,
        in_place: bool = False,
        warm_ups: int = WARM_UP_PASSES,
    ) -> None:
        # The graph holds addresses only, so the memory of the function must live as long as the graph.
        self._function: Callable[..., Outputs] | None = function
        self._inputs: list[Tensor] = [
            example if in_place else example.clone() for example in inputs
        ]
        current = torch.cuda.current_stream()
        stream = stream_for("captures", current.device) if stream is None else stream
        stream.wait_stream(current)
        with torch.cuda.stream(stream), nullcontext() if warm_up is None else warm_up:
            # Compilation, cuBLAS workspaces and NCCL's connections must precede the capture.
            for _ in range(warm_ups):
                function(*self._inputs)
        current.wait_stream(stream)
        torch.cuda.synchronize()
        # cuBLAS has one workspace for each stream, and torch frees it with the first graph of the stream that is closed
        # (pytorch/pytorch#193402). Without one the capture takes its own from the graph's memory, which is kept.
        torch._C._cuda_clearCublasWorkspaces()
        self._graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        _open.add(self)
        pool = None if beside is None else beside._graph.pool()
        # Thread-local: the loader's threads continue to allocate pinned memory meanwhile.
        capture = torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        with _without_collection(), capture:
            self.outputs: Outputs | None = function(*self._inputs)

    def is_of(self, *inputs: Tensor) -> bool:
        """Return whether these are the memory that it reads."""
        pairs = zip(self._inputs, inputs, strict=True)
        return all(mine.data_ptr() == given.data_ptr() for mine, given in pairs)

    def load(self, *inputs: Tensor) -> None:
        """Queue the copy of new inputs; the current stream may overwrite their memory afterwards."""
        assert self.outputs is not None, "the graph is closed"
        # `torch._foreach_copy_` has one program per 65,536 numbers, which takes 8 us even for few.
        for captured, new in zip(self._inputs, inputs, strict=True):
            captured.copy_(new, non_blocking=True)

    def replay(self) -> Outputs:
        """Queue the function on the inputs loaded last; the next call overwrites its outputs."""
        assert self.outputs is not None, "the graph is closed"
        self._graph.replay()
        return self.outputs

    def close(self) -> None:
        """Release the graph and its memory even while this object is referenced."""
        _open.discard(self)
        self._graph.reset()
        self._function = self.outputs = None
        self._inputs = []


_open: WeakSet[CudaGraph] = WeakSet()
_capturing = Lock()


@contextmanager
def _without_collection() -> Iterator[None]:
    """Let Python collect no cycles during a capture, of which torch allows one at a time.

    Parts of a closed step lie in cycles. When their pinned memory is freed, torch records an event on every stream that has
    copied from it. One that records into a capture is never valid, also after it: the next thread that allocates pinned memory
    queries it and fails, with "operation not permitted" or "invalid argument" (as in pytorch/pytorch#193982).
    """
    with _capturing:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def close_graphs() -> None:
    """Close all graphs of this process. A communicator of NCCL waits without end for graphs that captured its collectives."""
    for graph in list(_open):
        graph.close()
