"""feature_spec.yaml, mutated: the loader's batches, and a plan."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from tests.fuzz.commands import as_preproc, as_recipe
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import (
    YAML_LITERALS,
    BytesEdit,
    Edit,
    apply_bytes,
    apply_edits,
    apply_kind,
    as_yaml,
    bytes_edits,
    document_edits,
    kinds_of_file,
)
from tests.helpers.datasets import make_loader

SPEC = "feature_spec.yaml"
ROWS = {"train": 40, "test": 24}


@dataclass(frozen=True, slots=True)
class Dataset:
    """A valid dataset directory and the content of its spec."""

    root: Path
    spec: dict[str, Any]

    def copy_to(self, room: Path) -> Path:
        """Copy it to `room`; return the copy."""
        return shutil.copytree(self.root, room / "data")


def make_dataset(root: Path, file_format: str = "binary") -> Dataset:
    """Write two single-hot features of one table, a two-hot and a ragged one, two numericals and a label."""
    features = [
        CategoricalFeature.of("user", 100),
        CategoricalFeature.of("pair", 9, 2),
        CategoricalFeature.of("tags", 300, None),
        CategoricalFeature.of("friend", 100, table="user"),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(
        root,
        categorical=features,
        numerical=("n", "m"),
        numerical_dtype="float32",
        file_format=file_format,
    ) as dataset:
        for split, rows in ROWS.items():
            lengths = generator.integers(0, 4, rows)
            dataset[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=generator.integers(0, 2, rows),
                ids={
                    "user": generator.integers(0, 100, rows),
                    "pair": generator.integers(0, 9, (rows, 2)),
                    "tags": generator.integers(0, 300, lengths.sum()),
                    "friend": generator.integers(0, 100, rows),
                },
                lengths={"tags": lengths},
            )
    return Dataset(root, yaml.safe_load((root / SPEC).read_text()))


def read_epoch(root: Path) -> None:
    """Read every batch of every split, as training and evaluation do."""
    source = open_dataset(FeatureSpec.load(root))
    for split in source.spec.splits:
        if not source.num_rows(split):
            continue
        loader = make_loader(source, split, batch_size=16, workers=1, prefetch=1)
        for batch in loader.batches(0, loader.steps_per_epoch):
            assert batch.num_valid > 0


def read_and_verify(root: Path) -> None:
    """Read a dataset directory with the loader, and with `mode=verify`; the loader's refusal comes first."""
    try:
        as_recipe(lambda: read_epoch(root))
    finally:
        as_preproc("mode=verify", f"path={root}")


def _with_edits(dataset: Dataset, edits: list[Edit], room: Path) -> None:
    root = dataset.copy_to(room)
    (root / SPEC).write_text(as_yaml(apply_edits(dataset.spec, edits)), errors="surrogatepass")
    as_recipe(lambda: read_epoch(root))


def _with_bytes(dataset: Dataset, edits: list[BytesEdit], room: Path) -> None:
    root = dataset.copy_to(room)
    (root / SPEC).write_bytes(apply_bytes((root / SPEC).read_bytes(), edits))
    as_recipe(lambda: read_epoch(root))


def _verified(dataset: Dataset, edits: list[Edit], room: Path) -> None:
    root = dataset.copy_to(room)
    (root / SPEC).write_text(as_yaml(apply_edits(dataset.spec, edits)), errors="surrogatepass")
    as_preproc("mode=verify", f"path={root}")


def _with_kind(dataset: Dataset, change: tuple[str, str], room: Path) -> None:
    root = dataset.copy_to(room)
    apply_kind(root / change[0], change[1])
    as_recipe(lambda: read_epoch(root))


FUZZERS = [
    Fuzzer(
        "spec: values",
        make_dataset,
        lambda dataset: document_edits(dataset.spec, YAML_LITERALS),
        _with_edits,
        120,
    ),
    Fuzzer(
        "spec: values, verify",
        make_dataset,
        lambda dataset: document_edits(dataset.spec, YAML_LITERALS),
        _verified,
        40,
        other_exit_codes=(1,),
    ),
    Fuzzer("spec: bytes", make_dataset, lambda _: bytes_edits(), _with_bytes, 40),
    Fuzzer(
        "dataset: kinds of file",
        make_dataset,
        lambda dataset: kinds_of_file(
            [
                str(path.relative_to(dataset.root))
                for path in dataset.root.rglob("*")
                if path.is_file()
            ]
        ),
        _with_kind,
        20,
    ),
]
