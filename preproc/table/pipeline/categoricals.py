"""Phase of the categorical features: values are counted and ranked, or looked up in an earlier fit, and get ids."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configs.messages import shown
from configs.preproc_schema import Layout, Mode
from configs.table_schema import Categorical
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.fitted_state import rare_name, vocabulary_name
from preproc.report.console import COVERAGE_LIMITS, ColumnSummary
from preproc.table.duckdb_engine import QueryError
from preproc.table.extension import (
    DAYS_COLUMNS,
    fitted_rows,
    kept_ids,
    new_ids,
    still_waiting,
    waiting,
)
from preproc.table.feature_values import FeatureValues
from preproc.table.known_values import note_of_new_values, note_of_twins
from preproc.table.pipeline.journal import Journal
from preproc.vocabulary_sql import coverage, merge_counts, vocabulary


@dataclass(slots=True)
class EncodedFeature:
    """An encoded categorical feature: its summary, the rows of its table, and the relation of its vocabulary."""

    summary: ColumnSummary
    num_embeddings: int
    vocabulary: str | None
    has_days: bool = False  # whether the vocabulary has the columns of a later day
    rare: str | None = None  # relation of the counts of the values without an id, if they are kept
    is_dynamic: bool = False  # whether its values are keys

    def feature(self, name: str, hotness: int | None, table: str | None) -> CategoricalFeature:
        make = CategoricalFeature.of_keys if self.is_dynamic else CategoricalFeature.of
        return make(name, self.num_embeddings, hotness, table)


def encode_features(
    journal: Journal, values: FeatureValues, counted: range
) -> dict[str, EncodedFeature]:
    """Count, rank and encode all categorical features, several at a time if the engine supports that."""
    features = journal.table.categorical
    # Numbers of the features of every vocabulary, the one that has its limits first.
    groups = {f.name: [i] for i, f in enumerate(features) if f.vocabulary_of is None}
    for number, feature in enumerate(features):
        if feature.vocabulary_of is not None:
            groups[feature.vocabulary_of].append(number)
    encoded: dict[str, EncodedFeature] = {}
    with journal.progress.phase("count, rank and encode categoricals") as phase:
        phase.total = len(features)
        with ThreadPoolExecutor(journal.engine.columns_at_once) as pool:
            results = pool.map(
                lambda numbers: _encode_group(journal, values, numbers, counted), groups.values()
            )
            for name, result in zip(groups, results, strict=True):
                encoded |= result
                phase.detail = name
                phase.update(len(encoded))
    return {feature.name: encoded[feature.name] for feature in features}


def _encode_group(
    journal: Journal, values: FeatureValues, numbers: list[int], counted: range
) -> dict[str, EncodedFeature]:
    """Write relation `vocabulary_<number>` of the first feature and find the ids of all, which share it."""
    features = [journal.table.categorical[number] for number in numbers]
    first, owner = numbers[0], features[0]
    if owner.is_hashed:
        return {
            feature.name: _hashed(journal, values, number, feature, owner, counted)
            for feature, number in zip(features, numbers, strict=True)
        }
    name = f"vocabulary_{first}"
    counts = [values.counts(number, counted) for number in numbers]
    query = counts[0]
    if len(counts) > 1:
        query = merge_counts(f"({' UNION ALL '.join(counts)})")
    journal.query(f"counts_{first}", query)
    rare = _make_vocabulary(journal, first, owner)
    _note_values(journal, first, owner)
    for number in numbers:
        values.find_ids(number, values_with_id(journal, first, owner), owner)
    covered_query = coverage(f"counts_{first}", COVERAGE_LIMITS)
    (sums,) = journal.engine.rows(
        f"SELECT * FROM ({covered_query}) CROSS JOIN (SELECT count(*) FROM {name})"
    )
    distinct, seen, *covered, kept_rows = [int(value or 0) for value in sums]
    pairs = [list(pair) for pair in zip(covered[::2], covered[1::2], strict=True)]
    kept = kept_rows
    if journal.fitted is not None:
        known = values_with_id(journal, first, owner)
        ((kept,),) = journal.engine.rows(
            f"SELECT count(*) FROM counts_{first} AS c JOIN {known} AS v ON c.value = v.value"
        )
    encoded = {}
    for number, feature in zip(numbers, features, strict=True):
        counts_rows = len(features) == 1 and not feature.is_list
        with_value = seen if counts_rows else _rows_with_value(journal, values, number, counted)
        missing = 1 - with_value / len(counted)
        # The coverage of a vocabulary is reported once, at the feature that has its limits, where these rows choose its values.
        coverages = pairs if feature is owner and journal.fitted is None else None
        summary = ColumnSummary(
            missing, distinct, kept, coverages, len(counted), table_rows=kept_rows + 1
        )
        encoded[feature.name] = EncodedFeature(
            summary,
            kept_rows + 1,
            name if feature is owner else None,
            _has_days(journal, owner),
            rare if feature is owner else None,
        )
    return encoded


def _rows_with_value(journal: Journal, values: FeatureValues, number: int, counted: range) -> int:
    ((seen,),) = journal.engine.rows(values.num_rows(number, counted))
    return seen


def _note_values(journal: Journal, first: int, owner: Categorical) -> None:
    """Say which values are written in several ways; refuse those of a fit that are written in another way here."""
    counts, known = f"counts_{first}", f"vocabulary_{first}"
    note = None
    if journal.fitted is not None:
        if journal.config.mode is Mode.extend:
            known = f"{known}_old"
        note = note_of_new_values(journal.engine.rows, counts, known, owner.name)
    if journal.config.mode is not Mode.transform:
        note = note or note_of_twins(journal.engine.rows, counts, owner.name)
    if note is not None:
        journal.progress.say(note)


def values_with_id(journal: Journal, first: int, owner: Categorical) -> str:
    name = f"vocabulary_{first}"
    live = f"(SELECT value, id FROM {name} WHERE NOT retired)"
    return live if _has_days(journal, owner) else name


def _make_vocabulary(journal: Journal, first: int, owner: Categorical) -> str | None:
    """Write relation `vocabulary_<first>`; return the relation of the counts of the values without an id, if kept."""
    name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
    if journal.config.mode is Mode.extend:
        return _extend_vocabulary(journal, first, owner)
    if journal.fitted is not None:
        journal.once(name, lambda path: _copy_vocabulary(journal, owner.name, path))
        return None
    kept = vocabulary(counts, _limit(journal, owner))
    if owner.max_size is not None:
        kept = f"SELECT * FROM ({kept}) WHERE id <= {owner.max_size}"
    journal.query(name, f"{kept} ORDER BY id")
    if not _keeps_rare(journal, owner):
        return None
    rest = still_waiting(counts, name)
    if owner.max_size is None:  # by the count alone, without a join
        rest = f"SELECT value, count FROM {counts} WHERE count < {_limit(journal, owner)} ORDER BY value"
    journal.query(rare, rest)
    return rare


def _extend_vocabulary(journal: Journal, first: int, owner: Categorical) -> str:
    """Write relation `vocabulary_<first>` of the parent's values and those of this day; return that of the rare counts."""
    fitted, day = journal.fitted, journal.lineage.day
    assert fitted is not None
    name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
    before, parent, old, wait = (f"{name}_{part}" for part in ("read", "old", "kept", "wait"))
    limit = _limit(journal, owner)
    journal.once(before, lambda path: _copy_vocabulary(journal, owner.name, path))
    journal.query(parent, fitted_rows(before, fitted.has_days(owner.name)))
    journal.query(old, kept_ids(parent, counts, day, limit, journal.config.retire_after))
    rare_before = None
    if fitted.has_rare(owner.name):
        rare_before = f"{rare}_read"
        name_of, sums = rare_name(owner.name), "count(DISTINCT value) + max(count)"
        journal.once(rare_before, lambda path: _copy(journal, name_of, path, sums))
    journal.query(wait, waiting(parent, rare_before, counts))
    ((num_old,),) = journal.engine.rows(f"SELECT count(*) FROM {parent}")
    new = new_ids(wait, num_old + 1, day, limit, owner.max_size)
    columns = ", ".join(["value", "id", "count", *DAYS_COLUMNS])
    every = f"SELECT {columns} FROM {old} UNION ALL SELECT {columns} FROM ({new})"
    journal.query(name, f"SELECT * FROM ({every}) ORDER BY id")
    journal.query(rare, still_waiting(wait, name))
    return rare


