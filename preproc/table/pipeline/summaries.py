"""Counts of what became of values, per split, for the report."""

from preproc.report.console import ListCounts, SplitSummary
from preproc.table.feature_values import FeatureValues, rows_of
from preproc.table.pipeline.journal import Journal
from preproc.table.transformation import changed_values


def count_changes(
    journal: Journal,
    splits: dict[str, range],
    summaries: dict[str, SplitSummary],
    statistics: dict[str, list[list[float]]],
) -> None:
    """Count per split the values that transforms emptied or replaced, and what became of the items of lists of texts.

    Items of lists of codes were counted as their ids were written.
    """
    lists = [
        (i, f)
        for i, f in enumerate(journal.table.categorical)
        if f.is_list and not journal.engine.codes_texts
    ]
    changes = changed_values(journal.table.numerical, statistics)
    counts = []
    for number, feature in lists:
        every, whole = (
            journal.engine.num_items(f"c{number}", whole=is_whole) for is_whole in (False, True)
        )
        items = whole if journal.table.drops_empty(feature.name) else every
        most = feature.hotness
        counts += [f"sum({every} - {whole})"]
        counts += (
            ["0", "0", "0"]
            if most is None
            else [
                f"sum(CASE WHEN {items} > {most} THEN 1 ELSE 0 END)",
                f"sum(greatest({items} - {most}, 0))",
                f"sum(CASE WHEN {items} < {most} THEN 1 ELSE 0 END)",
            ]
        )
    counts += [f"sum(CASE WHEN {condition} THEN 1 ELSE 0 END)" for *_, condition in changes]
    for split, rows in splits.items() if counts else ():
        selected = ", ".join(f"CAST({count} AS BIGINT)" for count in counts)
        ((*found,),) = journal.engine.rows(f"SELECT {selected} FROM {rows_of(rows)}")
        summary = summaries[split]
        for index, (_, feature) in enumerate(lists):
            summary.lists[feature.name] = ListCounts(*found[4 * index : 4 * index + 4])
        for (name, kind, _), count in zip(changes, found[4 * len(lists) :], strict=True):
            of_kind = summary.emptied if kind == "emptied" else summary.clipped
            of_kind[name] = of_kind.get(name, 0) + count


def count_unseen(
    journal: Journal,
    values: FeatureValues,
    splits: dict[str, range],
    summaries: dict[str, SplitSummary],
    nonzeros: dict[str, dict[str, int]],
    counted: dict[tuple[str, str], int],
) -> None:
    """Count the values without an id per split; `counted` has values per split and feature, those known already."""
    for split, rows in splits.items():
        queries = {
            feature.name: values.num_values(number, rows)
            for number, feature in enumerate(journal.table.categorical)
            if (split, feature.name) not in counted
        }
        for number, history in enumerate(journal.table.history):
            slices_of = rows_of(rows, f"slices_{number}")
            queries[history.name] = f"SELECT CAST(sum(length_) AS BIGINT) FROM {slices_of}"
        for name, total in nonzeros[split].items():
            present = counted.get((split, name))
            if present is None:
                ((present,),) = journal.engine.rows(queries[name])
            summaries[split].unseen[name] = present - total
