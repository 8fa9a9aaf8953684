"""Training of one FuxiCTR model on a dataset directory, in FuxiCTR's own environment.

    PYTHON -m benchmarks.peers.fuxictr_job MODEL_ZOO/DeepFM/DeepFM_torch DeepFM DIR '{"embedding_dim": 16}' 2 1024 1 test

The arguments: folder of the model below FuxiCTR's `model_zoo`, its class, the dataset directory, the model's settings as
JSON, epochs, batch size, seed and splits. It prints one line of JSON per epoch, with AUC and log loss on each split.

The batches come from memory, so that nothing of FuxiCTR's loaders is measured; loss, optimizer, initial weights and training
loop are FuxiCTR's. Nothing of the project is imported, so the environment needs FuxiCTR and PyYAML only.
"""

import importlib
import json
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

LABEL = "label"


class Batches:
    """Batches of a split, as FuxiCTR's training loop reads them: a dictionary of tensors by column."""

    def __init__(self, columns: dict[str, torch.Tensor], batch_size: int, shuffle: bool) -> None:
        self.columns = columns
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.num_rows = len(columns[LABEL])

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(self.num_rows) if self.shuffle else torch.arange(self.num_rows)
        for rows in order.split(self.batch_size):
            yield {name: values[rows] for name, values in self.columns.items()}


def read_columns(root: Path, split: str) -> dict[str, torch.Tensor]:
    """Read a split of a split binary with one label, in the order of the spec's channels.

    Events of a sequence group are int64 [N, max_length], oldest first, with id 0 behind the last one, as in FuxiCTR's padding.
    """
    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    features, longest = spec["feature_spec"], lengths_of(spec)
    columns = {}
    for chunk in spec["source_spec"][split]:
        names = chunk["features"]
        if names[0] in longest:
            events = np.fromfile(root / chunk["files"][0], features[names[0]]["dtype"])
            starts, ends = np.fromfile(root / chunk["files"][1], np.int64).reshape(-1, 2).T
            place = starts[:, None] + np.arange(longest[names[0]])
            found = events[place.clip(max=len(events) - 1)]
            columns[names[0]] = np.where(place < ends[:, None], found, 0)
        if len(chunk["files"]) > 1 or names[0] not in features:
            continue  # an event's number, or the moments of rows
        dtypes = {np.dtype(features[name]["dtype"]) for name in names}
        values = np.fromfile(root / chunk["files"][0], dtypes.pop()).reshape(-1, len(names))
        columns |= {name: values[:, position] for position, name in enumerate(names)}
    channels = spec["channel_spec"]
    ordered = {
        name: torch.from_numpy(columns[name][:, None].astype(np.float32))
        for name in channels["numerical"]
    }
    ordered |= {
        name: torch.from_numpy(columns[name].astype(np.int64)) for name in channels["categorical"]
    }
    return ordered | {LABEL: torch.from_numpy(columns[channels["label"][0]].astype(np.float32))}


def lengths_of(spec: dict[str, Any]) -> dict[str, int]:
    """Return the most events of a row, by the features of sequence groups."""
    groups = spec.get("sequence_spec", {}).values()
    return {name: group["max_length"] for group in groups for name in group["features"]}


def feature_map(root: Path, embedding_dim: int) -> Any:
    """Return FuxiCTR's description of the columns of a dataset directory, a `FeatureMap`."""
    # Here, as below: the project's tests read columns without FuxiCTR.
    from fuxictr.features import FeatureMap

    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    channels, features = spec["channel_spec"], spec["feature_spec"]
    described = FeatureMap(root.name, str(root))
    described.labels = [LABEL]
    described.default_emb_dim = embedding_dim
    described.features = OrderedDict(
        (name, {"source": "", "type": "numeric"}) for name in channels["numerical"]
    )
    for name in channels["categorical"]:
        rows = features[name]["cardinality"]
        described.features[name] = {"source": "", "type": "categorical", "vocab_size": rows}
    for name, longest in lengths_of(spec).items():
        shared = {"share_embedding": features[name]["table"], "padding_idx": 0, "max_len": longest}
        described.features[name] |= {"type": "sequence", "feature_encoder": None} | shared
    described.num_fields = described.get_num_fields()
    described.set_column_index()
    return described


def train(
    folder: Path,
    name: str,
    root: Path,
    settings: dict[str, Any],
    epochs: int,
    batch_size: int,
    seed: int,
    splits: list[str],
) -> Iterator[dict[str, dict[str, float]]]:
    """Train a model; yield AUC and log loss of each split after each epoch."""
    from fuxictr.pytorch.torch_utils import seed_everything

    sys.path.insert(0, str(folder))
    model_class = getattr(importlib.import_module("src"), name)
    seed_everything(seed)
    with tempfile.TemporaryDirectory() as scratch:
        # The loop saves and loads the best weights; without patience, and saving always, these are the last ones.
        model = model_class(
            feature_map(root, settings["embedding_dim"]),
            **{"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["AUC", "logloss"]},
            **{"model_root": scratch, "verbose": 0, "task": "binary_classification", "gpu": -1},
            **settings,
        )
        training = Batches(read_columns(root, "train"), batch_size, shuffle=True)
        read = {split: Batches(read_columns(root, split), 8192, shuffle=False) for split in splits}
        model._max_gradient_norm = 10.0  # the default of `fit`
        model._eval_steps = sys.maxsize
        model._stop_training, model._total_steps = False, 0
        for _ in range(epochs):
            model.train_epoch(training)
            found = {split: model.evaluate(batches) for split, batches in read.items()}
            yield {
                split: {"auc": float(each["AUC"]), "log_loss": float(each["logloss"])}
                for split, each in found.items()
            }


def main() -> None:
    """Train the model of the command line."""
    folder, name, root, settings, epochs, batch_size, seed, *splits = sys.argv[1:]
    torch.set_num_threads(1)
    # JSON has no tuples, in which FuxiCTR takes several fields as one.
    values = {
        key: [tuple(part) if isinstance(part, list) else part for part in value]
        if isinstance(value, list)
        else value
        for key, value in json.loads(settings).items()
    }
    job = Path(folder), name, Path(root), values
    for result in train(*job, int(epochs), int(batch_size), int(seed), splits):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
