"""Datasets of `python -m preproc`, and ragged ones made from those of `dataset=synthetic`."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.rows import ROOT
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from dataloading.randomness import power_law

CHUNK_ROWS = 262_144
MOST_IDS = 10
"""Ids per row: 0 to so many, all equally often; 5 on average."""


def preprocess(*settings: str) -> None:
    """Run `python -m preproc` with these settings, which prints nothing but errors; raises CalledProcessError if it fails."""
    subprocess.run(
        [sys.executable, "-m", "preproc", *settings],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def ragged_dataset(stored: Path, num_ragged: int, exponent: float, tasks: int = 1) -> Path:
    """Return a dataset like a one-hot one whose first features are ragged; write it beside it if it does not exist."""
    path = stored.with_name(f"{stored.name}_ragged{num_ragged}_tasks{tasks}")
    if (path / "feature_spec.yaml").exists():
        return path
    source = open_dataset(FeatureSpec.load(stored, "feature_spec.yaml"))
    spec = source.spec
    features = [
        replace(feature, hotness=None, mean_hotness=0.0) if index < num_ragged else feature
        for index, feature in enumerate(spec.categorical)
    ]
    generator = np.random.default_rng(1)
    label = [RowColumn("label"), RowColumn("label_2")][:tasks]
    written = {"categorical": features, "numerical": spec.numerical, "label": label}
    with write_dataset(path, **written) as directory:
        for split in spec.splits:
            for start in range(0, source.num_rows(split), CHUNK_ROWS):
                rows = min(CHUNK_ROWS, source.num_rows(split) - start)
                columns = source.read(split, np.array([[start, start + rows]]))
                ids, lengths = {}, {}
                for feature, stored_ids in zip(features, columns.ids, strict=True):
                    ids[feature.name] = stored_ids
                    if feature.hotness is None:
                        lengths[feature.name] = generator.integers(0, MOST_IDS + 1, rows)
                        drawn = generator.random(lengths[feature.name].sum())
                        ids[feature.name] = power_law(drawn, feature.cardinality, exponent).astype(
                            np.int64
                        )
                numerical, labels = columns.numerical, columns.labels
                if tasks > 1:  # num_0 is the row's domain, and half of the clicks have label_2
                    numerical[:, 0] = generator.integers(0, 2, rows)
                    labels = np.stack([labels, labels * generator.integers(0, 2, rows)], axis=1)
                directory[split].append(
                    numerical=numerical, labels=labels, ids=ids, lengths=lengths
                )
    return path
