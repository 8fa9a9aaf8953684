"""Who this process is among the ranks, and the collectives that have nothing to do with tables.

The tables' files (`sharding.py`, `static_exchange.py`, `planner.py`), `checkpoint.py` and this one import
`torch.distributed`, nothing else does; the launcher's environment variables are read here, and in `launcher.py` for how
a rank ends. Everything else takes a `Ranks`.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# Ranks may take very different times to write their part of a checkpoint; one that is gone is noticed at once.
HOST_TIMEOUT = timedelta(hours=2)

# By name, as `open_channel` opens them; closed with the default group, or aborted with it.
_channels: dict[str, dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all: its numbers, its device and a few collectives.

    Attributes:
        rank: 0 .. world_size - 1, over all nodes.
        local_rank: 0 .. local_world_size - 1, on this node.
        world_size: processes in all.
        local_world_size: processes on this node.
        device: the device of this rank.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def is_rank0(self) -> bool:
        """Whether this rank writes files and talks to the terminal."""
        return self.rank == 0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Collect same-shaped tensors on rank 0; None elsewhere."""
        if self.world_size == 1:
            return [tensor]
        parts = (
            [torch.empty_like(tensor) for _ in range(self.world_size)] if self.is_rank0 else None
        )
        dist.gather(tensor.contiguous(), parts, dst=0)
        return parts

    def gather_objects(self, value: Any) -> list[Any] | None:
        """Collect every rank's value on rank 0, None elsewhere; the values must pickle."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.is_rank0 else None
        dist.gather_object(value, values, dst=0)
        return values

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank; the value must pickle."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def run_on_rank0(self, function: Callable[[], Any]) -> Any:
        """Run `function` on rank 0 and return its result on every rank.

        Raises:
            ValueError: on all ranks, with rank 0's text, when `function` raised one. Without this the other ranks
                would wait in the next collective until it times out.
        """
        outcome: tuple[Any, str | None] | None = None
        if self.is_rank0:
            try:
                outcome = (function(), None)
            except ValueError as error:
                outcome = (None, str(error))
        value, problem = self.broadcast_object(outcome)
        if problem is not None:
            raise ValueError(problem)
        return value

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            self.all_reduce_sum(torch.zeros(1, device=self.device)).item()


def process_rank() -> int:
    """This process's rank as the launcher gave it, before any group exists."""
    return int(os.environ.get("RANK", 0))


def node_name() -> str:
    """This machine's name: SLURM's, which tells nodes apart even where they share a machine, or its own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def launched_world() -> tuple[int, int]:
    """Ranks in all and ranks on this node, as the launcher gave them; (1, 1) without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def launcher_restarts() -> int:
    """How often the launcher starts all ranks anew when one has failed; 0 without a launcher."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def ranks_from_environment(device_type: str) -> Ranks:
    """Read what torchrun (or nothing: one process) says about this process.

    Args:
        device_type: `cpu` or `cuda`.

    Raises:
        ValueError: when more ranks run on this node than it has GPUs.
    """
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


def is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone, in gloo's words; NCCL waits until the launcher ends it."""
    return bool(re.search(r"Connection (closed|reset) by peer|Broken pipe", str(error)))


def is_first_reporter(what: str) -> bool:
    """Whether this is the first rank to ask, so that what several ranks know is said once.

    The answer is the launcher's: its store outlives the ranks. Without one, everybody is the first.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    return dist.distributed_c10d._get_default_store().add(what, 1) == 1


class HostChannel:
    """Collectives between the hosts alone, which neither wait for a GPU nor for those of another thread.

    A channel is for one thread at a time. All ranks must open their channels in the same order.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the elementwise maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank; it must pickle."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value on every rank; the values must pickle."""
        values = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values


@contextmanager
def process_group(ranks: Ranks) -> Iterator[None]:
    """Open the default process group (NCCL on GPUs, gloo on CPUs) and close it.

    A rank that fails leaves at once: closing NCCL politely would wait for collectives that the other ranks have begun
    and that this one will never join. They are ended by the launcher.
    """
    if ranks.device.type == "cuda":
        torch.cuda.set_device(ranks.device)
        options: dict[str, Any] = {"backend": "nccl", "device_id": ranks.device}
    else:
        options = {"backend": "gloo"}
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if ranks.world_size == 1 and "MASTER_ADDR" not in os.environ:
        # A plain `python dlrm.py`: TorchRec asks for a group even when it is alone.
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    elif restart != "0" and ranks.local_world_size == ranks.world_size:
        # torchrun's store on one node still has the addresses of the ranks that it started before. On several nodes
        # it makes a new one (c10d rendezvous), and nodes may count differently.
        store, rank, world_size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"restart_{restart}", store)
        options |= {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group(timeout=COLLECTIVE_TIMEOUT, **options)
    try:
        yield
    except BaseException:
        if ranks.device.type == "cuda":
            for group in (*_channels.values(), dist.group.WORLD):
                assert group is not None, "the default group is open inside this block"
                group.abort()
        else:
            dist.destroy_process_group()
        raise
    finally:
        _channels.clear()
    dist.destroy_process_group()


def open_channel(ranks: Ranks, name: str) -> dist.ProcessGroup | None:
    """Open a communicator for collectives that must not wait for those of another stream; all ranks must call it.

    NCCL runs what is queued on one communicator in one order. On CPUs nothing runs beside anything else, and the default
    group does.
    """
    if ranks.world_size == 1 or ranks.device.type != "cuda":
        return None
    if name not in _channels:
        _channels[name] = dist.new_group()
    return _channels[name]
