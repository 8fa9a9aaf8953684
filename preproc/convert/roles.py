"""Print labels, numericals, tables and the rest of an input before it is converted."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from configs.messages import printable, shown
from dataloading.dataset.row_columns import RowColumn
from preproc.convert.rows import Rows
from preproc.report.console import Progress

HASHED_ROWS = 1 << 20
"""Tables below this are small for any machine, and no remainder is worth a word."""
FEWEST_IDS = 1000


def print_roles(progress: Progress, rows: Rows) -> None:
    """Print labels, numericals, tables with their sizes, and what is not converted; advise where ids are hashes."""
    spec = rows.spec

    def kind(column: RowColumn) -> str:
        return "binary" if column.is_binary else f"number, {column.dtype.name}"

    lines = {"labels": [f"{printable(label.name)} ({kind(label)})" for label in spec.labels]}
    for column in spec.row_columns[len(spec.labels) :]:
        lines.setdefault(column.channel.value, []).append(printable(column.name))
    lines["numericals"] = [*map(printable, spec.numerical)] or ["none"]
    lines["not converted"] = [*map(printable, rows.left_out)] or ["nothing"]
    for name, values in lines.items():
        progress.say(f"{name:13}  {', '.join(values)}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("table", overflow="fold")
    table.add_column("rows", justify="right")
    table.add_column("features (ids per row)", overflow="fold")
    for name, features in spec.table_features.items():
        texts = (f"{printable(f.name)} ({f.hotness or 'ragged'})" for f in features)
        table.add_row(Text(printable(name)), f"{features[0].cardinality:,}", Text(", ".join(texts)))
    progress.console.print(table)
    _advise_on_hashes(progress, rows)


def _advise_on_hashes(progress: Progress, rows: Rows) -> None:
    """Print one line if tables have far more rows than there are ids, as hashes of values make them."""
    spec = rows.spec
    num_rows = sum(files.num_rows for files in spec.splits.values())
    sizes, hashed = [], []
    for name, features in spec.table_features.items():
        ids = int(num_rows * sum(f.mean_hotness for f in features))
        size = features[0].cardinality
        is_dynamic = features[0].is_dynamic
        if num_rows and not is_dynamic and size > max(HASHED_ROWS, 2 * ids):
            hashed.append(f"{shown(name)} ({size:,} rows for {ids:,} ids)")
            size = 1 << max(ids, FEWEST_IDS).bit_length()
        sizes.append(size)
    if hashed:
        progress.say(
            f"note: the ids of {', '.join(hashed)} look like hashes: most rows would be of no value. "
            f"table_rows=[{','.join(map(str, sizes))}], for example, writes each id as its remainder by the rows of its table"
        )
