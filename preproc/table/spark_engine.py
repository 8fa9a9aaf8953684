"""Spark engine: the same SQL as in `preproc/table/duckdb_engine.py`, on a cluster.

`python -m preproc engine=spark` runs it on this machine, and `spark-submit` on a cluster. All workers of a
cluster must have sources and `temp_directory` under the same paths. docs/preprocessing.md describes both, and
the settings of the RAPIDS accelerator.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    _parse_datatype_json_string,
)

from configs.messages import printable, shortened
from configs.preproc_schema import PreprocConfig
from configs.table_schema import LINE_FORMATS, Source
from dataloading.dataset.durable_files import replace_directory
from preproc.raw_files import RawFile
from preproc.table.duckdb_engine import MissingColumnError, QueryError, StagedRows, nulls_first
from preproc.table.expressions import quoted, text
from preproc.table.source_files import SourceFiles
from preproc.work_directory import memory_bytes

# Columns for the mistake in a line, and for the line.
REASON, LINE = "reason_", "line_"


class SparkEngine:
    """Spark on `threads` threads of this machine within `memory_limit`, or on the cluster of the session."""

    # A small column would leave most of a cluster idle.
    columns_at_once = 8
    codes_texts = False
    doubles = "ARRAY<DOUBLE>"
    drops_zones = False
    num_ties = 0
    staged: Mapping[str, Any] = {}

    def __init__(self, config: PreprocConfig, directory: Path) -> None:
        session = SparkSession.builder.appName("preproc")
        # Without `threads`, spark-submit or Spark's own configuration sets the resources.
        if config.threads:
            session = (
                session.master(f"local[{config.threads}]")
                .config("spark.sql.shuffle.partitions", config.threads)
                .config("spark.ui.enabled", "false")
                .config("spark.ui.showConsoleProgress", "false")
                .config("spark.driver.memory", f"{max(memory_bytes(config) >> 20, 512)}m")
                .config("spark.local.dir", str(directory / "spill"))
            )
        try:
            self._spark = session.getOrCreate()
        except (PySparkException, Py4JError) as error:
            reason = shortened(printable(" ".join(str(error).split())), 300)
            raise ValueError(
                f"Spark does not start ({reason}); it needs Java 17, and a master that answers, or take engine=duckdb"
            ) from None
        # Identifiers in double quotes, as in DuckDB; text stays text.
        self._spark.conf.set("spark.sql.ansi.enabled", "true")
        self._spark.conf.set("spark.sql.ansi.doubleQuotedIdentifiers", "true")
        self._spark.conf.set("spark.sql.session.timeZone", "UTC")
        self._spark.sparkContext.setLogLevel("ERROR")
        # Otherwise a line counts as complete once it has the columns that a query reads.
        self._spark.conf.set("spark.sql.csv.parser.columnPruning.enabled", "false")
        self._texts: list[tuple[RawFile, int, DataFrame]] = []
        for function in (
            "hex_number(digits STRING) RETURNS BIGINT RETURN CAST(conv(digits, 16, 10) AS BIGINT)",
            "text_order(value STRING) RETURNS BINARY RETURN CAST(value AS BINARY)",
            "whole_number(value DOUBLE) RETURNS DECIMAL(38, 0) RETURN CAST(floor(value) AS DECIMAL(38, 0))",
            "whole_seconds(time TIMESTAMP) RETURNS BIGINT RETURN unix_seconds(time)",
            # split() takes a regular expression; \\Q and \\E make it literal.
            "split_text(value STRING, separator STRING) RETURNS ARRAY<STRING> "
            "RETURN split(value, concat('\\\\Q', separator, '\\\\E'))",
        ):
            self._sql(f"CREATE OR REPLACE TEMPORARY FUNCTION {function}")

    def read(self, name: str, files: SourceFiles, change: Callable[[str], str]) -> None:
        """Read each file by itself; `order_` is the position of a row in the file, by block and within it."""
        parts = []
        for number, file in enumerate(files.files):
            if file.compression == "zstd":
                raise ValueError(f"{file.path}: Spark reads plain text and gzip; unpack it first")
            if files.source.format in LINE_FORMATS:
                raise ValueError(
                    f"{file.path}: Spark reads csv, tsv and Parquet, not {files.source.format}; take engine=duckdb"
                )
            if file.is_parquet:
                frame = self._parquet(file)
            else:
                frame = self._text(
                    files.source, str(file.path.absolute()), files.columns_of[number]
                )
            columns = [
                F.col(f"`{column.replace('`', '``')}`") for column in files.columns_of[number]
            ]
            frame = frame.select(
                F.lit(number).alias("file_"),
                # A block is identified by its offset; the rows of a block are read in order.
                F.struct(
                    F.col("_metadata.file_block_start"), F.monotonically_increasing_id()
                ).alias("order_"),
                *columns,
                *([] if file.is_parquet else [_reason(columns), F.col(LINE)]),
            )
            if not file.is_parquet:
                self._texts.append((file, int(files.source.has_header), frame))
                frame = frame.where(F.col(REASON).isNull()).drop(REASON, LINE)
            parts.append(frame)
        union = parts[0]
        for part in parts[1:]:
            union = union.unionByName(part)
        self._define(f"{name}_read_", union)
        self._define(name, self._sql(change(f"SELECT * FROM {quoted(f'{name}_read_')}")))

    def _define(self, name: str, frame: DataFrame) -> None:
        frame.createOrReplaceTempView(quoted(name) if not name.isidentifier() else name)

    def _parquet(self, file: RawFile) -> DataFrame:
        try:
            return self._spark.read.parquet(str(file.path.absolute()))
        except PySparkException as error:
            # Spark has no float16, for example.
            raise ValueError(
                f"{file.path}: {_explained(error)}; write it with other types, or set engine=duckdb"
            ) from None

    def _text(self, source: Source, path: str, names: list[str]) -> DataFrame:
        csv = source.format == "csv"
        # An empty quote turns quoting off; Spark writes it as the null character.
        quote = '"' if csv else "\u0000"
        reader = self._spark.read.options(
            header=source.has_header,
            sep=source.delimiter if csv else "\t",
            quote=quote,
            escape=quote,
            # A line that cannot be split into the columns is kept in a column of its own.
            mode="PERMISSIVE",
            columnNameOfCorruptRecord=LINE,
            nullValue="",
            emptyValue="",
            # Columns are read by their position; the header is not compared with the names.
            enforceSchema="true",
        )
        escaped = [column.replace("`", "``") for column in [*names, LINE]]
        schema = ", ".join(f"`{column}` STRING" for column in escaped)
        return reader.schema(schema).csv(path)

    def columns(self, query: str) -> list[tuple[str, str]]:
        """Analyse the query; a nested type is its name and its JSON, since its short form may be incomplete."""
        return [
            (
                field.name,
                f"{field.dataType.typeName()} {field.dataType.json()}"
                if isinstance(field.dataType, ArrayType | MapType | StructType)
                else field.dataType.simpleString(),
            )
            for field in self._sql(query).schema
        ]

    def without_nan(self, value: str, kind: str, instead: str = "NULL") -> str | None:
        """Ask isnan; Spark does not evaluate it from statistics of files."""
        nested = re.fullmatch(r"(?:array|map|struct) (\{.+)", kind, re.DOTALL)
        floats = {"float": FloatType(), "double": DoubleType()}
        data_type = _parse_datatype_json_string(nested[1]) if nested else floats.get(kind)
        return None if data_type is None else _without_nan(value, data_type, instead)

    def stage(self, rows: StagedRows, path: Path) -> None:
        """Number the rows; texts stay texts."""
        self.number(rows.query, rows.order_by, path)

    def number(self, query: str, order_by: list[str], path: Path) -> None:
        """Sort over partitions, then number the rows; no single task reads all rows."""
        ordered = path.with_name(f"{path.name}.ordered")
        frame = self._sql(f"SELECT * FROM ({query}) ORDER BY {nulls_first(order_by)}")
        frame = frame.withColumn("id_", F.monotonically_increasing_id())
        self._write(frame, ordered)
        stored = self._spark.read.parquet(str(ordered)).withColumn("part_", F.shiftright("id_", 33))
        counts = sorted(
            (row["part_"], row["count"]) for row in stored.groupBy("part_").count().collect()
        )
        firsts, total = {}, 0
        for part, count in counts:
            firsts[part] = total
            total += count
        starts = (
            F.create_map(*(F.lit(number) for pair in firsts.items() for number in pair))
            if firsts
            else F.lit(None)
        )
        # Within a partition the lower 33 bits count the rows.
        row = F.element_at(starts, F.col("part_")) + F.col("id_").bitwiseAND(2**33 - 1)
        names = [name for name in stored.columns if name not in ("id_", "part_")]
        numbered = stored.select(row.cast("bigint").alias("row_"), *names)
        self._write(numbered, path)
        shutil.rmtree(ordered)

    def write(self, query: str, path: Path) -> None:
        """Write Parquet files, one per partition."""
        self._write(self._sql(query), path)

    def _write(self, frame: DataFrame, path: Path) -> None:
        temporary = path.with_name(f"{path.name}.new")
        try:
            frame.write.mode("overwrite").parquet(str(temporary))
        except PySparkException as error:
            raise _explained(error) from None
        replace_directory(temporary, path)

    def _sql(self, query: str) -> DataFrame:
        try:
            return self._spark.sql(query)
        except PySparkException as error:
            raise _explained(error) from None

    def view(self, name: str, path: Path) -> None:
        self._spark.read.parquet(str(path)).createOrReplaceTempView(name)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            return [tuple(row) for row in self._sql(query).collect()]
        except PySparkException as error:
            raise _explained(error) from None

    def rejected(self) -> list[tuple[str, int, str, str]]:
        """Return the rejected lines; Spark counts lines without blank ones."""
        bad_lines = []
        for file, headers, frame in self._texts:
            # Numbering lines needs one task for a complete file, so it is done only if a line was rejected.
            if frame.where(F.col(REASON).isNotNull()).isEmpty():
                continue
            numbered = frame.withColumn("number_", F.row_number().over(Window.orderBy("order_")))
            bad = numbered.where(F.col(REASON).isNotNull()).orderBy("number_")
            bad_lines += [
                (str(file.path), row["number_"] + headers, row[REASON], row[LINE] or "")
                for row in bad.select("number_", REASON, LINE).collect()
            ]
        return bad_lines

    def exploded(self, column: str) -> str:
        """Return a query (row_, position_, value) with one row per item of a list of `rows_`, null for an empty one."""
        return (
            "SELECT row_, position_, nullif(CAST(item_ AS STRING), '') AS value FROM "
            f"(SELECT row_, posexplode({column}) AS (position_, item_) FROM rows_)"
        )

    def num_items(self, column: str, *, whole: bool) -> str:
        if whole:
            column = f"filter({column}, item_ -> CAST(item_ AS STRING) <> '')"
        return f"coalesce(array_size({column}), 0)"

    def close(self) -> None:
        """Do nothing: the session ends with the process, and `spark-submit` may own it."""


def _without_nan(value: str, kind: DataType, instead: str, depth: int = 0) -> str | None:
    if isinstance(kind, FloatType | DoubleType):
        nan = f"CAST({instead} AS {kind.simpleString()})"
        return f"(CASE WHEN isnan({value}) THEN {nan} ELSE {value} END)"
    name = f"item{depth}_"
    if isinstance(kind, ArrayType):
        item = _without_nan(name, kind.elementType, instead, depth + 1)
        return item and f"transform({value}, {name} -> {item})"
    if isinstance(kind, MapType):
        item = _without_nan(name, kind.valueType, instead, depth + 1)
        return item and f"transform_values({value}, (key{depth}_, {name}) -> {item})"
    if not isinstance(kind, StructType):
        return None
    fields = [(field.name, f"{value}.`{field.name.replace('`', '``')}`") for field in kind]
    changed = [
        _without_nan(sql, field.dataType, instead, depth)
        for field, (_, sql) in zip(kind, fields, strict=True)
    ]
    if not any(changed):
        return None
    packed = ", ".join(
        f"{text(field)}, {change or sql}"
        for (field, sql), change in zip(fields, changed, strict=True)
    )
    return f"(CASE WHEN {value} IS NOT NULL THEN named_struct({packed}) END)"


def _reason(columns: list[Column]) -> Column:
    """Return the mistake in a line of text, null for a good line."""
    # Spark replaces bytes that are not UTF-8 by this character.
    garbled = F.concat_ws("", *columns).contains("\ufffd")
    wanted = f"not {len(columns)} columns"
    return F.when(F.col(LINE).isNotNull(), wanted).when(garbled, "not UTF-8 text").alias(REASON)


def _explained(error: PySparkException) -> Exception:
    """Return the first two lines of a Spark error, which hold its reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    reason = shortened(printable(f"Spark: {' '.join(lines[:2])}"), 300)
    return MissingColumnError(reason) if "UNRESOLVED_COLUMN" in reason else QueryError(reason)
