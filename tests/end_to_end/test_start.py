"""The start of runs: a terminal's first line, and the imports that trials, jobs and days share."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sweep.trial_process import TrialServer, stop
from tests.helpers.command import ROOT
from tests.helpers.forks import python
from tests.helpers.rank_processes import wait_until

# In place of a run: notes what it has imported, and ends as its argument says.
TRIAL = """
import json, os, signal, sys
from pathlib import Path
ending, path = sys.argv[1:]
facts = {"imported": "nn.run" in sys.modules, "by": os.getppid(), "leads": os.getpid() == os.getsid(0)}
import torch
facts |= {"threads": torch.get_num_threads(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
Path(path).write_text(json.dumps(facts))
print("noted")
if ending == "wait":
    signal.pause()
sys.exit(int(ending))
"""
# Imports as on a machine with a GPU, where CUDA must not be asked before a fork.
SHARED = """
import os
from pathlib import Path
import torch

def asked(*_):
    raise AssertionError("CUDA was asked")

torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = asked
torch.cuda._device_count_nvml = lambda: 1
from nn.shared_imports import import_for_runs
import_for_runs()
threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
print(threads - {"jemalloc_bg_thd"}, os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
"""


def lines_on_terminal(columns: int, *arguments: str) -> list[str]:
    """Return the lines that `dlrm.py` leaves on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = str(columns)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "dlrm.py", *arguments])
    text = b""
    try:
        while piece := os.read(terminal, 4096):
            text += piece
    except OSError:  # the terminal's end
        os.waitpid(pid, 0)
    return [line.rpartition("\r")[2] for line in text.decode().replace("\r\n", "\n").splitlines()]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_first_line_on_a_terminal_stays_whole(columns):
    first, second = lines_on_terminal(columns, "sharding.tables={nope: {tier: host}}")
    assert first == "loading torch and TorchRec ..."
    assert second.startswith("error: sharding.tables names nope")


def test_trials_are_forks_of_one_process_that_has_imported_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr("sweep.trial_process.sys.executable", python())
    script = tmp_path / "trial.py"
    script.write_text(TRIAL)
    server = TrialServer()

    def start(ending: str, **variables: str):
        command = [sys.executable, str(script), ending, str(tmp_path / ending)]
        return server.start(command, os.environ | variables, tmp_path / f"{ending}.log")

    first = start("0", OMP_NUM_THREADS="2", CUDA_VISIBLE_DEVICES="5")
    second = start("3", OMP_NUM_THREADS="1")
    third = start("wait", OMP_NUM_THREADS="1")
    assert wait_until(lambda: first.poll() == 0 and second.poll() == 3, 60)
    assert wait_until((tmp_path / "wait").exists, 60)
    stop([third])
    assert (first.poll(), third.poll()) == (0, -signal.SIGTERM)
    server.close()
    facts = [json.loads((tmp_path / ending).read_text()) for ending in ("0", "3")]
    assert facts[0].pop("by") == facts[1].pop("by") != os.getpid()
    same = {"imported": True, "leads": True}
    assert facts == [same | {"threads": 2, "gpus": "5"}, same | {"threads": 1, "gpus": None}]
    assert (tmp_path / "0.log").read_text() == "noted\n"


@pytest.mark.doors
def test_trials_end_with_a_sweep_that_is_killed(tmp_path):
    script, note = tmp_path / "trial.py", tmp_path / "wait"
    script.write_text(TRIAL.replace("facts = {", 'facts = {"pid": os.getpid(), '))
    sweep = os.fork()
    if sweep == 0:
        command = [sys.executable, str(script), "wait", str(note)]
        TrialServer().start(command, os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "log")
        signal.pause()
    assert wait_until(lambda: note.exists() and note.read_text(), 60)
    trial = Path(f"/proc/{json.loads(note.read_text())['pid']}")
    assert trial.exists()
    os.kill(sweep, signal.SIGKILL)
    os.waitpid(sweep, 0)
    assert wait_until(lambda: not trial.exists() or "Z" in trial.joinpath("stat").read_text(), 20)


@pytest.mark.doors
def test_imports_for_forks_open_no_gpu_and_start_no_thread():
    done = subprocess.run(
        [sys.executable, "-c", SHARED],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith(" None\n"), done.stderr
    assert "{'python'" in done.stdout
