"""Phase of the categorical features: values are counted and ranked, or looked up in an earlier fit, and get ids."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from configs.messages import shown
from configs.preproc_schema import Layout, Mode
from configs.table_schema import Categorical
from dataloading.dataset.feature_spec import CategoricalFeature
from preproc.fitted_state import FittedState, rare_name, vocabulary_name
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


@dataclass(frozen=True, slots=True)
class EncodedFeature:
    """A categorical feature whose values have ids."""

    number: int  # of the feature
    owner: Categorical  # that whose vocabulary, buckets or keys it has
    ids: str  # relation (value, id) of the values that have an id; "" if hashed
    summary: ColumnSummary
    num_embeddings: int  # rows of its table
    vocabulary: str | None = None  # relation that is written as its vocabulary
    has_days: bool = False  # whether the vocabulary has the columns of a later day
    rare: str | None = None  # relation of the counts of the values without an id, if they are kept

    def feature(self, name: str, hotness: int | None) -> CategoricalFeature:
        """Return it as feature `name` of the dataset, or a history or events of it, which share its table."""
        make = CategoricalFeature.of_keys if self.owner.is_dynamic else CategoricalFeature.of
        table = None if name == self.owner.name else self.owner.name
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
    first, owner, fitted = numbers[0], features[0], journal.fitted
    if owner.is_hashed:
        return {
            feature.name: _hashed(journal, values, number, owner, counted)
            for feature, number in zip(features, numbers, strict=True)
        }
    name, counts = f"vocabulary_{first}", f"counts_{first}"
    of_features = [values.counts(number, counted) for number in numbers]
    query = of_features[0]
    if len(of_features) > 1:
        query = merge_counts(f"({' UNION ALL '.join(of_features)})")
    journal.query(counts, query)
    rare = _make_vocabulary(journal, first, owner)
    _note_values(journal, first, owner)
    has_days = fitted is not None and (bool(journal.extended) or fitted.has_days(owner.name))
    ids = f"(SELECT value, id FROM {name} WHERE NOT retired)" if has_days else name
    for number in numbers:
        values.find_ids(number, ids, owner)
    covered_query = coverage(counts, COVERAGE_LIMITS)
    (sums,) = journal.engine.rows(
        f"SELECT * FROM ({covered_query}) CROSS JOIN (SELECT count(*) FROM {name})"
    )
    distinct, seen, *covered, kept_rows = [int(value or 0) for value in sums]
    kept, coverages = kept_rows, None
    if fitted is not None:
        ((kept,),) = journal.engine.rows(
            f"SELECT count(*) FROM {counts} AS c JOIN {ids} AS v ON c.value = v.value"
        )
    else:
        coverages = [list(pair) for pair in zip(covered[::2], covered[1::2], strict=True)]
    encoded = {}
    for number, feature in zip(numbers, features, strict=True):
        if len(features) > 1 or feature.is_list:
            ((seen,),) = journal.engine.rows(values.num_rows(number, counted))
        missing, num_rows = 1 - seen / len(counted), kept_rows + 1
        # What a vocabulary covers is reported once, at the feature that has its limits, where these rows choose its values.
        covers = coverages if feature is owner else None
        summary = ColumnSummary(missing, distinct, kept, covers, len(counted), table_rows=num_rows)
        of = EncodedFeature(number, owner, ids, summary, num_rows)
        if feature is owner:
            of = replace(of, vocabulary=name, has_days=has_days, rare=rare)
        encoded[feature.name] = of
    return encoded


def _note_values(journal: Journal, first: int, owner: Categorical) -> None:
    """Say which values are written in several ways; refuse those of a fit that are written in another way here."""
    counts, known = f"counts_{first}", f"vocabulary_{first}" + "_old" * bool(journal.extended)
    note = None
    if journal.fitted is not None:
        note = note_of_new_values(journal.engine.rows, counts, known, owner.name)
    if journal.config.mode is not Mode.transform:
        note = note or note_of_twins(journal.engine.rows, counts, owner.name)
    if note is not None:
        journal.progress.say(note)


def _make_vocabulary(journal: Journal, first: int, owner: Categorical) -> str | None:
    """Write relation `vocabulary_<first>`; return the relation of the counts of the values without an id, if kept."""
    name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
    limit, fitted = owner.frequency_limit, journal.fitted
    limit = journal.config.frequency_limit if limit is None else limit
    if journal.extended:
        return _extend_vocabulary(journal, journal.extended, first, owner, limit)
    if fitted is not None:
        journal.once(name, lambda path: _copy_vocabulary(journal, fitted, owner.name, path))
        return None
    kept = vocabulary(counts, limit)
    if owner.max_size is not None:
        kept = f"SELECT * FROM ({kept}) WHERE id <= {owner.max_size}"
    journal.query(name, f"{kept} ORDER BY id")
    keeps_rare = journal.config.rare_counts
    if keeps_rare is None and journal.config.layout is Layout.table:
        # What `mode=extend` would count on.
        keeps_rare = limit > 1 or owner.max_size is not None
    if not keeps_rare:
        return None
    rest = still_waiting(counts, name)
    if owner.max_size is None:  # by the count alone, without a join
        rest = f"SELECT value, count FROM {counts} WHERE count < {limit} ORDER BY value"
    journal.query(rare, rest)
    return rare


def _extend_vocabulary(
    journal: Journal, fitted: FittedState, first: int, owner: Categorical, limit: int
) -> str:
    """Write relation `vocabulary_<first>` of the parent's values and those of this day; return that of the rare counts."""
    day = fitted.next_day.day
    name, counts, rare = f"vocabulary_{first}", f"counts_{first}", f"rare_{first}"
    before, parent, old, wait = (f"{name}_{part}" for part in ("read", "old", "kept", "wait"))
    journal.once(before, lambda path: _copy_vocabulary(journal, fitted, owner.name, path))
    journal.query(parent, fitted_rows(before, fitted.has_days(owner.name)))
    journal.query(old, kept_ids(parent, counts, day, limit, journal.config.retire_after))
    rare_before = None
    if fitted.has_rare(owner.name):
        rare_before = f"{rare}_read"
        name_of, sums = rare_name(owner.name), "count(DISTINCT value) + max(count)"
        journal.once(rare_before, lambda path: _copy(journal, fitted, name_of, path, sums))
    journal.query(wait, waiting(parent, rare_before, counts))
    ((num_old,),) = journal.engine.rows(f"SELECT count(*) FROM {parent}")
    new = new_ids(wait, num_old + 1, day, limit, owner.max_size)
    columns = ", ".join(["value", "id", "count", *DAYS_COLUMNS])
    every = f"SELECT {columns} FROM {old} UNION ALL SELECT {columns} FROM ({new})"
    journal.query(name, f"SELECT * FROM ({every}) ORDER BY id")
    journal.query(rare, still_waiting(wait, name))
    return rare


