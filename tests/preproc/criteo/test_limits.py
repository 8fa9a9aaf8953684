"""Runs on a full disk and within a memory limit, with a real file system and real memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs.exit_codes import USER_ERROR_EXIT_CODE
from tests.helpers.preproc_command import preproc, raw_line, write_lines
from tests.preproc.criteo.test_restart import all_files, any_table, raw_logs
from tests.preproc.table.test_pipeline import _hydra

pytestmark = pytest.mark.doors

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "preproc", "plot=false"]
# A mount that only its own processes see; as another user than root within a user namespace.
OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    command = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="no tmpfs can be mounted in a user namespace")
@pytest.mark.parametrize(
    ("job", "message"),
    [
        (raw_logs, "No space left on device: "),
        (any_table, "No space left on device: "),
    ],
)
def test_a_run_on_a_full_disk_ends_with_a_message_and_resumes_when_there_is_space(
    tmp_path, job, message
):
    # Repeated lines compress so well that the estimate before the run is too low.
    lines = [raw_line(row % 2, c1=f"{row * 2654435761 % 2**32:08x}") for row in range(400)] * 150
    source = write_lines(tmp_path / "raw.gz", lines, compress=True)
    (tmp_path / "disk").mkdir()
    options = [*job(str(source)), f"temp_directory={tmp_path / 'disk'}"]
    preproc(*options, f"output={tmp_path / 'wanted'}")
    script = (
        'mount -t tmpfs -o size=600k tmpfs "$DISK" && "$@" 2>"$LOG"; echo $? >>"$LOG"; '
        'ls -A "$DISK" >>"$LOG"; mount -o remount,size=200m "$DISK" && exec "$@"'
    )
    subprocess.run(
        [*OWN_MOUNTS, "sh", "-c", script, "sh", *COMMAND, *options, f"output={tmp_path / 'out'}"],
        cwd=ROOT,
        env={"DISK": str(tmp_path / "disk"), "LOG": str(tmp_path / "log")},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    log = (tmp_path / "log").read_text()
    assert log.startswith("error: ")
    assert message in log
    assert log.splitlines()[1] == str(USER_ERROR_EXIT_CODE)
    assert all_files(tmp_path / "out") == all_files(tmp_path / "wanted")


def peak_bytes(*options: str) -> int:
    """Run the command and return the largest resident set of a process of it."""
    code = (
        "import resource, subprocess, sys\n"
        "code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode\n"
        "if code: sys.exit(code)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *COMMAND, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def kept(output: Path) -> list[int]:
    columns = json.loads((output / "report.json").read_text())["columns"].values()
    return [column["kept"] for column in columns if column["kept"]]


def test_more_values_than_fit_spill_within_the_memory_limit(tmp_path):
    # 1.2 million distinct values in each of three columns, in 256 MB over the base of Python itself.
    lines = [
        f"1{chr(9) * 13}\t{i * 2654435761 % 2**32:08x}\t{i * 40503 % 2**32:08x}\t{i:08x}{chr(9) * 23}"
        for i in range(1_200_000)
    ]
    source, output = write_lines(tmp_path / "raw.tsv", lines), tmp_path / "out"
    options = [f"source={source}", f"output={output}", "memory_limit=450MB", "threads=2"]
    assert peak_bytes(*options) < 450e6
    assert kept(output) == [1_080_000] * 3


def test_a_table_of_more_values_than_fit_spills_within_the_memory_limit(tmp_path):
    # 1.5 million distinct texts of 32 characters in each of two columns.
    lines = [f"{i % 2},{i * 2654435761 % 2**32:032x},{i:032x}" for i in range(1_500_000)]
    source, output = write_lines(tmp_path / "raw.csv", ["y,a,b", *lines]), tmp_path / "out"
    table = {
        "sources": {"t": {"files": str(source)}},
        "label": {"name": "y"},
        "categorical": ["a", "b"],
    }
    options = ["dataset=any", f"table={_hydra(table)}", f"output={output}"]
    assert peak_bytes(*options, "memory_limit=450MB", "threads=2") < 450e6
    assert kept(output) == [1_350_000] * 2
