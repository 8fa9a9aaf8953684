"""A copy of a run's state in host memory, which can be written while the original trains on."""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorBase

REGISTERED_BYTES = 2**24
"""Tensors from this size on lie in pages of their own, which are pinned as they are."""
TOUCHING_THREADS = 8

State = dict[str, Tensor | ShardedTensor]


class StagingBuffer:
    """Memory for the copies, taken at the first one and used again; on GPUs it is pinned.

    Args:
        device: where the state lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, state: State) -> State:
        """Return a copy of this rank's part of a state; valid until the next call."""
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
            Shard(self._of_tensor((name, index), each.tensor), _on_host(each.metadata))
            for index, each in enumerate(sharded.local_shards())
        ]
        whole = sharded.metadata()
        whole = replace(whole, shards_metadata=[_on_host(each) for each in whole.shards_metadata])
        # The base's constructor: the class's own wants a process group. Saving asks for shards and metadata only.
        copied = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, whole)
        return cast(ShardedTensor, copied)

    def _of_tensor(self, key: tuple[str, int], value: Tensor) -> Tensor:
        value = value.detach()
        buffer = self._buffers.get(key)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = self._buffers[key] = _host_memory(value)
        return buffer.copy_(value, non_blocking=True)


def _on_host(shard: ShardMetadata) -> ShardMetadata:
    """Where a shard is, but in its rank's host memory."""
    assert shard.placement is not None, "TorchRec places every shard on a rank"
    return ShardMetadata(
        shard.shard_offsets, shard.shard_sizes, f"rank:{shard.placement.rank()}/cpu"
    )


def num_bytes(state: State) -> int:
    """Bytes of this rank's part of a state."""
    return sum(
        each.nbytes
        for value in state.values()
        for each in (
            [shard.tensor for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else [value]
        )
    )


def _host_memory(value: Tensor) -> Tensor:
    """Memory like a tensor, on the host; pinned for one on a GPU."""
    if value.device.type != "cuda":
        return torch.empty(value.shape, dtype=value.dtype)
    if value.nbytes < REGISTERED_BYTES:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    # torch would round pinned memory up to a power of two: up to twice the tables. Large pages are pinned in half the time.
    pages = mmap.mmap(-1, value.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=value.dtype).view(value.shape)
    with ThreadPoolExecutor(TOUCHING_THREADS) as pool:
        list(pool.map(Tensor.zero_, memory.view(-1).chunk(TOUCHING_THREADS)))
    cudart, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, memory.nbytes, 0)))
    # The pages go back when the tensor does; at the end of the process they do by themselves.
    weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
    return memory
