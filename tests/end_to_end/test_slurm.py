"""slurm_multinode.sh with a fake `srun` that records its arguments.

`tests/end_to_end/test_slurm_cluster.py` runs the same script on a real SLURM cluster.
"""

import os
import shutil
import socket
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
    "show hostnames gpu[07-09]") printf "127.0.0.1\\ngpu08\\ngpu09\\n" ;;
    "--oneliner show job"*)
        echo "JobId=$4 $HET Requeue=${REQUEUE:-1} BatchFlag=${BATCH_FLAG:-1} TimeLimit=${TIME_LIMIT:-1-00:00:00} TimeMin=N/A" ;;
    requeue*) echo "$2" > requeued.txt ;;
esac
"""
SRUN = [
    *["--nodes=3", "--ntasks=3", "--ntasks-per-node=1"],
    *["--cpu-bind=none", "--kill-on-bad-exit=0"],
]
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:21713", "--rdzv-id=40017"]


@pytest.fixture
def checkout(tmp_path):
    """Make a directory with a recipe and fake srun and scontrol commands."""
    (tmp_path / "dlrm.py").touch()
    (tmp_path / "nn/distributed").mkdir(parents=True)
    (tmp_path / "nn/distributed/node_launcher.py").touch()
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        command = tmp_path / "bin" / name
        command.write_text(text)
        command.chmod(0o755)
    return tmp_path


def submit(
    checkout: Path,
    *arguments: str,
    cwd: Path | None = None,
    script: Path = SCRIPT,
    **environment: str,
) -> subprocess.CompletedProcess:
    """Run the script with the job's environment, as SLURM runs it on the first node."""
    inherited = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=cwd or checkout,
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
    srun_arguments = launched(checkout, "dlrm.py", *options)
    assert srun_arguments[: len(SRUN) + 2] == [*SRUN, "/bin/sh", "-c"]
    assert srun_arguments[len(SRUN) + 3 :] == [
        *["sh", str(checkout), "runs/dlrm/job_40017/logs/start_0", "python", "node"],
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
    assert str(interpreter) in launched(checkout, "dlrm.py")


def test_a_job_that_was_submitted_within_a_step_starts(checkout):
    """It inherits the variables of the step; SLURM runs its script under this name."""
    script = Path(shutil.copy(SCRIPT, checkout / "slurm_script"))
    inherited = {"SLURM_STEP_ID": "0", "SLURM_HET_SIZE": "2"}
    done = submit(checkout, "dlrm.py", script=script, **JOB, **inherited)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_binding_and_restarts_can_be_set(checkout):
    srun_arguments = launched(
        checkout, "dlrm.py", RANKS_PER_NODE="2", NUMA_BINDING="exclusive", MAX_RESTARTS="0"
    )
    assert {"--nproc-per-node=2", "exclusive", "--max-restarts=0"} < set(srun_arguments)


def test_a_recipe_of_a_checkout_elsewhere_runs_there(checkout, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (checkout / ".venv").mkdir()
    done = submit(checkout, f"{checkout}/dlrm.py", cwd=elsewhere, **JOB)
    assert (done.returncode, done.stderr) == (0, "")
    passed = (elsewhere / "srun.txt").read_text().split("\0")
    assert str(checkout) in passed, "PYTHONPATH of the launcher"
    assert f"{checkout}/.venv/bin/python" in passed


def test_a_short_job_with_a_shorter_warning_starts(checkout):
    assert launched(checkout, "dlrm.py", TIME_LIMIT="00:05:00", SBATCH_SIGNAL="B:USR1@299")
    assert launched(checkout, "dlrm.py", TIME_LIMIT="UNLIMITED", SBATCH_SIGNAL="B:SIGUSR1@299")
    assert launched(checkout, "dlrm.py", SBATCH_SIGNAL="10")
    # The shell of an interactive salloc is a step.
    assert launched(checkout, "dlrm.py", SLURM_STEP_ID="4294967290")
    # Directives do not count in salloc.
    assert launched(checkout, "dlrm.py", TIME_LIMIT="00:05:00", BATCH_FLAG="0")


def test_a_port_that_somebody_holds_is_left_to_him_and_the_next_start_takes_another(checkout):
    with socket.create_server(("127.0.0.1", 21713)):
        done = submit(checkout, "dlrm.py", **JOB)
    assert done.stderr == (
        "slurm_multinode.sh: port 21713 of 127.0.0.1 is taken by another process; the rendezvous takes another\n"
    )
    assert "--rdzv-endpoint=127.0.0.1:21714" in (checkout / "srun.txt").read_text()
    for restart, port in (("1", 29632), ("2", 24783)):
        again = launched(checkout, "dlrm.py", SLURM_RESTART_COUNT=restart)
        assert f"--rdzv-endpoint=127.0.0.1:{port}" in again


def test_a_node_without_the_environment_ends_the_job(checkout):
    """The command of a node runs here, with an interpreter that is missing; other nodes are killed after waiting for it."""
    (checkout / ".venv").mkdir()
    step = 'while [[ $1 != /bin/sh ]]; do shift; done; "$@"; exit 137'
    code, requeued, err = end_with(checkout, step, SLURMD_NODENAME="gpu08")
    assert (code, requeued) == (2, False)
    assert err == (
        f"error: node gpu08: there is no {checkout}/.venv/bin/python; all nodes must see the checkout and its .venv\n"
    )


def test_a_run_directory_of_ones_own_is_kept(checkout):
    srun_arguments = launched(checkout, "dlrm.py", "run_dir=/runs/mine", "seed=2")
    assert srun_arguments[-3:] == ["dlrm.py", "run_dir=/runs/mine", "seed=2"]
    for form in ("++run_dir=/runs/mine", "--run_dir=/runs/mine"):
        assert launched(checkout, "dlrm.py", form)[-1] == form


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
        "/bin/sh",
    ]
    assert srun_arguments[len(SRUN) + 6 :][:4] == [
        *["sh", "/recsys", "runs/dcnv2/job_40017/logs/start_0", "python"],
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
        (
            ["dlrm.py"],
            JOB | {"MAX_RESTARTS": "many"},
            "MAX_RESTARTS and MAX_REQUEUES are numbers, not 'many'",
        ),
        (
            ["dlrm.py"],
            JOB | {"TIME_LIMIT": "00:05:00"},
            "--time (300 s) is not longer than the warning before it (300 s), so no start could train; ask for more time, or set "
            "the warning: SBATCH_SIGNAL=B:USR1@SECONDS sbatch ... (sbatch --signal is not seen here: with it, set SBATCH_SIGNAL "
            "too)",
        ),
        (
            ["dlrm.py"],
            JOB | {"SLURM_STEP_ID": "0"},
            "inside srun, which holds the nodes; write sbatch -N 2 slurm_multinode.sh dlrm.py, or salloc -N 2 "
            "./slurm_multinode.sh dlrm.py",
        ),
        (
            ["dlrm.py"],
            JOB | {"HET": "HetJobId=40017 HetJobOffset=0"},
            "a heterogeneous job, of which only the first component would train; ask for equal nodes, without ':'",
        ),
        (
            ["dlrm.py"],
            JOB | {"RANKS_PER_NODE": "0"},
            "RANKS_PER_NODE is a number of ranks, or gpu for one per GPU, not '0'",
        ),
        (
            ["dlrm.py"],
            JOB | {"SBATCH_SIGNAL": "B:TERM@60"},
            "SBATCH_SIGNAL=B:TERM@60: the warning before the time limit is USR1, as in B:USR1@300",
        ),
        (
            ["other/dlrm.py"],
            JOB,
            "neither {checkout}/elsewhere nor {checkout}/elsewhere/other is a checkout (no nn/distributed); submit from the root "
            "of the checkout",
        ),
    ],
)
def test_a_job_that_cannot_start_reports_the_reason(checkout, arguments, environment, message):
    elsewhere = checkout / "elsewhere"
    (elsewhere / "other").mkdir(parents=True)
    (elsewhere / "other" / "dlrm.py").touch()
    is_elsewhere = arguments == ["other/dlrm.py"]
    done = submit(checkout, *arguments, cwd=elsewhere if is_elsewhere else checkout, **environment)
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
    ended = end_with(checkout, f"exit {code}", SLURM_RESTART_COUNT="99")
    assert ended == (0, True, f"slurm_multinode.sh: {message}\n")


