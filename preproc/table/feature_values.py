"""Values of the categorical features of relation `rows_`, as an engine has stored them: texts, or codes of texts.

Relation `rows_` holds the value of feature `<i>`, or a list of them, in the column `c<i>`. Both classes turn it into counts
per value, and into ids; the ids are then written by `preproc/table/output_files.py`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from configs.table_schema import Categorical, TableConfig
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.table.expressions import hashed_id
from preproc.table.output_files import TableFiles, WrittenIds
from preproc.table.transformation import hashed_ids, vocabulary_ids
from preproc.vocabulary_sql import count_values, merge_counts

Write = Callable[[str, str], None]
"""Writes a relation, called by its name, with the rows of a query."""


def rows_of(rows: range, relation: str = "rows_") -> str:
    return f"(SELECT * FROM {relation} WHERE row_ >= {rows.start} AND row_ < {rows.stop})"


class Lookup(NamedTuple):
    """SQL of the values of a feature in the rows of a relation `r`."""

    value: str  # expression of the text
    id: str  # expression of its id
    join: str  # what both need behind FROM


def look_up(text: str, alias: str, vocabulary: str, owner: Categorical) -> Lookup:
    """Look up texts of feature `owner`; `alias` is one of its own in the query."""
    if owner.is_hashed:
        return Lookup(text, hashed_id(text, owner), "")
    join = f"LEFT JOIN {vocabulary} AS {alias} ON {text} = {alias}.value"
    return Lookup(text, f"CAST(coalesce({alias}.id, 0) AS INTEGER)", join)


class FeatureValues(Protocol):
    """Values of all features, each named by its number."""

    def counts(self, number: int, rows: range) -> str:
        """Return a query (value, count) of the values in some rows."""

    def num_values(self, number: int, rows: range) -> str:
        """Return a query of one number: the values in some rows."""

    def num_rows(self, number: int, rows: range) -> str:
        """Return a query of one number: those of some rows that have a value."""

    def find_ids(self, number: int, vocabulary: str) -> None:
        """Find the ids of the values, by a relation (value, id)."""

    def hash_ids(self, number: int, owner: Categorical) -> None:
        """Find the ids of the values as the buckets or keys of feature `owner`."""

    def look_up(self, column: str, number: int, vocabulary: str, owner: Categorical) -> Lookup:
        """Look up a column of `r` with values as of feature `number`, of which `find_ids` or `hash_ids` has run."""

    def write_ids(self, files: TableFiles, number: int, feature: CategoricalFeature) -> WrittenIds:
        """Write the files of the ids of a feature."""


def items_of(table: TableConfig, items: str, feature: str) -> str:
    """Return a query of items, as of `Engine.exploded`, without the empty ones unless they have id 0."""
    if not table.drops_empty(feature):
        return items
    return f"SELECT * FROM ({items}) WHERE value IS NOT NULL"


class TextValues:
    """Texts: relation `encoded_<i>` holds the ids of all rows."""

    def __init__(
        self,
        table: TableConfig,
        write: Write,
        exploded: Callable[[str, str, str], str],
    ) -> None:
        self._table = table
        self._features = table.categorical
        self._write = write
        self._exploded = exploded

    def _values(self, number: int) -> str:
        """Return the relation of the values: `items_<number>`, a row per value, for a list."""
        if not self._features[number].is_list:
            return f"(SELECT row_, c{number} AS value FROM rows_)"
        items = self._exploded("rows_", "row_", f"c{number}")
        self._write(f"items_{number}", items_of(self._table, items, self._features[number].name))
        return f"items_{number}"

    def counts(self, number: int, rows: range) -> str:
        return count_values("value", rows_of(rows, self._values(number)))

    def num_values(self, number: int, rows: range) -> str:
        return f"SELECT count(value) FROM {rows_of(rows, self._values(number))}"

    def num_rows(self, number: int, rows: range) -> str:
        values = rows_of(rows, self._values(number))
        return f"SELECT count(DISTINCT row_) FROM {values} WHERE value IS NOT NULL"

    def find_ids(self, number: int, vocabulary: str) -> None:
        ids = vocabulary_ids(self._values(number), vocabulary, self._features[number])
        self._write(f"encoded_{number}", ids)

    def hash_ids(self, number: int, owner: Categorical) -> None:
        ids = hashed_ids(self._values(number), owner, self._features[number])
        self._write(f"encoded_{number}", ids)

    def look_up(self, column: str, number: int, vocabulary: str, owner: Categorical) -> Lookup:
        return look_up(f"r.{column}", f"v{number}_", vocabulary, owner)

    def write_ids(self, files: TableFiles, number: int, feature: CategoricalFeature) -> WrittenIds:
        return files.write_ids(f"encoded_{number}", feature, self._features[number])


class CodedValues:
    """Codes: relation `texts_c<i>` (code, value) lists the values, and `ids_<i>` the ids of all codes in any order."""

    def __init__(
        self, table: TableConfig, write: Write, count: Callable[[int, range], str]
    ) -> None:
        self._features = table.categorical
        self._table = table
        self._write = write
        self._count = count

    def counts(self, number: int, rows: range) -> str:
        """Count the codes, then add up those of a value."""
        return merge_counts(self._count(number, rows))

    def num_values(self, number: int, rows: range) -> str:
        column = f"c{number}"
        if self._features[number].is_list:
            return f"SELECT coalesce(sum(list_count({column})), 0) FROM {rows_of(rows)}"
        return f"SELECT count({column}) FROM {rows_of(rows)}"

    def num_rows(self, number: int, rows: range) -> str:
        column = f"c{number}"
        if self._features[number].is_list:
            column = f"nullif(list_count({column}), 0)"
        return f"SELECT count({column}) FROM {rows_of(rows)}"

    def find_ids(self, number: int, vocabulary: str) -> None:
        """Join the texts, not the rows."""
        query = (
            f"SELECT t.code AS row_, CAST(coalesce(v.id, 0) AS INTEGER) AS id FROM texts_c{number} AS t "
            f"LEFT JOIN {vocabulary} AS v ON t.value = v.value"
        )
        self._write(f"ids_{number}", query)

    def hash_ids(self, number: int, owner: Categorical) -> None:
        """Hash the texts, not the rows."""
        ids = hashed_id("value", owner)
        query = f"SELECT code AS row_, {ids} AS id FROM texts_c{number}"
        self._write(f"ids_{number}", query)

    def look_up(self, column: str, number: int, vocabulary: str, owner: Categorical) -> Lookup:
        code, texts, ids = f"r.{column}", f"t{number}_", f"v{number}_"
        join = (
            f"LEFT JOIN texts_c{number} AS {texts} ON {code} = {texts}.code "
            f"LEFT JOIN ids_{number} AS {ids} ON {code} = {ids}.row_"
        )
        return Lookup(f"{texts}.value", f"coalesce({ids}.id, 0)", join)

    def write_ids(self, files: TableFiles, number: int, feature: CategoricalFeature) -> WrittenIds:
        described = self._features[number]
        return files.write_coded(
            f"c{number}",
            f"ids_{number}",
            feature,
            described,
            drops_empty=self._table.drops_empty(feature.name),
        )
