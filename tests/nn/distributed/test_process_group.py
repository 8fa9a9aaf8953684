"""Ranks: their numbers, collectives, and errors of one rank that all ranks report."""

import json
import os
import re
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nn.distributed.errors import RankError
from nn.distributed.process_group import _abort, process_group, ranks_from_environment
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import TINY, ranks_of_cpu
from tests.helpers.datasets import plant, write_clicks
from tests.helpers.distributed import run_distributed

ON_FILES = [option for option in TINY if not option.startswith("data.")]
ONE_TABLE = [
    *TINY,
    "data.synthetic.cardinalities=[500]",
    "data.synthetic.test_rows=253",
    "sharding.types=[table_wise]",
    "optimizer.embedding_name=sgd",
    "log.loggers=[]",
]


def on_two_ranks(*arguments: str) -> list[Ended]:
    """Run a command on two ranks and return both results."""
    return run_distributed(run_command, 2, *arguments)


def refused_by_both(*arguments: str) -> str:
    """Run a command that both ranks refuse; return the one line that rank 0 prints."""
    first, second = on_two_ranks(*arguments)
    assert (first.exit_code, second.exit_code) == (2, 2), (first, second)
    assert second.err == ""
    assert re.fullmatch(r"error: [^\n]+\n", first.err), first.err
    return first.err


def use_collectives() -> dict:
    """Call every collective of `Ranks` once."""
    with ranks_of_cpu() as ranks:
        numbers = torch.tensor([ranks.rank, 10])
        gathered = ranks.gather(numbers)
        try:
            ranks.run_on_rank0(lambda: refuse(ranks.rank))
        except ValueError as error:
            message = str(error)
        ranks.barrier()
        return {
            "who": (ranks.rank, ranks.local_rank, ranks.world_size, ranks.is_rank0),
            "gathered": None if gathered is None else torch.stack(gathered).tolist(),
            "sum": ranks.all_reduce_sum(numbers.clone()).tolist(),
            "broadcast": ranks.broadcast_object({"rank": ranks.rank}),
            "called": ranks.run_on_rank0(lambda: f"made by {ranks.rank}"),
            "message": message,
        }


def refuse(rank: int) -> None:
    raise ValueError(f"rank {rank} cannot")


def test_alone_every_collective_is_the_identity():
    assert use_collectives() == {
        "who": (0, 0, 1, True),
        "gathered": [[0, 10]],
        "sum": [0, 10],
        "broadcast": {"rank": 0},
        "called": "made by 0",
        "message": "rank 0 cannot",
    }


def test_two_ranks_exchange_values_and_errors_of_rank_0():
    first, second = run_distributed(use_collectives, 2)
    assert (first["who"], second["who"]) == ((0, 0, 2, True), (1, 1, 2, False))
    assert first["gathered"] == [[0, 10], [1, 10]]
    assert second["gathered"] is None
    for run in (first, second):
        assert run["sum"] == [1, 20]
        assert run["broadcast"] == {"rank": 0}
        assert run["called"] == "made by 0"
        assert run["message"] == "rank 0 cannot"


def test_the_group_is_closed_when_a_run_fails():
    with pytest.raises(ValueError, match="in between"), ranks_of_cpu():
        raise ValueError("in between")
    assert not dist.is_initialized()
    with ranks_of_cpu():
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_communicators_of_a_gpu_that_has_failed_are_left_after_a_while(monkeypatch):
    monkeypatch.setattr("nn.distributed.process_group.ABORT_S", 0.05)
    waits, ended = Event(), []
    _abort([SimpleNamespace(abort=waits.wait), SimpleNamespace(abort=lambda: ended.append(1))])
    assert not ended, "the first one still waits"
    waits.set()


def test_a_small_shared_memory_is_named():
    segment = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888)"
    message = f"NCCL error in: a.hpp:317, unhandled system error\nLast error:\n{segment}"
    with pytest.raises(RankError) as caught, ranks_of_cpu():
        raise dist.DistBackendError(message)
    assert str(caught.value).startswith(f"NCCL has too little shared memory ({segment}); give ")
    assert not dist.is_initialized()
    with pytest.raises(dist.DistBackendError, match=r"^another$"), ranks_of_cpu():
        raise dist.DistBackendError("another")


def test_one_process_needs_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")  # as clusters export it for all programs
    with process_group(ranks_from_environment("cpu")):
        assert dist.get_world_size() == 1


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ValueError,
        match=r"^4 ranks were started on a node with 2 GPUs; start at most 2 with --nproc-per-node, or "
        r"train on the CPU with device=cpu$",
    ):
        ranks_from_environment("cuda")


