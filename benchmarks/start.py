"""CPU seconds of the commands' starts, beside those of the bare imports that they need: `python -m benchmarks.start output=DIR`.

The runs of all rows alternate. `imports` is the least of the imports alone, `seconds` the least of the command, user and system
time with that of its processes; a training ends before its first step, a server when it is ready.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import held_output, writer_options
from benchmarks.rows import ROOT
from nn.observers.observer import Loop, Observer

SMALL = [
    *("data.synthetic.train_rows=2048", "data.synthetic.test_rows=64", "log.pictures=false"),
    *("train.max_steps=4", "log.loggers=[]", "device=cpu"),
]
LIBRARIES = "import hydra, numpy, rich.console, torch"
DLRM = str(ROOT / "dlrm.py")
TRAINING = f"{LIBRARIES}, torchrec, pyarrow.parquet, tensorboard.plugins.hparams.summary_v2"


class FirstStep(Observer):
    """Ends a training before its first step."""

    def on_step_begin(self, loop: Loop) -> None:
        os._exit(0)


@dataclass(frozen=True, slots=True)
class Row:
    """A command, and the imports that it needs."""

    name: str
    arguments: list[str]
    imports: str = "import hydra"
    until: str = ""  # the command is ended after a line on stderr that begins so


def rows(directory: Path) -> list[Row]:
    """Return the rows; `directory` has what they read."""
    run, first = str(directory / "run"), f"log.observers=[{__name__}:FirstStep]"
    space = directory / "space.yaml"
    space.write_text("optimizer.lr: [0.01, 0.02, 0.03]\n")
    return [
        Row("a wrong value", [DLRM, "train.lr=abc"]),
        Row("--help", [DLRM, "--help"]),
        Row("compare", ["-m", "compare", run], "import hydra, numpy, rich.console"),
        Row("mode=plan", [DLRM, "mode=plan"], f"{LIBRARIES}, torchrec"),
        Row("a training, to its first step", [DLRM, *SMALL[:2], first], TRAINING),
        Row("a sweep of 3 trials", _sweep(space, directory), TRAINING),
        Row("3 jobs of --multirun", [DLRM, "-m", "seed=1,2,3", *SMALL], TRAINING),
        Row(
            "serving.run",
            ["-m", "serving.run", f"model={directory / 'model'}", "port=0"],
            "import hydra, torch, uvicorn, prometheus_client",
            "ready",
        ),
    ]


def _sweep(space: Path, directory: Path) -> list[str]:
    output = directory / f"sweep-{time.time_ns()}"
    options = [f"space={space}", f"output={output}", "sampler=grid", *SMALL]
    return ["-m", "sweep", *options]


def prepare(directory: Path) -> None:
    """Train the quick start's model for some steps, and export it."""
    run = directory / "run"
    if not (directory / "model" / "1").exists():
        _command(directory, [DLRM, f"run_dir={run}", "train.max_steps=32"])
        export = [f"checkpoint={run / 'checkpoints/best'}", f"output={directory / 'model/1'}"]
        _command(directory, ["-m", "serving.export", *export])


def _command(directory: Path, arguments: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)


def seconds_of(directory: Path, arguments: list[str], until: str = "") -> tuple[float, float]:
    """Run Python with these arguments; return its CPU time and its time, until a line on stderr."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while until and not process.stderr.readline().startswith(until):
        pass
    elapsed = time.perf_counter() - started
    if until:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, elapsed if until else time.perf_counter() - started


def main() -> None:
    """Measure and print the table; write it to start.json."""
    options = writer_options(__doc__, {"output": "", "runs": "3"})
    directory = Path(options["output"]).resolve()
    with held_output(directory):
        prepare(directory)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(int(options["runs"])):
            for row in rows(directory):
                imports = seconds_of(directory, ["-c", row.imports])[0]
                found.setdefault(row.name, []).append(
                    (imports, *seconds_of(directory, row.arguments, row.until))
                )
        least = {
            name: [min(values) for values in zip(*of_row, strict=True)]
            for name, of_row in found.items()
        }
        for name, (imports, cpu, elapsed) in least.items():
            print(
                f"{name:30} imports {imports:5.2f}  seconds {cpu:5.2f}  more {cpu - imports:5.2f}  elapsed {elapsed:5.2f}"
            )
        (directory / "start.json").write_text(json.dumps(least, indent=1) + "\n")


if __name__ == "__main__":
    main()
