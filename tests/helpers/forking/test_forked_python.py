"""Commands that are forks behave as Python's: tests/helpers/forking/forked_python.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.forks import python

LOOP = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got it"))
os.write(1, b"%07d" % os.getpid())
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import sys; print(sys.argv, sys.stdin.read()); sys.exit(3)", "a", "b c"],
        ["-c", "import sys; sys.exit('no')"],
        ["-c", "1 / 0"],
        ["-c", "raise KeyboardInterrupt"],
        ["-c", "import os; os.abort()"],
        ["-c", "import os; print(os.environ['WORD'], os.getcwd(), sorted(os.environ))"],
        ["-c", "import atexit; atexit.register(print, 'the end')"],
        ["-c", "import time; print(time.tzname)"],
        ["-u", "script.py", "x"],
        ["-m", "script", "x"],
        ["no_script.py"],
        ["-V"],
    ],
    ids=" ".join,
)
def test_a_fork_ends_and_prints_as_python_does(command, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])")
    forked, real = (
        subprocess.run(
            [program, *command],
            cwd=tmp_path,
            env=os.environ | {"WORD": "é", "TZ": "Asia/Tokyo"},
            input="text",
            capture_output=True,
            text=True,
        )
        for program in (python(), sys.executable)
    )
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_the_fork(signum):
    process = subprocess.Popen([python(), "-c", LOOP], stdout=subprocess.PIPE)
    fork = Path("/proc", str(int(process.stdout.read(7))))
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.read(6) == b"got it"
    process.send_signal(signum)
    assert process.wait(20) == -signum
    assert process.stdout.read() == b""
    while fork.exists():
        time.sleep(0.01)
