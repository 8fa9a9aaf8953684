"""Conversion from any known format to a dataset directory, in chunks of rows."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from configs.messages import printable, shown
from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import check_output, checksums_of, verify_checksums
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.kept_columns import kept_file_name
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from preproc.convert.merlin import merlin_rows
from preproc.convert.mlperf_npy import NpyRows
from preproc.convert.nvidia_csv import CsvRows, is_csv_spec
from preproc.convert.rows import Remainders, Rows, SourceRows
from preproc.convert.writing import write_rows
from preproc.report.console import Progress, print_result, print_splits

HASHED_ROWS = 1 << 20
"""Tables below this are small for any machine, and no remainder is worth a word."""
FEWEST_IDS = 1000


def run_convert(config: PreprocConfig, progress: Progress) -> None:
    """Convert `config.path` to `config.output` and print a summary; ValueError for no known format, or an invalid value."""
    assert config.path is not None
    assert config.output is not None
    output = Path(config.output).absolute()
    check_output(output, config.overwrite)
    with progress.phase("open") as phase:
        rows = find_rows(Path(config.path), config.numerical_dtype.name, config.table_rows)
        phase.name = f"open {rows.kind} in {config.path}"
    _print_roles(progress, rows)
    _compare(rows.spec, progress)
    summaries = write_rows(rows, output, config, progress)
    print_splits(progress.console, summaries)
    print_result(progress, output, sum(s.rows for s in summaries.values()))


def _compare(spec: FeatureSpec, progress: Progress) -> None:
    """Compare the files of all splits with the checksums of the spec; the copy would otherwise vouch for damaged rows."""
    assert spec.root is not None
    listed = checksums_of(spec.metadata, f"{spec.root / SPEC_NAME}: metadata")
    paths = [path for files in spec.splits.values() for path in files.paths()]
    names = [path.relative_to(spec.root).as_posix() for path in paths]
    names += [kept_file_name(split) for split in spec.splits]
    names = [name for name in names if name in listed]
    if names:
        with progress.phase(f"compare the checksums of {len(names)} files"):
            verify_checksums(spec, names)


def find_rows(path: Path, numerical_dtype: str, table_rows: Sequence[int] | None = None) -> Rows:
    """Detect the format of `path` and return its rows, with ids modulo `table_rows` if given; ValueError for none."""
    has_tables = table_rows is None
    rows: Rows
    if (path / SPEC_NAME).is_file():
        if not is_csv_spec(path):
            if not has_tables:
                raise ValueError(
                    f"table_rows is for ids without a fit (MLPerf, Merlin, NVIDIA's CSV), and path={path} is a dataset; leave it "
                    "out"
                )
            return _dataset(path)
        rows = CsvRows(path, numerical_dtype, has_tables=has_tables)
    elif any(path.glob("day_*_labels.npy")):
        rows = NpyRows(path, has_tables=has_tables)
    elif any((path / "train").glob("*.parquet")):
        rows = merlin_rows(path, has_tables=has_tables)
    else:
        raise ValueError(
            f"{path}: nothing to convert; want a directory with a {SPEC_NAME} (a dataset, or NVIDIA's CSV), with "
            "train/*.parquet (Merlin, NVTabular) or with day_0_labels.npy (MLPerf)"
        )
    return rows if table_rows is None else Remainders(rows, table_rows)


def _dataset(path: Path) -> SourceRows:
    """Return the rows of a dataset directory; its fit and its reports are not converted."""
    spec = FeatureSpec.load(path)
    used = {file.relative_to(path) for files in spec.splits.values() for file in files.paths()}
    used |= {Path(kept_file_name(split)) for split in spec.splits} | {Path(SPEC_NAME)}
    others = {file.relative_to(path) for file in path.rglob("*") if file.is_file()} - used
    left_out = [
        f"{name}/" if (path / name).is_dir() else name for name in {f.parts[0] for f in others}
    ]
    return SourceRows(open_dataset(spec), "dataset directory", sorted(left_out))


def _print_roles(progress: Progress, rows: Rows) -> None:
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
