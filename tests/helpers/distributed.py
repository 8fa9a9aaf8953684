"""Run functions as several ranks, each a process of its own, and collect what they return.

Importing torch and TorchRec takes seconds: one process does it and the ranks are forks of it, which stay and serve
the next call too.
"""

import atexit
import multiprocessing as mp
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torchrec.distributed import comm

ANSWER_S = 300
"""Longest call; ranks that wait for each other for ever are ended."""
GRACE_S = 60
"""Time that the others have once a rank has answered: it may have left them waiting for it."""


class RankPool:
    """Processes that stand by as the ranks of one world."""

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
        """Return (result, traceback or nothing) of every rank; ranks without an answer are ended."""
        port = free_port()
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, port, local_world_size, args)))
        answers: dict[Connection, tuple[Any, str]] = {}
        end = time.monotonic() + ANSWER_S
        while len(answers) < self.world_size:
            missing = [pipe for pipe in self.pipes if pipe not in answers]
            ready = wait(missing, max(end - time.monotonic(), 0))
            if not ready:
                self.close()
                answers |= dict.fromkeys(missing, (None, "a rank gave no answer and was ended"))
            for pipe in ready:
                answers[pipe] = _receive(pipe)
                end = min(end, time.monotonic() + GRACE_S)
        return [answers[pipe] for pipe in self.pipes]

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _context() -> mp.context.BaseContext:
    """How ranks start: on GPUs each imports for itself, since a process that has met a GPU must not fork."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["nn.run"])
    return context


_pool: RankPool | None = None


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, local_world_size: int | None = None
) -> list[Any]:
    """Call `function(*args)` on every rank and return their results in order of rank.

    `function` lives at module level and sees the launcher's environment variables, as under torchrun on nodes of
    `local_world_size` ranks each; without it all are on one.
    """
    global _pool
    if _pool is None or _pool.world_size != world_size:
        _close_pool()
        _pool = RankPool(world_size)
    answers = _pool.call(function, args, local_world_size or world_size)
    failures = [trace for _, trace in answers if trace]
    if failures:
        _close_pool()  # a rank that failed amid a collective is of no more use
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
    """What torchrun would tell a rank of this machine."""
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
        # TorchRec keeps the groups of a node's ranks for ever, but each call opens its own process group.
        comm._INTRA_PG = comm._CROSS_PG = None
        os.environ |= launched_as(rank, world_size, local_world_size, port)
        try:
            answer = (function(*args), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
