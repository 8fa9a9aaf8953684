"""What checkpoints cost a run, and how soon it goes on after a rank was killed.

    python -m benchmarks.checkpoint --out DIR --ranks 4 --steps 2000 --save-every 500 dlrm.py experiment=dlrm_criteo_t3

Runs the same command three times under torchrun: without checkpoints, with one every --save-every steps (choose it so that
each is written before the next is due), and with --max-restarts=1 and a SIGKILL to one rank after the first checkpoint. Prints one line each and writes DIR/checkpoint.json. The cost of a save is what the second run took longer, a
save; it holds the pause and whatever writing takes from training.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rows import ROOT

GIB = 2**30
INTERVAL_S = 300.0
RECORD_EVERY = 10


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help="dlrm.py or dcnv2.py")
    parser.add_argument(
        "overrides", nargs="*", help="of the run, such as experiment=dlrm_criteo_t3"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the run directories go")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--timeout-s", type=float, default=580, help="limit of each run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bare = finished(args, "bare", ["checkpoint.save=false"])
    saving = finished(args, "saving", [f"checkpoint.save_every={args.save_every}"])
    result = costs(args, bare, saving) | recovery(args)
    (args.out / "checkpoint.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")


def command(args: argparse.Namespace, name: str, more: list[str], *launcher: str) -> list[str]:
    """The command of one run, whose run directory is emptied."""
    run_dir = args.out / name
    shutil.rmtree(run_dir, ignore_errors=True)
    return [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={args.ranks}",
            *launcher,
        ),
        *(str(ROOT / args.recipe), *args.overrides, *more, f"run_dir={run_dir}"),
        *(f"train.max_steps={args.steps}", f"log.every={RECORD_EVERY}", "log.tensorboard=false"),
        *("eval.at_start=false", "eval.max_steps=1", "checkpoint.save_every_minutes=null"),
    ]


def finished(args: argparse.Namespace, name: str, more: list[str]) -> Path:
    """Run to the end and return the run directory."""
    with (args.out / f"{name}.log").open("w") as log:
        done = subprocess.run(
            command(args, name, more), stdout=log, stderr=log, timeout=args.timeout_s
        )
    if done.returncode:
        sys.exit(f"{name} failed:\n{(args.out / f'{name}.log').read_text()[-4000:]}")
    return args.out / name


def costs(args: argparse.Namespace, bare: Path, saving: Path) -> dict[str, Any]:
    """What the saves within training cost; the last one, after the last step, is not among them."""
    lines = (saving / "checkpoints" / "saved.jsonl").read_text().splitlines()
    saves = [each for each in map(json.loads, lines) if each["step"] < args.steps]
    if len(saves) < 2:
        sys.exit(
            f"--save-every={args.save_every}: want two saves at least within --steps={args.steps}"
        )
    first, *others = saves
    step_ms = [summary(each)["step_ms"] for each in (bare, saving)]
    # The speed of a run leaves its first record out, and with it no save if that is after it.
    counted = args.steps - RECORD_EVERY
    save_s = (step_ms[1] - step_ms[0]) * counted / 1e3 / len(saves)
    write_s = mean(each["write_s"] for each in saves)
    return {
        "GiB": first["bytes"] / GIB,
        "saves": len(saves),
        "first pause s": first["paused_s"],
        "later pauses s": mean(each["paused_s"] for each in others),
        "pause GB/s": first["bytes"] / 1e9 / mean(each["paused_s"] for each in others),
        "write s": write_s,
        "write GB/s": first["bytes"] / 1e9 / write_s,
        "bare ms/step": step_ms[0],
        "saving ms/step": step_ms[1],
        "cost of a save s": save_s,
        "% of 5 minutes": 100 * save_s / INTERVAL_S,
        "pause, % of 5 minutes": 100 * mean(each["paused_s"] for each in others) / INTERVAL_S,
    }


def recovery(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from SIGKILL to the first record after the checkpoint that the ranks go on from."""
    more = [f"checkpoint.save_every={args.save_every}"]
    run_dir = args.out / "killed"
    with (args.out / "killed.log").open("w") as log:
        launcher = subprocess.Popen(
            command(args, "killed", more, "--max-restarts=1"), stdout=log, stderr=log
        )
    end = time.monotonic() + args.timeout_s
    try:
        _until(lambda: (run_dir / "checkpoints" / "saved.jsonl").exists(), end)
        ranks = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        killed_at = time.monotonic()
        _until(lambda: (run_dir / "restarts.jsonl").exists(), end)
        started_s = time.monotonic() - killed_at
        step = json.loads((run_dir / "restarts.jsonl").read_text())["step"]
        _until(lambda: last_step(run_dir) > step, end)
        return {"restarted s": started_s, "recovery s": time.monotonic() - killed_at}
    finally:
        launcher.terminate()
        launcher.wait()


def last_step(run_dir: Path) -> int:
    """Step of the last whole record."""
    line = (run_dir / "metrics.jsonl").read_text().rsplit("\n", 2)[-2]
    return json.loads(line).get("step", 0)


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a run."""
    return json.loads((run_dir / "summary.json").read_text())


def _until(condition: Callable[[], bool], end: float) -> None:
    while not condition():
        if time.monotonic() > end:
            sys.exit("the killed run did not come so far; see killed.log")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
