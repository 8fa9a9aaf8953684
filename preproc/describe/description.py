"""The description of a table as yaml, with comments, as a table on the terminal, and as the options of preprocessing."""

import json
import re
from dataclasses import dataclass
from typing import Any, cast

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from configs.messages import printable, shortened, shown
from configs.table_schema import LINE_FORMATS, MOST_NAME_BYTES
from preproc.describe.choices import (
    FEWEST,
    ITEM,
    OF_ITEM,
    USER,
    Choice,
    time_order,
    time_parts,
    time_seconds,
)
from preproc.describe.columns import MOST_ROWS, has_name
from preproc.describe.formats import FoundTable
from preproc.fitted_state import SOURCE, with_placeholder
from preproc.table.expressions import quoted

PLAIN = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")
MOST_ITEMS = 4096
"""Items of a list of ids with weights; of longer ones the last count."""
TAKEN = ("label", "numerical")
"""Names of files of a dataset that no categorical feature may have."""


@dataclass(frozen=True, slots=True)
class Description:
    yaml: str  # the text of the file of a table dataset
    choices: list[Choice]  # what each column becomes
    notes: list[str]  # lines on what a reader should look at

    @property
    def options(self) -> dict[str, Any]:
        """The content of the yaml as plain values, `layout`, `frequency_limit` and `table`, to be changed at will."""
        return cast("dict[str, Any]", yaml.safe_load(self.yaml))

    def print(self, console: Console) -> None:
        """Print a line per column, within the width of the terminal."""
        first = self.choices[0].column
        part = "the first " * (first.rows == MOST_ROWS)
        table = Table(
            title=f"columns, counted on {part}{first.rows:,} rows",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        # Names are folded, values cut: 46 characters are those of the other columns.
        longest = min(24, max(8, *(len(choice.column.name) + 2 for choice in self.choices)))
        table.add_column("column", overflow="fold", max_width=longest, min_width=6)
        table.add_column("type", no_wrap=True)
        table.add_column("missing %", justify="right", no_wrap=True)
        table.add_column("values", justify="right", no_wrap=True)
        table.add_column("such as", no_wrap=True, max_width=max(console.width - longest - 46, 8))
        table.add_column("becomes", no_wrap=True)
        for choice in self.choices:
            column = choice.column
            name = column.name
            table.add_row(
                shown(name) if name != name.strip() else printable(name),
                column.type_name,
                f"{100 * column.missing / column.rows:.1f}",
                f"{column.distinct:,}",
                ", ".join(shortened(value, 24) for value, _ in column.values[:3]),
                choice.role + " ?" * choice.is_candidate,
            )
        console.print(table)
        # What is not to be seen in the table: the rule that makes a label of a column, and a number that became a category.
        for choice in self.choices:
            if choice.why and (choice.role == "label" or FEWEST in choice.why):
                rule = choice.keys.get("expression") or printable(choice.column.name)
                text = f"{choice.role} {rule}: {choice.why}"
                console.print(text, highlight=False, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)

    def __repr__(self) -> str:
        return self.yaml


def describe_choices(
    choices: list[Choice], table: FoundTable, source: Any, command: str
) -> Description:
    """Return the description of the choices; `command` is how one preprocesses by it."""
    by_role: dict[str, list[Choice]] = {}
    for choice in choices:
        by_role.setdefault(choice.role, []).append(choice)
    keys = {"files": with_placeholder(table.source.files, source), "format": table.source.format}
    if table.source.delimiter != ",":
        keys["delimiter"] = table.source.delimiter
    if table.source.columns:
        keys["columns"] = table.source.columns
    lines = [
        "# @package _global_",
        f"# Written by mode=describe; look at each choice. {command}".rstrip(),
        "layout: table",
        "frequency_limit: 2  # values seen once get id 0, as unknown ones do",
        "table:",
        "  sources:",
        f"    rows: {_flow(keys)}",
    ]
    words = sorted({word for choice in choices for word in choice.column.words})
    if words:
        lines.append(f"  missing: {_flow(words)}  # texts that stand for no value")
    names = _Names()
    candidates = [choice.column.name for choice in choices if choice.is_candidate]
    also = f"; {_listed(candidates)} may be a label too" * bool(candidates)
    if "label" in by_role:
        (label,) = by_role["label"]
        lines.append(f"  label: {_entry(label, names)}  # {label.why}{printable(also)}")
    else:
        lines.append(
            "  label: {name: label}  # no column looks like a label: name one, or an SQL expression"
        )
    for weight in by_role.get("weight", [])[:1]:
        lines.append(f"  weight: {_entry(weight, names)}  # {weight.why}")
    for role in ("numerical", "categorical"):
        if role in by_role:
            lines.append(f"  {role}:")
            for choice in by_role[role]:
                column = choice.column
                share = 100 * column.missing / column.rows
                missing = f", {share:.3g} % missing" * bool(column.missing)
                lines.append(f"    - {_entry(choice, names)}  # {choice.why}{missing}")
    for time in by_role.get("time", []):
        if parts := time_parts(time.column):
            lines.append("  # parts of the time, as categorical features:")
            for name, part in (("hour", "hour"), ("weekday", "dayofweek")):
                entry = _flow({"name": name, "expression": f"{part}({parts})"})
                lines.append(f"  #  - {entry}")
    lines += _weights(by_role, names) or _sequence(by_role, names)
    if left := by_role.get("left out"):
        lines.append("  # left out:")
        lines += [f"  #  - {_text(c.column.name)}: {c.why}" for c in left]
    lines += _split(by_role.get("time", []), table)
    notes = _notes(choices, table, "label" in by_role)
    return Description("\n".join(lines) + "\n", choices, notes)


def _weights(by_role: dict[str, list[Choice]], names: "_Names") -> list[str]:
    """Return the groups of ids with weights: one of the same ids, with all numbers that weigh them."""
    groups: dict[str, dict[str, Any]] = {}
    option: dict[str, str] = {}
    # Those of which none is negative first: a model takes one of a group.
    for choice in sorted(by_role.get("weights", []), key=lambda choice: choice.column.lowest < 0):
        column, ids = choice.column.name, names.by_column[choice.keys["ids"]]
        if ids not in groups:
            group = names.of(f"weighed_{ids}")
            groups[ids] = {"name": group, "lists": [ids], "numbers": [], "length": MOST_ITEMS}
        weight = names.of(column)
        number = weight if weight == column else {"name": weight, "expression": quoted(column)}
        groups[ids]["numbers"].append(number)
        option.setdefault(groups[ids]["name"], weight)
    how = f"models weigh these ids with model.event_weights={_flow(option)}"
    entries = [f"    - {_flow(group)}" for group in groups.values()]
    entries += [f"    # {note}" for note in _weights_below_0(by_role.get("weights", []))]
    return [f"  sequence:  # {how}", *entries] if groups else []


def _weights_below_0(choices: list[Choice]) -> list[str]:
    weights = [choice.column for choice in choices if choice.role == "weights"]
    return [
        f"{shown(column.name)} has weights from {column.lowest:g} on; model.event_weights refuses those below 0"
        for column in weights
        if column.lowest < 0
    ]


def _sequence(by_role: dict[str, list[Choice]], names: "_Names") -> list[str]:
    """Return a suggestion for the events of a user, if there are users, items and times."""
    single = [c for c in by_role.get("categorical", []) if not c.column.is_list and not c.keys]
    users, items, of_items = (
        [c.column.name for c in single if has_name(c.column, pattern)]
        for pattern in (USER, ITEM, OF_ITEM)
    )
    if not (users and items and by_role.get("time")):
        return []
    entry = {
        "name": names.of("seen"),
        "of": [names.by_column[name] for name in dict.fromkeys([items[0], *of_items])],
        "by": quoted(users[0]),
        "order_by": time_seconds(by_role["time"][0].column),
        "length": 50,
    }
    return [
        "  # what the user did before, oldest first, for models of sequences (docs/sequences.md):",
        "  #sequence:",
        f"  #  - {_flow(entry)}",
    ]


def _split(times: list[Choice], table: FoundTable) -> list[str]:
    if times:
        order = _flow([time_order(times[0].column)])
        return [
            f"  order_by: {order}",
            "  split: {by: fraction, train: 0.9}  # the last tenth in time tests",
        ]
    if table.is_criteo:
        return ["  split: {by: fraction, train: 0.9}  # the logs are in the order of time"]
    return [
        "  split: {by: random, train: 0.8}  # no column is a time; with one: order_by, and by: fraction"
    ]


def _notes(choices: list[Choice], table: FoundTable, has_label: bool) -> list[str]:
    notes = []
    blanks = [c.column.name for c in choices if c.column.name != c.column.name.strip()]
    if blanks:
        notes.append(
            f"{len(blanks)} names of columns have blanks at an end ({_listed(blanks)}); the features have names without"
        )
    notes += _weights_below_0(choices)
    if not has_label:
        notes.append("no column looks like a label; name one by label=COLUMN")
    if table.source.columns and not table.is_criteo and table.source.format not in LINE_FORMATS:
        notes.append(
            f"no first line of names: the columns are {table.source.columns[0]} to {table.source.columns[-1]}; names would "
            "differ, and be no numbers or values of rows"
        )
    if table.is_criteo:
        is_raw = table.source.format == "tsv"
        kind = "criteo_kaggle reads them faster" if is_raw else "any reads them by this description"
        notes.append(f"these are Criteo's columns; dataset={kind}")
    for path, what in table.others.items():
        notes.append(f"left out {path}: {shortened(what, 100)}")
    return notes


def _listed(names: list[str]) -> str:
    return shortened(", ".join(map(shown, names)))


class _Names:
    """Names of features by those of columns: names that files can have, each once."""

    def __init__(self) -> None:
        self._used = set(TAKEN)
        self.by_column: dict[str, str] = {}

    def of(self, column: str) -> str:
        plain = re.sub(r"[^\w.-]", "_", column.strip()).lstrip(".") or "column"
        plain = plain.encode()[: MOST_NAME_BYTES - 8].decode(errors="ignore")
        name, number = plain, 1
        while name.lower() in self._used:
            number += 1
            name = f"{plain}_{number}"
        self._used.add(name.lower())
        self.by_column[column] = name
        return name


def _entry(choice: Choice, names: _Names) -> str:
    column = choice.column.name
    name = column if choice.role == "label" and column.lower() in TAKEN else names.of(column)
    keys = {"name": name, **choice.keys}
    if name != column and "expression" not in keys:
        keys["expression"] = quoted(column)
    return _text(name) if list(keys) == ["name"] and choice.role == "categorical" else _flow(keys)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    """Return a text as yaml, in quotes where it needs them; `${` of a name is no variable."""
    if PLAIN.fullmatch(value) and value.lower() not in YAML_WORDS:
        return value
    is_source = value.startswith(SOURCE)
    escaped = SOURCE * is_source + value[len(SOURCE) * is_source :].replace("${", "\\${")
    if '"' in escaped and escaped.isprintable():
        return "'" + escaped.replace("'", "''") + "'"
    return json.dumps(escaped, ensure_ascii=False)
