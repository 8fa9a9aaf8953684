"""Values of the categorical features of relation `rows_`, as an engine has stored them: texts, or codes of texts.

Relation `rows_` holds the value of feature `<i>`, or a list of them, in the column `c<i>`. Both classes turn it into counts
per value, and into ids; the ids are then written by `preproc/table/output_files.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from configs.table_schema import Categorical
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.table.expressions import hashed_id
from preproc.table.output_files import ReadIds, TableFiles
from preproc.table.transformation import NO_VALUE
from preproc.vocabulary_sql import merge_counts

Write = Callable[[str, str], None]
"""Writes a relation, called by its name, with the rows of a query."""


def rows_of(rows: range, relation: str = "rows_") -> str:
    return f"(SELECT * FROM {relation} WHERE row_ >= {rows.start} AND row_ < {rows.stop})"


class Lookup(NamedTuple):
    """SQL of the values of a feature in the rows of a relation `r`."""

    columns: dict[str, str]  # expressions: `k` of the code; or `v` of the text, and `i` of its id
    id: str  # expression of the id
    join: str  # what these need behind FROM


def look_up(text: str, alias: str, vocabulary: str, owner: Categorical) -> Lookup:
    """Look up texts of feature `owner`; `alias` is one of its own in the query."""
    if owner.is_hashed:
        found = hashed_id(text, owner)
        return Lookup({"v": text, "i": found}, found, "")
    join = f"LEFT JOIN {vocabulary} AS {alias} ON {text} = {alias}.value"
    found = f"CAST(coalesce({alias}.id, 0) AS INTEGER)"
    return Lookup({"v": text, "i": found}, found, join)


def ids_of_codes(texts: str, vocabulary: str, owner: Categorical) -> str:
    """Return a query (row_, id) of the ids of codes by a relation (code, value) of their texts: joined or hashed once each."""
    found = look_up("r.value", "v", vocabulary, owner)
    return f"SELECT r.code AS row_, {found.id} AS id FROM {texts} AS r {found.join}"


@dataclass(frozen=True, slots=True)
class TextValues:
    """Texts: relation `encoded_<i>` holds the ids of all rows."""

    features: list[Categorical]
    write: Write
    exploded: Callable[[str], str]

    def _values(self, number: int) -> str:
        """Return the relation of the values: `items_<number>`, a row per value, for a list."""
        if not self.features[number].is_list:
            return f"(SELECT row_, c{number} AS value FROM rows_)"
        self.write(f"items_{number}", self.exploded(f"c{number}"))
        return f"items_{number}"

    def counts(self, number: int, rows: range) -> str:
        """Return a query (value, count) of the values in some rows."""
        values = rows_of(rows, self._values(number))
        return (
            f"SELECT value, count(*) AS count FROM {values} WHERE value IS NOT NULL GROUP BY value"
        )

    def num_rows(self, number: int, rows: range) -> str:
        """Return a query of one number: those of some rows that have a value."""
        values = rows_of(rows, self._values(number))
        return f"SELECT count(DISTINCT row_) FROM {values} WHERE value IS NOT NULL"

    def find_ids(self, number: int, vocabulary: str, owner: Categorical) -> None:
        """Find the ids of the values: by a relation (value, id), or as the buckets or keys of feature `owner`.

        They are written in the order of rows; those of lists have a `position_` too.
        """
        position = ", r.position_" if self.features[number].is_list else ""
        found = look_up("r.value", "v", vocabulary, owner)
        query = (
            f"SELECT r.row_{position}, CASE WHEN r.value IS NULL THEN {NO_VALUE} ELSE {found.id} END AS id "
            f"FROM {self._values(number)} AS r {found.join} ORDER BY r.row_{position}"
        )
        self.write(f"encoded_{number}", query)

    def look_up(self, column: str, number: int, vocabulary: str, owner: Categorical) -> Lookup:
        """Look up a column of `r` with values as of feature `number`, of which `find_ids` has run."""
        return look_up(f"r.{column}", f"v{number}_", vocabulary, owner)

    def reader_of_ids(self, files: TableFiles, number: int, feature: CategoricalFeature) -> ReadIds:
        """Return what reads the ids of some rows."""
        is_list = self.features[number].is_list
        return partial(files.read_ids, f"encoded_{number}", feature, is_list)


@dataclass(frozen=True, slots=True)
class CodedValues:
    """Codes: relation `texts_c<i>` (code, value) lists the values, and `ids_<i>` the ids of all codes in any order."""

    features: list[Categorical]
    write: Write
    count: Callable[[str, range], str]

    def counts(self, number: int, rows: range) -> str:
        """Count the codes, then add up those of a value."""
        return merge_counts(self.count(f"c{number}", rows))

    def num_rows(self, number: int, rows: range) -> str:
        column = f"c{number}"
        if self.features[number].is_list:
            column = f"nullif(list_count({column}), 0)"
        return f"SELECT count({column}) FROM {rows_of(rows)}"

    def find_ids(self, number: int, vocabulary: str, owner: Categorical) -> None:
        self.write(f"ids_{number}", ids_of_codes(f"texts_c{number}", vocabulary, owner))

    def look_up(self, column: str, number: int, vocabulary: str, owner: Categorical) -> Lookup:
        code, ids = f"r.{column}", f"v{number}_"
        join = f"LEFT JOIN ids_{number} AS {ids} ON {code} = {ids}.row_"
        return Lookup({"k": code}, f"coalesce({ids}.id, 0)", join)

    def reader_of_ids(self, files: TableFiles, number: int, feature: CategoricalFeature) -> ReadIds:
        # Imported here, since pyarrow takes 25 MB of memory.
        from preproc.table.text_codes import read_codes

        ids, directory = files.array(f"ids_{number}", feature), files.directory / files.rows_in

        def read(rows: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for codes, lengths in read_codes(directory, f"c{number}", rows):
                yield ids.take(codes), lengths

        return read


FeatureValues = TextValues | CodedValues
"""Values of all features, each named by its number."""
