"""Starts of a small training on several ranks, each a fork of a process that has imported torch, and waits for what they do."""

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from nn.distributed.launcher import reserved_port
from tests.helpers.distributed import launched_as
from tests.helpers.forks import fork_context

RUN = [
    *("data.synthetic.train_rows=19200", "data.synthetic.test_rows=256", "device=cpu"),
    *("data.synthetic.cardinalities=[500,40,7,300,1000]", "data.synthetic.num_numerical=3"),
    *("model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]"),
    *("train.batch_size=64", "eval.batch_size=128", "eval.per_epoch=3", "optimizer.name=adagrad"),
    *("optimizer.lr=0.05", "log.every=7", "log.loggers=[]", "train.tf32=false"),
    *("checkpoint.save_every=10", "log.pictures=false"),
]


@dataclass(frozen=True, slots=True)
class Ranks:
    """One start of a run: its processes and the log of their output."""

    processes: list[BaseProcess]
    log: Path

    def wait(self, seconds: float) -> list[int]:
        """Return the exit codes. Ranks that take longer are killed and reported as an error."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        assert not late, f"ranks {late} did not end within {seconds:.0f} s:\n{self.log.read_text()}"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill the ranks that are still running."""
        for process in self.processes:
            process.kill()
            process.join()


def start(
    arguments: list[str],
    num_ranks: int,
    log: Path,
    local_world_size: int | None = None,
    prepare: Callable[[int], None] = int,
) -> Ranks:
    """Start the ranks of `dlrm.py <arguments>`, forked from a process that has imported torch already.

    No rank writes curves.png, which takes longer than this small run. All ranks are on one node, or on nodes of
    `local_world_size` ranks. Each calls `prepare` with its number first, a function of a module.
    """
    context = fork_context()
    port = reserved_port()
    log.touch()
    processes = [
        context.Process(
            target=_rank,
            args=(
                arguments,
                rank,
                (num_ranks, local_world_size or num_ranks),
                port,
                str(log),
                prepare,
            ),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, log)


def _rank(
    arguments: list[str],
    rank: int,
    world: tuple[int, int],
    port: int,
    log: str,
    prepare: Callable[[int], None],
) -> None:
    import torch

    from main import command
    from nn.observability import run_directory as recorder

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    recorder.draw_curves = lambda *_: None
    num_ranks, local_world_size = world
    if num_ranks > 1:
        os.environ |= launched_as(rank, num_ranks, local_world_size, port)
    prepare(rank)
    sys.argv = ["dlrm.py", *arguments]
    exit_code = 0
    try:
        command("dlrm")()
    except SystemExit as end:
        exit_code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    sys.stdout.flush()
    os._exit(exit_code)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition, seconds: float) -> bool:
    """Poll a condition every millisecond; return whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def trains(ranks: Ranks) -> bool:
    """Return whether a start has printed its first record."""
    return re.search(r"^step \d+/", ranks.log.read_text(), re.MULTILINE) is not None
