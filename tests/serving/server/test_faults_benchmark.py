"""The benchmark of faults ends with an error where its kills prove nothing, or have torn an export."""

import random
import sys
from pathlib import Path

import pytest

from benchmarks.serving import faults
from benchmarks.serving.faults import FaultError, kills_of_export

WORKS = "import os, sys, time; time.sleep(0.3); os.mkdir(sys.argv[1])"
TEARS = (
    "import os, sys, time; os.mkdir(sys.argv[1]); time.sleep(1.0); open(sys.argv[1] + '/x', 'w')"
)


def prepare(monkeypatch, script: str, share: float) -> None:
    """Let the export be a script, and each kill come after a share of its time."""

    def export(_: str, path: Path) -> list[str]:
        path.parent.mkdir(exist_ok=True)
        return [sys.executable, "-c", script, str(path)]

    monkeypatch.setattr(faults, "_export", export)
    monkeypatch.setattr(faults, "is_intact", lambda path: script == WORKS or (path / "x").exists())
    monkeypatch.setattr(random, "uniform", lambda *_: share)


def test_kills_that_hit_nothing_are_an_error(tmp_path, monkeypatch, capsys):
    prepare(monkeypatch, WORKS, 8.0)
    with pytest.raises(FaultError, match="none of 1 kills has hit a running export"):
        kills_of_export("checkpoint", tmp_path / "exports", 1)
    assert "0 of 1 kills hit it, 1 found it complete, 0 torn" in capsys.readouterr().out


def test_a_kill_that_hits_is_none(tmp_path, monkeypatch, capsys):
    prepare(monkeypatch, WORKS, 0.3)
    kills_of_export("checkpoint", tmp_path / "exports", 1)
    assert "1 of 1 kills hit it, 0 found it complete, 0 torn, 0 left" in capsys.readouterr().out


def test_a_torn_export_is_an_error(tmp_path, monkeypatch):
    prepare(monkeypatch, TEARS, 0.6)
    with pytest.raises(FaultError, match="1 torn"):
        kills_of_export("checkpoint", tmp_path / "exports", 1)


def test_an_error_is_one_line_and_an_exit_code(tmp_path, monkeypatch, capsys):
    def nothing(*_: object) -> None:
        raise FaultError("none of 1 kills")

    for name in ("swaps", "kills_of_server"):
        monkeypatch.setattr(faults, name, lambda *_: None)
    monkeypatch.setattr(faults, "kills_of_export", nothing)
    monkeypatch.setattr(faults.subprocess, "run", lambda *_, **__: None)
    arguments = ["--checkpoint", "a", "--other", "b", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["faults", *arguments])
    with pytest.raises(SystemExit) as end:
        faults.main()
    assert end.value.code == "error: none of 1 kills"
