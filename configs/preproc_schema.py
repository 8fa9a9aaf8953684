"""Every option of `python -m preproc`, in the style of `configs/schema.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from configs.messages import shown
from configs.options import Section, option
from configs.schema import SyntheticConfig
from configs.table_schema import TableConfig

Mode = StrEnum("Mode", "fit transform extend verify convert describe")
Format = StrEnum("Format", "binary parquet")
Layout = StrEnum("Layout", "criteo mlperf table synthetic yambda")
EngineName = StrEnum("EngineName", "duckdb spark")
Split = StrEnum("Split", "fraction last_file")
SplitName = StrEnum("SplitName", "train test validation")
VocabularyRows = StrEnum("VocabularyRows", "train all")
OnBad = StrEnum("OnBad", "fail skip quarantine")
NumericalType = StrEnum("NumericalType", "float16 float32")


@dataclass(kw_only=True, slots=True)
class StreamConfig:
    """The built-in synthetic clicks, under the same keys as in training."""

    synthetic: SyntheticConfig = MISSING


@dataclass(kw_only=True, slots=True)
class YambdaConfig(Section):
    """Logs of listens, `dataset=yambda`."""

    section = "yambda"

    events: str = option("flat/5b/multi_event.parquet", "file of all events below source")
    history: int = option(
        4086,
        "earlier events of its user that a row needs, and the most that it sees, a third of each pool",
        most=20_000,
        gt=2,
    )
    users: int = option(10_000, "users of the synthetic log, without source", most=2**31 - 1, gt=0)
    mean_events: float = option(4763.0, "mean events of a user of the synthetic log", gt=0)


@dataclass(kw_only=True, slots=True)
class KafkaConfig(Section):
    """Parts of the messages of a topic, `source=kafka://HOST:PORT/TOPIC`."""

    section = "kafka"

    part_rows: int = option(1_000_000, "messages of a part, at most", most=2**31 - 1, gt=0)
    part_s: float = option(60.0, "seconds after its first message when a part ends", gt=0)
    idle_s: float | None = option(None, "seconds without a message to end after; null: go on", gt=0)
    settings: str | None = option(
        None,
        "yaml file of further settings of the client librdkafka, such as ssl.ca.location",
        path=True,
    )


TOPIC = re.compile(r"kafka://([^/\s]+)/([\w.-]+)")


def topic_of(source: object) -> tuple[str, str] | None:
    """Return the brokers and the topic that `source` names; None if it names no topic."""
    found = TOPIC.fullmatch(source) if isinstance(source, str) else None
    return None if found is None else (found[1], found[2])


@dataclass(kw_only=True, slots=True)
class PreprocConfig(Section):
    mode: Mode = option(
        Mode.fit,
        "fit (make a dataset, vocabularies and statistics from its training rows), transform (make one by the fit "
        "of another), extend (one of the next day: old values keep their ids, docs/every_day.md), verify (read one, say what "
        "is wrong), convert (path to output) or describe (write the yaml of a table of your own, docs/your_data.md)",
    )
    fitted: str | None = option(
        None,
        "with mode=transform: the dataset whose fit is applied; with mode=extend: that of the day before; with mode=verify: one "
        "whose vocabularies path must have",
        path=True,
    )
    path: str | None = option(
        None,
        "dataset directory to verify, or what to convert: a dataset directory, NVIDIA's CSV with its spec, "
        "Merlin's Parquet, MLPerf's npy files",
        path=True,
    )
    to: Format = option(
        Format.binary,
        "what to convert to: binary (NVIDIA's transcoder made it of csv, which is gone) or parquet",
    )
    files_per_split: int | None = option(
        None,
        "files of each split, which SPLIT/_file_list.txt lists; null: a file per 16,777,216 rows, and no list",
        most=65_536,
        gt=0,
        only="mode=convert to=parquet",
    )
    layout: Layout = option(
        Layout.criteo, "criteo, mlperf, table, synthetic or yambda; set by dataset=..."
    )
    engine: EngineName = option(
        EngineName.duckdb, "duckdb (this machine) or spark (a cluster); both write the same bytes"
    )
    table: Any = option(
        None, "sources, columns and transforms of layout=table; docs/preprocessing.md has them"
    )
    output: str | None = option(
        None,
        "dataset directory to write (required); with mode=describe the yaml, null: mine/dataset/<source's name>.yaml",
        path=True,
    )
    label: str | None = option(
        None, "column of the label; null: the likeliest one", only="mode=describe"
    )
    overwrite: bool = option(False, "replace a dataset that output already holds")
    threads: int | None = option(None, "worker threads; null: one per core", most=4096, gt=0)
    source: Any = option(
        None,
        "raw logs: a file, a glob, a _file_list.txt or a list of them; .tsv, .gz or .zst; day_2 before day_10; with "
        "mode=describe a directory too; with mode=transform kafka://HOST:PORT/TOPIC, whose messages become parts below output "
        "(docs/every_day.md)",
        path=True,
    )
    split: Split | None = option(
        None,
        "fraction: the first train_fraction of the lines train, the rest test; last_file: of the "
        "last file the first half tests and the second half validates, all other files train; null: fraction, or table.split",
    )
    split_name: SplitName | None = option(
        SplitName.test, "with mode=transform: the split of all rows; null: split as mode=fit does"
    )
    train_fraction: float = option(
        0.9, "fraction of the lines that train with split=fraction, the first ones", gt=0, lt=1
    )
    test_source: Any = option(
        None, "files of the test split, written like source; then all of source trains", path=True
    )
    frequency_limit: int = option(
        0,
        "a value that occurs less often gets id 0, like missing and unseen ones; 0 keeps every value; mode=extend counts "
        "over all days, with the limit of the fit",
        ge=0,
    )
    rare_counts: bool | None = option(
        None,
        "with mode=fit: keep the counts of values without an id, which mode=extend needs to count them over days; null: of "
        "layout=table where values are too rare for an id or too many",
    )
    refit: bool = option(
        False, "fit the statistics of numericals on this day, not keep them", only="mode=extend"
    )
    retire_after: int | None = option(
        None,
        "a value that did not occur for this many days gets id 0 until it is frequent again; its id is never another value's; "
        "null: never",
        most=2**31 - 1,
        gt=0,
        only="mode=extend",
    )
    vocabulary: VocabularyRows = option(
        VocabularyRows.train, "rows whose values are counted: train, or all (NVIDIA's way)"
    )
    numerical_dtype: NumericalType = option(
        NumericalType.float16, "stored type of numerical features: float16 (NVIDIA's) or float32"
    )
    table_rows: list[int] | None = option(
        None,
        "rows per table with dataset=criteo_mlperf, one entry per category, and with mode=convert of ids that are hashes, one "
        "entry per table, where ids are taken modulo; and with dataset=yambda, where only those of crosses are",
        most=2**31 - 1,
        gt=0,
    )
    shuffle: bool = option(
        False, "write the training rows in a random order, the same for the same seed and rows"
    )
    on_bad: OnBad = option(
        OnBad.fail, "bad rows: fail, skip them, or quarantine them in output/bad_rows.tsv"
    )
    memory_limit: str | None = option(
        None, "such as 8GB; larger data spills to disk; null: 80 % of the machine's memory"
    )
    temp_directory: str | None = option(
        None, "directory for temporary columns and DuckDB's spill; null: beside output", path=True
    )
    plot: bool = option(True, "draw the report as output/report.png")
    seed: int = option(1, "seed of shuffle and of what is synthetic", ge=0)
    kafka: KafkaConfig = field(default_factory=KafkaConfig)
    yambda: YambdaConfig = field(default_factory=YambdaConfig)
    data: StreamConfig = MISSING

    def check_relations(self) -> Iterator[str]:
        if self.mode is Mode.verify:
            if self.path is None:
                yield "no path: set path=DIR, the dataset directory to verify"
            return
        if self.mode is Mode.describe:
            if self.source is None:
                yield "no source: set source=FILE, the table to describe"
            yield from self._check_files("source")
            return
        if self.mode is Mode.convert and self.path is None:
            yield "no path: set path=DIR, the directory to convert"
        if self.output is None:
            yield "no output: set output=DIR, the dataset directory to write"
        if (self.mode in (Mode.transform, Mode.extend)) != (self.fitted is not None):
            yield "mode=transform or mode=extend and fitted=DIR go together: DIR is the dataset whose fit is applied, or extended"
        if self.rare_counts and self.mode is not Mode.fit:
            yield f"rare_counts=true is of mode=fit, and mode={self.mode.value} has no use of it; leave it out"
        if self.mode is Mode.extend and self.layout not in (Layout.criteo, Layout.table):
            yield (
                f"mode=extend is for raw logs with vocabularies, not for layout={self.layout.value}; choose "
                "dataset=criteo_kaggle, criteo_1tb or any"
            )
        if isinstance(self.source, str) and self.source.startswith("kafka:"):
            yield from self._check_topic()
        if self.mode is Mode.convert:
            return
        if self.layout is Layout.synthetic:
            yield from self._check_synthetic()
        elif self.layout is Layout.criteo:
            yield from self._check_criteo()
        elif self.layout is Layout.mlperf:
            yield from self._check_criteo()
            yield from self._check_mlperf()
        elif self.layout is Layout.yambda:
            yield from self._check_yambda()
        else:
            TableConfig.of(self.table)
            yield from self._check_files("test_source")

    def _check_topic(self) -> Iterator[str]:
        is_table = self.layout is Layout.table
        sources = TableConfig.of(self.table).sources.values() if is_table else ()
        formats = [source.format for source in sources if source.files == self.source]
        if not (
            topic_of(self.source) is not None and formats == ["jsonl"] and self.one_split == "train"
        ):
            yield (
                f"source={self.source}: want kafka://HOST:PORT/TOPIC, with mode=transform, split_name=train and a table with one "
                "source of files: ${source} and format: jsonl"
            )

    def _check_synthetic(self) -> Iterator[str]:
        for name in ("source", "test_source", "split"):
            value = getattr(self, name)
            if value is not None:
                yield (
                    f"dataset=synthetic reads no files, got {name}={getattr(value, 'name', value)}; "
                    "drop it or choose dataset=criteo_kaggle or dataset=criteo_1tb"
                )
        if not self.data.synthetic.cardinalities:
            yield "dataset=synthetic needs data.synthetic.cardinalities, one entry per table"

    @property
    def one_split(self) -> str | None:
        """Name of the split that all rows become; None: they are divided."""
        is_one = self.mode is Mode.transform and self.test_source is None
        return self.split_name.name if is_one and self.split_name else None

    def _check_mlperf(self) -> Iterator[str]:
        if len(self.table_rows or []) != 26:
            yield f"dataset=criteo_mlperf needs table_rows, a positive number per category (26), got {self.table_rows}"
        # MLPerf's procedure leaves no choice.
        fixed = {
            "mode": (self.mode, Mode.fit),
            "engine": (self.engine, EngineName.duckdb),
            "numerical_dtype": (self.numerical_dtype, NumericalType.float32),
            "vocabulary": (self.vocabulary, VocabularyRows.train),
            "frequency_limit": (self.frequency_limit, 0),
            "test_source": (self.test_source, None),
            "split": (self.split or Split.last_file, Split.last_file),
        }
        for name, (got, wanted) in fixed.items():
            if got != wanted:
                yield (
                    f"dataset=criteo_mlperf follows MLPerf's procedure, which knows no {name}={getattr(got, 'name', got)}; "
                    "leave it out, or choose dataset=criteo_1tb"
                )

    def _check_yambda(self) -> Iterator[str]:
        if self.mode is not Mode.fit:
            yield f"dataset=yambda has no mode={self.mode.value}; leave it out"
        if self.source is not None and not isinstance(self.source, str):
            yield f"dataset=yambda wants one directory, got source={self.source}"
        if len(self.table_rows or []) != 11:
            yield f"dataset=yambda needs table_rows, 11 positive numbers, got {self.table_rows}"

    def _check_criteo(self) -> Iterator[str]:
        if self.table is not None:
            yield (
                f"table={shown(self.table)} describes files of your own, and Criteo's logs have their own columns (nothing else "
                "to keep); add dataset=any for your files, or drop it"
            )
        if self.source is None:
            yield "no source: set source=FILE, a glob or '[FILE,FILE]', the raw logs to read"
        for name in ("source", "test_source"):
            yield from self._check_files(name)

    def _check_files(self, name: str) -> Iterator[str]:
        value = getattr(self, name)
        patterns = value if isinstance(value, list) else [value]
        if not (
            value is None
            or (bool(patterns) and all(isinstance(part, str) and part for part in patterns))
        ):
            yield f"{name} must be a file, a glob or a list of them, got {value}"
