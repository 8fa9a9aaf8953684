"""Text whose lines name their values, as tables: JSON lines, libsvm and libffm. All columns are text, as those of CSV are.

A line of JSON is an object, and a key of it a column; lists of values are lists of text, other nested values their JSON.

A line of libsvm is a label, perhaps `qid:N`, and items `index:value`; of libffm, items `field:id:value`. Columns:

- `label`, and of libsvm `qid`;
- `ids` and `values` of libsvm: those of all items, separated by blanks; and `x7`, the value of index 7;
- `f3` and `f3_value` of libffm: ids and values of the items of field 3, separated by blanks.
"""

import glob
import re

import duckdb

from configs.messages import printable, shortened, shown
from configs.table_schema import Source
from preproc.raw_files import RawFile
from preproc.table.expressions import quoted, text

# More indices than these are no columns of their own, unless the source's `columns` names them.
MOST_INDICES = 64
FIRST_LINES = "LIMIT 2048"
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
ITEM = {"libsvm": rf"\d+:{NUMBER}", "libffm": rf"[^ :]+:[^ :]+:{NUMBER}"}
LINE = {
    "libsvm": rf"{NUMBER}( qid:\d+)?( {ITEM['libsvm']})*",
    "libffm": rf"{NUMBER}( {ITEM['libffm']})*",
}
WANTED = {"libsvm": "label index:value ...", "libffm": "label field:id:value ..."}


def line_columns(
    connection: duckdb.DuckDBPyConnection, source: Source, file: RawFile, lists: set[str]
) -> list[str]:
    """Return the names of the columns of a file, of which all lines are read; those that are lists are added to `lists`.

    Raises ValueError: a line cannot be read; names the file.
    """
    try:
        if source.format == "jsonl":
            # Names alone: a nested object may have names that differ by their case, and columns of many names are no map.
            options = "sample_size = -1, maximum_depth = 1, map_inference_threshold = -1"
            query = f"DESCRIBE SELECT * FROM {_json(file, options)}"
            names = [name for name, *_ in connection.execute(query).fetchall()]
            # The first lines tell most columns that are none; all lines are read again for the others alone.
            found = _lists(connection, file, names, FIRST_LINES)
            maybe = [name for name, is_list in found.items() if is_list is not False]
            found = _lists(connection, file, maybe) if maybe else {}
            lists |= {name for name, is_list in found.items() if is_list}
            renamed = [n for n in maybe if found[n] is None and re.search(r"_\d+$", n)]
            _refuse_twins(connection, file, renamed)
            return list(source.columns or names)
        if source.columns:
            return list(source.columns)
        rows = f"(SELECT DISTINCT split_part(unnest(items_), ':', 1) AS key FROM {_items(source, file)})"
        indices = [key for (key,) in connection.execute(f"FROM {rows}").fetchall()]
    except duckdb.Error as error:
        reason = shortened(printable(str(error).splitlines()[0].partition("Error: ")[2]), 300)
        raise ValueError(f"{file.path}: {reason}; correct it") from None
    keys = sorted(set(indices) - {"qid"}, key=lambda key: (len(key), key))
    if source.format == "libffm":
        return ["label", *(name for key in keys for name in (f"f{key}", f"f{key}_value"))]
    own = [f"x{key}" for key in keys] if len(keys) <= MOST_INDICES else []
    return ["label", *["qid"] * ("qid" in indices), "ids", "values", *own]


def _refuse_twins(connection: duckdb.DuckDBPyConnection, file: RawFile, names: list[str]) -> None:
    """Raise ValueError if no line has one of these names: DuckDB makes `A_1` of an `A` beside an `a`."""
    found = ", ".join(f"coalesce(bool_or(list_contains(keys, {text(n)})), false)" for n in names)
    path = text(glob.escape(str(file.path)))
    objects = f"read_ndjson_objects({path}, compression = '{file.compression}')"
    keys = f"SELECT json_keys(json) AS keys FROM {objects}"
    rows = connection.execute(f"SELECT {found} FROM ({keys})").fetchall() if names else [()]
    for name, is_there in zip(names, rows[0], strict=True):
        if not is_there:
            raise ValueError(
                f"{file.path}: two columns are called {shown(name.rpartition('_')[0])} (SQL ignores case); rename one"
            )


def _lists(
    connection: duckdb.DuckDBPyConnection, file: RawFile, names: list[str], limit: str = ""
) -> dict[str, bool | None]:
    """Return which columns of JSON are lists wherever they have a value; None of one without any."""
    types = ", ".join(f"{text(name)}: 'JSON'" for name in names)
    kinds = [f"json_type({quoted(name)})" for name in names]
    are_lists = [f"bool_and({kind} = 'ARRAY') FILTER ({kind} <> 'NULL')" for kind in kinds]
    lines = f"(SELECT * FROM {_json(file, f'columns = {{{types}}}')} {limit})"
    (found,) = connection.execute(f"SELECT {', '.join(are_lists)} FROM {lines}").fetchall()
    return dict(zip(names, found, strict=True))


def lines_of(source: Source, file: RawFile, columns: list[str], lists: frozenset[str]) -> str:
    """Return the relation of the lines of a file in its order, with these columns."""
    if source.format == "jsonl":
        types = [f"{text(c)}: 'VARCHAR{'[]' if c in lists else ''}'" for c in columns]
        return _json(file, f"columns = {{{', '.join(types)}}}")
    values = ", ".join(f"{_value(source, c)} AS {quoted(c)}" for c in columns)
    return f"(SELECT {values} FROM {_items(source, file)})"


def _json(file: RawFile, options: str) -> str:
    return (
        f"read_json({text(glob.escape(str(file.path)))}, format = 'newline_delimited', records = true, "
        f"compression = '{file.compression}', {options})"
    )


def _items(source: Source, file: RawFile) -> str:
    """Return the relation (label_, items_) of the lines that are not blank."""
    # No text holds the delimiter, so a line is one field.
    lines = (
        f"read_csv({text(glob.escape(str(file.path)))}, compression = '{file.compression}', "
        "columns = {'line_': 'VARCHAR'}, delim = '\x01', quote = '', escape = '', comment = '', "
        "header = false, auto_detect = false, strict_mode = true)"
    )
    bare = r"trim(regexp_replace(split_part(line_, '#', 1), '\s+', ' ', 'g'))"
    wrong = text(f"no line of {source.format}, which is {WANTED[str(source.format)]}: ")
    # A filter, since columns that nothing reads are not computed.
    return (
        "(SELECT split_part(line_, ' ', 1) AS label_, string_split(line_, ' ')[2:] AS items_ "
        f"FROM (SELECT {bare} AS line_ FROM {lines}) WHERE line_ <> '' AND "
        f"CASE WHEN regexp_full_match(line_, {text(LINE[str(source.format)])}) THEN true "
        f"ELSE error({wrong} || line_[:80]) END)"
    )


def _value(source: Source, column: str) -> str:
    if column == "label":
        return "label_"
    if source.format == "libffm":
        field, is_value = re.fullmatch(r"f(.*?)(_value)?", column).groups()  # type: ignore[union-attr]
        part, condition = 3 if is_value else 2, f"starts_with(x_, {text(f'{field}:')})"
    elif column in ("ids", "values"):
        part, condition = 1 + (column == "values"), "NOT starts_with(x_, 'qid:')"
    else:
        part, condition = 2, f"starts_with(x_, {text(column.removeprefix('x') + ':')})"
    items = f"[split_part(x_, ':', {part}) FOR x_ IN items_ IF {condition}]"
    return f"nullif(array_to_string({items}, ' '), '')"
