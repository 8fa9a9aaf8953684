"""Parsing in several processes: the same bytes, and no process that outlives the run."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from preproc import parse, parse_pool
from preproc.parse_pool import WORKER_BYTES, WORTHWHILE_BYTES, ParsePool, num_workers
from tests.preproc_command import preproc, raw_line, write_lines
from tests.test_preproc_restart import all_files, noise

ROOT = Path(__file__).resolve().parents[1]


def test_two_processes_write_what_one_writes(tmp_path, monkeypatch):
    lines = noise(3000)
    lines[700] = "no line"
    for day, part in enumerate((lines[:2000], lines[2000:])):
        write_lines(tmp_path / f"day_{day}.gz", part, compress=True)
    options = [f"source={tmp_path}/day_*", "on_bad=quarantine", "threads=2"]
    monkeypatch.setattr(parse, "TASK_BYTES", 20_000)
    pools = []
    monkeypatch.setattr(
        parse, "ParsePool", lambda *given: pools.append(ParsePool(*given)) or pools[-1]
    )
    preproc(*options, f"output={tmp_path / 'one'}")
    monkeypatch.setattr(parse_pool, "WORTHWHILE_BYTES", 1)
    preproc(*options, f"output={tmp_path / 'two'}")
    assert [pool.workers for pool in pools] == [1, 2]
    assert all_files(tmp_path / "two") == all_files(tmp_path / "one")
    assert b"day_0.gz\t701\t" in (tmp_path / "two/bad_rows.tsv").read_bytes()


def test_processes_are_as_many_as_threads_memory_and_text_allow():
    much, long = 100 * WORKER_BYTES, 100 * WORTHWHILE_BYTES
    assert num_workers(16, much, long) == 16
    assert num_workers(16, 3 * WORKER_BYTES + 1, long) == 3
    assert num_workers(16, much, 4.5 * WORTHWHILE_BYTES) == 4
    assert num_workers(16, -1, long) == num_workers(16, much, 10) == 1


def test_a_process_that_is_killed_is_told():
    text = (raw_line() + "\n").encode()

    def texts():
        yield text
        yield text
        for process in list(pool._pool._processes.values()):
            os.kill(process.pid, signal.SIGKILL)
        while True:
            yield text

    with (
        ParsePool(2, "float16") as pool,
        pytest.raises(ValueError, match="a parsing process was ended from outside"),
    ):
        list(pool.in_order(texts()))


def test_no_process_outlives_a_killed_run(tmp_path):
    source = write_lines(tmp_path / "raw.tsv", noise(300))
    code = (
        "import sys\nfrom preproc import parse, parse_pool\n"
        "from tests.preproc_command import preproc\n"
        "if __name__ == '__main__':\n"
        "    parse_pool.WORTHWHILE_BYTES = 1\n"
        # Once every process has answered, the run hangs.
        "    parse._Writer.append = lambda *_: print('parsing', flush=True) or input()\n"
        "    preproc(*sys.argv[1:])\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code, f"source={source}", f"output={tmp_path / 'out'}", "threads=2"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert run.stdout.readline() == b"parsing\n"
    assert len(living(run.pid)) >= 3
    run.kill()
    run.wait()
    ends = time.monotonic() + 20
    while living(run.pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not living(run.pid)


def living(session: int) -> list[str]:
    """Return the processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of = entry.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(entry.parent.name)
    return found
