"""Facts of its launcher that a rank reads."""

import sys

import pytest

from nn.distributed.launcher import refuse_elastic_nodes
from tests.helpers.command import ROOT, start_command
from tests.helpers.distributed import free_port

ELASTIC = "nodes cannot join or leave a run yet; write --nnodes=2 (or 1)"


@pytest.mark.parametrize(
    ("words", "variable", "refused"),
    [
        (["--nnodes", "1:2", "dlrm.py"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nproc-per-node=2", "--nnodes=1:2"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        ([], "1:2", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nnodes=2"], "1:2", None),
        (["--nnodes", "2:2"], "", None),
        (["--standalone", "dlrm.py"], "", None),
    ],
)
def test_a_number_of_nodes_that_may_change_is_refused(
    words, variable, refused, tmp_path, monkeypatch
):
    command_line = tmp_path / "cmdline"
    command_line.write_text("\0".join(["python", "torchrun", *words]))
    monkeypatch.setenv("PET_NNODES", variable)
    refuse_elastic_nodes(command_line)  # without a launcher
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    if refused is None:
        refuse_elastic_nodes(command_line)
        return
    with pytest.raises(ValueError, match="torchrun") as error:
        refuse_elastic_nodes(command_line)
    assert str(error.value).startswith(refused)


def test_a_launcher_that_cannot_be_read_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    refuse_elastic_nodes(tmp_path / "ended")
    refuse_elastic_nodes(tmp_path)


@pytest.mark.doors
def test_torchrun_with_a_number_of_nodes_that_may_change_ends_at_the_start(tmp_path):
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    ended = start_command(
        *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node=2", *rendezvous),
        *("--rdzv-conf=last_call_timeout=1", str(ROOT / "dlrm.py"), "run_dir=run"),
        directory=tmp_path,
        program=sys.executable,  # the parent of a fork is no launcher
    )
    assert ended.exit_code == 1
    assert ended.err.count(f"error: torchrun --nnodes=1:2: {ELASTIC}") == 1
    assert not (tmp_path / "run").exists()
