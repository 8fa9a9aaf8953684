"""slurm_multinode.sh with a fake `srun` that records its arguments.

`tests/end_to_end/test_slurm_cluster.py` runs the same script on a real SLURM cluster.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "slurm_multinode.sh"
JOB = {"SLURM_JOB_ID": "40017", "SLURM_JOB_NODELIST": "gpu[07-09]"}
# NUL ends each argument, so that spaces in arguments are kept.
FAKE_SRUN = '#!/bin/sh\nprintf "%s\\0" "$@" > srun.txt\n'
FAKE_SCONTROL = """\
#!/bin/sh
case "$*" in
    "show hostnames gpu[07-09]") printf "gpu07\\ngpu08\\ngpu09\\n" ;;
    requeue*) echo "$2" > requeued.txt ;;
esac
"""
SRUN = [
    *["--nodes=3", "--ntasks=3", "--ntasks-per-node=1"],
    *["--cpu-bind=none", "--kill-on-bad-exit=0"],
]
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=gpu07:20017", "--rdzv-id=40017"]


@pytest.fixture
def checkout(tmp_path):
    """Make a directory with a recipe and fake srun and scontrol commands."""
    (tmp_path / "dlrm.py").touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        command = tmp_path / "bin" / name
        command.write_text(text)
        command.chmod(0o755)
    return tmp_path


def submit(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the script with the job's environment, as SLURM runs it on the first node."""
    inherited = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        cwd=checkout,
        env=inherited | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def launched(checkout: Path, *arguments: str, **environment: str) -> list[str]:
    """Return the arguments of `srun`."""
    done = submit(checkout, *arguments, **(JOB | environment))
    assert (done.returncode, done.stderr) == (0, "")
    return (checkout / "srun.txt").read_text().split("\0")[:-1]


def test_every_node_starts_one_torchrun_with_its_rendezvous_on_the_first(checkout):
    options = ["experiment=dlrm_criteo_t0", "data.path=DIR"]
    assert launched(checkout, "dlrm.py", *options) == [
        *SRUN,
        *[
            "python",
            "-m",
            "nn.distributed.node_launcher",
            "runs/dlrm/job_40017/logs/start_0",
            "node",
        ],
        *["--nnodes=3", "--nproc-per-node=gpu", "--max-restarts=3", *RENDEZVOUS],
        *["dlrm.py", *options, "run_dir=runs/dlrm/job_40017"],
    ]


def test_arguments_are_passed_on_unchanged(checkout):
    options = [
        "data.path=/two words/$(touch owned)",
        "sharding.tables={cat_0:row_wise}",
        "*",
        "--help",
        "",
    ]
    assert launched(checkout, "dlrm.py", *options, "run_dir=`touch owned`;touch owned")[-6:] == [
        *options,
        "run_dir=`touch owned`;touch owned",
    ]
    assert not (checkout / "owned").exists()


def test_the_environment_of_the_checkout_is_used(checkout):
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    assert launched(checkout, "dlrm.py")[len(SRUN)] == str(interpreter)


def test_ranks_binding_and_restarts_can_be_set(checkout):
    srun_arguments = launched(
        checkout, "dlrm.py", RANKS_PER_NODE="2", NUMA_BINDING="exclusive", MAX_RESTARTS="0"
    )
    assert {"--nproc-per-node=2", "exclusive", "--max-restarts=0"} < set(srun_arguments)


def test_a_run_directory_of_ones_own_is_kept(checkout):
    srun_arguments = launched(checkout, "dlrm.py", "run_dir=/runs/mine", "seed=2")
    assert srun_arguments[-3:] == ["dlrm.py", "run_dir=/runs/mine", "seed=2"]


def test_a_requeued_job_keeps_its_run_directory_and_writes_new_logs(checkout):
    first = launched(checkout, "dlrm.py")
    again = launched(checkout, "dlrm.py", SLURM_RESTART_COUNT="2")
    assert first[-1] == again[-1] == "run_dir=runs/dlrm/job_40017"
    assert "runs/dlrm/job_40017/logs/start_2" in again


