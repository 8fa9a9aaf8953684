"""slurm_multinode.sh on a real SLURM cluster of four nodes: environment of the ranks, refusals, requeues and restarts.

Needs Debian's packages: `apt-get install --no-install-recommends slurmctld slurmd slurm-client munge`. The tests share one
cluster, and the jobs that wait for the time limit and for each other run beside those of other tests.
"""

import ast
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from nn.checkpoint.directory import list_checkpoints, step_of
from nn.checkpoint.tensor_index import read_index
from tests.helpers.composed import TINY
from tests.helpers.rank_processes import start
from tests.helpers.runs import differences, jsonl, records, summary
from tests.helpers.slurm_cluster import INSTALL, NODES, Cluster, missing_commands, slurm_cluster

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.doors

OPTIONS = [
    *(*TINY, "train.tf32=false", "log.every=1", "log.loggers=[]"),
    *("checkpoint.save_every=25", "eval.per_epoch=1"),
]
STEPS_PER_EPOCH = 32
# A recipe that prints its rank, node and arguments. `fail` exits with 2 once all ranks have started, `wait` waits to be
# cancelled, and `warn` is warned before it trains, at every start.
STAND_IN = """\
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))  # the warning may come twice
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURMD_NODENAME"]
print([os.environ[each] for each in names], sys.argv[1:], flush=True)
if sys.argv[1] == "fail":
    pathlib.Path("rank_" + os.environ["RANK"]).touch()
    while len(list(pathlib.Path().glob("rank_*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)
    sys.exit(2)
if sys.argv[1] == "warn":
    subprocess.run(["scancel", "--batch", "--signal=USR1", os.environ["SLURM_JOB_ID"]], check=True)
if sys.argv[1] in ("wait", "warn"):
    time.sleep(200)
"""
# dlrm.py, which waits before each step of its first start, or as long as there is a file `pace`: events need time.
PACED = """\
if __name__ == "__main__":
    import os, pathlib, time
    from main import command
    from nn.training.train_step import TrainStep

    train, is_first = TrainStep.train, os.environ.get("SLURM_RESTART_COUNT", "0") == "0"

    def paced(self, *arguments):
        if is_first or pathlib.Path("pace").exists():
            time.sleep(float(os.environ["PACE"]))
        return train(self, *arguments)

    TrainStep.train = paced
    command("dlrm")()
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

    def nodes(self) -> list[str]:
        """Return the nodes that the job runs on, or ran on."""
        listed = self.cluster.job(self.number)["NodeList"]
        return self.cluster.command("scontrol", "show", "hostnames", listed).split()

    def run_dir(self) -> Path:
        """Return the run directory of a training."""
        number = self.cluster.job(self.number)["JobId"]
        return self.directory / "runs" / "paced" / f"job_{number}"

    def saved_since(self, step: int) -> int:
        """Wait for a later checkpoint; return its step."""
        latest = [step]

        def is_later() -> bool:
            steps = map(step_of, list_checkpoints(self.run_dir() / "checkpoints"))
            latest.append(next(iter(steps), 0))
            return latest[-1] > step

        until(is_later, self.log)
        return latest[-1]

    def end(self) -> tuple[str, str, str]:
        """Wait for the end of the job; return its last facts."""
        until(lambda: self.facts()[0] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), self.log)
        return self.facts()

    def log(self) -> str:
        """Return the output of the job so far."""
        path = self.directory / f"recsys_{self.cluster.job(self.number)['JobId']}.log"
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
        found = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if variables <= set(environment_of(path))
        ]
        # Not by number, which begins anew after the largest one.
        return sorted(found, key=started_at)


def started_at(pid: int) -> int:
    """Return when a process began, in ticks of the machine's clock; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def environment_of(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


def until(condition: Callable[[], bool], explain: Callable[[], str], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert not missing_commands(), f"no {', '.join(missing_commands())} here: {INSTALL}"
    with slurm_cluster() as started:
        yield started


def checkout(directory: Path) -> Path:
    """Make a directory that SLURM takes for a checkout."""
    directory.mkdir()
    for name in ("nn", "configs", "dataloading", "main.py", "dlrm.py", "slurm_multinode.sh"):
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "stand_in.py").write_text(STAND_IN)
    (directory / "paced.py").write_text(PACED)
    return directory


def submitted(
    cluster: Cluster, directory: Path, *arguments: str, options=(), script=None, **environment: str
) -> Job:
    """Submit the first argument as a recipe, from `directory`."""
    number = cluster.command(
        *(
            "sbatch",
            "--parsable",
            "--nodes=2",
            *options,
            script or "slurm_multinode.sh",
            *arguments,
        ),
        directory=directory,
        **{"OMP_NUM_THREADS": "1", "SLURM_WAIT": "10", "RANKS_PER_NODE": "1", **environment},
    )
    return Job(cluster, directory, number)


