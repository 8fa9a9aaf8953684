"""Calls of a function on several ranks, one process per rank.

The import of torch and TorchRec takes seconds. One process imports them, and the ranks are forks of it. The ranks stay alive for
later calls.
"""

import atexit
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torchrec.distributed import comm

from nn.distributed.launcher import reserved_port
from tests.helpers.forks import fork_context

ANSWER_S = 300
"""Time limit of a call; ranks in a deadlock are killed then."""
GRACE_S = 60
"""Time limit of the other ranks once a rank has failed: they may wait for it in a collective."""


class RankPool:
    """Idle processes for the ranks of one world size."""

    def __init__(self, world_size: int) -> None:
        context = _context()
        self.world_size = world_size
        self.pipes: list[Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], local_world_size: int
    ) -> list[tuple[Any, str]]:
        """Return (result, traceback or "") per rank; ranks without an answer are killed."""
        port = reserved_port()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, port, local_world_size, args)))
        answers: dict[Connection, tuple[Any, str]] = {}
        end = time.monotonic() + ANSWER_S
        while len(answers) < self.world_size:
            missing = [pipe for pipe in self.pipes if pipe not in answers]
            ready = wait(missing, max(end - time.monotonic(), 0))
            if not ready:
                self.close()
                answers |= dict.fromkeys(missing, (None, "a rank gave no answer and was killed"))
            for pipe in ready:
                answers[pipe] = _receive(pipe)
                if answers[pipe][1]:
                    end = min(end, time.monotonic() + GRACE_S)
        return [answers[pipe] for pipe in self.pipes]

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()
            process.join()


def _context() -> mp.context.BaseContext:
    """Return the start method of ranks: a process with a CUDA context must not fork, so on GPUs ranks are spawned."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    return fork_context()


_pool: RankPool | None = None


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, local_world_size: int | None = None
) -> list[Any]:
    """Call `function(*args)` on every rank and return the results in order of rank.

    `function` must be defined at module level. It sees the environment variables of torchrun on nodes of `local_world_size`
    ranks (default: all ranks on one node).
    """
    global _pool
    if _pool is None or _pool.world_size != world_size:
        _close_pool()
        _pool = RankPool(world_size)
    answers = _pool.call(function, args, local_world_size or world_size)
    failures = [trace for _, trace in answers if trace]
    if failures:
        _close_pool()  # a rank that failed within a collective cannot be used again
    assert not failures, "\n".join(failures)
    return [result for result, _ in answers]


@atexit.register
def _close_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def _receive(pipe: Connection) -> tuple[Any, str]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "a rank died"


def launched_as(rank: int, world_size: int, local_world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local_world_size),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, port, local_world_size, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # TorchRec caches its process groups within and across nodes, but each call opens its own process group.
        comm._INTRA_PG = comm._CROSS_PG = None
        os.environ |= launched_as(rank, world_size, local_world_size, port)
        try:
            answer = (function(*args), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
