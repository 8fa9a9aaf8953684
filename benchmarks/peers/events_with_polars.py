"""Preprocessing of the tables of `benchmarks/peers/event_tables.py` with Polars, as `dataset/events.yaml` describes it.

    python -m benchmarks.peers.events_with_polars 'DIR/part_*.parquet' OUTPUT FREQUENCY_LIMIT

CSV is converted to Parquet once. Columns are then encoded one at a time, so that the table need not fit in memory.
"""

import sys
import tempfile
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl

from dataloading.dataset.feature_spec import id_dtype

TEXTS = ["user", "item", "referrer", "brand", "city", "campaign", "device", "category", "country"]
TEXTS += ["slot", "system"]
TYPES: dict[str, pl.DataType | type[pl.DataType]] = {"time": pl.Datetime("ms"), "clicked": pl.Int8}
TYPES |= dict.fromkeys([*TEXTS, "tags"], pl.String)
TYPES |= {"price": pl.Float64, "age": pl.Int32, "session_s": pl.Float64, "views": pl.Int32}
TYPES |= {"discount": pl.Float64, "idle_days": pl.Int32}
HOTNESS = 5
TEST_BEGINS = datetime(2026, 3, 25)
CATEGORICAL = {name: pl.col(name) for name in TEXTS} | {
    "hour": pl.col("time").dt.hour().cast(pl.String),
    "country_category": pl.concat_str("country", "category", separator="\x1f"),
    "tags": pl.col("tags").fill_null("").str.split("|"),
}


def numericals(train: pl.LazyFrame) -> list[pl.Expr]:
    """Return the transformed numericals, fitted on the training rows."""
    age = pl.col("age").fill_null(40).cast(pl.Float64)
    session = pl.col("session_s").fill_null(0).clip(0, 3600)
    idle = pl.col("idle_days").fill_null(0).clip(0, 365).cast(pl.Float64)
    fitted = train.select(
        age_mean=age.mean(),
        age_std=age.std(ddof=0),
        session_min=session.min(),
        session_max=session.max(),
        idle_mean=idle.mean(),
        idle_std=idle.std(ddof=0),
    )
    fit = fitted.collect().row(0, named=True)
    return [
        (pl.col("price").fill_null(0) + 1).log(),
        (age - fit["age_mean"]) / fit["age_std"],
        (session - fit["session_min"]) / (fit["session_max"] - fit["session_min"]),
        (pl.col("views").fill_null(0).cast(pl.Float64) + 1).log(),
        pl.col("discount").fill_null(0),
        (idle - fit["idle_mean"]) / fit["idle_std"],
    ]


def preprocess(source: str, output: Path, limit: int, parquet_dir: str) -> None:
    """Write the split binary."""
    if source.endswith(".csv"):
        lines = pl.scan_csv(source, schema=TYPES)
        source = f"{parquet_dir}/all.parquet"
        lines.sink_parquet(source, compression="lz4")
    data = pl.scan_parquet(source)
    is_train = data.select(pl.col("time") < TEST_BEGINS).collect().to_series()
    masks = {"train": is_train, "test": ~is_train}
    labels = data.select("clicked").collect().to_series()
    parts = [
        expression.cast(pl.Float32).alias(str(i))
        for i, expression in enumerate(numericals(data.filter(pl.col("time") < TEST_BEGINS)))
    ]
    numbers = data.select(parts).collect().to_numpy(order="c").astype(np.float16)
    for split, mask in masks.items():
        (output / split).mkdir(parents=True)
        labels.filter(mask).to_numpy().tofile(output / split / "label.bin")
        numbers[mask.to_numpy()].tofile(output / split / "numerical.bin")
    for name, expression in CATEGORICAL.items():
        column = data.select(value=expression).collect()
        counted = column.filter(is_train)
        if name == "tags":
            counted = counted.explode("value")
            # Five per row, and null behind the last.
            five = pl.col("value").list.gather(list(range(HOTNESS)), null_on_oob=True)
            column = column.select(five).explode("value")
        vocabulary = (
            counted.filter(pl.col("value") != "")
            .group_by("value")
            .len()
            .filter(pl.col("len") >= limit)
            .sort(["len", "value"], descending=[True, False])
            .with_row_index("id", offset=1)
            .select("value", "id")
        )
        joined = column.join(vocabulary, on="value", how="left", maintain_order="left")
        ids = joined["id"].fill_null(0).to_numpy().astype(id_dtype(len(vocabulary) + 1))
        for split, mask in masks.items():
            of_rows = ids.reshape(len(mask), -1)
            of_rows[mask.to_numpy()].tofile(output / split / f"{name}.bin")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=Path(sys.argv[2]).parent) as directory:
        preprocess(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), directory)
