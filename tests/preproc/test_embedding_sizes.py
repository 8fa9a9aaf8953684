"""Suggested columns per table: the rule of NVTabular's `get_embedding_sizes`."""

import io

import pytest

from configs.console import LiteralConsole
from dataloading.embedding_sizes import suggested_embedding_dim
from preproc.report.console import ColumnSummary, SplitSummary, print_columns


@pytest.mark.parametrize(
    ("cardinality", "columns"),
    [
        # What NVTabular prints for MovieLens 25M: userId, movieId, genres.
        *((162_542, 512), (56_595, 512), (21, 16)),
        # The bounds, and two values between them.
        *((1, 16), (61, 16), (62, 16), (70, 17), (1_000, 77), (29_000, 505), (10**9, 512)),
    ],
)
def test_the_rule_gives_the_published_numbers(cardinality, columns):
    assert suggested_embedding_dim(cardinality) == columns


def test_the_table_of_columns_has_a_suggestion_per_table():
    stream = io.StringIO()
    console = LiteralConsole(file=stream, width=200, color_system=None)
    # The row of id 0 belongs to the table.
    genres = ColumnSummary(0.0, 20, 20, [], 1, table_rows=21)
    columns = {"genres": genres, "age": ColumnSummary(0.0)}
    print_columns(console, columns, {"train": SplitSummary(1, {}, {"genres": 0})}, "1 rows")
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert ["genres", "0.00", "20", "20", "21", "16", "0.00"] in lines
    assert ["age", "0.00"] in lines
    assert "suggested dim" in stream.getvalue()
