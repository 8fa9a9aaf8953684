"""The transformations of Criteo logs, as SQL that any engine with window functions runs.

Semantics: NVIDIA's Spark preprocessing (DeepLearningExamples, `preproc/spark_data_utils.py`), with ties broken.

* A categorical value is kept if it is counted at least `frequency_limit` times. Kept values get ids
  1, 2, ... by descending count, equal counts in ascending byte order of the value (NVIDIA leaves
  that order open, so two runs of theirs differ). Missing, rare and unseen values get id 0.
* A numerical x becomes ln(x + 3); missing and x <= -3 become 0.

`preproc/criteo/parse.py` reads and checks the raw lines.
"""

from collections.abc import Sequence

NUM_NUMERICAL = 13
NUM_CATEGORICAL = 26
LABEL = "label"
NUMERICAL = tuple(f"num_{i}" for i in range(NUM_NUMERICAL))
CATEGORICAL = tuple(f"cat_{i}" for i in range(NUM_CATEGORICAL))
COLUMNS = (LABEL, *NUMERICAL, *CATEGORICAL)


def numerical(column: str) -> str:
    """Return the expression of a transformed numerical column; its logarithm is of double precision, as Spark's."""
    return (
        f"CAST(CASE WHEN {column} > -3 THEN ln(CAST({column} AS DOUBLE) + 3) ELSE 0 END AS FLOAT)"
    )


def merge_counts(partial: str) -> str:
    """Return a query (value, count) that adds up the relation `partial` of the same columns."""
    return f"SELECT value, CAST(sum(count) AS BIGINT) AS count FROM {partial} GROUP BY value"


def coverage(counts: str, limits: Sequence[int]) -> str:
    """Return a query of one row: number of values and of rows, then both again per limit."""
    at_least = [
        f"sum(CASE WHEN count >= {limit} THEN {what} ELSE 0 END)"
        for limit in limits
        for what in ("1", "count")
    ]
    return f"SELECT count(*), sum(count), {', '.join(at_least)} FROM {counts}"


def vocabulary(counts: str, frequency_limit: int) -> str:
    """Return a query (value, id, count) over the kept values of the relation `counts`."""
    return (
        f"SELECT value, row_number() OVER (ORDER BY count DESC, value) AS id, count FROM {counts} "
        f"WHERE count >= {frequency_limit}"
    )
