"""A file of scores that grows by tables: Parquet or CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from configs.messages import shown
from nn.scores.named_rows import ROW, ROW_FIELD
from nn.scores.request import is_csv

SCORE = "score"


def score_columns(tasks: Sequence[str]) -> list[str]:
    """Return the names of the scores: `score` of a single label, `score_<label>` of each of several."""
    return [SCORE] if len(tasks) == 1 else [f"{SCORE}_{task}" for task in tasks]


def score_schema(
    fields: Sequence[pa.Field], tasks: Sequence[str], facts: Mapping[str, str], path: Path
) -> pa.Schema:
    """Return the columns of a file: those that name the rows, then the scores, float64.

    Raises ValueError: two columns have one name, or CSV cannot hold one.
    """
    scores = score_columns(tasks)
    for field in fields:
        if field.name in scores:
            raise ValueError(
                f"predict.columns names {shown(field.name)}, which is the name of a column of scores; leave it out, or keep "
                "the column under another name when preprocessing"
            )
        if is_csv(path) and (pa.types.is_nested(field.type) or pa.types.is_binary(field.type)):
            raise ValueError(
                f"predict.columns names {shown(field.name)}, whose {field.type} CSV cannot hold; write output=FILE.parquet, or "
                "leave it out"
            )
    return pa.schema(
        [*fields, *(pa.field(name, pa.float64()) for name in scores)], metadata=dict(facts)
    )


def open_score_file(
    path: Path, schema: pa.Schema, num_scores: int
) -> pc.CSVWriter | pq.ParquetWriter:
    """Open a new file at `path`; its ending tells the format, and the last `num_scores` columns are scores.

    Scores in Parquet are written as they are: they hardly compress, and a dictionary of them costs half of the speed. Row
    numbers take no room as differences. Arrow then writes 58 million rows/s on one core, and 22 million with zstd.
    """
    if is_csv(path):
        return pc.CSVWriter(path, schema)
    scores = set(schema.names[-num_scores:])
    numbers = {ROW} if schema.field(0).equals(ROW_FIELD) else set()
    kept = [name for name in schema.names if name not in scores | numbers]
    return pq.ParquetWriter(
        path,
        schema,
        compression={name: "zstd" if name in kept else "none" for name in schema.names},
        use_dictionary=kept,
        column_encoding={
            **dict.fromkeys(scores, "PLAIN"),
            **dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
        },
    )
