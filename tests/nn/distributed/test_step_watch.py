"""A step that lasts too long ends the run on all ranks, with their stacks; a rank that is late elsewhere does not."""

import os
import signal
import time

import pytest
import torch

from configs.exit_codes import FAULT_EXIT_CODE
from nn.distributed.errors import DeviceError, RankError
from nn.distributed.failures import report_faults
from nn.distributed.process_group import Ranks
from tests.helpers.rank_processes import RUN, start, wait_until

# Neither a save nor an evaluation, which are not bounded, in the first thousands of steps.
RARE = ["checkpoint.save_every=100000", "eval.per_epoch=1", "data.synthetic.train_rows=6400000"]
SHORT = {"LEAST_S": 1.5, "FACTOR": 5.0, "POLL_S": 0.1, "ANSWER_S": 1.0}


def shorten(rank: int) -> None:
    """Bound steps by seconds instead of minutes."""
    from nn.distributed import step_watch

    vars(step_watch).update(SHORT)


def hang_in_a_step(rank: int) -> None:
    """Let rank 1 never end its 100th step, in which rank 0 waits for it."""
    from nn.training.train_step import TrainStep

    shorten(rank)
    set_rate = TrainStep._set_learning_rate

    def slow(self, step, factor):
        while rank == 1 and step == 100:
            time.sleep(0.1)
        set_rate(self, step, factor)

    TrainStep._set_learning_rate = slow


def be_late_with_a_checkpoint(rank: int) -> None:
    """Let rank 1 take longer than any bound in front of its first checkpoint, while the others continue."""
    from nn.checkpoint.manager import CheckpointManager

    shorten(rank)
    save, late = CheckpointManager.save, []

    def slow(self, step, *args, **kwargs):
        result = save(self, step, *args, **kwargs)
        if rank == 1 and step >= 60 and not late:
            late.append(time.sleep(6))
        return result

    CheckpointManager.save = slow


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """A run whose 100th step hangs, and the same command again."""
    directory = tmp_path_factory.mktemp("hung")
    options = [*RUN, f"run_dir={directory / 'run'}"]
    first = start(options, 2, directory / "first.log", prepare=hang_in_a_step)
    codes = first.wait(90)
    return directory, codes, start(options, 2, directory / "second.log").wait(90)


def test_a_hanging_step_ends_all_ranks_with_their_stacks_and_one_line(hung):
    directory, codes, _ = hung
    log = (directory / "first.log").read_text()
    assert codes == [FAULT_EXIT_CODE] * 2, log
    assert log.count("error: a step lasts ") == 1
    assert log.count("resumes from the latest checkpoint") == 1
    stacks = [(directory / f"run/stacks/rank_{rank}.txt").read_text() for rank in range(2)]
    assert "test_step_watch.py" in stacks[1]
    assert "in slow" in stacks[1]
    assert "process_group.py" in stacks[0] or "distributed_c10d.py" in stacks[0]


def test_the_same_command_resumes_after_it(hung):
    directory, _, codes = hung
    log = (directory / "second.log").read_text()
    assert codes == [0, 0], log
    assert "checkpoints/step_100, 100 steps" in log


@pytest.mark.doors
def test_a_rank_that_is_late_outside_of_a_step_ends_nothing(tmp_path):
    options = [
        *RUN,
        f"run_dir={tmp_path / 'run'}",
        "checkpoint.save_every=60",
        "train.max_steps=130",
    ]
    # Three ranks wait for the late one, and ask at once.
    ranks = start(options, 4, tmp_path / "log", prepare=be_late_with_a_checkpoint)
    assert ranks.wait(90) == [0] * 4, ranks.log.read_text()
    assert not (tmp_path / "run/stacks").exists()


@pytest.mark.doors
def test_a_rank_that_was_stopped_gives_no_answer(tmp_path):
    options = [*RUN, f"run_dir={tmp_path / 'run'}", *RARE]
    ranks = start(options, 2, tmp_path / "log", prepare=shorten)
    try:
        assert wait_until(lambda: "\nstep 70/" in ranks.log.read_text(), 120), ranks.log.read_text()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        ranks.processes[0].join(30)
        assert ranks.processes[0].exitcode == FAULT_EXIT_CODE
        assert "no answer from ranks [1]" in ranks.log.read_text()
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), DeviceError),
        (RuntimeError("CUDA error: unspecified launch failure"), DeviceError),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), DeviceError),
        # The other rank reports its own error; a wrong index in a kernel would come again.
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), RuntimeError),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), RuntimeError),
        (torch.OutOfMemoryError("CUDA out of memory"), RankError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_gpu_that_fails_ends_the_run_as_a_hanging_step_does(error, expected):
    ranks = Ranks(1, 1, 2, 2, torch.device("cuda", 1))
    with pytest.raises(expected) as raised, report_faults(ranks):
        raise error
    assert (raised.value is error) == (expected is RuntimeError)
