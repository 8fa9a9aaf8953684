"""Test AUC of our models beside FuxiCTR's on the same rows.

    python -m benchmarks.peers.with_fuxictr --source LOGS --out DIR --python FUXICTR/bin/python --zoo FUXICTR/model_zoo MODEL ...

`LOGS` are raw logs in Criteo's format; the first 90 % of the lines train, the rest test. `python -m preproc` makes one
dataset directory (`dataset=criteo_buckets`), and both libraries read its ids. Ours is trained by the ordinary command
line, `python main.py experiment=MODEL_criteo_buckets`, FuxiCTR's by `benchmarks/peers/fuxictr_job.py` in an environment of
its own, which has `fuxictr` from PyPI; its model files are read from a clone of reczoo/FuxiCTR. Its settings are in `PAIRS`.
Every run has a fixed number of epochs, so no test row chooses anything.

`--validate` trains on the first 81 % of the lines and tests on the next 9 %: FuxiCTR's were chosen so. `--set` adds
settings to ours, and `--peer-set` to FuxiCTR's. Finished runs are kept in `DIR/results.jsonl` and not repeated.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.launch import command_parser
from benchmarks.rows import ROOT

TRAINED = 0.9
"""Share of the lines that train: that of `dataset=criteo_buckets`."""
EPOCHS = 2


@dataclass(frozen=True, slots=True)
class Pair:
    """FuxiCTR's model, and its settings."""

    folder: str
    model_class: str
    peer_settings: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1024
    epochs: int = EPOCHS


MLP = {"hidden_units": [256, 128], "net_dropout": 0.2}
PAIRS = {
    "wide_deep": Pair("WideDeep/WideDeep_torch", "WideDeep", MLP),
    "deepfm": Pair("DeepFM/DeepFM_torch", "DeepFM", MLP),
    "dcnv2": Pair(
        "DCNv2",
        "DCNv2",
        {
            "model_structure": "parallel",
            "num_cross_layers": 2,
            "parallel_dnn_hidden_units": [256, 128],
            "net_dropout": 0.2,
        },
    ),
    "dlrm": Pair("DLRM", "DLRM", {"top_mlp_units": [256, 128], "top_mlp_dropout": 0.2}),
    "finalmlp": Pair(
        "FinalMLP",
        "FinalMLP",
        {
            "mlp1_hidden_units": [256, 128],
            "mlp2_hidden_units": [256],
            "fs_hidden_units": [64],
            "num_heads": 8,
            "mlp1_dropout": 0.2,
            "mlp2_dropout": 0.2,
        },
    ),
    "masknet": Pair(
        "MaskNet",
        "MaskNet",
        {
            "model_type": "ParallelMaskNet",
            "parallel_num_blocks": 3,
            "parallel_block_dim": 64,
            "dnn_hidden_units": [128],
            "reduction_ratio": 1,
            "net_dropout": 0.2,
            "learning_rate": 3e-4,
        },
        batch_size=256,
    ),
    "wukong": Pair(
        "WuKong",
        "WuKong",
        {
            "num_wukong_layers": 2,
            "fmb_features": 8,
            "lcb_features": 32,
            "fmb_mlp_units": [128],
            "mlp_hidden_units": [256, 128],
            "net_dropout": 0.2,
        },
    ),
}
COMMON = ("device=cpu", "checkpoint.save=false", "log.loggers=[]", "log.every=1000")
PEER_COMMON = {
    "embedding_dim": 16,
    "learning_rate": 1e-3,
    "embedding_regularizer": 1e-5,
}