def _keeps_rare(journal: Journal, owner: Categorical) -> bool:
    """Tell whether a fit keeps the counts of the values without an id, by default those that `mode=extend` would count on."""
    kept = journal.config.rare_counts
    if kept is not None or journal.config.layout is not Layout.table:
        return bool(kept)
    return _limit(journal, owner) > 1 or owner.max_size is not None


def _limit(journal: Journal, owner: Categorical) -> int:
    limit = owner.frequency_limit
    return journal.config.frequency_limit if limit is None else limit


def _has_days(journal: Journal, owner: Categorical) -> bool:
    if journal.config.mode is Mode.extend:
        return True
    return journal.fitted is not None and journal.fitted.has_days(owner.name)


def _hashed(
    journal: Journal,
    values: FeatureValues,
    number: int,
    feature: Categorical,
    owner: Categorical,
    counted: range,
) -> EncodedFeature:
    values.find_ids(number, "", owner)
    ((seen, distinct),) = journal.engine.rows(
        f"SELECT CAST(sum(count) AS BIGINT), count(*) FROM ({values.counts(number, counted)})"
    )
    seen = _rows_with_value(journal, values, number, counted) if feature.is_list else int(seen or 0)
    kept = distinct
    if owner.capacity is not None:
        kept = min(distinct, owner.capacity - 1)
        if distinct > kept:
            journal.progress.warn(
                f"{shown(owner.name)} has {distinct:,} values and rows for {kept:,} keys: training admits some "
                "(data.dynamic.admit_after) and evicts others (data.dynamic.evict); raise its capacity to keep all"
            )
    rows = owner.capacity or (distinct if owner.buckets is None else owner.buckets) + 1
    missing = 1 - seen / len(counted)
    summary = ColumnSummary(missing, distinct, kept, rows=len(counted), table_rows=rows)
    return EncodedFeature(summary, rows, None, is_dynamic=owner.is_dynamic)


def _copy_vocabulary(journal: Journal, name: str, path: Path) -> None:
    """Copy the vocabulary of feature `name`; ValueError if a value has two ids."""
    fitted = journal.fitted
    assert fitted is not None
    if _copy(journal, vocabulary_name(name), path, "count(value) - count(DISTINCT value)"):
        raise fitted.two_ids(name)


def _copy(journal: Journal, name: str, path: Path, expression: str) -> int | None:
    """Copy file `name` of the fit, and return a number over all of its rows; ValueError if it cannot be read."""
    assert journal.fitted is not None
    journal.fitted.copy(name, path)
    copied = f"copied_{path.name}"
    try:
        journal.engine.view(copied, path)
        ((number,),) = journal.engine.rows(f"SELECT {expression} FROM {copied}")
    except QueryError as error:
        raise journal.fitted.unreadable(name, error) from None
    return number
