"""Phase of the order: the splits one after another, training rows first, shuffled with `shuffle=true`."""

from dataclasses import dataclass

from configs.messages import shown
from configs.preproc_schema import Mode
from dataloading.dataset.split_files import SPLITS
from preproc.table.expressions import random_number, split_of, text
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.rows import Staged, stored_columns, where_in_all


class NoRowsError(ValueError):
    """The sources have no row, or none that is good."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """The rows of the dataset, as relation `rows_`, in which each split is one range."""

    staged: Staged
    splits: dict[str, range]  # training rows first
    split_of_row: str  # expression of the split of a row of `staged_`
    # whose files have the rows: `rows_`, where `before_` is the row in `staged_`, or that of the staged rows in their order
    relation: str

    @property
    def is_moved(self) -> bool:
        """Return whether the rows have another order than in `staged_`, or are fewer."""
        return self.relation == "rows_"

    @property
    def num_rows(self) -> int:
        return max(rows.stop for rows in self.splits.values())


def order_rows(journal: Journal, staged: Staged) -> Ordered:
    """Write `rows_`; ValueError if a split is unknown, or a split that the mode needs has no rows."""
    config, rule = journal.config, journal.table.split
    if config.one_split:
        split_of_row = text(config.one_split)
    else:
        last = _last_file(journal) if rule.by == "last_file" else (0, 0)
        split_of_row = split_of(rule, staged.num_rows, last, config.train_fraction, config.seed)
    rows_and_split = f"(SELECT *, {split_of_row} AS name_ FROM staged_)"
    found = journal.engine.rows(
        f"SELECT name_, count(*), min(row_), max(row_) FROM {rows_and_split} GROUP BY name_"
    )
    counts = {name: count for name, count, _, _ in found}
    _check_splits(journal, staged.num_rows, counts)
    splits: dict[str, range] = {}
    start = 0
    for name in SPLITS:
        if counts.get(name):
            splits[name] = range(start, start + counts[name])
            start += counts[name]
    ranges = {name: range(first, last + 1) for name, _, first, last in found}
    if ranges == splits and not config.shuffle:
        # The rows are in this order already, as they are if they lie in the order of time.
        journal.engine.view("rows_", journal.work.directory / staged.relation)
        return Ordered(staged, splits, split_of_row, staged.relation)
    rank = " ".join(f"WHEN {text(name)} THEN {i}" for i, name in enumerate(SPLITS))
    number = random_number(config.seed, "row_ + 1000000007")
    place = f"CASE WHEN name_ = 'train' THEN {number} ELSE 0 END" if config.shuffle else "0"
    query = (
        f"SELECT {stored_columns(staged.held)}, CASE name_ {rank} END AS rank_, {place} AS place_, "
        f"row_ AS before_ FROM {rows_and_split} WHERE name_ IS NOT NULL"
    )
    journal.number("rows_", query, ["rank_", "place_", "before_"])
    return Ordered(staged, splits, split_of_row, "rows_")


def _check_splits(journal: Journal, num_rows: int, counts: dict[str, int]) -> None:
    """Raise ValueError for `counts` of the rows by split that make no dataset."""
    if not num_rows:
        journal.refuse(
            NoRowsError("table.split: the sources have no rows; give files that have some")
        )
    if unknown := sorted(set(counts) - {*SPLITS, None}):
        wanted = f"want {', '.join(SPLITS)} or null"
        journal.refuse(ValueError(f"table.split: got split {shown(unknown[0])}, {wanted}"))
    needed = () if journal.config.mode is Mode.transform else ("train", "test")
    missing = [name for name in needed if not counts.get(name)]
    if not set(counts) & set(SPLITS):
        missing = ["any split"]
    if missing:
        is_by_file = journal.table.split.by == "last_file"
        left = f"no rows are left for {missing[0]} of {num_rows}"
        left += " by last_file, which wants two files or more" * is_by_file
        journal.refuse(ValueError(f"table.split: {left}; change the split"))


def _last_file(journal: Journal) -> tuple[int, int]:
    """Return the number of the last file, and the first row of the second half of its rows."""
    last = max(len(files) for _, files in journal.sources.values()) - 1
    if journal.table.query and len(journal.sources) > 1:  # the query says of which source
        ((last,),) = journal.engine.rows("SELECT coalesce(max(file_), 0) FROM staged_")
    of_last = f"FROM staged_ WHERE file_ = {last}"
    ((rows,),) = journal.engine.rows(f"SELECT count(*) {of_last}")
    middle = journal.engine.rows(f"SELECT row_ {of_last} ORDER BY row_ LIMIT 1 OFFSET {rows // 2}")
    return last, middle[0][0] if middle else 0


def where_in_output(journal: Journal, rows: Ordered, row: int) -> str:
    """Return the file and the number in it of a row of the dataset."""
    if rows.is_moved:
        ((row,),) = journal.engine.rows(f"SELECT before_ FROM rows_ WHERE row_ = {row}")
    if rows.staged.relation == "staged_":
        ((row,),) = journal.engine.rows(f"SELECT all_row_ FROM staged_ WHERE row_ = {row}")
    return where_in_all(journal, row)
