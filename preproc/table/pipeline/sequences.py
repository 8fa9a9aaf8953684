"""Phase of the sequence groups: events and rows of each log in one line, user by user, oldest first.

`preproc/table/log_files.py` writes events and slices from one pass over it. What a row sees are the events of its user that
stand in the line before the first one of the row's time; so neither its own event, nor one of the same time, nor a later
one can be among them. Events of one time are in the order of their rows in the sources, those of earlier days first. The line
has numbers in place of texts, since it is sorted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from configs.messages import printable, shortened, shown
from configs.preproc_schema import OnBad
from configs.table_schema import EventLists, EventLog, TableConfig
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from preproc.fitted_state import latest_name
from preproc.report.console import LogCounts
from preproc.table.feature_values import FeatureValues, Lookup, look_up
from preproc.table.known_values import refuse_other_numbers
from preproc.table.pipeline.categoricals import EncodedFeature
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.order import Ordered
from preproc.table.pipeline.rows import where_in_source, without_failing
from preproc.table.source_files import read_columns
from preproc.table.staging import Staging

NOTHING = {"k": "CAST(NULL AS INTEGER)", "v": "CAST(NULL AS STRING)", "i": "0"}
"""Columns of a value that there is not."""


@dataclass(frozen=True, slots=True)
class _Lines:
    """Lines of one relation `r`, as SQL."""

    relation: str
    who: str
    time: str
    is_taken: str  # conditions that a line with a user and a time is an event
    has_value: str
    found: Sequence[Lookup]
    numbers: Sequence[str]
    out: str = "CAST(NULL AS BIGINT)"
    join: str = ""
    day: int = 1  # 0: of the days before

    @property
    def is_known(self) -> str:
        return f"{self.who} IS NOT NULL AND {self.time} IS NOT NULL"

    def query(self, users: str, kinds: Sequence[str]) -> str:
        """Return the query of the lines; `users`: relation (row_, who_), `kinds` as `kinds_of_values`."""
        columns = [f"{self.out} AS out_", "w.row_ AS who_", f"{self.time} AS time_"]
        columns += [f"{self.day} AS day_", "r.row_ AS place_"]
        columns.append(f"({self.is_taken} AND {self.has_value}) AS item_")
        for j, found in enumerate(self.found):
            columns += [f"{(NOTHING | found.columns)[kind]} AS {kind}{j}" for kind in kinds]
        columns += [f"{number} AS m{j}" for j, number in enumerate(self.numbers)]
        ids = (found.join for found in self.found if "i" in found.columns)
        joins = " ".join(dict.fromkeys([self.join, *ids]))
        return (
            f"SELECT {', '.join(columns)} FROM {self.relation} AS r JOIN {users} AS w "
            f"ON {self.who} = w.who_ {joins} WHERE {self.is_known}"
        )


def kinds_of_values(journal: Journal, log: EventLog) -> list[str]:
    """Return which columns a feature has in the line of a log: `k`, and `v` and `i`, as `Lookup.columns`."""
    has_codes = journal.engine.codes_texts and not log.source
    has_texts = not has_codes or journal.extended is not None
    return ["k"] * has_codes + ["v", "i"] * has_texts


def line_up(
    journal: Journal, rows: Ordered, values: FeatureValues, number: int, of: list[EncodedFeature]
) -> LogCounts:
    """Write relation `line_<number>` of log `number`, of the features `of`, and return what became of the events.

    Columns: `row_`, the place in the line; `out_`, the row of the dataset, null if it is none; `who_`, the row of relation
    `who_<number>` (row_, who_), which has the users in order; `time_`, in whole seconds; `item_`, whether it is an event; of
    the j-th feature the code of its text `k<j>`, or its text `v<j>` and its id `i<j>`; the numbers `m<j>`.
    """
    log, past = journal.table.logs[number], len(journal.table.history) + number
    is_taken = [f"coalesce(r.past{past}_, false)"] * bool(log.filter and not log.source)
    is_taken += ["coalesce(r.name_ = 'train', false)"] * (log.rows == "train")
    lines_of_rows = _Lines(
        f"(SELECT *, {rows.split_of_row} AS name_ FROM staged_)",
        f"r.who{past}_",
        f"r.time{past}_",
        " AND ".join(is_taken) or "true",
        f"r.c{of[0].number} IS NOT NULL",
        [values.look_up(f"c{f.number}", f.number, f.ids, f.owner) for f in of],
        [f"r.event{past}_{j}_" for j in range(len(log.numbers))],
        "p.row_" if rows.is_moved else "r.row_",
        "LEFT JOIN rows_ AS p ON r.row_ = p.before_" * rows.is_moved,
    )
    # Of the events of another source, or carried, which may be whole numbers.
    texts = [look_up(f"CAST(r.c{j} AS STRING)", f"v{j}_", f.ids, f.owner) for j, f in enumerate(of)]
    events, lines = lines_of_rows, [lines_of_rows]
    if log.source:
        # The rows are no events, but see those of the other source.
        zeros, none = ["CAST(0 AS FLOAT)"] * len(log.numbers), [Lookup({}, "", "")] * len(of)
        lines_of_rows = replace(lines_of_rows, has_value="false", found=none, numbers=zeros)
        events = _Lines(
            _stage_events(journal, number, rows.staged.facts.five),
            "r.who0_",
            "r.time0_",
            "coalesce(r.past0_, false)" if log.filter else "true",
            "r.c0 IS NOT NULL",
            texts,
            [f"r.event0_{j}_" for j in range(len(log.numbers))],
        )
        lines = [lines_of_rows, events]
    counts = _counts(journal, events)
    if fitted := journal.extended:
        carried = f"carried_{number}"
        journal.once(carried, lambda path: fitted.copy(latest_name(log.name), path))
        ((counts.carried,),) = journal.engine.rows(f"SELECT count(*) FROM {carried}")
        numbers = [f"r.m{j}" for j in range(len(log.numbers))]
        lines.append(_Lines(carried, "r.who_", "r.time_", "true", "true", texts, numbers, day=0))
    users = f"who_{number}"
    every = (
        f"SELECT {part.who} AS who_ FROM {part.relation} AS r WHERE {part.is_known}"
        for part in lines
    )
    distinct = f"SELECT DISTINCT who_ FROM ({' UNION ALL '.join(every)})"
    journal.number(users, distinct, ["who_"])
    kinds = kinds_of_values(journal, log)
    query = " UNION ALL ".join(part.query(users, kinds) for part in lines)
    journal.number(f"line_{number}", query, ["who_", "time_", "day_", "place_"])
    return counts


def sequence_group(of: EventLog | EventLists) -> SequenceGroup:
    numbers = tuple(
        EventColumn(name, np.dtype(np.int64 if name == of.time_name else np.float32))
        for name in of.number_names
    )
    return SequenceGroup(of.name, tuple(of.features), of.length, numbers, of.time_name)


def _counts(journal: Journal, events: _Lines) -> LogCounts:
    """Count what is in no log, by the first reason."""
    known = events.is_known
    reasons = [
        f"NOT ({known})",
        f"{known} AND NOT ({events.is_taken})",
        f"{known} AND {events.is_taken} AND NOT ({events.has_value})",
    ]
    sums = ", ".join(
        f"CAST(coalesce(sum(CASE WHEN {reason} THEN 1 ELSE 0 END), 0) AS BIGINT)"
        for reason in reasons
    )
    (found,) = journal.engine.rows(f"SELECT count(*), {sums} FROM {events.relation} AS r")
    return LogCounts(*found)


def _stage_events(journal: Journal, number: int, five: dict[str, str]) -> str:
    """Write relation `events_<number>`, the rows of the source of a log; return that of the good ones."""
    table, log = journal.table, journal.table.logs[number]
    features = {feature.name: feature for feature in table.categorical}
    described = TableConfig(
        sources={log.source: table.sources[log.source]},
        label=[],
        missing=table.missing,
        categorical=[features[name] for name in log.of],
        sequence=[replace(log, source="")],
        empty_items=table.empty_items,
    )
    name = f"events_{number}"
    where = f"table.sequence: {shown(log.name)}: source {shown(log.source)}"

    def write(path: Path) -> None:
        try:
            found = {log.source: read_columns(*journal.sources[log.source])}
            staging = Staging(journal.engine, described, found)
            staging.refuse_text_order(is_fit=journal.fitted is None)
            staging.refuse_no_text()
            staging.refuse_other_rows()
            refuse_other_numbers(staging.five, five)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        order = ["file_", "order_"]
        without_failing(journal, staging, lambda: journal.engine.number(staging.query, order, path))
        _, files = journal.sources[log.source]
        named = {str(file.path) for file in files}
        lines = {item[:3] for item in journal.engine.rejected() if item[0] in named}
        if lines and journal.config.on_bad is OnBad.fail:
            file, line, reason = min(lines)
            raise ValueError(f"{file}, line {line}: {printable(reason)}; correct or remove it")
        if lines:
            journal.progress.say(
                f"note: {where}: {len(lines):,} lines cannot be read and are left out"
            )

    journal.once(name, write)
    first_bad = f"SELECT row_, bad_ FROM {name} WHERE bad_ IS NOT NULL ORDER BY row_ LIMIT 1"
    bad = journal.engine.rows(first_bad)
    if bad and journal.config.on_bad is OnBad.fail:
        [(row, reason)] = bad
        at = where_in_source(journal, name, log.source, row)
        reason = shortened(printable(reason), 300)
        journal.refuse(ValueError(f"{at}: {reason}; correct or remove it"))
    if bad:
        ((count,),) = journal.engine.rows(f"SELECT count(bad_) FROM {name}")
        journal.progress.say(f"note: {where}: {count:,} bad rows are left out")
    return f"(SELECT * FROM {name} WHERE bad_ IS NULL)"