@pytest.fixture
def submit(cluster, tmp_path) -> Callable[..., Job]:
    """Return a function that submits a job from a new checkout."""
    directory = checkout(tmp_path / "checkout")
    return lambda *arguments, **options: submitted(cluster, directory, *arguments, **options)


@pytest.fixture(scope="module")
def limited(cluster, tmp_path_factory) -> Job:
    """Submit a training that reaches its time limit of three minutes; SLURM warns it 105 to 135 s after its start."""
    directory = checkout(tmp_path_factory.mktemp("limited") / "checkout")
    arguments = ["paced.py", *OPTIONS, "train.epochs=8"]
    limits = ("--nodes=1", "--time=3")
    return submitted(
        cluster, directory, *arguments, options=limits, PACE="1", SBATCH_SIGNAL="B:USR1@45"
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[int, int], Path]:
    """Return a function that trains without interruption on ranks of a node each, and returns the run directory."""
    done: dict[tuple[int, int], Path] = {}

    def train(num_ranks: int, epochs: int) -> Path:
        run = num_ranks, epochs
        if run not in done:
            done[run] = tmp_path_factory.mktemp("alone") / "run"
            arguments = [*OPTIONS, f"train.epochs={epochs}", f"run_dir={done[run]}"]
            ranks = start(arguments, num_ranks, done[run].with_name("log"), 1)
            assert ranks.wait(300) == [0] * num_ranks, ranks.log.read_text()
        return done[run]

    return train


def ended_alike(job: Job, undisturbed: Path, epochs: int) -> None:
    """Check that a training has every step once, and all metrics and stored bytes of one that nothing disturbed."""
    trained = [record["step"] for record in records(job.run_dir()) if "loss" in record]
    assert trained == list(range(1, epochs * STEPS_PER_EPOCH + 1)), "a gap, or a step twice"
    assert differences(undisturbed, job.run_dir()) == []


def test_ranks_are_numbered_over_nodes_and_a_user_error_is_not_requeued(submit):
    arguments = ["fail", "two words/$(touch owned)", "`touch owned`;touch owned", "*", ""]
    job = submit("stand_in.py", *arguments, RANKS_PER_NODE="2")
    assert job.end() == ("FAILED", "2:0", "0"), job.log()
    node_of_rank = {}
    for node in job.nodes():
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
    assert "cpu binding" not in job.log()


def test_what_cannot_heal_ends_the_job_with_2_and_one_line(submit):
    one = "--nodes=1"
    refused = {
        "--time (300 s) is not longer than the warning before it (300 s)": submit(
            "stand_in.py", "end", options=(one, "--time=5")
        ),
        "expected one of node, socket,": submit(
            "stand_in.py", "end", options=(one,), NUMA_BINDING="nodes"
        ),
        "2 starts in a row ended at step 0, at which they began": submit(
            "stand_in.py", "warn", options=(one,), MAX_REQUEUES="1"
        ),
    }
    if not torch.cuda.is_available():
        no_gpu = submit("stand_in.py", "end", options=(one, "--export=NONE"))
        refused["no GPU is visible"] = no_gpu
    for line, job in refused.items():
        state, code, restarts = job.end()
        assert (state, code) == ("FAILED", "2:0"), job.log()
        assert restarts == ("2" if "in a row" in line else "0")
        assert line in job.log()
        assert "Traceback" not in job.log()


def test_a_port_that_somebody_holds_in_silence_is_not_taken(submit):
    node = NODES[-1]
    job = submit("stand_in.py", "end", options=("--nodes=1", "--hold", f"--nodelist={node}"))
    port = 20000 + int(job.number) % 12768
    with socket.create_server((node, port)):
        job.cluster.command("scontrol", "release", job.number)
        assert job.end() == ("COMPLETED", "0:0", "0"), job.log()
    assert f"port {port} of {node} is taken by another process" in job.log()


def test_a_cancelled_job_stays_cancelled(submit):
    job = submit("stand_in.py", "wait", options=("--nodes=1",))
    until(lambda: any(job.logs(0, "*")), job.log)
    job.cluster.command("scancel", job.number)
    assert job.end()[::2] == ("CANCELLED", "0"), job.log()


