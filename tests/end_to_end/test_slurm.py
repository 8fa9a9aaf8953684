"""slurm_multinode.sh, with an `srun` that writes down what each node would run instead of running it.

`tests/end_to_end/test_slurm_cluster.py` has the same script on a real SLURM.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "slurm_multinode.sh"
JOB = {"SLURM_JOB_ID": "40017", "SLURM_JOB_NODELIST": "gpu[07-09]"}
# Written NUL by NUL, so that no argument can be mistaken for two.
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
    """A directory with a recipe and, on PATH, the two commands of SLURM."""
    (tmp_path / "dlrm.py").touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        command = tmp_path / "bin" / name
        command.write_text(text)
        command.chmod(0o755)
    return tmp_path


def submit(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the script as the first node of a job would."""
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
    """What `srun` was given."""
    done = submit(checkout, *arguments, **(JOB | environment))
    assert (done.returncode, done.stderr) == (0, "")
    return (checkout / "srun.txt").read_text().split("\0")[:-1]


def test_every_node_starts_one_torchrun_that_meets_on_the_first(checkout):
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


def test_arguments_arrive_as_they_were_written(checkout):
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
    given = launched(
        checkout, "dlrm.py", RANKS_PER_NODE="2", NUMA_BINDING="exclusive", MAX_RESTARTS="0"
    )
    assert {"--nproc-per-node=2", "exclusive", "--max-restarts=0"} < set(given)


def test_a_run_directory_of_ones_own_is_kept(checkout):
    given = launched(checkout, "dlrm.py", "run_dir=/runs/mine", "seed=2")
    assert given[-3:] == ["dlrm.py", "run_dir=/runs/mine", "seed=2"]


def test_a_requeued_job_finds_its_run_directory_and_writes_new_logs(checkout):
    first = launched(checkout, "dlrm.py")
    again = launched(checkout, "dlrm.py", SLURM_RESTART_COUNT="2")
    assert first[-1] == again[-1] == "run_dir=runs/dlrm/job_40017"
    assert "runs/dlrm/job_40017/logs/start_2" in again


def test_a_container_brings_its_own_python_and_files(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    given = launched(
        checkout,
        "dcnv2.py",
        CONTAINER_IMAGE="registry#recsys:1",
        CONTAINER_MOUNTS="/scratch/a b:/data",
    )
    assert given[len(SRUN) :][:4] == [
        "--container-image=registry#recsys:1",
        "--container-workdir=/recsys",
        "--container-mounts=/scratch/a b:/data",
        "python",
    ]
    assert given[-2:] == ["dcnv2.py", "run_dir=runs/dcnv2/job_40017"]
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
def test_what_cannot_start_says_why(checkout, arguments, environment, message):
    done = submit(checkout, *arguments, **environment)
    assert done.returncode == 2
    assert done.stderr == f"slurm_multinode.sh: {message.format(checkout=checkout)}\n"
    assert not (checkout / "srun.txt").exists()


def end_with(checkout: Path, srun: str, **environment: str) -> tuple[int, bool, str]:
    """Exit code, whether the job was requeued, and what was said, of a job whose step is `srun`."""
    (checkout / "bin" / "srun").write_text(f"#!/bin/bash\n{srun}\n")
    done = submit(checkout, "dlrm.py", **(JOB | environment))
    requeued = checkout / "requeued.txt"
    return done.returncode, requeued.exists() and requeued.read_text() == "40017\n", done.stderr


@pytest.mark.parametrize("code", [2, 3, 130])
def test_an_error_that_would_come_again_ends_the_job(checkout, code):
    assert end_with(checkout, f"exit {code}") == (code, False, "")


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_job_that_can_go_on_is_requeued(checkout, code):
    said = f"the ranks ended with {code}; the job goes back to the queue"
    ended = end_with(checkout, f"exit {code}", SLURM_RESTART_COUNT="9")
    assert ended == (0, True, f"slurm_multinode.sh: {said}\n")


def test_a_job_that_fails_again_and_again_ends(checkout):
    said = "the ranks ended with 1, requeued 10 times; the job ends"
    ended = end_with(checkout, "exit 1", SLURM_RESTART_COUNT="10")
    assert ended == (1, False, f"slurm_multinode.sh: {said}\n")
    assert end_with(checkout, "exit 1", MAX_REQUEUES="0")[:2] == (1, False)


def test_a_warning_is_handed_on_and_waited_for_and_does_not_count_as_a_failure(checkout):
    step = (
        "trap 'sleep 0.5; touch saved; exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.1; done"
    )
    code, requeued, _ = end_with(checkout, step, SLURM_RESTART_COUNT="99")
    assert (code, requeued) == (0, True)
    assert (checkout / "saved").exists()


def test_a_cancelled_job_is_waited_for_and_stays_cancelled(checkout):
    step = "kill -TERM $PPID; sleep 0.5; touch saved; exit 75"
    assert end_with(checkout, step)[:2] == (75, False)
    assert (checkout / "saved").exists()


def test_slurm_is_asked_for_one_task_a_node_a_warning_and_requeues():
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


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