def _hashed(
    journal: Journal, values: FeatureValues, number: int, owner: Categorical, counted: range
) -> EncodedFeature:
    values.find_ids(number, "", owner)
    ((seen, distinct),) = journal.engine.rows(
        f"SELECT CAST(sum(count) AS BIGINT), count(*) FROM ({values.counts(number, counted)})"
    )
    if journal.table.categorical[number].is_list:
        ((seen,),) = journal.engine.rows(values.num_rows(number, counted))
    kept = distinct
    if owner.capacity is not None:
        kept = min(distinct, owner.capacity - 1)
        if distinct > kept:
            journal.progress.warn(
                f"{shown(owner.name)} has {distinct:,} values and rows for {kept:,} keys: training admits some "
                "(data.dynamic.admit_after) and evicts others (data.dynamic.evict); raise its capacity to keep all"
            )
    rows = owner.capacity or (distinct if owner.buckets is None else owner.buckets) + 1
    missing = 1 - int(seen or 0) / len(counted)
    summary = ColumnSummary(missing, distinct, kept, rows=len(counted), table_rows=rows)
    return EncodedFeature(number, owner, "", summary, rows)


def _copy_vocabulary(journal: Journal, fitted: FittedState, name: str, path: Path) -> None:
    """Copy the vocabulary of feature `name`; ValueError if a value has two ids."""
    is_double = "count(value) - count(DISTINCT value)"
    if _copy(journal, fitted, vocabulary_name(name), path, is_double):
        raise fitted.two_ids(name)


def _copy(
    journal: Journal, fitted: FittedState, name: str, path: Path, expression: str
) -> int | None:
    """Copy file `name` of the fit, and return a number over all of its rows; ValueError if it cannot be read."""
    fitted.copy(name, path)
    copied = f"copied_{path.name}"
    try:
        journal.engine.view(copied, path)
        ((number,),) = journal.engine.rows(f"SELECT {expression} FROM {copied}")
    except QueryError as error:
        raise fitted.unreadable(name, error) from None
    return number
