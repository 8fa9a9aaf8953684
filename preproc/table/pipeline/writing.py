"""Phase of the writing: the files of all splits and vocabularies."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.preproc_schema import Mode
from configs.table_schema import Categorical
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.lineage import RARE
from preproc.complete_dataset import draw_report, row_columns
from preproc.report.console import ColumnSummary, LogCounts, SplitSummary, print_notes
from preproc.table.feature_values import FeatureValues
from preproc.table.output_files import IdCounts, TableFiles
from preproc.table.pipeline.categoricals import EncodedFeature
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.numericals import Numericals, count_changes, refuse_overflows
from preproc.table.pipeline.order import Ordered, where_in_output
from preproc.table.pipeline.sequences import kinds_of_values, sequence_group


@dataclass(frozen=True, slots=True)
class Transformed:
    """Values that the files of the dataset are written of, beside the rows themselves."""

    values: FeatureValues
    numericals: Numericals
    encoded: dict[str, EncodedFeature]
    categorical: list[CategoricalFeature]  # features, then histories, then those of logs
    columns: dict[str, ColumnSummary]
    logs: dict[str, LogCounts]  # by sequence group


def write_splits(
    journal: Journal, rows: Ordered, of: Transformed
) -> tuple[dict[str, SplitSummary], dict[str, dict[str, Any]]]:
    """Write the files of all splits and vocabularies; return summaries, and bytes and CRC-32 per file."""
    config, table, dataset = journal.config, journal.table, journal.work.dataset
    splits, held = rows.splits, rows.staged.held
    # Threads that write files.
    threads = min(config.threads or os.cpu_count() or 1, journal.engine.columns_at_once)
    for name in ("vocabulary", *splits):
        (dataset / name).mkdir(parents=True, exist_ok=True)
    with (
        journal.progress.phase("write"),
        TableFiles(journal.work, rows.relation, splits) as files,
        ThreadPoolExecutor(threads) as pool,
    ):
        numericals = pool.submit(
            files.write_numericals,
            of.numericals.stored_in,
            of.numericals.columns,
            table.numerical_names,
            config.numerical_dtype.name,
            partial(refuse_overflows, journal, rows, of.numericals.relation),
        )
        named = dict(zip(held.row_numbers, row_columns(held), strict=True))
        labels = pool.submit(files.write_row_columns, named)
        kept = pool.submit(files.write_kept, table.keep)
        features = _begin_features(journal, of, files, pool)
        logs = [pool.submit(_write_log, journal, of, files, i) for i in range(len(table.logs))]
        summaries = {
            split: SplitSummary(len(part), labels.result()[split]) for split, part in splits.items()
        }
        changes = pool.submit(count_changes, journal, rows, of.numericals, summaries)
        if threads == 1:
            # What follows computes beside those that write.
            wait([numericals])
            wait(features.values())
            wait(logs)
        ranges = numericals.result()
        numerical_bin = dataset / next(iter(summaries)) / "numerical.bin"
        draw_report(dataset, numerical_bin, of.columns, summaries, config, table)
        for task in (kept, *logs, changes):
            task.result()
        for name, counts in features.items():
            for split, count in counts.result().items():
                summary = summaries[split]
                summary.zero_ids[name] = count.zeros
                summary.num_ids[name] = count.ids
                summary.unseen[name] = count.values - count.known
                if count.lists is not None:
                    summary.lists[name] = count.lists
        for number, lists in enumerate(table.event_lists):
            # Imported here, since pyarrow takes 25 MB of memory.
            from preproc.table.list_files import write_lists

            where = partial(where_in_output, journal, rows)
            write_lists(files, number, sequence_group(lists), of.logs[lists.name], where)
    # A fit that is only applied cannot be changed.
    if config.mode is Mode.fit or config.refit:
        # The length of a list or a history is left as it is.
        print_notes(journal.progress.console, {f.name: ranges[f.name] for f in table.numerical})
    return summaries, files.records


def _begin_features(
    journal: Journal, of: Transformed, files: TableFiles, pool: ThreadPoolExecutor
) -> dict[str, Future[dict[str, IdCounts]]]:
    """Begin to write ids and vocabularies; return the counts of the ids of features, then of histories."""
    table, made = journal.table, {feature.name: feature for feature in of.categorical}
    if any(column.rare for column in of.encoded.values()):
        (journal.work.dataset / RARE).mkdir(exist_ok=True)

    def write_feature(number: int, described: Categorical) -> dict[str, IdCounts]:
        feature, encoded = made[described.name], of.encoded[described.name]
        read = of.values.reader_of_ids(files, number, feature)
        drops_empty = table.drops_empty(feature.name)
        counts = files.write_ids(feature, described, read, drops_empty=drops_empty)
        if encoded.vocabulary:
            files.write_vocabulary(encoded.vocabulary, feature.name, has_days=encoded.has_days)
        if encoded.rare:
            files.write_rare(encoded.rare, feature.name)
        return counts

    tasks = {f.name: partial(write_feature, i, f) for i, f in enumerate(table.categorical)}
    for i, past in enumerate(table.history):
        items, slices = f"past_ids_{i}", f"slices_{i}"
        tasks[past.name] = partial(files.write_history, items, slices, made[past.name])
    # Lists take longest, and the threads end at about the same time.
    order = sorted(tasks, key=lambda name: made[name].hotness == 1)
    begun = {name: pool.submit(tasks[name]) for name in order}
    return {name: begun[name] for name in tasks}


def _write_log(journal: Journal, of: Transformed, files: TableFiles, number: int) -> None:
    # Imported here, since pyarrow takes 25 MB of memory.
    from preproc.table.log_files import LineValues, write_log

    log = journal.table.logs[number]
    kinds, values = kinds_of_values(journal, log), []
    features = {feature.name: feature for feature in of.categorical}
    for j, name in enumerate(log.of):
        columns = {kind: f"{kind}{j}" for kind in kinds}
        feature, i, path = features[name], of.encoded[name].number, f"line_{number}.{j}"
        ids = files.array(f"ids_{i}", feature, path) if "k" in columns else None
        texts = files.texts(f"all_/texts_c{i}", "value", path) if "k" in columns else None
        values.append(LineValues(columns, feature.dtype, ids, texts))
    keeps_latest = journal.config.mode is not Mode.transform
    numbers = sequence_group(log).numbers
    write_log(files, number, log, values, numbers, of.logs[log.name], keeps_latest=keeps_latest)
