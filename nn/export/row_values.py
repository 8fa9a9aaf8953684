"""Raw values of the rows of a table, from the vocabulary that preprocessing fitted: `<table>.value.parquet`.

The file has one row per row of the table, with `id` and `value`. Row 0, that of missing, rare and unseen values, has none.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.messages import first_line, shown
from dataloading.dataset.parquet_files import open_file

FOLDER = "vocabulary"
BATCH_ROWS = 1 << 17
SCHEMA = pa.schema([("id", pa.int64()), ("value", pa.string())])


def find_vocabularies(fitted: Path, tables: list[str]) -> dict[str, Path]:
    """Return the vocabulary of every table that has one.

    A table has the name of the feature that the vocabulary is of, after a prefix if the model has several tables per feature.
    Features that share a vocabulary share a table. Raises ValueError: `fitted` has no vocabularies, or none of these tables.
    """
    files = {path.stem: path for path in sorted((fitted / FOLDER).glob("*.parquet"))}
    if not files:
        raise ValueError(
            f"fitted={fitted}: there is no {FOLDER}/ with vocabularies; name the dataset that the model was trained on"
        )
    found = {}
    for table in tables:
        likely = [name for name in files if _is_of(table, name)]
        if likely:
            found[table] = files[max(likely, key=len)]
    if not found:
        raise ValueError(
            f"fitted={fitted} has vocabularies of {shown(list(files))}, and none of the tables {shown(tables)}; name the "
            "dataset that the model was trained on"
        )
    return found


def _is_of(table: str, feature: str) -> bool:
    # Names that no module can have are changed: a dot to `_`, and a taken name by a `_` after it.
    names = {feature, changed := feature.replace(".", "_"), f"{changed}_"}
    return any(table == name or table.endswith(f"_{name}") for name in names)


def write_values(vocabulary: Path, path: Path, table: str, num_rows: int) -> None:
    """Write the values of the rows of a table, in constant memory.

    Raises ValueError: the vocabulary is not of a table of `num_rows` rows, or is damaged.
    """
    with open_file(vocabulary) as file:
        values = file.metadata.num_rows
        if values + 1 != num_rows:
            raise ValueError(
                f"{vocabulary} has {values:,} values, but table {table} of the checkpoint has {num_rows:,} rows, want one per "
                "value and row 0; name the dataset that the model was trained on"
            )
        names = file.schema_arrow.names
        if not {"id", "value"} <= set(names):
            raise ValueError(f"{vocabulary}: columns {shown(names)}, want value and id")
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
            writer.write_table(pa.table({"id": [0], "value": [None]}, schema=SCHEMA))
            wanted = 1
            try:
                columns = ["id", "value", *({"retired"} & set(names))]
                for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                    ids = np.asarray(batch.column("id"))
                    if (ids != np.arange(wanted, wanted + len(ids))).any():
                        raise ValueError(f"{vocabulary}: ids are not 1, 2, ...; copy it again")
                    wanted += len(ids)
                    rows = pa.Table.from_batches([batch])
                    if "retired" in rows.column_names:
                        live = pc.if_else(rows["retired"], None, rows["value"])
                        rows = rows.set_column(1, "value", live)
                    writer.write_table(rows.select(SCHEMA.names).cast(SCHEMA))
            except (pa.ArrowException, OSError) as error:
                reason = shown(first_line(error))
                raise ValueError(f"{vocabulary}: damaged ({reason}); copy it again") from None
