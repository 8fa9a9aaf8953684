"""A SLURM cluster of four nodes on this machine: munge, a controller and four daemons, in a temporary directory.

It does not read or change a SLURM of the machine itself. `python -m tests.helpers.slurm_cluster COMMAND` runs a command in it.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nn.distributed.launcher import reserved_port

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Debian installs daemons outside a user's PATH.
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
START_S = 30

# Names of nodes are addresses, since the first node of a job is its rendezvous endpoint and nobody here can name hosts. A
# requeued job waits until its old credentials have expired; `cred_expire` shortens the default of two minutes. The first job
# id is random, since the rendezvous port follows from it and jobs of two clusters on one machine could otherwise meet.
NODES = tuple(f"127.0.0.{number}" for number in (11, 12, 13, 14))
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={first_job_id}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
KillWait=10
SlurmdTimeout=10
ReturnToService=2
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9
"""


def missing_commands() -> list[str]:
    """Return the commands of a cluster that this machine lacks."""
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


class Cluster:
    """A running cluster.

    Attributes:
        root: directory of the cluster, with a log per daemon.
        nodes: names of the nodes.
    """

    def __init__(self, root: Path) -> None:
        host = socket.gethostname()
        self.root = root
        self.nodes = NODES
        ports = [reserved_port() for _ in range(1 + len(NODES))]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._node_daemons: dict[str, subprocess.Popen[bytes]] = {}
        configuration = CONFIGURATION.format(
            host=host,
            user=getpass.getuser(),
            root=root,
            port=ports[0],
            nodes="\n".join(
                f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port}"
                for node, port in zip(NODES, ports[1:], strict=True)
            ),
            first_job_id=secrets.randbelow(2**24) + 1,
        )
        (root / "slurm.conf").write_text(configuration)
        (root / "state").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that select this cluster."""
        inherited = {key: value for key, value in os.environ.items() if "SLURM" not in key}
        return inherited | {"PATH": PATH, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until both nodes accept jobs."""
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._daemon(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={self.root}/munge.socket", f"--pid-file={self.root}/munged.pid"),
            *(f"--log-file={self.root}/munged.txt", f"--seed-file={self.root}/munge.seed"),
        )
        self._wait_for("munge's socket", (self.root / "munge.socket").exists)
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self._wait_for("idle nodes", lambda: self._states() == ["idle"] * len(NODES))

    def start_node(self, node: str) -> None:
        """Start the daemon of a node, which `lose_node` may have killed."""
        self._node_daemons[node] = self._daemon("slurmd", "-D", "-N", node)

    def lose_node(self, node: str, processes: list[int]) -> None:
        """Kill the daemon of a node and `processes`, as a power failure does; SLURM notices within SlurmdTimeout."""
        # Else the parent of its processes would report their end.
        parents = {_parent(pid) for pid in processes} - set(processes) - {1}
        daemon = self._node_daemons.pop(node)
        self._daemons.remove(daemon)
        daemon.kill()
        daemon.wait()
        for pid in (*parents, *processes):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def command(self, *command: str, directory: Path | None = None, **environment: str) -> str:
        """Run a SLURM command with additional `environment` variables; return its output."""
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job in `scontrol show job`, such as JobState and Restarts."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job_id)
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def stop(self) -> None:
        """Stop all jobs and daemons."""
        subprocess.run(
            ["scancel", "--user", getpass.getuser()], env=self.environment, check=False, timeout=60
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._jobs():
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=START_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        name = f"{Path(command[0]).name}{len(self._daemons)}.log"
        with (self.root / name).open("wb") as log:
            daemon = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def _states(self) -> list[str]:
        return self._lines("sinfo", "--noheader", "--Node", "--partition=all", "--format=%t")

    def _jobs(self) -> list[str]:
        return self._lines("squeue", "--noheader")

    def _lines(self, *command: str) -> list[str]:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split() if done.returncode == 0 else []

    def _wait_for(self, what: str, condition) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            ended = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.root.glob("*.log"))
                raise RuntimeError(f"no {what}, ended: {ended}\n{logs}")
            time.sleep(0.2)


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start a cluster; stop it at the end."""
    # The path of a socket is limited to about 100 characters; pytest's directories are longer.
    with tempfile.TemporaryDirectory(prefix="slurm-") as root:
        cluster = Cluster(Path(root))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    with slurm_cluster() as started:
        sys.exit(subprocess.run(sys.argv[1:], env=started.environment).returncode)
