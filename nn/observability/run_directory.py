"""Run directory: configuration, plan, metrics and result of a run.

config.yaml     resolved configuration
plan.json       one `TablePlan` per table
memory.json     estimated peak memory per GPU, one `RankMemory` per rank; only for training on GPUs
metrics.jsonl   environment in the first line, then one record per line, flushed at once
restarts.jsonl  one object per resume: checkpoint step and environment
tensorboard/    the numbers of the records, under train/ and test/
summary.json    result; exists only after the run has finished
curves.png      plot of the records
"""

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.tensorboard import SummaryWriter

from dataloading.dataset.durable_files import (
    UnlockableError,
    lock_directory,
    replace_text,
    sync_stream,
)
from nn.checkpoint.directory import list_checkpoints
from nn.models.tasks import Metric
from nn.observability.curves import draw_curves
from nn.sharding.memory_estimate import RankMemory
from nn.sharding.plan import TablePlan

SUMMARY_KEYS = ("steps", "samples_per_s", "step_ms", "peak_hbm_bytes")
"""Keys of every summary, beside those of the metrics."""

# Float32 carries about 7 digits, and an AUC needs six decimals.
SIGNIFICANT_DIGITS = 7


def empty_summary(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return a summary of which nothing was measured."""
    steps, *others = SUMMARY_KEYS
    return dict.fromkeys([steps, *(metric.test_key for metric in metrics), *others])


def default_run_dir(recipe: str) -> Path:
    """Return `runs/<recipe>/<time>`, with a number appended if that exists already."""
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
    """Describe the machine, the software and the command of a run; entries without a value are None.

    Args:
        recipe: name of the recipe.
        device: this rank's device; other ranks are assumed to have the same.
        world_size: number of ranks over all hosts.
        num_hosts: number of hosts.
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
    """Return the commit of the checkout at `root`, with suffix `-dirty` if files were changed.

    Return None for an installed copy: a repository in a parent folder would be a different project.
    """
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        completed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() or None


def _gpu_driver() -> str | None:
    path = Path("/sys/module/nvidia/version")
    return path.read_text().strip() if path.exists() else None


def _num_cpus() -> int | None:
    """Return the number of CPUs in this process's affinity mask; containers and schedulers may reduce it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def to_json_value(value: Any) -> Any:
    """Convert `value` for JSON: floats rounded to 7 significant digits, nan and infinity as None."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value


class RunDirectory:
    """Writer of the run directory; every method is a no-op on ranks other than 0.

    Args:
        run_dir: directory to create, with its parents.
        rank: this process's rank.
        config_yaml: text of the resolved configuration.
        environment: first line of `metrics.jsonl`: `environment()` and other constants of the run. If it contains
            `teacher_auc`, `curves.png` shows that ceiling.
        tensorboard: write TensorBoard events too.
        resume_step: step of the checkpoint that the run resumes from. Records up to this step are kept, later ones are
            removed. 0 restarts the run; None is for a directory that no run has used.

    Raises:
        ValueError: `run_dir` contains the records of an earlier run, is in use, or cannot be created.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        config_yaml: str,
        environment: Mapping[str, Any],
        tensorboard: bool = True,
        resume_step: int | None = None,
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
                f"run_dir={run_dir} cannot be created ({error.strerror}); set another run_dir"
            ) from None
        self._lock = lock_run_directory(run_dir)
        path = run_dir / "metrics.jsonl"
        if resume_step is None and path.exists():
            self.close()
            raise ValueError(_already_used_message(run_dir))
        records = _records_until(path, resume_step) if resume_step else []
        _write_atomically(path, "".join(records))
        self._metrics = path.open("a", encoding="utf-8")
        if records:
            self._has_training = any('"loss"' in record for record in records)
            with (run_dir / "restarts.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(to_json_value({"step": resume_step, **environment})) + "\n")
        else:
            self._write_line(environment)
        for name in ("summary.json", "curves.png"):
            (run_dir / name).unlink(missing_ok=True)
        _write_atomically(run_dir / "config.yaml", config_yaml)
        if tensorboard:
            # TensorBoard would otherwise show events of an earlier attempt after the checkpoint.
            purge = None if resume_step is None else resume_step + 1
            self._events = SummaryWriter(run_dir / "tensorboard", flush_secs=30, purge_step=purge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; records written so far are kept."""
        if self._metrics is not None:
            self._metrics.close()
        if self._events is not None:
            self._events.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sync(self) -> None:
        """Sync the records to disk, so that they are as durable as a checkpoint that refers to them."""
        if self._metrics is not None:
            sync_stream(self._metrics)

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
        """Append a training record; `record["step"]` is the number of finished steps."""
        self._write_record("train", record)

    def write_test(self, record: Mapping[str, Any]) -> None:
        """Append an evaluation record; `record["step"]` is the number of finished steps."""
        self._write_record("test", record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json` and, after training, `curves.png` at the end of the run.

        Args:
            summary: result with at least `SUMMARY_KEYS`; values that were not measured are None or nan.
        """
        missing = [key for key in SUMMARY_KEYS if key not in summary]
        assert not missing, f"summary without {missing}"
        if self._metrics is None:
            return
        _write_json(self.run_dir / "summary.json", to_json_value(summary))
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
        self._metrics.write(json.dumps(to_json_value(record), allow_nan=False) + "\n")
        self._metrics.flush()


def lock_run_directory(run_dir: Path) -> int | None:
    """Lock a run directory until this process ends, and return the descriptor of the lock.

    Return None on a file system that cannot lock directories.

    Raises:
        ValueError: another process has locked the directory.
    """
    try:
        return lock_directory(run_dir)
    except BlockingIOError:
        raise ValueError(
            f"run_dir={run_dir} is in use: {_holder_of(run_dir)} is writing to it; wait until it ends, stop it (SIGTERM "
            "saves a checkpoint), or set another run_dir"
        ) from None
    except UnlockableError:
        # Some network file systems cannot lock a directory.
        return None


def _holder_of(directory: Path) -> str:
    """Name the process that has locked a directory; its id is unknown on another host or without Linux."""
    inode = directory.stat().st_ino
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, device_inode, *_ = line.split()
            if kind == "FLOCK" and device_inode.endswith(f":{inode}"):
                return f"process {pid}"
    return "another process"


def _already_used_message(run_dir: Path) -> str:
    """Return the error text for a directory that contains records of an earlier run."""
    checkpoints = run_dir / "checkpoints"
    text = f"run_dir={run_dir} already holds the metrics.jsonl of an earlier run"
    set_another = "set another run_dir, or none for a new runs/<recipe>/<time>"
    if list_checkpoints(checkpoints):
        return f"{text}; {set_another}"
    damaged = sorted(path.name for path in checkpoints.glob("step_*.damaged"))
    unusable = f" ({', '.join(damaged)} cannot be used)" if damaged else ""
    return (
        f"{text}, but no complete checkpoint to resume from{unusable}; {set_another}, or delete "
        f"{run_dir / 'metrics.jsonl'} to restart there"
    )


def _records_until(path: Path, last_step: int) -> list[str]:
    """Return the complete lines of metrics.jsonl up to a step; the first line has no step."""
    if not path.exists():
        return []
    first, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return [first, *(line for line in complete if json.loads(line)["step"] <= last_step)]


def _write_json(path: Path, content: Any) -> None:
    _write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, without a sync: it exists with its full text or not at all."""
    replace_text(path, text, path.with_name(f".{path.name}.tmp"), synced=False)
