"""Conversion from any known format to a dataset directory, in chunks of rows."""

from collections.abc import Sequence
from pathlib import Path

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import check_output, checksums_of, verify_checksums
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.kept_columns import kept_file_name
from dataloading.dataset.open_dataset import open_dataset
from preproc.convert.merlin import merlin_rows
from preproc.convert.mlperf_npy import NpyRows
from preproc.convert.nvidia_csv import CsvRows, is_csv_spec
from preproc.convert.roles import print_roles
from preproc.convert.rows import Remainders, Rows, SourceRows
from preproc.convert.writing import write_rows
from preproc.report.console import Progress, print_result, print_splits


def run_convert(config: PreprocConfig, progress: Progress) -> None:
    """Convert `config.path` to `config.output` and print a summary; ValueError for no known format, or an invalid value."""
    assert config.path is not None
    assert config.output is not None
    output = Path(config.output).absolute()
    check_output(output, config.overwrite)
    with progress.phase("open") as phase:
        rows = find_rows(Path(config.path), config.numerical_dtype.name, config.table_rows)
        phase.name = f"open {rows.kind} in {config.path}"
    print_roles(progress, rows)
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