def test_a_training_survives_what_a_cluster_does_to_it(submit, limited, alone):
    """A rank dies, all processes of a node, a node; preemption, scontrol requeue, a warning."""
    epochs = 40
    job = submit("paced.py", *OPTIONS, f"train.epochs={epochs}", PACE="0.03")
    cluster, pace = job.cluster, job.directory / "pace"
    pace.touch()
    saved = job.saved_since(0)
    os.kill(job.processes(job.nodes()[1])[-1], signal.SIGKILL)
    saved = job.saved_since(saved + 50)
    assert job.facts()[::2] == ("RUNNING", "0"), "the ranks were not restarted in place"

    for pid in job.processes(job.nodes()[1]):
        os.kill(pid, signal.SIGKILL)
    saved = job.saved_since(saved + 50)
    assert job.facts()[::2] == ("RUNNING", "1"), "the job was not requeued"

    lost = job.nodes()[1]
    cluster.lose_node(lost, job.processes(lost))
    saved = job.saved_since(saved + 50)
    assert job.facts()[::2] == ("RUNNING", "2"), "SLURM did not requeue the job"
    assert lost not in job.nodes()
    cluster.start_node(lost)

    nodes = f"--nodelist={','.join(job.nodes())}"
    urgent = ("--partition=urgent", "--exclusive", "--output=/dev/null")
    cluster.command("sbatch", *urgent, nodes, "--wrap=sleep 1")
    until(lambda: job.facts()[2] == "3", job.log)
    assert stopped_at(job, 2, "SIGTERM") >= saved
    saved = job.saved_since(saved + 50)

    cluster.command("scontrol", "requeue", job.number)
    until(lambda: job.facts()[2] == "4", job.log)
    assert stopped_at(job, 3, "SIGTERM") >= saved
    saved = job.saved_since(saved + 50)

    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    until(lambda: job.facts()[2] == "5", job.log)
    assert stopped_at(job, 4, "SIGUSR1") >= saved
    pace.unlink()
    assert job.end() == ("COMPLETED", "0:0", "5"), job.log()
    assert "the ranks ended with 75; the job is requeued" in job.log()
    environment = json.loads((job.run_dir() / "metrics.jsonl").read_text().splitlines()[0])
    assert (environment["world_size"], environment["num_hosts"]) == (2, 2)
    ended_alike(job, alone(2, epochs), epochs)


def stopped_at(job: Job, start: int, name: str) -> int:
    """Wait until the ranks of a start have saved after a signal; return the step."""
    prefix = f"stopped by {name} after step "
    folder = job.run_dir() / "logs" / f"start_{start}"

    def lines() -> list[str]:
        texts = (path.read_text() for path in folder.glob("**/stderr.log"))
        return [line for text in texts for line in text.splitlines() if line.startswith(prefix)]

    until(lambda: bool(lines()), job.log, 60)
    assert "; a checkpoint was saved" in lines()[0]
    return int(lines()[0].removeprefix(prefix).split(";")[0])


def test_a_job_of_one_or_two_nodes_goes_on_with_the_one_that_is_left(submit, tmp_path):
    """And takes the other one back when it is requeued, with the bits of runs that were stopped and started again."""
    epochs = 24
    arguments = [*OPTIONS, f"train.epochs={epochs}", "checkpoint.keep=1"]
    others = f"--exclude={','.join(NODES[2:])}"
    job = submit("paced.py", *arguments, options=("--nodes=1-2", others), PACE="0.03")
    cluster, pace = job.cluster, job.directory / "pace"
    pace.touch()
    saved = job.saved_since(0)
    first, lost = job.nodes()
    cluster.lose_node(lost, job.processes(lost))
    saved = job.saved_since(saved + 50)
    assert (job.facts()[::2], job.nodes()) == (("RUNNING", "1"), [first])
    cluster.start_node(lost)
    cluster.command("scancel", "--batch", "--signal=USR1", job.number)
    saved = job.saved_since(saved + 50)
    assert (job.facts()[::2], job.nodes()) == (("RUNNING", "2"), [first, lost])
    pace.unlink()
    assert job.end() == ("COMPLETED", "0:0", "2"), job.log()
    printed = " ".join(job.logs(0, first) + job.logs(0, lost))
    assert "the tables fit 1 x cpu" in " ".join(printed.split())
    run, wanted = job.run_dir(), tmp_path / "stopped"
    stops = [f"train.max_steps={record['step']}" for record in jsonl(run / "restarts.jsonl")]
    for number, (count, stop) in enumerate(zip((2, 1, 2), [*stops, ""], strict=True)):
        options = [*arguments, *filter(None, [stop]), f"run_dir={wanted}"]
        ranks = start(options, count, tmp_path / f"log_{number}", 1)
        assert ranks.wait(300) == [0] * count, ranks.log.read_text()
    losses, wanted_losses = (
        [(record["step"], record["loss"]) for record in records(each) if "loss" in record]
        for each in (run, wanted)
    )
    assert losses == wanted_losses
    same_tensors(run, wanted)


