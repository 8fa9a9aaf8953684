"""Facts of its launcher that a rank reads."""

import socket
import sys

import pytest
from torch.distributed import TCPStore

from nn.distributed.launcher import check_variables, refuse_elastic_nodes, reserved_port
from tests.helpers.command import ROOT, run_command, start_command

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ELASTIC = "nodes cannot join or leave a run yet; write --nnodes=2 (or 1)"


@pytest.mark.parametrize(
    ("words", "variable", "refused"),
    [
        (["--nnodes", "1:2", "dlrm.py"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nproc-per-node=2", "--nnodes=1:2"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        ([], "1:2", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nnode=1:2"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nn", "1:2"], "", "torchrun --nnodes=1:2: " + ELASTIC),
        (["--nnodes=2"], "1:2", None),
        (["--nproc-per-node", "1:2"], "", None),
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


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ("RANK=1", "RANK is 1, and WORLD_SIZE 1, which is not set"),
        ("RANK=5 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1", "RANK is 5, and WORLD_SIZE 2"),
        ("RANK=x WORLD_SIZE=2", "RANK is 'x', which is no number"),
        ("RANK= WORLD_SIZE=", "RANK is '', which is no number"),
        ("WORLD_SIZE=0", "RANK is 0, and WORLD_SIZE 0"),
        ("WORLD_SIZE=2", "WORLD_SIZE is 2, and RANK is not set"),
        ("RANK=0 WORLD_SIZE=2", "WORLD_SIZE is 2, and MASTER_ADDR is not set"),
        ("LOCAL_RANK=3", "LOCAL_RANK is 3, and LOCAL_WORLD_SIZE 1, which is not set"),
        ("LOCAL_WORLD_SIZE=0", "LOCAL_RANK is 0, and LOCAL_WORLD_SIZE 0"),
        ("LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE is larger than WORLD_SIZE"),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
            "LOCAL_RANK is set, and LOCAL_WORLD_SIZE is not",
        ),
        ("MASTER_ADDR=a MASTER_PORT=tcp://b:80", None),  # of Kubernetes' service `master`
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=a", None),
        ("RANK=3 WORLD_SIZE=4 MASTER_ADDR=a MASTER_PORT=1", None),  # one rank on each node
    ],
)
def test_variables_that_are_not_those_of_a_rank_are_refused(variables, problem, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for text in variables.split():
        monkeypatch.setenv(*text.split("=", 1))
    if problem is None:
        check_variables()
        return
    with pytest.raises(ValueError, match="the environment") as error:
        check_variables()
    assert str(error.value).startswith(f"the environment is not that of a rank: {problem}; start")


def test_a_process_without_a_node_leader_reports_its_variables(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    ended = run_command("train.batch_size=-1")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err.startswith("error: the environment is not that of a rank: LOCAL_RANK is 3")
    assert ended.err.count("\n") == 1


def test_a_reserved_port_is_for_its_server_alone():
    port = reserved_port()
    assert reserved_port() != port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    assert TCPStore("127.0.0.1", port, is_master=True).port == port


@pytest.mark.doors
def test_torchrun_with_a_number_of_nodes_that_may_change_ends_at_the_start(tmp_path):
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{reserved_port()}"]
    ended = start_command(
        *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node=2", *rendezvous),
        *("--rdzv-conf=last_call_timeout=1", str(ROOT / "dlrm.py"), "run_dir=run"),
        directory=tmp_path,
        program=sys.executable,  # the parent of a fork is no launcher
    )
    assert ended.exit_code == 1
    assert ended.err.count(f"error: torchrun --nnodes=1:2: {ELASTIC}") == 1
    assert not (tmp_path / "run").exists()
