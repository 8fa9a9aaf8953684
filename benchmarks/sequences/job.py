"""A run of the comparison of sequence models, ours or FuxiCTR's."""

import argparse
import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.with_fuxictr import Pair, train_peer
from benchmarks.sequences.datasets import dataset

QUIET = (
    *("eval.baseline=false", "checkpoint.save=false", "log.loggers=[]", "log.every=100000"),
    "log.pictures=false",
)
"""Of all runs: nothing but training and the last evaluation."""
NEXT_ITEM = ("model.item_features=[item]",)
"""Of datasets of next items."""
PEERS = {"din": "DIN", "bst": "BST"}
"""Folder and class of FuxiCTR's models."""


def peer(model: str, data: str, rate: float) -> Pair:
    """Return FuxiCTR's model of a name with a learning rate, and with the sizes, batches and epochs of ours."""
    items = ["item"] if data != "liked" else ["movieId", "genres"]
    fields = [(*items,)], [(*(f"history_{item}" for item in items),)]
    settings: dict[str, Any] = {
        f"{model}_target_field": fields[0],
        f"{model}_sequence_field": fields[1],
        **{"dnn_hidden_units": [200, 80], "embedding_dim": 16, "learning_rate": rate},
    }
    settings |= {"attention_hidden_units": [80, 40]} if model == "din" else {"num_heads": 2}
    return Pair(PEERS[model], PEERS[model], settings, batch_size=512, epochs=2)


@dataclass(frozen=True, slots=True)
class Job:
    """One run, and the file of its result."""

    data: str
    model: str
    variant: str
    seed: int
    args: argparse.Namespace
    is_peer: bool = False

    @property
    def file(self) -> Path:
        chosen = [f"lr={self.args.peer_lr}"] if self.is_peer else self.args.set
        settings = "".join(f"-{each.replace('/', '_')}" for each in chosen)
        name = f"{self.data}-{self.column}-{self.variant}-{self.seed}-{self.split}{settings}.json"
        return self.args.out / "results" / name

    @property
    def split(self) -> str:
        return "validation" if self.args.validate else "test"

    @property
    def column(self) -> str:
        return f"{self.model}, FuxiCTR" if self.is_peer else self.model

    def auc(self) -> float | None:
        """Return the result, or None if the run has not finished."""
        with suppress(FileNotFoundError):
            return json.loads(self.file.read_text())["auc"]
        return None

    def run(self) -> None:
        """Train and evaluate, and write the result."""
        data = dataset(self.data, self.variant, self.args.source, self.args.out)
        result = self._trained_peer(data) if self.is_peer else self._trained(data)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.rename(self.file)

    def _trained(self, data: Path) -> dict[str, Any]:
        # Here: the tables are printed without the imports of a training.
        import torch

        from nn.library.options import options
        from nn.library.own_training import Training

        torch.set_num_threads(1)
        overrides = [f"data.path={data}", f"seed={self.seed}", f"eval.split={self.split}", *QUIET]
        overrides += [] if self.data == "liked" else NEXT_ITEM
        run_dir = self.args.out / "runs" / self.file.stem
        shutil.rmtree(run_dir, ignore_errors=True)
        overrides += [f"run_dir={run_dir}", *self.args.set]
        with Training(options(f"{self.model}_movielens_events", *overrides), quiet=True) as run:
            run.train()
        summary = json.loads((run_dir / "summary.json").read_text())
        return {"auc": summary["test_auc"], "log_loss": summary["test_log_loss"]}  # of any split

    def _trained_peer(self, data: Path) -> dict[str, Any]:
        args = self.args
        pair = peer(self.model, self.data, args.peer_lr)
        epochs = train_peer(args.fuxictr, args.zoo, pair, data, self.seed, [self.split])
        return epochs[-1][self.split]
