"""SQL over single rows that preprocessing and a server evaluate alike: casts, arithmetic, parts of times and of texts.

DuckDB evaluates it in both, so its bits are the same. Since a model may be from anybody, a server evaluates nothing else.
"""

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from configs.messages import first_line, printable, shortened, shown

if TYPE_CHECKING:
    import duckdb

FUNCTION = re.compile(
    r"[-+*/%]|//|\*\*|\|\||!?~~\*?|abs|sign|ceil|floor|round|sqrt|exp|ln|log|log2|log10|pow|power|greatest|least|mod|nullif|"
    r"ifnull|second|minute|hour|day|week|month|quarter|year|dayofweek|weekday|isodow|dayofyear|dayname|monthname|date_part|"
    r"datepart|date_trunc|date_diff|datediff|epoch|epoch_ms|to_timestamp|strptime|try_strptime|strftime|lower|upper|l?trim|"
    r"rtrim|length|substr|substring|left|right|split_part|contains|starts_with|ends_with|prefix|suffix|concat|"
    r"regexp_extract|regexp_matches",
    re.IGNORECASE,
)
PART = re.compile(
    r"value_constant|column_ref|operator_cast|type|function|operator_(not|is_null|is_not_null|coalesce|nullif)|compare_\w+|"
    r"conjunction_(and|or)|case_expr",
    re.IGNORECASE,
)
NUMBER = r"boolean|u?(tiny|small|big|huge)?int(eger)?|float|double|decimal(\(\d+, ?\d+\))?"
KIND = re.compile(
    rf"{NUMBER}|varchar|date|time|timestamp(_s|_ms|_ns|tz)?|timestamp with time zone", re.IGNORECASE
)
"""Types of columns, and of casts."""
COLUMN = re.compile(r'[A-Za-z_]\w*|"([^"]|"")*"')
"""An expression that is a column."""


@cache
def _database() -> "duckdb.DuckDBPyConnection":
    """Return a database without files, in whose zone preprocessing computes too."""
    import duckdb

    limits: dict[str, Any] = {
        "threads": 1,
        "memory_limit": "512MB",
        "enable_external_access": False,
    }
    connection = duckdb.connect(config=limits)
    connection.execute("SET GLOBAL TimeZone = 'UTC'; SET lock_configuration = true")
    return connection


def _parsed(sql: str) -> dict[str, Any]:
    import duckdb

    query = "SELECT json_serialize_sql(?)"
    try:
        ((found,),) = _database().cursor().execute(query, [f"SELECT ({sql}\n)"]).fetchall()
        parsed = json.loads(found)
    except (duckdb.Error, RecursionError, UnicodeError):
        raise ValueError("no SQL of one expression, or one that is nested too deeply") from None
    if parsed["error"] or len(parsed["statements"]) != 1:
        raise ValueError("no SQL of one expression")
    return parsed["statements"][0]["node"]


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict) and "class" in node:
        yield node
    if isinstance(node, dict | list):
        for below in node.values() if isinstance(node, dict) else node:
            yield from _parts(below)


def unserved(feature: str, sql: str, reason: object) -> str:
    """Return why a server takes no raw values of a feature."""
    return (
        f"feature {shown(feature)} is the SQL expression {shown(sql)}, which the server does not evaluate ({reason}); make it a "
        "column before preprocessing, or send ids"
    )


def columns_of(sql: str) -> list[str]:
    """Return the columns that an expression reads.

    Raises ValueError: it is none of one row, or has a part that a server does not evaluate, which the message names.
    """
    node, plain = _parsed(sql), _parsed("1")
    chosen = node.get("select_list", [])
    if len(chosen) != 1 or {**node, "select_list": 1} != {**plain, "select_list": 1}:
        raise ValueError("no SQL of one expression")
    names = {}
    try:
        parts = list(_parts(chosen))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    for part in parts:
        name = part.get("function_name", part.get("type_name", ""))
        if not PART.fullmatch(part["type"]) or (
            name and not (KIND if part["type"] == "TYPE" else FUNCTION).fullmatch(name)
        ):
            raise ValueError(f"{part['type'].lower().replace('_', ' ')} {name}".strip())
        if part["type"] == "COLUMN_REF":
            names[".".join(part["column_names"])] = len(part["column_names"]) == 1
    if not names or not all(names.values()):
        raise ValueError(f"it reads {', '.join(names) or 'no column'}")
    return list(names)


def of_utc(sql: str, times: Container[str] = ()) -> str:
    """Return SQL of a time whose casts of text heed the zone of the text, which types but TIMESTAMPTZ drop without a word.

    Times without a zone are of UTC. For what orders and counts seconds only: parts of a time, such as its hour, may be local.
    `times`: columns, in lower case, that are a TIMESTAMP; they need no cast, and one to TIMESTAMPTZ takes .2 us a row.
    """
    # Within these a name may be that of another column.
    if not re.search(r"\b(select|lambda)\b|->", sql, re.IGNORECASE):
        own = r'\bCAST\s*\(\s*("?(\w+)"?)\s+AS\s+(?:DATETIME|TIMESTAMP)\s*\)'
        sql = re.sub(own, lambda of: of[of[2].lower() in times], sql, flags=re.IGNORECASE)
    kind = r'"?(?:DATETIME|TIMESTAMP)(_NS)?(?:_[MU]?S)?\b"?(?:\s*\(\s*\d\s*\))?(?:\s+WITHOUT\s+TIME\s+ZONE\b)?'
    cast = rf"(\bAS\s+){kind}(?=\s*\))|(::\s*){kind}(?!\s+WITH\b)"
    return re.sub(cast, r"\1\3TIMESTAMPTZ\2\4", sql, flags=re.IGNORECASE)


