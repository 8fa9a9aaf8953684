"""Crash test: kill a training run at random moments, restart it, and compare its result with an uninterrupted run.

    python -m tests.crash --seed 1 --kills 20

Each kill is a SIGKILL to one random rank. One kill in five hits ranks that start and restore. The others hit the training at a
random time, half of them while a checkpoint is written. The surviving ranks must end within a minute with one message. Ranks
that were starting get SIGTERM, as from a launcher. A finished run is compared with the uninterrupted one: records, summary,
weights and optimizer states must be equal bit by bit. Another run starts if kills are left.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from configs.exit_codes import LOST_RANK_EXIT_CODE
from tests.helpers.distributed import free_port, launched_as
from tests.helpers.forks import fork_context
from tests.helpers.runs import differences

NUM_STEPS = 300
RUN = [
    *("data.synthetic.train_rows=19200", "data.synthetic.test_rows=256", "device=cpu"),
    *("data.synthetic.cardinalities=[500,40,7,300,1000]", "data.synthetic.num_numerical=3"),
    *("model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]"),
    *("train.batch_size=64", "eval.batch_size=128", "eval.per_epoch=3", "optimizer.name=adagrad"),
    *("optimizer.lr=0.05", "log.every=7", "log.tensorboard=false", "train.tf32=false"),
    *("checkpoint.save_every=10",),
]
END_WITHIN_S = 60.0
STARTS_WITHIN_S = 3.0


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
    arguments: list[str], num_ranks: int, log: Path, local_world_size: int | None = None
) -> Ranks:
    """Start the ranks of `dlrm.py <arguments>`, forked from a process that has imported torch already.

    No rank writes curves.png, which takes longer than this small run. All ranks are on one node, or on nodes of
    `local_world_size` ranks.
    """
    context = fork_context()
    port = free_port()
    log.touch()
    processes = [
        context.Process(
            target=_rank,
            args=(arguments, rank, (num_ranks, local_world_size or num_ranks), port, str(log)),
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, log)


def _rank(arguments: list[str], rank: int, world: tuple[int, int], port: int, log: str) -> None:
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


def crash(directory: Path, seed: int, kills: int, num_ranks: int) -> int:
    """Run the test below `directory`; return the number of kills while a checkpoint was written."""
    generator = random.Random(seed)
    uninterrupted = directory / "uninterrupted"
    log = directory / "uninterrupted.log"
    ranks = start([*RUN, f"run_dir={uninterrupted}"], num_ranks, log)
    assert wait_until(lambda: trains(ranks), 120), ranks.log.read_text()
    started = time.monotonic()
    assert set(ranks.wait(300)) == {0}, ranks.log.read_text()
    duration = time.monotonic() - started
    print(
        f"seed {seed}: {NUM_STEPS} steps on {num_ranks} ranks take {duration:.1f} s uninterrupted",
        flush=True,
    )
    killed = killed_in_save = round_ = 0
    while killed < kills:
        round_ += 1
        interrupted = directory / f"interrupted_{round_}"
        while True:
            log = directory / f"{round_}_{killed}.log"
            ranks = start([*RUN, f"run_dir={interrupted}"], num_ranks, log)
            moment = None
            if killed < kills:
                moment = kill_one(ranks, interrupted, generator, duration / kills)
            if moment is None:
                assert set(ranks.wait(300)) == {0}, log.read_text()
                break
            killed += 1
            killed_in_save += moment == "saving"
            killed_at = time.monotonic()
            codes = ranks.wait(END_WITHIN_S)
            seconds = time.monotonic() - killed_at
            output = log.read_text()
            assert "Traceback" not in output, output
            assert output.count("error: ") == (LOST_RANK_EXIT_CODE in codes), output
            print(
                f"kill {killed:2} while {moment:8} exit codes {codes} after {seconds:.1f} s, "
                f"checkpoints {checkpoints(interrupted)}",
                flush=True,
            )
        different = differences(uninterrupted, interrupted)
        assert not different, f"not as the uninterrupted run: {', '.join(different)}"
        print(f"round {round_}: equal bit by bit to the uninterrupted run", flush=True)
        shutil.rmtree(interrupted)
    return killed_in_save


def kill_one(ranks: Ranks, run_dir: Path, generator: random.Random, pace_s: float) -> str | None:
    """Kill a random rank at a random moment; return the phase of the run then, or None if it ended before."""
    victim = generator.choice(ranks.processes)
    is_early = generator.random() < 0.2
    start_delay, delay = generator.uniform(0, STARTS_WITHIN_S), generator.uniform(0, 2 * pace_s)
    wants_save = generator.random() < 0.5
    in_save_delay = generator.uniform(0, 0.02)

    def is_over() -> bool:
        return not all(process.is_alive() for process in ranks.processes)

    def is_saving() -> bool:
        return any((run_dir / "checkpoints").glob(".step_*.unfinished"))

    if is_early:
        time.sleep(start_delay)
    else:
        wait_until(lambda: trains(ranks) or is_over(), 120)
        time.sleep(delay)
        if wants_save:
            wait_until(lambda: is_saving() or is_over(), 5)
            time.sleep(in_save_delay)
    is_starting = not trains(ranks)
    moment = "starting" if is_starting else "saving" if is_saving() else "training"
    if is_over():
        return None
    os.kill(victim.pid, signal.SIGKILL)
    if is_starting:
        for process in ranks.processes:
            process.terminate()
    return moment


def trains(ranks: Ranks) -> bool:
    """Return whether a start has printed its first record."""
    return "step " in ranks.log.read_text()


def checkpoints(run_dir: Path) -> list[str]:
    """Return the names of the files in the directory of checkpoints."""
    directory = run_dir / "checkpoints"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@contextmanager
def _directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="crash-") as name:
        yield Path(name)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with _directory() as directory:
        in_save = crash(directory, options.seed, options.kills, options.ranks)
    print(
        f"seed {options.seed}: {options.kills} kills, {in_save} of them while saving: equal bit by bit to the uninterrupted run"
    )


if __name__ == "__main__":
    main()
