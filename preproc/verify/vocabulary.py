"""Check of the vocabularies of a dataset, and of the ids against them."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dataloading.dataset.documents import read_json
from dataloading.dataset.feature_spec import FeatureSpec
from preproc.vocabulary_file import check_vocabulary, has_days

if TYPE_CHECKING:
    import pyarrow as pa

READ_ITEMS = 1 << 18


def vocabulary_mistakes(spec: FeatureSpec, fitted: str | None) -> Iterator[tuple[Path, str]]:
    """Yield (file, mistake) of vocabularies beside the splits, of ids that differ, and of others than those of `fitted`."""
    assert spec.root is not None
    # Splits whose rows the vocabularies count; none if the dataset has the fit of another.
    counted: list[str] = []
    # Features whose lists are cut or filled, so that they have other ids than were counted, and histories, whose values are
    # counted in the feature that they are histories of; those of logs too.
    lists_cut, histories = {feature.name for feature in spec.categorical}, set()
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        of_rows = str(read_json(spec.root / "report.json")["counted"])
        if not any(files.parquet for files in spec.splits.values()):
            counted = {"train": ["train"], "all": list(spec.splits)}.get(of_rows, [])
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        described = read_json(spec.root / "preproc.json")["features"]
        histories = {history["name"] for history in described.get("history", [])}
        logs = described.get("sequence", [])
        histories |= {f"{log['name']}_{of}" for log in logs for of in log.get("of", [])}
        lists_cut = {f["name"] for f in described["categorical"] if f.get("hotness") is not None}
    for table, features in spec.table_features.items():
        path = spec.root / "vocabulary" / f"{table}.parquet"
        if not path.is_file():
            continue
        cardinality = features[0].cardinality
        try:
            num_values = check_vocabulary(path, "copy the dataset again")
        except ValueError as error:
            yield path, str(error).removeprefix(f"{path}: ")
            continue
        if num_values + 1 != cardinality:
            yield path, f"{num_values:,} values, but a table of {cardinality:,} rows"
        elif counted and not lists_cut & {feature.name for feature in features}:
            digest = 0
            for feature, split in product(features, counted):
                if feature.name not in histories:
                    stored = spec.splits[split].ids[feature.name]
                    digest += _digest_of_ids(stored, feature.dtype.newbyteorder("<"))
            if digest % 2**64 != _digest_of_counts(path):
                where = ", ".join(counted)
                yield path, f"its counts are not those of the ids in {where}: ids were exchanged"
        if fitted and not _is_same(path, Path(fitted) / "vocabulary" / path.name):
            yield path, f"other values than those of {Path(fitted) / 'vocabulary' / path.name}"


def _digest(ids: np.ndarray) -> np.ndarray:
    """Return a number per id, uint64, that looks random; 0 for 0. Sums of them tell sets of ids apart in constant memory."""
    mixed = ids.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)


def _digest_of_ids(path: Path, dtype: np.dtype) -> int:
    total = 0
    with path.open("rb") as stream:
        while len(ids := np.frombuffer(stream.read(READ_ITEMS * dtype.itemsize), dtype)):
            total += int(_digest(ids).sum(dtype=np.uint64))
    return total


def _digest_of_counts(path: Path) -> int:
    from dataloading.dataset.parquet_files import open_file

    total = first = 0
    columns = ["today", "retired"] if has_days(path) else ["count"]
    with open_file(path) as file:
        for batch in file.iter_batches(READ_ITEMS, columns=columns):
            counts = np.asarray(batch.column(0)).astype(np.uint64)
            if len(columns) > 1:
                # Rows with a retired value have id 0.
                counts *= ~np.asarray(batch.column("retired"))
            ids = np.arange(first + 1, first + len(counts) + 1)
            total += int((_digest(ids) * counts).sum(dtype=np.uint64))
            first += len(counts)
    return total % 2**64


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two vocabularies have the same values and counts; their files may declare columns differently."""
    from dataloading.dataset.parquet_files import open_file

    if not other.is_file():
        return False
    check_vocabulary(other, "copy that dataset again")
    columns = ["value", "count"]
    with open_file(one) as first, open_file(other) as second:
        if first.metadata.num_rows != second.metadata.num_rows:
            return False
        others = second.iter_batches(READ_ITEMS, columns=columns)
        rest: pa.RecordBatch | None = None
        for batch in first.iter_batches(READ_ITEMS, columns=columns):
            # Batches may end at other rows.
            while len(batch):
                rest = rest if rest is not None and len(rest) else next(others)
                count = min(len(batch), len(rest))
                for name in columns:
                    if not batch.column(name)[:count].equals(rest.column(name)[:count]):
                        return False
                batch, rest = batch.slice(count), rest.slice(count)
    return True
