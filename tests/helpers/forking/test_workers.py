"""The processes that share the tests of one command: tests/helpers/forking/workers.py."""

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.command import ROOT

CONFTEST = """
import pytest
from tests.helpers.forking.workers import run_files

@pytest.fixture(scope="session")
def server(tmp_path_factory):
    yield tmp_path_factory.getbasetemp().name
    print("torn down", file=open("log", "a"))

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    run_files(session, 2)
    return True
"""
FILES = {
    "conftest.py": CONFTEST,
    "test_a.py": """
import pytest, sys, warnings
def test_fails(server):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    warnings.warn("beware")
    assert server == "nowhere"
@pytest.mark.skip(reason="no need")
def test_skips(): pass
""",
    "test_b.py": "def test_passes(server, tmp_path): assert tmp_path.parent.name == server",
    "test_c.py": "def test_passes(capfd): assert capfd.readouterr().out == ''",
}
DIES = """
import os
def test_passes(): pass
def test_dies(): os._exit(7)
def test_is_lost(): pass
"""


def run_pytest(directory: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    for name, text in files.items():
        (directory / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run(
        [*command, "--rootdir=.", f"--basetemp={directory / 'base'}", "-rs"],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_workers_report_as_one_process_does(tmp_path):
    code, text = run_pytest(tmp_path, FILES)
    assert code == 1
    assert "1 failed, 2 passed, 1 skipped, 1 warning" in text
    assert re.search(r"E +AssertionError: assert 'worker\d' == 'nowhere'", text)
    for words in ("to stdout", "to stderr", "beware", "no need"):
        assert words in text
    assert set((tmp_path / "log").read_text().splitlines()) == {"torn down"}


def test_a_worker_that_dies_fails_the_command_and_the_other_goes_on(tmp_path):
    code, text = run_pytest(tmp_path, FILES | {"test_0.py": DIES})
    assert code == 1
    assert "2 failed, 3 passed, 1 skipped" in text
    assert (
        "the worker died with exit code 7 (negative: a signal) during test_0.py::test_dies" in text
    )
    assert "1 tests did not run, since their worker died" in text


def test_the_first_failure_may_end_the_command(tmp_path):
    slow = "import time\ndef test_waits(): time.sleep(60)\ndef test_never(): pass"
    code, text = run_pytest(tmp_path, FILES | {"test_0.py": slow}, "-x")
    assert code == 1
    assert "stopping after 1 failures" in text