def test_a_container_runs_its_own_python(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    srun_arguments = launched(
        checkout,
        "dcnv2.py",
        CONTAINER_IMAGE="registry#recsys:1",
        CONTAINER_MOUNTS="/scratch/a b:/data",
    )
    assert srun_arguments[len(SRUN) :][:4] == [
        "--container-image=registry#recsys:1",
        "--container-workdir=/recsys",
        "--container-mounts=/scratch/a b:/data",
        "python",
    ]
    assert srun_arguments[-2:] == ["dcnv2.py", "run_dir=runs/dcnv2/job_40017"]
    bare = launched(checkout, "dcnv2.py", CONTAINER_IMAGE="image", CONTAINER_WORKDIR="/code")
    assert [option for option in bare if "container" in option] == [
        "--container-image=image",
        "--container-workdir=/code",
    ]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], JOB, "no recipe; write sbatch -N 2 slurm_multinode.sh dlrm.py [options]"),
        (["dlrm.py"], {}, "not a job; submit it with sbatch -N 2 slurm_multinode.sh dlrm.py"),
        (["dlmr.py"], JOB, "no file dlmr.py in {checkout}; submit from the root of the checkout"),
        (
            ["dlrm.py"],
            JOB | {"SLURM_JOB_NODELIST": "elsewhere"},
            "scontrol names no host in SLURM_JOB_NODELIST=elsewhere",
        ),
    ],
)
def test_a_job_that_cannot_start_reports_the_reason(checkout, arguments, environment, message):
    done = submit(checkout, *arguments, **environment)
    assert done.returncode == 2
    assert done.stderr == f"slurm_multinode.sh: {message.format(checkout=checkout)}\n"
    assert not (checkout / "srun.txt").exists()


def end_with(checkout: Path, srun: str, **environment: str) -> tuple[int, bool, str]:
    """Run a job whose step is the script `srun`; return exit code, whether it was requeued, and stderr."""
    (checkout / "bin" / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    done = submit(checkout, "dlrm.py", **(JOB | environment))
    requeued = checkout / "requeued.txt"
    return done.returncode, requeued.exists() and requeued.read_text() == "40017\n", done.stderr


@pytest.mark.parametrize("code", [2, 3, 130])
def test_a_permanent_error_ends_the_job(checkout, code):
    assert end_with(checkout, f"exit {code}") == (code, False, "")


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_resumable_job_is_requeued(checkout, code):
    message = f"the ranks ended with {code}; the job is requeued"
    ended = end_with(checkout, f"exit {code}", SLURM_RESTART_COUNT="9")
    assert ended == (0, True, f"slurm_multinode.sh: {message}\n")


def test_the_number_of_requeues_is_limited(checkout):
    message = "the ranks ended with 1, requeued 10 times; the job ends"
    ended = end_with(checkout, "exit 1", SLURM_RESTART_COUNT="10")
    assert ended == (1, False, f"slurm_multinode.sh: {message}\n")
    assert end_with(checkout, "exit 1", MAX_REQUEUES="0")[:2] == (1, False)


def test_a_warning_is_forwarded_and_awaited_and_is_not_a_failure(checkout):
    step = (
        "trap 'sleep 0.5; touch saved; exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.1; done"
    )
    code, requeued, _ = end_with(checkout, step, SLURM_RESTART_COUNT="99")
    assert (code, requeued) == (0, True)
    assert (checkout / "saved").exists()


def test_a_cancelled_job_is_awaited_and_stays_cancelled(checkout):
    step = "kill -TERM $PPID; sleep 0.5; touch saved; exit 75"
    assert end_with(checkout, step)[:2] == (75, False)
    assert (checkout / "saved").exists()


def test_directives_request_one_task_per_node_a_warning_and_requeues():
    lines = SCRIPT.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert set(directives) >= {
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@300",
    }
    # SLURM reads directives up to the first command only.
    assert lines.index(directives[-1]) < lines.index("set -euo pipefail")


def test_shellcheck_reports_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
