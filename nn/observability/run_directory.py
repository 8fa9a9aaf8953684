"""The run directory: what a run was, what it measured on the way and what came out.

config.yaml     the resolved configuration
plan.json       one object a table, as `TablePlan`
memory.json     of training on GPUs: what each rank's should hold at its fullest, one object a rank, as `RankMemory`
metrics.jsonl   first line the environment, then one object a record, written through at once
restarts.jsonl  one object each time the run went on from a checkpoint: its step and the environment
tensorboard/    the numbers of the records, under train/ and test/
summary.json    the result, only there when the run came to its end
curves.png      the records as a picture
"""

import fcntl
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.tensorboard import SummaryWriter

from nn.checkpoint.directory import newest_first
from nn.observability.curves import draw_curves
from nn.sharding.memory_estimate import RankMemory
from nn.sharding.plan import TablePlan

SUMMARY_KEYS = (
    "steps",
    "test_auc",
    "test_log_loss",
    "samples_per_s",
    "step_ms",
    "peak_hbm_bytes",
)

# Float32 carries about as many digits, and an AUC needs six after the point.
SIGNIFICANT_DIGITS = 7


def default_run_dir(recipe: str) -> Path:
    """Return `runs/<recipe>/<time>`, with a number behind it where that is taken already."""
    started = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    run_dir = Path("runs") / recipe / started
    attempt = 1
    while run_dir.exists():
        attempt += 1
        run_dir = run_dir.with_name(f"{started}_{attempt}")
    return run_dir