def same_tensors(run: Path, other: Path) -> None:
    """Check that two finished runs have the bytes of each tensor."""
    stored, wanted = (
        read_index(each / "checkpoints" / f"step_{summary(each)['steps']}").tensors
        for each in (run, other)
    )
    assert stored.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert stored[name].array().tobytes() == tensor.array().tobytes(), name


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    """A dataset of users with raw keys, of whom over 1,500 come and go and 799 have a row, and few items."""
    drawn, num_rows = np.random.default_rng(0), 64 * STEPS_PER_EPOCH
    users, root = CategoricalFeature.of_keys("cat_0", 800), tmp_path_factory.mktemp("data") / "keys"
    with write_dataset(
        root,
        categorical=[users, CategoricalFeature.of("cat_4", 40)],
        numerical=("n",),
    ) as dataset:
        for split in ("train", "test"):
            at = 2 * np.arange(num_rows) + drawn.integers(0, 400, num_rows)
            dataset[split].append(
                numerical=drawn.normal(size=(num_rows, 1)),
                labels=drawn.random(num_rows) < 0.4,
                ids={"cat_0": at * 0x9E3779B97F4A7C1 - 2**61, "cat_4": at % 40},
            )
    return root


@pytest.mark.parametrize(
    ("group_size", "has_keys"),
    [(4, False), (2, False), (4, True), (2, True)],
    ids=["one group", "a group a node", "keys, one group", "keys, a group a node"],
)
def test_two_nodes_of_two_ranks_end_with_the_bits_of_one_node(
    submit, tmp_path, keys, group_size, has_keys
):
    """With all ranks in one group, and with a group a node; raw keys are mapped once a node."""
    options = [*OPTIONS, f"sharding.group_size={group_size}", "sharding.tables={cat_4: row_wise}"]
    options += [f"data.path={keys}"] if has_keys else []
    job = submit("dlrm.py", *options, f"run_dir={tmp_path}/nodes", RANKS_PER_NODE="2")
    assert job.end() == ("COMPLETED", "0:0", "0"), job.log()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "dlrm.py")
    one_node = [sys.executable, *torchrun, *options, f"run_dir={tmp_path}/one"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(one_node, cwd=ROOT, env=environment, check=True, capture_output=True)
    for name, num_hosts in (("nodes", 2), ("one", 1)):
        first = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        assert (first["world_size"], first["num_hosts"]) == (4, num_hosts)
    one, nodes = tmp_path / "one", tmp_path / "nodes"
    assert (records(nodes), summary(nodes)) == (records(one), summary(one))
    # Tables of one group may lie on other ranks, since the planner knows the nodes.
    same_tensors(nodes, one)


def test_tasks_of_an_array_in_paths_with_spaces_train_and_are_requeued_alone(
    cluster, tmp_path, alone
):
    """Submitted from another directory than that of the checkout, with the recipe by its path."""
    epochs = 8
    local, elsewhere = checkout(tmp_path / "my check out"), tmp_path / "else where"
    elsewhere.mkdir()
    arguments = [f"{local}/paced.py", *OPTIONS, f"train.epochs={epochs}"]
    script, options = f"{local}/slurm_multinode.sh", ("--nodes=1", "--array=0-1")
    array = submitted(
        cluster, elsewhere, *arguments, options=options, script=script, PACE="0.05"
    ).number
    tasks = [Job(cluster, elsewhere, f"{array}_{task}") for task in (0, 1)]
    # Its id is that of the array.
    tasks[1].saved_since(0)
    assert cluster.job(tasks[1].number)["JobId"] == array
    cluster.command("scancel", "--batch", "--signal=USR1", tasks[1].number)
    for task, restarts in zip(tasks, ("0", "1"), strict=True):
        assert task.end() == ("COMPLETED", "0:0", restarts), task.log()
        ended_alike(task, alone(1, epochs), epochs)


def test_a_training_that_reaches_its_time_limit_is_requeued_and_completes(limited, alone):
    state, code, restarts = limited.end()
    assert (state, code) == ("COMPLETED", "0:0"), limited.log()
    assert int(restarts) > 0
    stopped_at(limited, 0, "SIGUSR1")
    assert limited.log().count("the ranks ended with 75; the job is requeued") == int(restarts)
    ended_alike(limited, alone(1, 8), 8)