def test_tables_that_do_not_fit_end_both_ranks(tmp_path):
    message = refused_by_both(*TINY, f"run_dir={tmp_path / 'run'}", "sharding.host_gib=0.0001")
    assert message.startswith("error: the tables do not fit: ")
    assert not (tmp_path / "run").exists()


def test_a_used_run_directory_ends_both_ranks(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{}\n{"step": 1}\n')
    message = refused_by_both(*TINY, f"run_dir={tmp_path}")
    assert "already holds the metrics.jsonl of an earlier run" in message


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Train a model with one table on two ranks; return its run directory."""
    run_dir = tmp_path_factory.mktemp("distributed") / "run"
    ended = on_two_ranks(*ONE_TABLE, "train.max_steps=2", f"run_dir={run_dir}")
    assert [(result.exit_code, result.err) for result in ended] == [(0, ""), (0, "")]
    return run_dir


def test_one_rank_evaluates_as_two_do(trained, tmp_path):
    restore = f"checkpoint.restore={trained / 'checkpoints' / 'step_2'}"
    ended = run_command(*ONE_TABLE, "mode=eval", restore, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0
    two, one = (
        json.loads((run / "summary.json").read_text()) for run in (trained, tmp_path / "run")
    )
    assert one["test_rows"] == two["test_rows"] == 253
    for name in ("test_auc", "test_log_loss"):
        assert one[name] == pytest.approx(two[name], abs=1e-6)


def test_a_checkpoint_of_another_optimizer_ends_both_ranks(trained, tmp_path):
    # The rank without the table must refuse as well, although it misses nothing.
    message = refused_by_both(
        *ONE_TABLE,
        f"checkpoint.restore={trained / 'checkpoints' / 'step_2'}",
        "optimizer.embedding_name=adagrad",
        f"run_dir={tmp_path / 'run'}",
    )
    assert "holds another model or optimizer: no tables.cat_0.momentum1" in message


def test_latencies_of_two_ranks_are_those_of_batches_that_divide(tmp_path):
    sizes = ["inference.batch_sizes=[1,64]", "inference.steps=3", "inference.warmup_steps=1"]
    ended = on_two_ranks(*TINY, "mode=inference", *sizes, f"run_dir={tmp_path / 'run'}")
    assert [(result.exit_code, result.err) for result in ended] == [(0, ""), (0, "")]
    assert "left out: batch sizes 1, which split 'test' of 256 rows or 2 ranks" in ended[0].out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result["batch_size"] for result in summary["inference"]] == [64]
    assert ended[1].out == ""


def test_a_loss_that_is_no_number_ends_both_ranks(tmp_path):
    rule = ["optimizer.name=sgd", "optimizer.lr=1e30"]
    first, second = on_two_ranks(*TINY, *rule, f"run_dir={tmp_path / 'run'}")
    assert (first.exit_code, second.exit_code) == (3, 3)
    message = r"error: the loss is (nan|inf) at step \d \(learning rate 1e\+30\); nothing was"
    assert re.match(message, first.err), first.err
    assert second.err == ""


def record_end(directory: Path, *arguments: str) -> None:
    """Run a command, record its exit code and errors, and end the process with its connections."""
    ended = run_command(*arguments)
    rank = os.environ["RANK"]
    (directory / f"rank_{rank}.json").write_text(json.dumps([ended.exit_code, ended.err]))
    os._exit(ended.exit_code)


def test_a_bad_row_of_one_rank_ends_all_ranks_and_is_reported_once(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    # The second rank reads the rows 160 .. 191.
    plant(root / "train" / "item.bin", 170, 101, "int8")
    files = [f"data.path={root}", "data.shuffle_block=0", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(AssertionError, match="a rank died"):
        run_distributed(record_end, 2, tmp_path, *ON_FILES, *files)
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert (first[0], second[0]) == (1, 2)
    reported = r"error: rank 1: feature 'item': id 101 at row 170 of [^\n]+\n"
    assert re.fullmatch(reported, second[1])
    lost_rank = r"error: rank 0 stopped because another rank has exited; see the message[^\n]+\n"
    assert re.fullmatch(lost_rank, first[1])
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_error_of_a_node_is_printed_on_that_node(monkeypatch):
    """A dataset may be missing on one node only; only its ranks meet the error."""
    rank = {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    for name, value in (rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    assert "nowhere" in run_command(*TINY, "data.path=nowhere").err
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_command(*TINY, "data.path=nowhere").err == ""
