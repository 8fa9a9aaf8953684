"""Run a function as several gloo ranks, each a process of its own, and collect what they return."""

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def run_distributed(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank and return their results in order of rank.

    `function` lives at module level and sees the launcher's environment variables, as under torchrun.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_entry, args=(function, rank, world_size, port, results, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join()
    failures = [trace for _, trace, _ in answers if trace is not None]
    assert not failures, "\n".join(failures)
    return [value for _, _, value in sorted(answers, key=lambda answer: answer[0])]


def _entry(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    args: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        results.put((rank, None, function(*args)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
