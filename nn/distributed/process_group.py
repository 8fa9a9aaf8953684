"""Process group, ranks and the collectives that do not concern tables.

This module reads the launcher's environment variables, except those by which `launcher.py` ends a rank; other code gets `Ranks`.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from configs.messages import os_error_text
from nn.distributed.errors import Rank0Error, RankError
from nn.distributed.launcher import check_variables, is_launched
from nn.ops.cuda_graph import close_graphs

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Ranks may take very different times to write their files of a checkpoint. Lost ranks are noticed at once anyway.
HOST_TIMEOUT = timedelta(hours=2)
ABORT_S = 30.0
"""Time for NCCL to abort its communicators."""
SHARED_MEMORY = "/dev/shm"
"""Directory of the memory in which the ranks of a node exchange data by NCCL."""

# Groups of `open_channel` by name; destroyed or aborted with the default group.
_channels: dict[str, dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank, world size and device of this process, with a few collectives."""

    rank: int  # 0 .. world_size - 1, over all nodes
    local_rank: int  # 0 .. local_world_size - 1, on this node
    world_size: int  # number of ranks over all nodes
    local_world_size: int  # number of ranks on this node
    device: torch.device

    @property
    def is_rank0(self) -> bool:
        """Return whether this is rank 0, which writes files and prints to the terminal."""
        return self.rank == 0

    def gather(
        self, tensor: torch.Tensor, channel: dist.ProcessGroup | None = None
    ) -> list[torch.Tensor] | None:
        """Gather tensors of one shape on rank 0, on the default communicator or that of `open_channel`; None on other ranks."""
        if self.world_size == 1:
            return [tensor]
        gathered = None
        if self.is_rank0:
            gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.gather(tensor.contiguous(), gathered, dst=0, group=channel)
        return gathered

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Gather picklable values on rank 0; return None on other ranks."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.is_rank0 else None
        dist.gather_object(value, values, dst=0)
        return values

    def all_reduce_sum(
        self, tensor: torch.Tensor, channel: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """All-reduce in place with sum, on the default communicator or that of `open_channel`."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=channel)
        return tensor

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """Start to all-reduce in place with sum on the default communicator; return what lets the current stream wait for it."""
        return dist.all_reduce(tensor, async_op=True).wait

    def all_reduce_max(
        self, tensor: torch.Tensor, channel: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """All-reduce in place with the maximum, on the default communicator or that of `open_channel`."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=channel)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        objects = [value]
        dist.broadcast_object_list(objects, src=0, device=self.device)
        return objects[0]

    def run_on_rank0(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its result on every rank; its ValueError or OSError is a Rank0Error on each."""
        outcome: tuple[Any, str | None] | None = None
        if self.is_rank0:
            try:
                outcome = (function(), None)
            except ValueError as error:
                outcome = (None, str(error))
            except OSError as error:
                outcome = (None, os_error_text(error))
        value, problem = self.broadcast_object(outcome)
        if problem is not None:
            raise Rank0Error(problem)
        return value

    def barrier(self) -> None:
        if self.world_size > 1:
            self.all_reduce_sum(torch.zeros(1, device=self.device)).item()


def process_rank() -> int:
    """Return this process's rank from the launcher's environment; needs no process group."""
    return int(os.environ.get("RANK", 0))


def launched_world() -> tuple[int, int]:
    """Return world size and local world size from the launcher's environment; (1, 1) without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def launcher_restarts() -> int:
    """Return the launcher's maximum number of restarts after failures; 0 without a launcher."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def ranks_from_environment(device_type: str) -> Ranks:
    """Read ranks and device from torchrun's environment; ValueError for other variables, or fewer GPUs than ranks."""
    check_variables()
    rank = process_rank()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size, local_world_size = launched_world()
    if device_type == "cuda":
        count = torch.cuda.device_count()
        if local_world_size > count:
            raise ValueError(
                f"{local_world_size} ranks were started on a node with {count} GPUs; start at most "
                f"{count} with --nproc-per-node, or train on the CPU with device=cpu"
            )
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    return Ranks(rank, local_rank, world_size, local_world_size, device)


def is_lost_peer(error: Exception) -> bool:
    """Return whether a collective failed because another rank exited; NCCL seldom notices, and the launcher ends its ranks."""
    lost = r"Connection (closed|reset) by peer|Broken pipe|remote process exited"
    return bool(re.search(lost, str(error)))


def has_device_failed(error: Exception) -> bool:
    """Return whether a GPU (XID, ECC) or NCCL has failed: no lost rank, and no error of the program in a kernel."""
    kinds = (torch.AcceleratorError, dist.DistBackendError)
    of_program = r"device-side assert|no kernel image|invalid device function"
    is_kind = isinstance(error, kinds) or "CUDA error" in str(error)
    return is_kind and not is_lost_peer(error) and re.search(of_program, str(error)) is None


def store_of_start(name: str) -> dist.Store:
    """Return a store of this start's ranks, of a connection of its own: a wait of the main thread holds the default one's."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"{name}/{restart}", store.clone())


def is_first_reporter(key: str) -> bool:
    """Return whether this rank is the first to call with `key`, by the launcher's store; without a launcher every rank is."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    return dist.distributed_c10d._get_default_store().add(key, 1) == 1


class HostChannel:
    """Gloo group for collectives of one thread on host memory, opened by all ranks in one order."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    def maximum(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        objects = [value]
        dist.broadcast_object_list(objects, src=0, group=self.group, device=torch.device("cpu"))
        return objects[0]

    def gather(self, value: Any) -> list[Any]:
        values = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """Open the default process group (NCCL on GPUs, gloo on CPUs) and destroy it at the end.

    After an error the NCCL communicators are aborted: destroying them would wait for collectives that other ranks have
    started and this rank will never join. The launcher ends the other ranks.

    Raises ValueError: the nodes have unequally many ranks; on all of them. Raises RankError: NCCL found too little room in
    /dev/shm, which containers limit to 64 MiB by default.
    """
    try:
        _open(ranks)
        try:
            _check_nodes(ranks)
            yield
        except BaseException:
            close_graphs()
            if ranks.device.type == "cuda":
                assert dist.group.WORLD is not None, "the default group is open inside this block"
                _abort([*_channels.values(), dist.group.WORLD])
            else:
                dist.destroy_process_group()
            raise
        finally:
            _channels.clear()
        # A graph that somebody still refers to, or a cycle that is not collected yet, would hold this rank here without end.
        close_graphs()
        dist.destroy_process_group()
    except dist.DistBackendError as error:
        line = next((line for line in str(error).splitlines() if SHARED_MEMORY in line), None)
        if line is None:
            raise
        raise RankError(
            f"NCCL has too little shared memory ({line}); give the container a larger {SHARED_MEMORY} (docker run --shm-size=1g, "
            "or in Kubernetes an emptyDir of medium Memory mounted there), or share the host's (--ipc=host)"
        ) from error


def _check_nodes(ranks: Ranks) -> None:
    """Refuse nodes of unequally many ranks, on all of them: plans, groups and hops take the counts of one for those of all."""
    if ranks.local_world_size < ranks.world_size:
        counts = [ranks.local_world_size, -ranks.local_world_size]
        most, least = ranks.all_reduce_max(torch.tensor(counts, device=ranks.device)).tolist()
        if most != -least:
            raise ValueError(
                f"the nodes have {-least} to {most} ranks; start as many on every node (torchrun's --nproc-per-node)"
            )


def _abort(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort NCCL's communicators; leave them after `ABORT_S`: NCCL waits ten minutes for a GPU that has failed."""

    def abort() -> None:
        for group in groups:
            group.abort()

    thread = Thread(target=abort, daemon=True)
    thread.start()
    thread.join(ABORT_S)


def _open(ranks: Ranks) -> None:
    if dist.is_initialized():
        raise ValueError(
            "this process has a process group of torch.distributed, of another training or of its own; end that first, or "
            "train in a process of its own"
        )
    if ranks.device.type == "cuda":
        if ranks.world_size > 1:
            _map_segments()
        torch.cuda.set_device(ranks.device)
        options: dict[str, Any] = {"backend": "nccl", "device_id": ranks.device}
    else:
        options = {"backend": "gloo"}
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if ranks.world_size == 1 and not is_launched():
        # TorchRec requires a process group even for a single process without a launcher.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif restart != "0" and ranks.local_world_size == ranks.world_size:
        # On one node torchrun's store still contains the addresses of the ranks before the restart. On several nodes the
        # c10d rendezvous creates a new store, and restart counts may differ between nodes.
        store, rank, world_size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"restart_{restart}", store)
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(timeout=COLLECTIVE_TIMEOUT, **options)


def _map_segments() -> None:
    """Let torch map the memory that it takes from the GPU, unless the user has set its allocator.

    NCCL registers mapped memory in the graphs that capture it, and peers then read and write it; what cudaMalloc gives, it
    copies to and from buffers of its own. Without effect where the process has used the GPU before.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def open_channel(
    ranks: Ranks, name: str, parts: Sequence[Sequence[int]] = ()
) -> dist.ProcessGroup | None:
    """Open a communicator of GPUs for collectives beside those of another stream, on all ranks; None on CPUs.

    With `parts` of the ranks it is for the part of this rank, also on CPUs.
    """
    if not parts and (ranks.world_size == 1 or ranks.device.type != "cuda"):
        return None
    if name not in _channels:
        _channels[name] = dist.new_subgroups_by_enumeration(parts)[0] if parts else dist.new_group()
    return _channels[name]
