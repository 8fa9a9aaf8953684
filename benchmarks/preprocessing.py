"""Speed, memory and disk of our preprocessing, and of a script for Polars on a shop's events, whose bytes are compared.

    python -m benchmarks.preprocessing days=3 rows=1000000 frequency_limit=3
    python -m benchmarks.preprocessing dataset=events 'source=DIR/part_*.parquet' turns=2

The first command generates Criteo's logs (`benchmarks/day_files.py`) in a temporary directory below `work`. The second one
reads tables that `benchmarks/peers/event_tables.py` has written; `benchmarks/peers/events_with_polars.py` needs the extra
`bench`. Options that begin with `preproc.` are passed to `python -m preproc`. `turns` repeats all commands.

Memory is the resident set of all processes of a command. Disk is the space below its directory. Both are sampled every 0.1 s.
CPU time is the total of all processes; it varies less than wall time where other jobs share the machine. A command that
exceeds `memory_gib` is stopped. The exit code is 1 if the bytes differ.
"""

import filecmp
import glob
import gzip
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.day_files import write_days
from benchmarks.launch import command_parser

PEERS_DIRECTORY = Path(__file__).parent / "peers"
OPTIONS = {
    "source": "",
    "dataset": "criteo_1tb",
    "days": "3",
    "rows": "1000000",
    "seed": "1",
    "frequency_limit": "3",
    "threads": str(os.cpu_count()),
    "memory_gib": "16",
    "turns": "1",
    "work": tempfile.gettempdir(),
}
SAMPLE_S = 0.1
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Measured:
    """Measurement of all processes of a command; memory and disk are peaks, `output_bytes` is the disk at the end."""

    outcome: str = "ok"
    seconds: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    output_bytes: int = 0


def measure(command: list[str], directory: Path, memory_gib: float) -> Measured:
    """Run a command that writes below `directory`, and sample its memory, CPU time and disk."""
    directory.mkdir()
    result = Measured()
    began = perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                sleep(SAMPLE_S)
                resident, cpu_s = used_by(process.pid)
                result.memory_bytes = max(result.memory_bytes, resident)
                result.cpu_s = max(result.cpu_s, cpu_s)
                result.disk_bytes = max(result.disk_bytes, disk_bytes(directory))
                if result.memory_bytes > memory_gib * 2**30:
                    result.outcome = f"stopped: over {memory_gib:g} GiB"
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        result.seconds = perf_counter() - began
        result.output_bytes = disk_bytes(directory)
        if process.returncode and result.outcome == "ok":
            result.outcome = f"failed with {process.returncode}"
            output.seek(0)
            print(output.read().decode(errors="replace")[-4000:], file=sys.stderr)
    return result


def used_by(session: int) -> tuple[int, float]:
    """Return the resident bytes and CPU seconds of a session's processes; CPU time includes ended children."""
    resident, ticks = 0, 0
    for stat in glob.glob("/proc/[0-9]*/stat"):
        try:
            fields = Path(stat).read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended meanwhile
            continue
        if int(fields[3]) == session:
            resident += int(fields[21]) * PAGE
            ticks += sum(map(int, fields[11:15]))
    return resident, ticks / TICKS_PER_S


def disk_bytes(directory: Path) -> int:
    """Return the disk space of the files below `directory`."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:  # the file was removed meanwhile
                continue
    return total


def differing(ours: Path, theirs: Path) -> list[str]:
    """Return the .bin files below `ours` that are missing below `theirs` or differ there."""
    return [
        str(path.relative_to(ours))
        for path in sorted(ours.rglob("*.bin"))
        if not (theirs / path.relative_to(ours)).exists()
        or not filecmp.cmp(path, theirs / path.relative_to(ours), shallow=False)
    ]


def count_rows(path: str) -> int:
    """Return the number of rows of a Parquet file, of a CSV file with a header, or of a log, plain or gzip."""
    if path.endswith(".parquet"):
        import pyarrow.parquet as pq

        return pq.read_metadata(path).num_rows
    return count_lines(path) - path.endswith(".csv")


def count_lines(path: str) -> int:
    """Return the number of lines of a text file, plain or gzip."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rb") as stream:
        return sum(block.count(b"\n") for block in iter(lambda: stream.read(1 << 24), b""))


def parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of this benchmark, and those for `python -m preproc`."""
    parser = command_parser(__doc__)
    usage = " ".join(f"{key}={value}" for key, value in OPTIONS.items())
    parser.add_argument("option", nargs="*", help=usage)
    options, passed_on = dict(OPTIONS), []
    for option in parser.parse_args(arguments).option:
        key, equals, value = option.partition("=")
        if key.startswith("preproc.") and equals:
            passed_on.append(option.removeprefix("preproc."))
        elif key in options and equals:
            options[key] = value
        else:
            parser.error(f"got {option!r}, want KEY=VALUE with one of {', '.join(options)}")
    if options["dataset"] == "events" and not options["source"]:
        parser.error("dataset=events wants source=FILES of benchmarks.peers.event_tables")
    return options, passed_on


def main() -> None:
    """Run the benchmark of the command line."""
    options, passed_on = parse(sys.argv[1:])
    differ = False
    with tempfile.TemporaryDirectory(dir=options["work"]) as folder:
        work = Path(folder)
        source = options["source"]
        if not source:
            days, rows, *others = (int(options[k]) for k in ("days", "rows", "seed", "threads"))
            text_bytes = sum(size for _, size in write_days(work / "logs", days, rows, *others))
            source, num_rows = f"{work}/logs/day_*", days * rows
        else:
            paths = glob.glob(source)
            text_bytes = sum(os.path.getsize(path) for path in paths)
            num_rows = sum(map(count_rows, paths))
        limit, dataset, threads = (options[k] for k in ("frequency_limit", "dataset", "threads"))
        print(
            f"{num_rows:,} rows, {text_bytes / 1e9:.2f} GB, dataset={dataset}, "
            f"frequency_limit={limit}, threads={threads}, load average {os.getloadavg()[0]:.1f}"
        )
        print(
            f"{'':8} {'rows/s':>10} {'s':>8} {'CPU s':>8} {'GiB memory':>11} {'GB disk':>8}  bytes",
            flush=True,
        )
        names = ("ours", "polars") if dataset == "events" else ("ours",)
        for name in names * int(options["turns"]):
            shutil.rmtree(work / name, ignore_errors=True)
            directory = work / name
            output = directory / "out"
            if name == "ours":
                command = [sys.executable, "-m", "preproc", f"dataset={dataset}"]
                command += ["--config-dir", str(PEERS_DIRECTORY)] * (dataset == "events")
                command += [f"source={source}", f"output={output}", f"frequency_limit={limit}"]
                command += [f"threads={threads}", *passed_on]
            else:
                command = [sys.executable, "-m", "benchmarks.peers.events_with_polars", source]
                command += [str(output), limit]
            result = measure(command, directory, float(options["memory_gib"]))
            agrees = f"{result.output_bytes / 1e6:,.0f} MB"
            if name != "ours" and result.outcome == "ok":
                wrong = differing(work / "ours/out", output)
                agrees = f"{len(wrong)} files differ, such as {wrong[0]}" if wrong else "the same"
                differ |= bool(wrong)
                shutil.rmtree(directory)
            rate = f"{num_rows / result.seconds:,.0f}" if result.outcome == "ok" else "-"
            print(
                f"{name:8} {rate:>10} {result.seconds:8.1f} {result.cpu_s:8.1f} {result.memory_bytes / 2**30:11.2f} "
                f"{result.disk_bytes / 1e9:8.2f}  {agrees if result.outcome == 'ok' else result.outcome}",
                flush=True,
            )
            differ |= name == "ours" and result.outcome != "ok"
    raise SystemExit(int(differ))


if __name__ == "__main__":
    main()