@dataclass(frozen=True, slots=True)
class Results:
    """Finished runs in a file, one line of JSON each."""

    path: Path

    def auc(self, key: list[Any], train: Callable[[], dict[str, float]]) -> float:
        """Return the AUC of a run, which `train` makes unless it has finished."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        of_key = {json.dumps(line["run"]): line["metrics"] for line in map(json.loads, lines)}
        metrics = of_key.get(json.dumps(key))
        if metrics is None:
            metrics = train()
            with self.path.open("a") as stream:
                stream.write(json.dumps({"run": key, "metrics": metrics}) + "\n")
        return metrics["auc"]


def train_ours(data: Path, run_dir: Path, overrides: Iterable[str]) -> dict[str, float]:
    """Train one of our models; return AUC and log loss of the test split, and the parameters."""
    command = [sys.executable, str(ROOT / "main.py"), *overrides, f"data.path={data}"]
    _run([*command, f"run_dir={run_dir}"])
    summary = json.loads((run_dir / "summary.json").read_text())
    return {"auc": summary["test_auc"], "log_loss": summary["test_log_loss"]}


def train_peer(
    python: Path, folder: Path, pair: Pair, data: Path, settings: dict[str, Any], seed: int
) -> dict[str, float]:
    """Train one of FuxiCTR's models; return AUC and log loss of the test split after the last epoch."""
    arguments = [str(folder), pair.model_class, str(data), json.dumps(settings)]
    arguments += [str(pair.epochs), str(pair.batch_size), str(seed)]
    printed = _run([str(python), "-m", "benchmarks.peers.fuxictr_job", *arguments])
    last = json.loads(printed.splitlines()[-1])
    return {"auc": last["AUC"], "log_loss": last["logloss"]}


def _run(command: list[str]) -> str:
    """Run a command in one thread; return what it printed. Its errors are shown."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    return done.stdout


def preprocess(source: Path, out: Path, validate: bool) -> Path:
    """Make the dataset directory, of the training lines alone to validate; return it."""
    output = out / ("validation" if validate else "data")
    if output.exists():
        return output
    if validate:
        lines = source.read_text().splitlines(keepends=True)
        source = out / "training_lines.tsv"
        source.write_text("".join(lines[: int(len(lines) * TRAINED)]))
    command = [sys.executable, "-m", "preproc", "dataset=criteo_buckets"]
    _run([*command, f"source={source}", f"output={output}"])
    return output


def main() -> None:
    """Train the models of the command line in both libraries, and print a table."""
    parser = command_parser(__doc__)
    parser.add_argument("models", nargs="*", default=list(PAIRS), help=", ".join(PAIRS))
    parser.add_argument("--source", type=Path, required=True, help="raw logs, plain text")
    parser.add_argument("--out", type=Path, required=True, help="folder for data and runs")
    parser.add_argument("--python", type=Path, required=True, help="of FuxiCTR's environment")
    parser.add_argument("--zoo", type=Path, required=True, help="model_zoo of FuxiCTR's clone")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--validate", action="store_true", help="test on training lines instead")
    parser.add_argument("--set", nargs="+", default=[], help="more settings of ours")
    parser.add_argument("--peer-set", type=json.loads, default={}, help="of FuxiCTR's, as JSON")
    args = parser.parse_args()
    unknown = set(args.models) - set(PAIRS)
    if unknown:
        parser.error(f"got models {sorted(unknown)}, want some of {', '.join(PAIRS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    data = preprocess(args.source.resolve(), args.out.resolve(), args.validate)
    results = Results(args.out / "results.jsonl")
    print("| model | ours, by seed | mean | FuxiCTR, by seed | mean | difference |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.models:
        ours, peer = [], []
        for seed in args.seeds:
            ours.append(_ours(name, seed, data, args, results))
            peer.append(_peer(name, seed, data, args, results))
        difference = mean(ours) - mean(peer)
        print(f"| {name} | {_row(ours)} | {_row(peer)} | {difference:+.4f} |", flush=True)


def _ours(name: str, seed: int, data: Path, args: argparse.Namespace, results: Results) -> float:
    overrides = [f"experiment={name}_criteo_buckets", *COMMON, *args.set, f"seed={seed}"]
    run_dir = args.out.resolve() / "runs" / f"{data.name}-{name}-{seed}-{os.getpid()}"
    return results.auc([data.name, *overrides], lambda: train_ours(data, run_dir, overrides))


def _peer(name: str, seed: int, data: Path, args: argparse.Namespace, results: Results) -> float:
    pair = PAIRS[name]
    settings = PEER_COMMON | pair.peer_settings | args.peer_set
    key = [data.name, pair.model_class, settings, EPOCHS, pair.batch_size, seed]
    # The path stays a link: a virtual environment's Python is one.
    python = Path(os.path.abspath(args.python))
    folder = args.zoo.resolve() / pair.folder
    return results.auc(key, lambda: train_peer(python, folder, pair, data, settings, seed))


def _row(aucs: list[float]) -> str:
    return f"{' '.join(f'{auc:.4f}'.lstrip('0') for auc in aucs)} | **{mean(aucs):.4f}**"


if __name__ == "__main__":
    main()
