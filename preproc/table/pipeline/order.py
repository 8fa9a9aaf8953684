"""Phase of the order: the splits one after another, training rows first, shuffled with `shuffle=true`."""

from configs.messages import shown
from configs.preproc_schema import Mode
from dataloading.dataset.split_files import SPLITS
from preproc.table.expressions import random_number, split_of, text
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.rows import stored_columns


class NoRowsError(ValueError):
    """The sources have no row, or none that is good."""


def order_rows(journal: Journal) -> tuple[dict[str, range], str]:
    """Write relation `rows_`, numbered so that each split is one range, training rows first.

    Return these ranges, and the expression of the split of a row of `staged_`.
    """
    rule, config = journal.table.split, journal.config
    ((rows,),) = journal.engine.rows("SELECT count(*) FROM staged_")
    one = config.one_split
    last = _last_file(journal) if rule.by == "last_file" else (0, 0)
    expression = split_of(rule, rows, last, config.train_fraction, config.seed)
    expression = text(one) if one else expression
    rows_and_split = f"(SELECT *, {expression} AS name_ FROM staged_)"
    found = journal.engine.rows(
        f"SELECT name_, count(*), min(row_), max(row_) FROM {rows_and_split} GROUP BY name_"
    )
    split_rows = {name: count for name, count, _, _ in found}
    unknown = sorted(set(split_rows) - {*SPLITS, None})
    problem = None
    if unknown:
        problem = f"got split {shown(unknown[0])}, want {', '.join(SPLITS)} or null"
    if not rows:
        journal.work.forget()
        raise NoRowsError("table.split: the sources have no rows; give files that have some")
    wanted = () if config.mode is Mode.transform else ("train", "test")
    missing = [name for name in wanted if not split_rows.get(name)]
    if not set(split_rows) & set(SPLITS):
        missing = ["any split"]
    if missing:
        files = " by last_file, which wants two files or more" * (rule.by == "last_file")
        problem = problem or f"no rows are left for {missing[0]} of {rows}{files}; change the split"
    if problem:
        journal.work.forget()
        raise ValueError(f"table.split: {problem}")
    splits: dict[str, range] = {}
    start = 0
    for name in SPLITS:
        if split_rows.get(name):
            splits[name] = range(start, start + split_rows[name])
            start += split_rows[name]
    ranges = {name: range(first, last + 1) for name, _, first, last in found}
    if ranges == splits and not config.shuffle:
        # The rows are in this order already, as they are if they lie in the order of time.
        path = "staged_" if "staged_" in journal.work.state["relations"] else "all_"
        journal.engine.view("rows_", journal.work.directory / path)
        journal.work.state["rows_in"] = path
        return splits, expression
    rank = " ".join(f"WHEN {text(name)} THEN {i}" for i, name in enumerate(SPLITS))
    number = random_number(config.seed, "row_ + 1000000007")
    place = f"CASE WHEN name_ = 'train' THEN {number} ELSE 0 END" if config.shuffle else "0"
    query = (
        f"SELECT {stored_columns(journal)}, CASE name_ {rank} END AS rank_, {place} AS place_, "
        f"row_ AS before_ FROM {rows_and_split} WHERE name_ IS NOT NULL"
    )
    journal.once(
        "rows_", lambda path: journal.engine.number(query, ["rank_", "place_", "before_"], path)
    )
    journal.work.state["rows_in"] = "rows_"
    return splits, expression


def _last_file(journal: Journal) -> tuple[int, int]:
    """Return the number of the last file, and the first row of the second half of its rows."""
    files = max(len(files) for _, files in journal.sources.values())
    last = files - 1
    if journal.table.query and len(journal.sources) > 1:  # the query says of which source
        ((last,),) = journal.engine.rows("SELECT coalesce(max(file_), 0) FROM staged_")
    of_last = f"FROM staged_ WHERE file_ = {last}"
    ((rows,),) = journal.engine.rows(f"SELECT count(*) {of_last}")
    middle = journal.engine.rows(f"SELECT row_ {of_last} ORDER BY row_ LIMIT 1 OFFSET {rows // 2}")
    return last, middle[0][0] if middle else 0
