"""Mutated artifacts load, or are refused with one line and exit code 2: the short form of `python -m tests.fuzz`."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="hypothesis is not installed (group `dev`)")
from hypothesis import strategies as st

from configs.options import require
from tests.fuzz import harness
from tests.fuzz.all_fuzzers import FUZZERS
from tests.fuzz.harness import Fuzzer, Report, fuzz, prepared

pytestmark = pytest.mark.doors

SEED = 1
SHORT = FUZZERS[::6]
"""All of them took a tenth of CI's time; `python -m tests.fuzz` runs them."""


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory) -> Callable[[Fuzzer], Any]:
    """Return a function that makes the artifact of a fuzzer; fuzzers with the same `prepare` share one."""
    made: dict[Callable, Any] = {}

    def artifact(fuzzer: Fuzzer) -> Any:
        if fuzzer.prepare not in made:
            made[fuzzer.prepare] = prepared(fuzzer, tmp_path_factory.mktemp("artifact") / "valid")
        return made[fuzzer.prepare]

    return artifact


@pytest.mark.parametrize("fuzzer", SHORT, ids=lambda fuzzer: fuzzer.name)
def test_every_mutation_loads_or_is_refused_in_one_line(fuzzer, artifact_of, tmp_path):
    artifact = artifact_of(fuzzer)
    report = fuzz(fuzzer, artifact, tmp_path, examples=fuzzer.examples, with_seed=SEED)
    assert not report.failures, f"{report}\n{report.explained()}"
    assert report.succeeded + report.refused > 0


def report_of(attempt: Callable[[Path], object], directory: Path) -> Report:
    """Run a fuzzer of one example, which fails, succeeds or is refused by itself."""
    fuzzer = Fuzzer("x", lambda _: None, lambda _: st.just(0), lambda _, __, room: attempt(room))
    return fuzz(fuzzer, None, directory, examples=1, with_seed=SEED)


def ends_with(line: str, exit_code: int = 2) -> Callable[[Path], None]:
    def attempt(_: Path) -> None:
        try:
            require(False, line)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(exit_code)

    return attempt


def fails(_: Path) -> None:
    raise KeyError("x")


def python_refuses(_: Path) -> None:
    try:
        int("x")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (fails, "KeyError at"),
        (python_refuses, "refused by Python's ValueError"),
        (ends_with("two\nlines"), "not one printable line"),
        (ends_with("\x1b[31m"), "not one printable line"),
        (ends_with("x" * 2000), "a line of more than 1000 characters"),
        (ends_with("x", 1), "exit code 1"),
        (lambda _: print("\x1b[2J"), "control characters on stdout"),
        (lambda room: (room.parent.parent / "new").touch(), "wrote"),
        (lambda room: (room.parent.parent / "outside/secret.bin").read_bytes(), "read"),
        (lambda _: time.sleep(9), "_TooSlowError"),
        (lambda _: bytearray(100 << 20), "too much memory"),
        (lambda room: (os.mkfifo(room / "a"), (room / "a").read_text()), "_TooSlowError"),
    ],
)
def test_the_harness_finds(attempt, kind, tmp_path, monkeypatch):
    if kind == "_TooSlowError":
        monkeypatch.setattr(harness, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(harness, "MEMORY_LIMIT_BYTES", 50 << 20)
    report = report_of(attempt, tmp_path)
    assert [key.startswith(kind) for key in report.failures] == [True], report.failures


@pytest.mark.parametrize("attempt", [ends_with("no such file x"), lambda _: None])
def test_the_harness_accepts(attempt, tmp_path):
    report = report_of(attempt, tmp_path)
    assert (report.failures, report.succeeded + report.refused) == ({}, 1)
