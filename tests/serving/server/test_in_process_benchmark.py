"""The benchmark of a served model prints rows/s in process, over HTTP, and their ratio in one command."""

import re
import subprocess
import sys

import pytest

from tests.helpers.command import ROOT

pytestmark = pytest.mark.doors

OPTIONS = "--device cpu --dense fp32 --experiment dlrm_criteo_kaggle --shrink 1000 --batches 64"
LOAD = "--seconds 0.2 --threads 1 --concurrency 8 --clients 1"


def test_one_command_prints_both_speeds_and_their_ratio():
    command = [sys.executable, "-m", "benchmarks.serving.in_process"]
    command += f"{OPTIONS} {LOAD}".split()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    line = ended.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"64 rows per request: ([\d,]+) rows/s in process, ([\d,]+) over HTTP on loopback, ratio ([\d.]+)",
        line,
    )
    assert found, line
    alone, over_http = (int(text.replace(",", "")) for text in found.groups()[:2])
    assert alone > 1000
    assert over_http > 1000
    assert float(found[3]) == pytest.approx(over_http / alone, abs=0.006)