def test_the_number_of_requeues_in_a_row_is_limited(checkout):
    message = "the ranks ended with 1, requeued 2 times in a row; the job ends"
    for _ in range(2):
        assert end_with(checkout, "exit 1", MAX_REQUEUES="2")[:2] == (0, True)
        (checkout / "requeued.txt").unlink()
    assert end_with(checkout, "exit 1", MAX_REQUEUES="2") == (
        *(1, False),
        f"slurm_multinode.sh: {message}\n",
    )
    assert end_with(checkout, "exit 1", MAX_REQUEUES="0")[:2] == (1, False)
    (checkout / "runs/dlrm/job_40017/failures").write_text("8")
    assert end_with(checkout, "exit 1", MAX_REQUEUES="08")[:2] == (1, False)


def test_a_warning_is_forwarded_and_awaited_and_is_not_a_failure(checkout):
    step = (
        "trap 'sleep 0.5; touch saved; exit 75' USR1; kill -USR1 $PPID; while :; do sleep 0.1; done"
    )
    code, requeued, _ = end_with(checkout, step, MAX_REQUEUES="0", SLURM_RESTART_COUNT="99")
    assert (code, requeued) == (0, True)
    assert (checkout / "saved").exists()


def test_a_task_of_an_array_is_requeued_alone(checkout):
    """The id of the last task is that of the array."""
    end_with(checkout, "exit 75", SLURM_ARRAY_JOB_ID="40017", SLURM_ARRAY_TASK_ID="3")
    assert (checkout / "requeued.txt").read_text() == "40017_3\n"


