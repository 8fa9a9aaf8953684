"""Phase of the writing: the files of all splits and vocabularies."""

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.preproc_schema import Mode
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.lineage import RARE
from preproc.complete_dataset import draw_report, row_columns
from preproc.report.console import ColumnSummary, LogCounts, SplitSummary, print_notes
from preproc.table.feature_values import FeatureValues
from preproc.table.output_files import IdCounts, TableFiles
from preproc.table.pipeline.categoricals import EncodedFeature
from preproc.table.pipeline.journal import Journal
from preproc.table.pipeline.numericals import Numericals, count_changes, write_numericals
from preproc.table.pipeline.rows import where_in_output
from preproc.table.pipeline.sequences import kinds_of_values, sequence_group


@dataclass(frozen=True, slots=True)
class Transformed:
    """The rows of the dataset after the other phases."""

    splits: dict[str, range]
    values: FeatureValues
    numericals: Numericals
    statistics: dict[str, Any]  # fitted numbers per numerical feature
    categorical: list[CategoricalFeature]  # features, then histories, then those of logs
    encoded: dict[str, EncodedFeature]
    columns: dict[str, ColumnSummary]
    logs: dict[str, LogCounts]  # by sequence group


def write_splits(
    journal: Journal, of: Transformed
) -> tuple[dict[str, SplitSummary], dict[str, dict[str, Any]]]:
    """Write the files of all splits and vocabularies; return summaries, and bytes and CRC-32 per file."""
    config, table, dataset = journal.config, journal.table, journal.work.dataset
    splits = of.splits
    # Threads that write files.
    threads = min(config.threads or os.cpu_count() or 1, journal.engine.columns_at_once)
    for name in ("vocabulary", *splits):
        (dataset / name).mkdir(parents=True, exist_ok=True)
    with (
        journal.progress.phase("write"),
        TableFiles(journal.work, dataset, splits) as files,
        ThreadPoolExecutor(threads) as pool,
    ):
        numericals = pool.submit(write_numericals, journal, of.numericals, files)
        named = dict(zip(journal.held.row_numbers, row_columns(journal.held), strict=True))
        labels = pool.submit(files.write_row_columns, named)
        kept = pool.submit(files.write_kept, table.keep)
        features = _begin_features(journal, of, files, pool)
        logs = [pool.submit(_write_log, journal, of, files, i) for i in range(len(table.logs))]
        ranges = numericals.result()
        summaries = {
            split: SplitSummary(len(rows), labels.result()[split]) for split, rows in splits.items()
        }
        if threads == 1:
            wait(features.values())
            wait(logs)
        numerical_bin = dataset / next(iter(summaries)) / "numerical.bin"
        draw_report(dataset, numerical_bin, of.columns, summaries, config, table)
        kept.result()
        for log in logs:
            log.result()
        hotness = {feature.name: feature.hotness for feature in of.categorical}
        for name, counts in features.items():
            for split, count in counts.result().items():
                summary = summaries[split]
                summary.zero_ids[name] = count.zeros
                summary.unseen[name] = count.values - count.known
                if count.lists is not None:
                    summary.lists[name] = count.lists
                # Lists of a fixed length are cut and filled, ragged ones are complete.
                num_ids = len(splits[split]) * (hotness[name] or 0) or count.known + count.zeros
                summary.num_ids[name] = num_ids
        for number in range(len(table.event_lists)):
            _write_lists(journal, of, files, number)
    # A fit that is only applied cannot be changed.
    if config.mode is Mode.fit or config.refit:
        # The length of a list or a history is left as it is.
        scaled = [feature.name for feature in table.numerical]
        print_notes(journal.progress.console, {name: ranges[name] for name in scaled})
    count_changes(journal, splits, summaries, of.statistics)
    return summaries, files.records


def _begin_features(
    journal: Journal, of: Transformed, files: TableFiles, pool: ThreadPoolExecutor
) -> dict[str, Future[dict[str, IdCounts]]]:
    """Begin to write ids and vocabularies; return the counts of the ids of every feature."""
    if any(column.rare for column in of.encoded.values()):
        (journal.work.dataset / RARE).mkdir(exist_ok=True)

    table = journal.table

    def write(number: int) -> dict[str, IdCounts]:
        feature = of.categorical[number]
        past = number - len(table.categorical)
        if past >= 0:
            counts = files.write_history(f"past_ids_{past}", f"slices_{past}", feature)
        else:
            counts = files.write_ids(
                feature,
                table.categorical[number],
                of.values.reader_of_ids(files, number, feature),
                drops_empty=table.drops_empty(feature.name),
            )
        written = of.encoded[feature.name]
        if written.vocabulary:
            files.write_vocabulary(written.vocabulary, feature.name, has_days=written.has_days)
        if written.rare:
            files.write_rare(written.rare, feature.name)
        return counts

    names = [feature.name for feature in of.categorical]
    # Lists take longest, and the threads end at about the same time.
    order = sorted(range(len(names)), key=lambda number: of.categorical[number].hotness == 1)
    begun = {n: pool.submit(write, n) for n in order if names[n] in of.encoded}
    return {names[number]: begun[number] for number in sorted(begun)}


def _write_log(journal: Journal, of: Transformed, files: TableFiles, number: int) -> None:
    # Imported here, since pyarrow takes 25 MB of memory.
    from preproc.table.log_files import LineValues, write_log

    log = journal.table.logs[number]
    features = {feature.name: i for i, feature in enumerate(of.categorical)}
    values = []
    for j, name in enumerate(log.features):
        columns = {kind: f"{kind}{j}" for kind in kinds_of_values(journal, log)}
        feature, i, path = of.categorical[features[name]], features[log.of[j]], f"line_{number}.{j}"
        ids = files.array(f"ids_{i}", feature, path) if "k" in columns else None
        texts = files.texts(f"all_/texts_c{i}", "value", path) if "k" in columns else None
        values.append(LineValues(columns, feature.dtype, ids, texts))
    keeps_latest = journal.config.mode is not Mode.transform
    numbers = sequence_group(log).numbers
    counts = of.logs[log.name]
    write_log(files, number, log, values, numbers, counts, keeps_latest=keeps_latest)


def _write_lists(journal: Journal, of: Transformed, files: TableFiles, number: int) -> None:
    # Imported here, since pyarrow takes 25 MB of memory.
    from preproc.table.list_files import write_lists

    group = sequence_group(journal.table.event_lists[number])
    write_lists(files, number, group, of.logs[group.name], partial(where_in_output, journal))
