"""Preprocessing of Criteo's logs with PySpark in local mode: one vocabulary per column, and one plan that joins all."""

import tempfile
from functools import reduce

import numpy as np
import pyarrow.dataset as ds
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ByteType, LongType, StringType, StructField, StructType

from benchmarks.peers.criteo_job import CATEGORICAL, LABEL, NUMERICAL, Job, run

SCHEMA = StructType(
    [StructField(LABEL, ByteType())]
    + [StructField(name, LongType()) for name in NUMERICAL]
    + [StructField(name, StringType()) for name in CATEGORICAL]
)


def preprocess(job: Job) -> None:
    """Write the split binary."""
    with tempfile.TemporaryDirectory(dir=job.output.parent) as scratch:
        spark = (
            SparkSession.builder.master(f"local[{job.threads}]")
            .config("spark.driver.memory", "4g")
            .config("spark.local.dir", scratch)
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", str(4 * job.threads))
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            _preprocess(job, spark, scratch)
        finally:
            spark.stop()


def _preprocess(job: Job, spark: SparkSession, scratch: str) -> None:
    files = [_read(spark, path, number) for number, path in enumerate(job.files)]
    reduce(DataFrame.unionAll, files).write.parquet(f"{scratch}/parsed")
    data = spark.read.parquet(f"{scratch}/parsed")
    counted = {row["file"]: row["count"] for row in data.groupBy("file").count().collect()}
    splits = job.splits([counted[number] for number in range(len(job.files))])
    in_order = Window.orderBy("file", "line")
    data.select("file", "line").withColumn("row", F.row_number().over(in_order) - 1).write.parquet(
        f"{scratch}/rows"
    )
    data = data.join(spark.read.parquet(f"{scratch}/rows"), ["file", "line"]).drop("file", "line")
    train = data.where(F.col("row") < splits["train"].stop)
    logs = [
        F.coalesce(F.when(F.col(name) > -3, F.log(F.col(name) + 3)), F.lit(0.0))
        .cast("float")
        .alias(name)
        for name in NUMERICAL
    ]
    encoded = data.select("row", LABEL, *logs, *CATEGORICAL)
    kept = {}
    for name in CATEGORICAL:
        by_count = Window.orderBy(F.col("count").desc(), F.col(name))
        train.where(F.col(name).isNotNull()).groupBy(name).count().where(
            F.col("count") >= job.frequency_limit
        ).select(name, F.row_number().over(by_count).alias(f"id_{name}")).write.parquet(
            f"{scratch}/{name}"
        )
        vocabulary = spark.read.parquet(f"{scratch}/{name}")
        kept[name] = vocabulary.count()
        encoded = encoded.join(vocabulary, name, "left").drop(name)
    ids = [F.coalesce(F.col(f"id_{name}"), F.lit(0)).alias(name) for name in CATEGORICAL]
    encoded.select("row", LABEL, *NUMERICAL, *ids).sort("row").write.parquet(f"{scratch}/encoded")
    _write_binary(job, splits, f"{scratch}/encoded", kept)


def _read(spark: SparkSession, path: str, number: int) -> DataFrame:
    lines = spark.read.csv(path, sep="\t", schema=SCHEMA, quote="", mode="FAILFAST")
    return lines.withColumns({"file": F.lit(number), "line": F.monotonically_increasing_id()})


def _write_binary(job: Job, splits: dict[str, slice], directory: str, kept: dict[str, int]) -> None:
    files = sorted(ds.dataset(directory, format="parquet").files)
    start = 0
    for batch in ds.dataset(files, format="parquet").to_batches(batch_readahead=1):
        for split, part in splits.items():
            first = max(part.start - start, 0)
            rows = batch.slice(first, max(part.stop - start - first, 0))
            if not rows.num_rows:
                continue
            job.write(split, "label", rows.column(LABEL).to_numpy().astype(np.uint8))
            numbers = np.stack([rows.column(name).to_numpy() for name in NUMERICAL], axis=1)
            job.write(split, "numerical", numbers.astype(np.float16))
            for name in CATEGORICAL:
                job.write_ids(split, name, rows.column(name).to_numpy(), kept[name])
        start += batch.num_rows


if __name__ == "__main__":
    run(preprocess)
