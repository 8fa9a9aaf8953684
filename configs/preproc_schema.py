"""Every option of `python -m preproc`, in the style of `configs/schema.py`."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from configs.schema import SyntheticConfig, option, require
from configs.table_schema import TableConfig


class Mode(Enum):
    """What the command does."""

    fit = "fit"
    transform = "transform"
    verify = "verify"
    convert = "convert"


class Format(Enum):
    """What `mode=convert` writes."""

    binary = "binary"
    parquet = "parquet"
    csv = "csv"


class Layout(Enum):
    """What is turned into a dataset directory."""

    criteo = "criteo"
    table = "table"
    synthetic = "synthetic"


class EngineName(Enum):
    """What runs the SQL."""

    duckdb = "duckdb"
    spark = "spark"


class Split(Enum):
    """Which lines of `source` train and which test."""

    fraction = "fraction"
    last_file = "last_file"


class VocabularyRows(Enum):
    """Which rows are counted to build the vocabularies."""

    train = "train"
    all = "all"


class OnBad(Enum):
    """What happens to a row that cannot be read."""

    fail = "fail"
    skip = "skip"
    quarantine = "quarantine"


class NumericalType(Enum):
    """How numerical features are stored."""

    float16 = "float16"
    float32 = "float32"


@dataclass(kw_only=True, slots=True)
class StreamConfig:
    """The built-in click stream, under the keys that training knows it by."""

    synthetic: SyntheticConfig = MISSING


@dataclass(kw_only=True, slots=True)
class PreprocConfig:
    """One dataset directory out of raw logs or of the synthetic stream, or a look at one that stands."""

    mode: Mode = option(
        Mode.fit,
        "fit (make a dataset, vocabularies and statistics from its training rows), transform (make one by the fit "
        "of another), verify (read one, say what is wrong) or convert (path to output)",
    )
    fitted: str | None = option(None, "with mode=transform: the dataset whose fit is applied")
    path: str | None = option(
        None,
        "dataset directory to verify, or what to convert: a dataset directory, NVIDIA's CSV with its spec, "
        "Merlin's Parquet, MLPerf's npy files",
    )
    to: Format = option(Format.binary, "what to convert to: binary, parquet or csv (NVIDIA's)")
    layout: Layout = option(Layout.criteo, "criteo, table or synthetic; set by dataset=...")
    engine: EngineName = option(
        EngineName.duckdb, "duckdb (this machine) or spark (a cluster); both write the same bytes"
    )
    table: Any = option(
        None, "sources, columns and transforms of layout=table; docs/preprocessing.md has them"
    )
    output: str | None = option(None, "dataset directory to write (required)")
    overwrite: bool = option(False, "replace a dataset that output already holds")
    threads: int | None = option(None, "threads to work with; null: one a core")
    source: Any = option(
        None, "raw logs: a file, a glob or a list of them; .tsv, .gz or .zst; day_2 before day_10"
    )
    split: Split = option(
        Split.fraction,
        "fraction: the first train_fraction of the lines train, the rest test; last_file: of the "
        "last file the first half tests and the second half validates, all other files train",
    )
    train_fraction: float = option(0.9, "part of the lines that trains, with split=fraction")
    test_source: Any = option(
        None, "files of the test split, written like source; then all of source trains"
    )
    frequency_limit: int = option(
        0, "a value seen less often gets id 0, as missing and unseen ones do; 0 keeps every value"
    )
    vocabulary: VocabularyRows = option(
        VocabularyRows.train,
        "rows whose values are counted: train, or all (NVIDIA's way: test rows included)",
    )
    numerical_dtype: NumericalType = option(
        NumericalType.float16, "stored type of numerical features: float16 (NVIDIA's) or float32"
    )
    shuffle: bool = option(
        False, "write the training rows in a random order, the same for the same seed and rows"
    )
    on_bad: OnBad = option(
        OnBad.fail,
        "a row that cannot be read: fail; skip it; or quarantine it in output/bad_rows.tsv",
    )
    memory_limit: str | None = option(
        None, "memory the run may take, such as 8GB; what needs more spills; null: 80 % of all"
    )
    temp_directory: str | None = option(
        None, "where columns are staged and DuckDB spills; null: beside output"
    )
    plot: bool = option(True, "draw the report as output/report.png")
    seed: int = option(1, "seed of shuffle and of the synthetic stream")
    data: StreamConfig = MISSING

    def __post_init__(self) -> None:
        require(
            self.threads is None or self.threads > 0,
            f"threads must be positive or null, got {self.threads}",
        )
        if self.mode is Mode.verify:
            require(self.path is not None, "no path: set path=DIR, the dataset directory to verify")
            return
        require(
            self.mode is not Mode.convert or self.path is not None,
            "no path: set path=DIR, the directory to convert",
        )
        require(
            self.output is not None,
            "no output: set output=DIR, the dataset directory to write",
        )
        require(
            0 < self.train_fraction < 1,
            f"train_fraction must lie between 0 and 1, got {self.train_fraction}; "
            "to test on other files set test_source",
        )
        require(
            self.frequency_limit >= 0,
            f"frequency_limit must not be negative, got {self.frequency_limit}",
        )
        require(
            (self.mode is Mode.transform) == (self.fitted is not None),
            "mode=transform and fitted=DIR go together: DIR is the dataset whose fit is applied",
        )
        if self.mode is Mode.convert:
            return
        if self.layout is Layout.synthetic:
            self._check_synthetic()
        elif self.layout is Layout.criteo:
            self._check_criteo()
        else:
            TableConfig.of(self.table)

    def _check_synthetic(self) -> None:
        for name in ("source", "test_source"):
            require(
                getattr(self, name) is None,
                f"dataset=synthetic reads no files, got {name}={getattr(self, name)}; "
                "drop it or choose dataset=criteo_kaggle or dataset=criteo_1tb",
            )
        require(
            bool(self.data.synthetic.cardinalities),
            "dataset=synthetic needs data.synthetic.cardinalities, one entry a table",
        )

    def _check_criteo(self) -> None:
        require(
            self.source is not None,
            "no source: set source=FILE, a glob or '[FILE,FILE]', the raw logs to read",
        )
        for name in ("source", "test_source"):
            value = getattr(self, name)
            patterns = value if isinstance(value, list) else [value]
            require(
                value is None or all(isinstance(each, str) and each for each in patterns),
                f"{name} must be a file, a glob or a list of them, got {value}",
            )
