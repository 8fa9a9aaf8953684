"""Training day by day against training on everything so far: AUC on the next part, and the time of both.

    python -m benchmarks.continuous.every_day --data criteo --source criteo_kaggle_137k.tsv.gz --out DIR
    python -m benchmarks.continuous.every_day --data movielens --source ml-latest-small --out DIR

Further arguments are options of both trainings, such as optimizer.lr=0.006.

The rows, in the order of time, are cut into parts of equal size. One run continues from part to part (`mode=extend`,
`stage=next`). The other is trained again on all parts so far (`mode=fit`). Both score the training rows of the next part
before they see them, with the values that they know.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
# Nearly all rows train, since both are scored on the next part.
SPLIT = 0.98


@dataclass(frozen=True)
class Data:
    """Commands of one dataset.

    Attributes:
        preproc: options of preprocessing.
        train: command of a training.
    """

    preproc: list[str]
    train: list[str]


DATA = {
    "criteo": Data(
        ["dataset=criteo_kaggle", f"train_fraction={SPLIT}"],
        ["dlrm.py", "experiment=dlrm_criteo_kaggle"],
    ),
    "movielens": Data(
        ["dataset=movielens", f"table.split={{by:fraction,train:{SPLIT}}}"],
        [
            *("main.py", "experiment=embedding_mlp_movielens", "train.batch_size=256"),
            *("train.max_steps=null", "eval.every=null"),
        ],
    ),
}
COMMON = ["log.pictures=false", "log.loggers=[]", "device=cpu", "checkpoint.save_every=null"]
COMMON += ["checkpoint.keep=1", "eval.at_start=false", "eval.max_steps=null"]


@dataclass
class Result:
    """Measurements of one way to train.

    Attributes:
        auc: on each next part.
        preproc_s: seconds of preprocessing per part.
        train_s: seconds of the training per part.
        steps_s: seconds of its steps, without start, evaluations and end.
    """

    auc: list[float] = field(default_factory=list)
    preproc_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)


def timed(command: Sequence[str]) -> float:
    """Run a command of the project and return its seconds."""
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stdout}{ended.stderr}")
    return time.perf_counter() - started


def cut(name: str, source: Path, num_parts: int, out: Path) -> list[Path]:
    """Write the parts and return what `source` of preprocessing names."""
    out.mkdir(parents=True, exist_ok=True)
    file = source if source.is_file() else next(source.glob("ratings.csv*"))
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as stream:
        lines = stream.readlines()
    head = lines.pop(0) if name == "movielens" else ""
    if head:
        lines.sort(key=lambda line: int(line.rsplit(",", 1)[1]))
    parts = []
    for number in range(num_parts):
        some = lines[len(lines) * number // num_parts : len(lines) * (number + 1) // num_parts]
        parts.append(out / f"part_{number}" if head else out / f"part_{number}.tsv")
        write_part(parts[-1], source, head, some)
    return parts


def write_part(part: Path, source: Path, head: str, lines: list[str]) -> None:
    """Write rows as a file, or as a directory of MovieLens with the films of `source`."""
    if not head:
        part.write_text("".join(lines))
        return
    part.mkdir(exist_ok=True)
    (part / "ratings.csv").write_text(head + "".join(lines))
    for films in source.glob("movies.csv*"):
        shutil.copy(films, part)


def joined(name: str, parts: Sequence[Path], source: Path, out: Path) -> str:
    """Return option `source` of several parts as one."""
    if name == "criteo":
        return f"source=[{','.join(map(str, parts))}]"
    head, *_ = (parts[0] / "ratings.csv").read_text().splitlines(keepends=True)
    lines: list[str] = []
    for part in parts:
        lines += (part / "ratings.csv").read_text().splitlines(keepends=True)[1:]
    write_part(out, source, head, lines)
    return f"source={out}"


class Comparison:
    """The runs of one dataset and one seed."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self.name, self.source = arguments.data, arguments.source
        self.data = DATA[self.name]
        self.out = arguments.out / f"seed_{seed}"
        self.options = [*COMMON, *self.data.train[1:], f"train.epochs={arguments.epochs}"]
        self.options += [f"seed={seed}", *arguments.overrides]
        self.limit = f"frequency_limit={arguments.limit}"
        self.epochs = arguments.epochs
        self.parts = cut(self.name, self.source, arguments.parts, self.out)

    def preprocess(self, *options: str) -> float:
        """Run preprocessing."""
        command = ["-m", "preproc", *self.data.preproc, *options, "plot=false", "overwrite=true"]
        return timed(command)

    def train(self, *options: str) -> float:
        """Run a training, or an evaluation."""
        return timed([self.data.train[0], *self.options, *options])

    def steps_seconds(self, data: Path, run_dir: Path) -> float:
        """Return the seconds of the steps of the last training in a run directory."""
        rows = yaml.safe_load((data / "feature_spec.yaml").read_text())["metadata"]["rows"]
        speed = json.loads((run_dir / "summary.json").read_text())["samples_per_s"]
        return rows["train"] * self.epochs / speed

    def day_by_day(self) -> Result:
        """Train one run on part after part."""
        result, run_dir = Result(), self.out / "days"
        for number, part in enumerate(self.parts):
            output, before = self.out / f"day_{number}", self.out / f"day_{number - 1}"
            how = (
                ["mode=extend", f"fitted={before}"] if number else [self.limit, "rare_counts=true"]
            )
            seconds = self.preprocess(f"source={part}", f"output={output}", *how)
            stage = ["stage=next"] if number else []
            result.preproc_s.append(seconds)
            result.train_s.append(self.train(f"data.path={output}", f"run_dir={run_dir}", *stage))
            result.steps_s.append(self.steps_seconds(output, run_dir))
        records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()[1:])
        result.auc = [record["next_auc"] for record in records if "next_auc" in record]
        return result

    def again(self) -> Result:
        """Train a run on all parts so far, and score the next one."""
        result = Result()
        for number in range(len(self.parts) - 1):
            output, run_dir = self.out / f"all_{number}", self.out / f"run_{number}"
            source = joined(self.name, self.parts[: number + 1], self.source, self.out / "joined")
            result.preproc_s.append(self.preprocess(source, f"output={output}", self.limit))
            result.train_s.append(self.train(f"data.path={output}", f"run_dir={run_dir}"))
            result.steps_s.append(self.steps_seconds(output, run_dir))
            following, scores = self.out / f"next_{number}", self.out / f"score_{number}"
            transform = ["mode=transform", f"fitted={output}", "split_name=null", self.limit]
            self.preprocess(f"source={self.parts[number + 1]}", f"output={following}", *transform)
            checkpoint = max((run_dir / "checkpoints").glob("step_*"), key=step_of)
            mode = ["mode=eval", "eval.split=train", f"checkpoint.restore={checkpoint}"]
            self.train(f"data.path={following}", f"run_dir={scores}", *mode)
            result.auc.append(json.loads((scores / "summary.json").read_text())["test_auc"])
        return result


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def row(name: str, result: Result) -> str:
    """Return a line of the table: AUC per part, mean, and seconds."""
    each = " ".join(f"{value:.4f}"[1:] for value in result.auc)
    mean = sum(result.auc) / len(result.auc)
    seconds = [result.preproc_s, result.train_s, result.steps_s]
    numbers = " | ".join(f"{sum(some[1:]):.1f}" for some in seconds)
    return f"| {name} | {each} | {mean:.4f} | {numbers} |"


def main() -> None:
    """Compare both ways and print a table; the seconds leave out the first part, which both train alike."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=sorted(DATA), required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("overrides", nargs="*", help="of both trainings")
    arguments = parser.parse_args()
    print(
        "| way, seed | AUC on each next part | mean | preprocessing s | training s | its steps s |"
    )
    print("|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        comparison = Comparison(arguments, seed)
        print(row(f"day by day, {seed}", comparison.day_by_day()), flush=True)
        print(row(f"all parts again, {seed}", comparison.again()), flush=True)


if __name__ == "__main__":
    main()
