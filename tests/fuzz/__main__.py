"""The long form: `python -m tests.fuzz --examples 5000 --seed 7 [--only checkpoint]`; exit code 1 after a failure."""

import argparse
import faulthandler
import multiprocessing
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz.all_fuzzers import FUZZERS
from tests.fuzz.harness import Fuzzer, Report, fuzz, prepared


def main() -> int:
    """Run all fuzzers, each in a process of its own, and print what each has found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument(
        "--examples", type=int, help="of each fuzzer; by default those of the short form"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="fuzzers whose name contains this")
    parser.add_argument("--lines", action="store_true", help="print the kinds of refusals too")
    options = parser.parse_args()
    failed = 0
    for fuzzer in FUZZERS:
        if options.only not in fuzzer.name:
            continue
        receive, send = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(fuzzer, options.examples or fuzzer.examples, options.seed, send)
        )
        process.start()
        send.close()
        try:
            report = receive.recv()
        except EOFError:
            report = None
        process.join()
        if report is None:
            print(f"{fuzzer.name}: its process ended with {process.exitcode}")
            failed += 1
            continue
        failed += bool(report.failures)
        _print(report, with_lines=options.lines)
    return 1 if failed else 0


def _run(fuzzer: Fuzzer, examples: int, seed: int, send: Connection) -> None:
    faulthandler.enable()
    directory = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        artifact = prepared(fuzzer, directory / "valid")
        (directory / "copies").mkdir()
        send.send(fuzz(fuzzer, artifact, directory / "copies", examples=examples, with_seed=seed))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _print(report: Report, *, with_lines: bool) -> None:
    print(report, flush=True)
    if report.failures:
        print(report.explained(), flush=True)
    if with_lines:
        for line, count in sorted(report.lines.items(), key=lambda item: -item[1]):
            print(f"  {count:5} x {line}")


if __name__ == "__main__":
    sys.exit(main())
