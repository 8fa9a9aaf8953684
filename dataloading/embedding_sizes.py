"""Number of columns that a table of so many rows usually needs."""

SMALLEST, LARGEST = 16, 512
"""Bounds of a suggestion, in columns."""


def suggested_embedding_dim(cardinality: int) -> int:
    """Return 1.6 * cardinality**0.56, rounded, between `SMALLEST` and `LARGEST` columns.

    This is the rule of NVTabular's `get_embedding_sizes` (`_emb_sz_rule` in nvtabular/ops/categorify.py), which has it
    from fastai's tabular models. It grows with the number of distinct values alone and knows nothing of the data: a
    start for a search, no optimum. `cardinality`: rows of the table, at least 1.
    """
    return min(max(SMALLEST, round(1.6 * cardinality**0.56)), LARGEST)
