"""Stand-in for a run's command, without torch: it writes the files of a run directory whose AUC depends on optimizer.lr.

The AUC is best at 0.1. `fake.mode`, a text in the option `recipe`, makes it wait, diverge or be killed.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

EVALUATIONS = 4


def main(arguments: list[str]) -> int:
    options = dict(argument.partition("=")[::2] for argument in arguments)
    run_dir = Path(options["run_dir"])
    is_test = options.get("mode") == "eval"
    starts = run_dir / "starts"
    run_dir.mkdir(parents=True, exist_ok=True)
    with starts.open("a") as stream:
        stream.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '-')}\n")
    number = len(starts.read_text().splitlines())
    lr = float(options["optimizer.lr"])
    best = 0.8 - 0.05 * abs(math.log10(lr) + 1)
    (run_dir / "config.yaml").write_text(json.dumps({"optimizer": {"lr": lr}}))
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        metrics.write_text(json.dumps({"recipe": "fake"}) + "\n")
    done = len(metrics.read_text().splitlines()) - 1
    mode = options.get("recipe", "")
    for index in range(done, 1 if is_test else EVALUATIONS):
        if mode == "diverge" and lr > 1:
            print("error: the loss is nan", file=sys.stderr, flush=True)
            return 3
        if (mode == "killed" and number == 1 and index == 2) or mode == "always_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        auc = best - 0.1 / (index + 1) if not is_test else best + 0.001
        with metrics.open("a") as stream:
            stream.write(json.dumps({"step": 10 * (index + 1), "test_auc": auc}) + "\n")
        if mode == "slow":
            time.sleep(30)
    checkpoint = run_dir / "checkpoints/step_40"
    checkpoint.mkdir(parents=True, exist_ok=True)
    summary = {"steps": 40, "test_auc": best, "best_checkpoint": "checkpoints/step_40"}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