def environment(
    recipe: str, device: torch.device, *, world_size: int = 1, num_hosts: int = 1
) -> dict[str, str | int | None]:
    """Describe where and from what a run starts; what is not there is None.

    Args:
        recipe: name of the recipe.
        device: this rank's device; the others' are taken to be alike.
        world_size: ranks over all hosts.
        num_hosts: hosts.
    """
    is_cuda = device.type == "cuda"
    return {
        "recipe": recipe,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": _version("torchrec"),
        "fbgemm": _version("fbgemm-gpu") or _version("fbgemm-gpu-cpu"),
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "gpu_driver": _gpu_driver() if is_cuda else None,
        "num_cpus": _num_cpus(),
        "world_size": world_size,
        "num_hosts": num_hosts,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(root: Path) -> str | None:
    """Return the commit of the checkout at `root`, `-dirty` behind it where files were changed.

    None for an installed copy: a repository further up would be somebody else's.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _gpu_driver() -> str | None:
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else None


def _num_cpus() -> int | None:
    """CPUs this process may use, which a container or a scheduler may have narrowed."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def plain(value: Any) -> Any:
    """Return `value` fit for JSON: floats rounded to 7 significant digits, nan and infinity None."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


class RunDirectory:
    """Writes the run directory; on other ranks than 0 every method does nothing.

    Args:
        run_dir: made here, with its parents.
        rank: this process's rank.
        config_yaml: text of the resolved configuration.
        environment: first line of `metrics.jsonl`, from `environment()` and whatever else does not
            change during the run; with `teacher_auc` in it, `curves.png` draws that ceiling.
        tensorboard: write TensorBoard events too.
        goes_on_at: step of the checkpoint that the run in `run_dir` goes on from: records up to it are kept, those
            after it come anew; 0 begins anew; None for a directory that no run has used.

    Raises:
        ValueError: `run_dir` holds the records of an earlier run, is in use, or cannot be made.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        config_yaml: str,
        environment: Mapping[str, Any],
        tensorboard: bool = True,
        goes_on_at: int | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._metrics = None
        self._lock: int | None = None
        self._events = None
        self._has_training = False
        if rank != 0:
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run_dir={run_dir} cannot be made ({error.strerror}); set another run_dir"
            ) from None
        self._lock = claim(run_dir)
        path = run_dir / "metrics.jsonl"
        if goes_on_at is None and path.exists():
            self.close()
            raise ValueError(_why_taken(run_dir))
        records = _records_until(path, goes_on_at) if goes_on_at else []
        _write_whole(path, "".join(records))
        self._metrics = path.open("a", encoding="utf-8")
        if records:
            self._has_training = any('"loss"' in each for each in records)
            with (run_dir / "restarts.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(plain({"step": goes_on_at, **environment})) + "\n")
        else:
            self._write_line(environment)
        for name in ("summary.json", "curves.png"):
            (run_dir / name).unlink(missing_ok=True)
        _write_whole(run_dir / "config.yaml", config_yaml)
        if tensorboard:
            # What an earlier start wrote after the checkpoint is not shown.
            purge = None if goes_on_at is None else goes_on_at + 1
            self._events = SummaryWriter(run_dir / "tensorboard", flush_secs=30, purge_step=purge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was recorded so far stays."""
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sync(self) -> None:
        """Make the records survive a power cut, as the checkpoint that counts on them does."""
        if self._metrics is not None:
            os.fsync(self._metrics.fileno())

    def write_plan(self, rows: list[TablePlan]) -> None:
        """Write `plan.json`."""
        if self._metrics is not None:
            _write_json(self.run_dir / "plan.json", [asdict(row) for row in rows])

    def write_memory(self, ranks: list[RankMemory]) -> None:
        """Write `memory.json`."""
        if self._metrics is not None:
            content = [asdict(rank) | {"total": rank.total} for rank in ranks]
            _write_json(self.run_dir / "memory.json", content)

    def write_train(self, record: Mapping[str, Any]) -> None:
        """Add one record of training; `record["step"]` is the number of steps done."""
        self._write_record("train", record)

    def write_test(self, record: Mapping[str, Any]) -> None:
        """Add one record of an evaluation; `record["step"]` is the number of steps done."""
        self._write_record("test", record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` and, of training, `curves.png`: the run came to its end.

        Args:
            summary: at least `SUMMARY_KEYS`; what was not measured is None or nan.
        """
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        assert not missing, f"summary without {missing}"
        if self._metrics is None:
            return
        _write_json(self.run_dir / "summary.json", plain(summary))
        if self._has_training:
            draw_curves(self.run_dir / "metrics.jsonl", self.run_dir / "curves.png")

    def _write_record(self, group: str, record: Mapping[str, Any]) -> None:
        if self._metrics is None:
            return
        self._write_line(record)
        self._has_training = self._has_training or group == "train"
        if self._events is None:
            return
        for name, value in record.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and name not in ("step", "epoch"):
                tag = f"{group}/{name.removeprefix(f'{group}_')}"
                self._events.add_scalar(tag, value, record["step"])

    def _write_line(self, record: Mapping[str, Any]) -> None:
        assert self._metrics is not None
        self._metrics.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._metrics.flush()


def claim(run_dir: Path) -> int | None:
    """Keep other processes from writing into a run directory until this one ends; return what holds it.

    Raises:
        ValueError: one does already.
    """
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder_of(descriptor)
        os.close(descriptor)
        raise ValueError(
            f"run_dir={run_dir} is in use: {holder} is writing into it; wait for its end, end it (SIGTERM leaves a "
            "checkpoint), or set another run_dir"
        ) from None
    except OSError:
        # Not every network file system can lock a directory.
        os.close(descriptor)
        return None
    return descriptor


def _holder_of(descriptor: int) -> str:
    """Name the process that has locked a directory; on another host, or without Linux, nobody knows."""
    inode = os.fstat(descriptor).st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.endswith(f":{inode}"):
                return f"process {pid}"
    return "another process"


def _why_taken(run_dir: Path) -> str:
    """Say why a directory with records is not written into, and what to do."""
    checkpoints = run_dir / "checkpoints"
    text = f"run_dir={run_dir} already holds the metrics.jsonl of an earlier run"
    set_another = "set another run_dir, or none for a new runs/<recipe>/<time>"
    if newest_first(checkpoints):
        return f"{text}; {set_another}"
    damaged = sorted(each.name for each in checkpoints.glob("step_*.damaged"))
    kept = f" ({', '.join(damaged)} cannot be used)" if damaged else ""
    return (
        f"{text}, but no whole checkpoint to go on from{kept}; {set_another}, or delete "
        f"{run_dir / 'metrics.jsonl'} to begin anew there"
    )


def _records_until(path: Path, last_step: int) -> list[str]:
    """Lines of metrics.jsonl, as far as they are whole and not of later steps; the first has no step."""
    if not path.exists():
        return []
    first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [first, *(line for line in whole if json.loads(line)["step"] <= last_step)]


def _write_json(path: Path, content: Any) -> None:
    _write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is either there in full or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
