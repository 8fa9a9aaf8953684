"""Values that are removed from the vocabulary of a dataset, since they must be forgotten.

An id keeps its row of the vocabulary, so that all other values keep their ids, and has no value any more: no other value gets it.
The dataset is replaced by a copy, whose other files are hard links. Its identity stays (`dataloading.lineage`), so that days
follow it, and runs on it resume.
"""

from collections.abc import Sequence, Set
from functools import reduce
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from dataloading.dataset.documents import YamlDumper, read_json, read_yaml
from dataloading.dataset.durable_files import edited_copy, replace_text
from dataloading.dataset.feature_spec import SPEC_NAME
from dataloading.dataset.parquet_files import open_file
from dataloading.lineage import BEFORE_FORGETTING, FITTED
from preproc.dataset_writer import checksum
from preproc.fitted_state import latest_name, rare_name, table_of, vocabulary_name
from preproc.vocabulary_file import BATCH_ROWS


def ids_of(directory: Path, vocabulary: str, values: Sequence[str]) -> dict[str, int]:
    """Return the ids of the values that a dataset's vocabulary has; empty without one."""
    path = directory / vocabulary_name(vocabulary)
    found: dict[str, int] = {}
    if path.is_file():
        with open_file(path) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=["value", "id"]):
                rows = batch.filter(pc.is_in(batch["value"], pa.array(values)))
                found |= dict(zip(*map(pa.Array.to_pylist, rows.columns), strict=True))
    return found


def forget_values(
    directory: Path, vocabulary: str, values: Sequence[str], features: Set[str] = frozenset()
) -> int:
    """Remove values from a vocabulary, from the counts of those without an id, and from the latest events of users.

    `features`: those that have the values. Returns how many events went: of these users, or with such a value.
    """
    files = {vocabulary_name(vocabulary): ["value"], rare_name(vocabulary): ["value"]}
    path = directory / FITTED
    for log in table_of(read_json(path), path).logs if (directory / "latest").is_dir() else ():
        columns = {"who_": log.by.strip('" '), **{f"c{i}": of for i, of in enumerate(log.of)}}
        files[latest_name(log.name)] = [c for c, of in columns.items() if of in features]
    names = [name for name, of in files.items() if of and (directory / name).is_file()]
    events = 0
    document = read_yaml(directory / SPEC_NAME)
    metadata = document["metadata"]
    with edited_copy(directory, [SPEC_NAME]) as copy:
        for name in names:
            (copy / name).unlink()
            gone = _write_without(directory / name, copy / name, files[name], pa.array(values))
            events += gone * (files[name] != ["value"])
            metadata.setdefault(BEFORE_FORGETTING, {}).setdefault(name, metadata["files"][name])
            metadata["files"][name] = checksum(copy / name)
        text = yaml.dump(document, Dumper=YamlDumper, sort_keys=False)
        replace_text(copy / SPEC_NAME, text)
    return events


def _write_without(source: Path, target: Path, columns: Sequence[str], values: pa.Array) -> int:
    """Copy a file: rows with an id have null in place of the values in `columns`, others are left out; return how many."""
    count = 0
    with (
        open_file(source) as file,
        pq.ParquetWriter(target, file.schema_arrow, compression="zstd") as writer,
    ):
        for batch in file.iter_batches(BATCH_ROWS):
            gone = reduce(pc.or_, [pc.is_in(batch[name], values) for name in columns])
            count += pc.sum(gone).as_py() or 0
            if "id" in batch.schema.names:
                at, left = batch.schema.get_field_index("value"), batch["value"]
                field = batch.schema.field(at)
                batch = batch.set_column(
                    at, field, pc.if_else(gone, pa.scalar(None, field.type), left)
                )
            else:
                batch = batch.filter(pc.invert(gone))
            writer.write_batch(batch)
    return count
