"""slurm_multinode.sh, with an `srun` that writes down what each node would run instead of running it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "slurm_multinode.sh"
JOB = {"SLURM_JOB_ID": "40017", "SLURM_JOB_NODELIST": "gpu[07-09]"}
# Written NUL by NUL, so that no argument can be mistaken for two.
FAKE_SRUN = '#!/bin/sh\nprintf "%s\\0" "$@" > srun.txt\n'
FAKE_SCONTROL = (
    '#!/bin/sh\n[ "$*" = "show hostnames gpu[07-09]" ] && printf "gpu07\\ngpu08\\ngpu09\\n"\n'
)
SRUN = [
    *["--nodes=3", "--ntasks=3", "--ntasks-per-node=1"],
    *["--cpu-bind=none", "--kill-on-bad-exit=1"],
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
        *["python", "-m", "torch.distributed.run"],
        *["--nnodes=3", "--nproc-per-node=gpu", *RENDEZVOUS],
        *["dlrm.py", *options],
    ]


def test_arguments_arrive_as_they_were_written(checkout):
    options = [
        "data.path=/two words/$(touch owned)",
        "sharding.tables={cat_0:row_wise}",
        "run_dir=`touch owned`;touch owned",
        "*",
        "--help",
        "",
    ]
    assert launched(checkout, "dlrm.py", *options)[-6:] == options
    assert not (checkout / "owned").exists()


def test_the_environment_of_the_checkout_is_used(checkout):
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    assert launched(checkout, "dlrm.py")[len(SRUN)] == str(interpreter)


def test_ranks_of_a_node_can_be_set(checkout):
    assert "--nproc-per-node=2" in launched(checkout, "dlrm.py", RANKS_PER_NODE="2")


def test_a_container_brings_its_own_python_and_files(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    given = launched(
        checkout,
        "dcnv2.py",
        CONTAINER_IMAGE="registry#recsys:1",
        CONTAINER_MOUNTS="/scratch/a b:/data",
    )
    assert given[len(SRUN) :][:3] == [
        "--container-image=registry#recsys:1",
        "--container-mounts=/scratch/a b:/data",
        "python",
    ]
    assert given[-1] == "dcnv2.py"
    bare = launched(checkout, "dcnv2.py", CONTAINER_IMAGE="image")
    assert [each for each in bare if "container" in each] == ["--container-image=image"]


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


def test_a_failing_job_fails(checkout):
    (checkout / "bin" / "srun").write_text("#!/bin/sh\nexit 3\n")
    assert submit(checkout, "dlrm.py", **JOB).returncode == 3


def test_one_task_a_node_is_asked_for():
    lines = SCRIPT.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert "#SBATCH --ntasks-per-node=1" in directives
    # SLURM reads directives up to the first command only.
    assert lines.index(directives[-1]) < lines.index("set -euo pipefail")
