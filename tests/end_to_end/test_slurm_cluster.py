"""slurm_multinode.sh on a real SLURM cluster of two nodes: environment of the ranks, requeues and restarts.

Needs Debian's packages: `apt-get install --no-install-recommends slurmctld slurmd slurm-client munge`.
"""

import ast
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nn.checkpoint.directory import list_checkpoints, step_of
from tests.helpers.composed import TINY
from tests.helpers.rank_processes import start
from tests.helpers.runs import differences, records
from tests.helpers.slurm_cluster import INSTALL, Cluster, missing_commands, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    bool(missing_commands()), reason=f"no {', '.join(missing_commands())} here: {INSTALL}"
)

EPOCHS = 16
# A recipe that prints its rank, node and arguments. `fail` exits with 2 once all ranks have started. `wait` waits for SLURM's
# warning in its first start.
STAND_IN = """\
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME"]
print([os.environ[each] for each in names], sys.argv[1:], flush=True)
if sys.argv[1] == "fail":
    pathlib.Path("rank_" + os.environ["RANK"]).touch()
    while len(list(pathlib.Path().glob("rank_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    sys.exit(2)
if sys.argv[1] == "wait" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(200)
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A submitted job and its submit directory."""

    cluster: Cluster
    directory: Path
    number: str

    def facts(self) -> tuple[str, str, str]:
        """Return state, exit code and number of requeues in SLURM's records."""
        facts = self.cluster.job(self.number)
        return facts["JobState"], facts["ExitCode"], facts["Restarts"]

    def end(self) -> tuple[str, str, str]:
        """Wait for the end of the job; return its last facts."""
        until(lambda: self.facts()[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), self.log)
        return self.facts()

    def log(self) -> str:
        """Return the output of the job so far."""
        path = self.directory / f"recsys_{self.number}.log"
        return path.read_text() if path.exists() else ""

    def logs(self, start: int, node: str) -> list[str]:
        """Return the output of each rank of a node, in order of local rank."""
        paths = self.directory.glob(
            f"runs/*/job_{self.number}/logs/start_{start}/{node}/**/stdout.log"
        )
        return [path.read_text() for path in sorted(paths, key=lambda path: path.parent.name)]

    def processes(self, node: str) -> list[int]:
        """Return the process ids of a node: torchrun, then its ranks."""
        variables = {f"SLURM_JOB_ID={self.number}".encode(), f"SLURMD_NODENAME={node}".encode()}
        variables.add(f"SLURM_CONF={self.cluster.environment['SLURM_CONF']}".encode())
        return sorted(
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if variables <= set(environment_of(path))
        )


def environment_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def until(condition: Callable[[], bool], explain: Callable[[], str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster() as started:
        yield started


@pytest.fixture
def submit(cluster, tmp_path) -> Callable[..., Job]:
    """Return a function that submits a job from a new checkout."""
    for name in ("nn", "configs", "dataloading", "main.py", "dlrm.py", "slurm_multinode.sh"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def submit(*arguments: str, options: tuple[str, ...] = (), **environment: str) -> Job:
        number = cluster.command(
            *("sbatch", "--parsable", "--nodes=2", *options, "slurm_multinode.sh", *arguments),
            directory=tmp_path,
            PATH=f"{Path(sys.executable).parent}:{cluster.environment['PATH']}",
            OMP_NUM_THREADS="1",
            SLURM_WAIT="10",
            **environment,
        )
        return Job(cluster, tmp_path, number)

    return submit


def test_ranks_are_numbered_over_nodes_and_a_user_error_is_not_requeued(submit):
    arguments = ["fail", "two words/$(touch owned)", "`touch owned`;touch owned", "*", ""]
    job = submit("stand_in.py", *arguments, RANKS_PER_NODE="2")
    assert job.end() == ("FAILED", "2:0", "0"), job.log()
    node_of_rank = {}
    for node in job.cluster.nodes:
        logs = job.logs(0, node)
        assert len(logs) == 2, "one log per rank"
        for local_rank, log in enumerate(logs):
            identity, received = ast.literal_eval(log.strip().replace("] [", "], ["))
            assert received == [*arguments, f"run_dir=runs/stand_in/job_{job.number}"]
            assert identity[1:] == [str(local_rank), "4", "2", node]
            node_of_rank[identity[0]] = node
    assert sorted(node_of_rank) == ["0", "1", "2", "3"]
    nodes = [node_of_rank[rank] for rank in "0123"]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "ranks of a node are not consecutive"
    assert not (job.directory / "owned").exists()


def test_a_job_that_reaches_its_time_limit_is_requeued_and_completes(submit):
    """The limit is a minute and the warning comes 55 s before it. A slow start of the ranks leads to another requeue."""
    options = ("--nodes=1", "--time=1", "--signal=B:USR1@55")
    job = submit("stand_in.py", "wait", options=options, RANKS_PER_NODE="1")
    state, code, restarts = job.end()
    assert (state, code) == ("COMPLETED", "0:0"), job.log()
    assert int(restarts) > 0
    assert job.log().count("; the job is requeued") == int(restarts)


def test_a_cancelled_job_stays_cancelled(submit):
    job = submit("stand_in.py", "wait", options=("--nodes=1",), RANKS_PER_NODE="1")
    until(lambda: any(job.logs(0, "*")), job.log)
    job.cluster.command("scancel", job.number)
    assert job.end()[::2] == ("CANCELLED", "0"), job.log()


def test_a_job_that_loses_a_rank_and_a_node_and_is_warned_ends_as_an_uninterrupted_one(submit):
    options = [
        *(*TINY, f"train.epochs={EPOCHS}", "train.tf32=false", "log.every=1"),
        *("log.loggers=[]", "checkpoint.save_every=25"),
    ]
    job = submit("dlrm.py", *options, RANKS_PER_NODE="1")
    run_dir = job.directory / "runs" / "dlrm" / f"job_{job.number}"
    node = job.cluster.nodes[1]

    def saved_since(step: int) -> int:
        """Wait for a later checkpoint; return its step."""
        latest = [step]

        def is_later() -> bool:
            steps = map(step_of, list_checkpoints(run_dir / "checkpoints"))
            latest.append(next(iter(steps), 0))
            return latest[-1] > step

        until(is_later, job.log)
        return latest[-1]

    saved = saved_since(0)
    os.kill(job.processes(node)[-1], signal.SIGKILL)
    saved = saved_since(saved + 50)
    assert job.facts()[::2] == ("RUNNING", "0"), "the ranks were not restarted in place"
    for pid in job.processes(node):
        os.kill(pid, signal.SIGKILL)
    saved = saved_since(saved + 50)
    assert job.facts()[::2] == ("RUNNING", "1"), "the job was not requeued"
    job.cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    assert job.end() == ("COMPLETED", "0:0", "2"), job.log()
    assert "the ranks ended with 75; the job is requeued" in job.log()
    assert len((run_dir / "restarts.jsonl").read_text().splitlines()) == 3
    environment = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    assert (environment["world_size"], environment["num_hosts"]) == (2, 2)

    alone = job.directory / "alone"
    ranks = start([*options, f"run_dir={alone}"], 2, job.directory / "alone.log", 1)
    assert ranks.wait(120) == [0, 0], ranks.log.read_text()
    trained = [record["step"] for record in records(run_dir) if "loss" in record]
    assert trained == list(range(1, EPOCHS * 32 + 1)), "a gap, or a step twice"
    assert differences(alone, run_dir) == []
