"""Staging of a run's state in host memory, so that training continues while a checkpoint is written."""

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorBase

from nn.ops.pinned_memory import pinned_memory

State = dict[str, Tensor | ShardedTensor]


class StagingBuffer:
    """Host buffers for copies of the state, allocated at the first copy and reused; pinned for GPUs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, state: State) -> State:
        """Return a copy of this rank's shards and tensors; valid until the next call."""
        copied = {
            name: self._of_shards(name, value)
            if isinstance(value, ShardedTensor)
            else self._of_tensor((name, 0), value)
            for name, value in state.items()
        }
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _of_shards(self, name: str, sharded: ShardedTensor) -> ShardedTensor:
        shards = [
            Shard(self._of_tensor((name, index), shard.tensor), _on_host(shard.metadata))
            for index, shard in enumerate(sharded.local_shards())
        ]
        metadata = sharded.metadata()
        on_host = [_on_host(shard) for shard in metadata.shards_metadata]
        metadata = replace(metadata, shards_metadata=on_host)
        # The constructor of `ShardedTensor` needs a process group; the base's does not. Saving uses shards and metadata only.
        copied = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)
        return cast(ShardedTensor, copied)

    def _of_tensor(self, key: tuple[str, int], value: Tensor) -> Tensor:
        value = value.detach()
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


def _on_host(shard: ShardMetadata) -> ShardMetadata:
    """Return a shard's metadata with placement in its rank's host memory."""
    assert shard.placement is not None, "TorchRec places every shard on a rank"
    return ShardMetadata(
        shard.shard_offsets, shard.shard_sizes, f"rank:{shard.placement.rank()}/cpu"
    )


def stored_bytes(state: State) -> int:
    """Return the bytes that a checkpoint of all ranks takes."""
    total = 0
    for value in state.values():
        if isinstance(value, ShardedTensor):
            described = value.metadata()
            total += math.prod(described.size) * described.tensor_properties.dtype.itemsize
        else:
            total += value.nbytes
    return total


def in_file(tensor: Tensor) -> bool:
    """Return whether a tensor lies in a mapped file, which stays as it is until the next save: no copy is needed."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None


def num_bytes(state: State, *, with_files: bool = True) -> int:
    """Return the bytes of this rank's shards and tensors, with or without those in mapped files."""
    return sum(
        tensor.nbytes * (with_files or not in_file(tensor))
        for value in state.values()
        for tensor in (
            [shard.tensor for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [value]
        )
    )
