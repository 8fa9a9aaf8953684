"""A SLURM cluster of two nodes on this machine: munge, a controller and two daemons, in a temporary directory.

Nothing of the machine's own SLURM is read or changed. `python -m tests.helpers.slurm_cluster COMMAND` runs a command inside one.
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
from contextlib import contextmanager
from pathlib import Path

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
# Debian keeps daemons where a user's PATH does not lead.
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
START_S = 30

# The first node has this machine's name, since that is where the ranks meet. A requeued job waits until its old
# credentials have expired, two minutes unless `cred_expire` says otherwise. Jobs of two clusters on one machine would meet
# each other, at the port that their number gives: so numbers begin anywhere.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
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
ReturnToService=2
PropagateResourceLimits=NONE
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def missing_commands() -> list[str]:
    """What a cluster needs and this machine has not."""
    return [each for each in NEEDED if shutil.which(each, path=PATH) is None]


class Cluster:
    """A running cluster.

    Attributes:
        root: its directory, with a log of each daemon.
        nodes: names of the two nodes.
    """

    def __init__(self, root: Path) -> None:
        host = socket.gethostname()
        self.root = root
        self.nodes = (host, f"{host}-2")
        self._daemons: list[subprocess.Popen[bytes]] = []
        configuration = CONFIGURATION.format(
            host=host,
            user=getpass.getuser(),
            root=root,
            nodes=self.nodes,
            ports=_free_ports(3),
            first_job_id=secrets.randbelow(2**24) + 1,
        )
        (root / "slurm.conf").write_text(configuration)
        (root / "state").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """What a command needs to find this cluster and no other."""
        inherited = {key: value for key, value in os.environ.items() if "SLURM" not in key}
        return inherited | {"PATH": PATH, "SLURM_CONF": str(self.root / "slurm.conf")}

    def start(self) -> None:
        """Start all daemons and wait until both nodes take jobs."""
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
            self._daemon("slurmd", "-D", "-N", node)
        self._wait_for("two idle nodes", lambda: self._states() == ["idle", "idle"])

    def command(self, *command: str, directory: Path | None = None, **environment: str) -> str:
        """Run one of SLURM's commands, with more `environment` if need be, and return what it prints."""
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
        """Facts of a job as `scontrol` knows them, such as JobState and Restarts."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job_id)
        return dict(each.split("=", 1) for each in shown.split() if "=" in each)

    def stop(self) -> None:
        """End all jobs and daemons."""
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

    def _daemon(self, *command: str) -> None:
        name = f"{Path(command[0]).name}{len(self._daemons)}.log"
        with (self.root / name).open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _states(self) -> list[str]:
        return self._lines("sinfo", "--noheader", "--Node", "--format=%t")

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
            ended = [each.args[0] for each in self._daemons if each.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(each.read_text()[-2000:] for each in self.root.glob("*.log"))
                raise RuntimeError(f"no {what}, ended: {ended}\n{logs}")
            time.sleep(0.2)


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start a cluster, and stop it at the end."""
    # Sockets have short names only, and pytest's directories long ones.
    with tempfile.TemporaryDirectory(prefix="slurm-") as root:
        cluster = Cluster(Path(root))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


if __name__ == "__main__":
    with slurm_cluster() as started:
        sys.exit(subprocess.run(sys.argv[1:], env=started.environment).returncode)