READS_FILE = re.compile(r'"function_name": "(read_|query|glob|duckdb_|\w+_scan)')


def reads_other_rows(sql: str) -> bool:
    """Return whether an expression has a window, or reads a table or a file; False if DuckDB does not parse it."""
    if not re.search(r"\b(over|from|table)\b", sql, re.IGNORECASE):
        return False
    try:
        tree = _parsed(sql)
        text = json.dumps(tree)
        return '"class": "WINDOW"' in text or bool(READS_FILE.search(text)) or _reads_table(tree)
    except (ValueError, RecursionError):
        return False


def _reads_table(node: Any, queries: frozenset[str] = frozenset()) -> bool:
    """Return whether a part reads a table other than `queries`, the names that the WITHs around it define."""
    if isinstance(node, list):
        return any(_reads_table(below, queries) for below in node)
    if not isinstance(node, dict):
        return False
    if node.get("type") == "BASE_TABLE":
        return bool(node["schema_name"]) or node["table_name"].lower() not in queries
    if node.get("type") == "RECURSIVE_CTE_NODE":
        queries |= {node["cte_name"].lower()}
    for query in node.get("cte_map", {"map": []})["map"]:
        # Before its own name is known: without RECURSIVE a query that names itself reads a table.
        if _reads_table(query["value"], queries):
            return True
        queries |= {query["key"].lower()}
    return any(_reads_table(below, queries) for key, below in node.items() if key != "cte_map")


def of_many_rows(query: str) -> set[str]:
    """Return the columns, in lower case, that windows or aggregates of a query give; none if DuckDB does not parse it."""
    try:
        parts = list(_parts(_parsed(query.strip().removesuffix(";"))))
    except (ValueError, RecursionError):
        return set()
    aggregates = "SELECT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'"
    many = {"WINDOW", *(name for (name,) in _database().cursor().execute(aggregates).fetchall())}
    named = [(f".{part['alias'].lower()}", _words(part)) for part in parts if part.get("alias")]
    # A column may be computed from one of a query within.
    while more := {name for name, words in named if words & many} - many:
        many |= more
    return {word[1:] for word in many if word.startswith(".")}


def _words(node: dict[str, Any]) -> set[str]:
    """Return the classes and functions of a node's parts, and its columns with a point before."""
    parts = list(_parts(node))
    columns = {"." + part["column_names"][-1].lower() for part in parts if "column_names" in part}
    return columns.union(*((part["class"], part.get("function_name", "")) for part in parts))


class RowSql:
    """Expressions over the columns of a request.

    `expressions`: by feature. `types`: SQL types by column. `numbers`: features whose values are numbers where their SQL has
    some; all others are texts. `times`: features whose values are whole seconds of times, rounded down. Raises ValueError: an
    expression has no meaning.
    """

    def __init__(
        self,
        expressions: Mapping[str, str],
        types: Mapping[str, str],
        numbers: Sequence[str],
        times: Container[str] = (),
    ) -> None:
        for sql in expressions.values():
            columns_of(sql)
        quoted = ['"' + name.replace('"', '""') + '"' for name in types]
        read = ", ".join(f"unnest(?::VARCHAR[]) AS {name}" for name in quoted)
        typed = ", ".join(
            f"CAST({name} AS {kind}) AS {name}"
            for name, kind in zip(quoted, types.values(), strict=True)
        )
        values = ", ".join(f"({sql}\n) AS v{i}" for i, sql in enumerate(expressions.values()))
        rows = f"SELECT {values} FROM (SELECT {typed} FROM (SELECT {read}))"
        self._names = list(expressions)
        columns = []
        for name, (column, kind, *_) in zip(
            expressions, self._run(f"DESCRIBE {rows}", [[] for _ in types]), strict=True
        ):
            if not KIND.fullmatch(kind):
                raise ValueError(f"feature {shown(name)} has values of type {shown(kind)}")
            # NaN is a missing value.
            number = f"nullif({column}, 'nan')" if kind in ("FLOAT", "DOUBLE") else column
            if name in times:
                is_time = kind.startswith(("DATE", "TIMESTAMP"))
                seconds = f"epoch(CAST({column} AS TIMESTAMP))" if is_time else number
                is_whole = "INT" in kind
                columns.append(
                    f"try_cast({seconds if is_whole else f'floor({seconds})'} AS BIGINT)"
                )
                continue
            is_number = name in numbers and re.fullmatch(NUMBER, kind, re.IGNORECASE)
            columns.append(f"CAST({number} AS {'DOUBLE' if is_number else 'VARCHAR'})")
        self._query = f"SELECT {', '.join(columns)} FROM ({rows})"

    def values(self, columns: Sequence[Sequence[str | None]]) -> dict[str, list[Any]]:
        """Return the values by feature: texts, numbers or seconds, None where one is missing.

        `columns` are texts in the order of `types`.

        Raises ValueError: a value cannot be cast, or is out of range.
        """
        rows = self._run(self._query, [list(column) for column in columns])
        return {name: [row[i] for row in rows] for i, name in enumerate(self._names)}

    def _run(self, query: str, columns: list[Any]) -> list[tuple[Any, ...]]:
        import duckdb

        try:
            with _database().cursor() as cursor:
                return cursor.execute(query, columns).fetchall()
        except duckdb.Error as error:
            raise ValueError(shortened(printable(first_line(error)), 300)) from None
