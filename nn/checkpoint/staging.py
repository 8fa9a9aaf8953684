"""Staging of a run's state in host memory, so that training continues while a checkpoint is written."""

import math

import torch
from torch import Tensor

from nn.distributed.sharded_tensor import Piece, ShardedTensor, State, local_tensors, pieces_of
from nn.ops.pinned_memory import pinned_memory


class StagingBuffer:
    """Host buffers for copies of the state, allocated at the first copy and reused; pinned for GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def take(self, state: State) -> State:
        """Return a copy of this rank's shards and tensors; valid until the next call."""
        copied: State = {}
        for name, value in state.items():
            pieces = [
                Piece(offsets, self._copy((name, offsets), tensor))
                for offsets, tensor in pieces_of(value)
            ]
            copied[name] = ShardedTensor(value.shape, value.dtype, pieces)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _copy(self, key: tuple[str, tuple[int, ...]], value: Tensor) -> Tensor:
        if in_file(value):
            return value
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            if value.device.type == "cuda":
                buffer = pinned_memory(value.shape, value.dtype)
            else:
                buffer = torch.empty(value.shape, dtype=value.dtype)
            self._buffers[key] = buffer
        return buffer.copy_(value, non_blocking=True)


def stored_bytes(state: State) -> int:
    """Return the bytes that a checkpoint of all ranks takes."""
    return sum(math.prod(value.shape) * value.dtype.itemsize for value in state.values())


def in_file(tensor: Tensor) -> bool:
    """Return whether a tensor lies in a mapped file, which stays as it is until the next save: no copy is needed."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def num_bytes(state: State, *, with_files: bool = True) -> int:
    """Return the bytes of this rank's shards and tensors, with or without those in mapped files."""
    return sum(
        tensor.nbytes * (with_files or not in_file(tensor))
        for value in state.values()
        for tensor in local_tensors(value)
    )