@pytest.mark.parametrize("variables", [{"BATCH_FLAG": "0"}, {"REQUEUE": "0"}])
def test_a_job_of_salloc_or_that_may_not_be_is_not_requeued(checkout, variables):
    code, requeued, err = end_with(checkout, "exit 75", **variables)
    assert (code, requeued) == (75, False)
    assert err == (
        "slurm_multinode.sh: the ranks ended with 75; a job of salloc or with --no-requeue is not requeued, and the same "
        "command with the same run_dir resumes\n"
    )


def test_commands_of_one_salloc_do_not_count_for_each_other(checkout):
    """They have the same job and start."""
    job = checkout / "runs/dlrm/job_40017"
    step = f"mkdir -p {job}/logs/start_0; echo 2 > {job}/logs/start_0/ended_with; echo 0 > {job}/starts.txt"
    assert end_with(checkout, f"{step}; exit 137", BATCH_FLAG="0") == (2, False, "")
    assert end_with(checkout, "exit 0", BATCH_FLAG="0") == (0, False, "")
    assert not (job / "starts.txt").exists()


def test_the_reason_is_read_where_a_container_has_written_it(checkout):
    job = checkout / "my runs/dlrm/job_40017"
    step = f"mkdir -p '{job}/logs/start_0'; echo 3 > '{job}/logs/start_0/ended_with'; exit 137"
    mounts = f"/data:/data,{checkout}/my runs:/recsys/runs:rw"
    assert end_with(checkout, step, CONTAINER_IMAGE="image", CONTAINER_MOUNTS=mounts)[0] == 3
    assert end_with(checkout, "exit 1", CONTAINER_IMAGE="image", CONTAINER_MOUNTS=mounts)[0] == 0
    assert (job / "failures").read_text() == "1\n"


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
