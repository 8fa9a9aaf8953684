"""One rule for the order of text in SQL of the user: it is refused, with the cast to write.

All columns of text files are text, and text puts '10' before '9': a split in time would leak, a largest value would be wrong.
The parser of DuckDB finds what SQL orders or compares, and the engine says which of it is text. `text_order(x)` is the way to
say that the order of the bytes is right. A part whose type is not known by itself, as in a correlated subquery, is not checked.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import duckdb

from configs.messages import printable, shortened
from preproc.table.duckdb_engine import Engine, QueryError
from preproc.text_columns import TEXT_TYPES
from preproc.work_directory import small_database

# What may order something; SQL without it is not parsed.
MAY_ORDER = re.compile(
    r"[<>]|\b(between|order\s+by|greatest|least|(arg_?)?(min|max)(_by)?|\w*sort\w*|(list|array)_(min|max))\b",
    re.IGNORECASE,
)
COMPARISONS = re.compile(r"COMPARE_(LESS|GREATER)THAN(OREQUALTO)?")
# Arguments that are ordered, by function.
ORDERED = {
    **dict.fromkeys(("min", "max", "list_min", "list_max", "array_min", "array_max"), slice(1)),
    **dict.fromkeys(("list_sort", "array_sort", "list_reverse_sort", "sort_array"), slice(1)),
    **dict.fromkeys(("arg_min", "arg_max", "argmin", "argmax", "min_by", "max_by"), slice(1, 2)),
    **dict.fromkeys(("greatest", "least"), slice(None)),
}
Node = dict[str, Any]


def is_text(kind: str) -> bool:
    """Return whether a type of an engine is text, or a list of texts."""
    kind = kind.lower()
    return (
        kind.removesuffix("[]") in TEXT_TYPES
        or re.search(r'^array .*"elementType":"string"', kind, re.I) is not None
    )


def remedy(sql: str) -> str:
    """Return what is wrong with the order of the text `sql`, and the cast to write."""
    return f"text would put '10' before '9'; write CAST({_shown(sql)} AS BIGINT) or AS TIMESTAMP"


def ordered_text(where: str, ordering: str, sql: str) -> ValueError:
    return ValueError(
        f"{where}: {_shown(ordering)} orders text, and {remedy(sql)}, or text_order({_shown(sql)}) where the order of its "
        "bytes is right"
    )


def _shown(sql: str) -> str:
    return shortened(printable(sql), 200)


def refuse_text_order(engine: Engine, where: str, sql: str, base: str | None) -> None:
    """Raise ValueError if SQL orders or compares texts; begins with `where`.

    `base`: a query; None if `sql` is a query itself.
    """
    if not MAY_ORDER.search(sql):
        return
    with small_database() as parser:
        tree = _parsed(parser, f"SELECT ({sql}\n)" if base else sql)
        for ordering, operands, select in _orderings(tree, None, []):
            probe = _sql(parser, {**select, "select_list": operands})
            if probe is None:
                continue
            if select["from_table"]["type"] == "EMPTY":
                probe += f" FROM ({base})"
            try:
                kinds = [kind for _, kind in engine.columns(probe)]
            except QueryError:
                continue
            if all(map(is_text, kinds)):
                of = next((o for o in operands if o["class"] != "CONSTANT"), operands[0])
                raise ordered_text(where, *(_expression(parser, part) for part in (ordering, of)))


def _parsed(parser: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """Return the tree of a statement; an empty one if this parser does not read it."""
    ((tree,),) = parser.execute("SELECT json_serialize_sql(CAST(? AS VARCHAR))", [sql]).fetchall()
    return json.loads(tree).get("statements", [])


def _orderings(
    tree: Any, select: Node | None, ctes: list[Any]
) -> Iterator[tuple[Node, list[Node], Node]]:
    """Yield what orders, the expressions that it orders by or compares, and the query that these are evaluated in."""
    if isinstance(tree, list):
        for part in tree:
            yield from _orderings(part, select, ctes)
    if not isinstance(tree, dict):
        return
    if tree.get("type") == "SELECT_NODE":
        ctes = ctes + tree["cte_map"]["map"]
        nothing = dict.fromkeys(("where_clause", "having", "qualify", "sample"))
        nothing |= {key: [] for key in ("modifiers", "group_expressions", "group_sets")}
        select = {**tree, **nothing, "cte_map": {"map": ctes}}
        for order in (order for m in tree["modifiers"] for order in m.get("orders", [])):
            by = _named(order["expression"], tree["select_list"])
            yield by, [by], select
    elif select is not None:
        for operands in _ordered(tree):
            yield tree, operands, select
    for key, part in tree.items():
        if key != "modifiers" or tree.get("type") != "SELECT_NODE":
            yield from _orderings(part, select, ctes)


def _ordered(tree: Node) -> list[list[Node]]:
    """Return the groups of expressions that a node itself orders."""
    kind = tree.get("class")
    groups = [[order["expression"]] for order in tree.get("orders", []) if kind == "WINDOW"]
    if kind == "COMPARISON" and COMPARISONS.fullmatch(tree["type"]):
        groups.append([tree["left"], tree["right"]])
    elif kind == "BETWEEN":
        groups.append([tree["input"], tree["lower"], tree["upper"]])
    elif kind in ("FUNCTION", "WINDOW"):
        arguments = [argument["expression"] for argument in tree["arguments"]]
        if arguments := arguments[ORDERED.get(tree["function_name"].lower(), slice(0))]:
            groups.append(arguments)
        groups += [
            [order["expression"]] for order in (tree.get("order_bys") or {}).get("orders", [])
        ]
    return groups


def _named(by: Node, select_list: list[Node]) -> Node:
    """Return the expression that ORDER BY names by its alias or its number."""
    if by["class"] == "COLUMN_REF":
        return next((item for item in select_list if item["alias"] in by["column_names"][-1:]), by)
    if by["class"] == "CONSTANT" and str(by["literal"]["text"]).isdigit():
        number = int(by["literal"]["text"])
        return select_list[number - 1] if 0 < number <= len(select_list) else by
    return by


def _sql(parser: duckdb.DuckDBPyConnection, select: Node) -> str | None:
    """Return the SQL of a query, as both engines read it; None if it has none."""
    statement = {"error": False, "statements": [{"node": select, "named_param_map": []}]}
    try:
        ((sql,),) = parser.execute(
            "SELECT json_deserialize_sql(CAST(? AS JSON))", [json.dumps(statement)]
        ).fetchall()
    except duckdb.Error:
        return None
    return re.sub(r"\bAS VARCHAR\)", "AS STRING)", sql)


def _expression(parser: duckdb.DuckDBPyConnection, expression: Node) -> str:
    ((statement,),) = parser.execute("SELECT json_serialize_sql('SELECT 1')").fetchall()
    (select,) = json.loads(statement)["statements"]
    return (
        _sql(parser, {**select["node"], "select_list": [{**expression, "alias": ""}]}) or "it"
    ).removeprefix("SELECT ")
