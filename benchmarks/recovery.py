"""Time in which a run resumes after one of its ranks was killed.

    python -m benchmarks.recovery --ranks 4 --out DIR dlrm experiment=dlrm_criteo_t3 data.path=DATA

The command starts `torchrun --max-restarts=1 dlrm.py ... run_dir=DIR/run`. The run resumes from the checkpoint in DIR/run, such
as that of benchmarks.checkpoint with the same options; without one it trains until its first checkpoint. Then one rank gets
SIGKILL. The result is the seconds from the kill until the ranks have found their checkpoint, and until the first record after
it. They are printed and written to DIR/recovery.json.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.launch import children, held_output, launched
from benchmarks.rows import ROOT, run_parser

RECORD_EVERY = 10
ENDLESS = ["train.epochs=1000000", f"log.every={RECORD_EVERY}", "log.loggers=[]"]


def main() -> None:
    """Measure the run of the command line."""
    parser = run_parser(__doc__, out="holds the run directory")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=300)
    args = parser.parse_args()
    with held_output(args.out):
        run_dir, log = args.out / "run", args.out / "recovery.log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={args.ranks}"),
            *("--max-restarts=1", str(ROOT / f"{args.recipe}.py"), f"run_dir={run_dir}"),
            *(*args.overrides, *ENDLESS),
        ]
        log.unlink(missing_ok=True)
        with launched(command, log) as launcher:
            result = time_recovery(launcher, run_dir, log, time.monotonic() + args.timeout_s)
        (args.out / "recovery.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result.items():
        print(f"{name:28} {value:,.1f}")


def time_recovery(
    launcher: subprocess.Popen, run_dir: Path, log: Path, end: float
) -> dict[str, float]:
    """Kill the last rank once it trains and a checkpoint exists; return the times of the recovery."""

    def wait_for(condition: Callable[[], bool]) -> float:
        while not condition():
            if time.monotonic() > end or launcher.poll() is not None:
                sys.exit(f"the run ended or timed out:\n{log.read_text()[-4000:]}")
            time.sleep(0.02)
        return time.monotonic()

    restarts = run_dir / "restarts.jsonl"
    checkpoints = run_dir / "checkpoints"
    started_at = time.monotonic()
    first_at = wait_for(lambda: last_step(run_dir) > 0 and any(checkpoints.glob("step_*")))
    num_restarts = num_lines(restarts)
    os.kill(children(launcher.pid)[-1], signal.SIGKILL)
    killed_at = time.monotonic()
    resumed_at = wait_for(lambda: num_lines(restarts) > num_restarts)
    step = json.loads(restarts.read_text().splitlines()[-1])["step"]
    trained_at = wait_for(lambda: last_step(run_dir) > step)
    return {
        "start to first record s": first_at - started_at,
        "kill to checkpoint found s": resumed_at - killed_at,
        "kill to next record s": trained_at - killed_at,
    }


def last_step(run_dir: Path) -> int:
    """Return the step of the last complete record, or 0."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1]).get("step", 0) if lines else 0


def num_lines(path: Path) -> int:
    """Return the number of complete lines of a file; 0 if it does not exist."""
    return path.read_text().count("\n") if path.exists() else 0


if __name__ == "__main__":
    main()
