"""Conversion from any known format to a dataset directory, in chunks of rows."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import (
    check_output,
    checksums_of,
    verify_checksums,
    write_dataset,
)
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.dataset.kept_columns import kept_file_name
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.split_files import SplitFiles
from preproc.convert.merlin import merlin_rows
from preproc.convert.mlperf_npy import NpyRows
from preproc.convert.nvidia_csv import CsvRows, is_csv_spec
from preproc.convert.roles import print_roles
from preproc.convert.rows import Remainders, Rows, SourceRows
from preproc.report.console import LabelSum, Progress, SplitSummary, print_result, print_splits


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
    summaries = _write_dataset(rows, output, config, progress)
    print_splits(progress.console, summaries)
    print_result(progress.console, progress, output, sum(s.rows for s in summaries.values()))


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


def _part_rows(rows: Rows, split: str, num_files: int) -> list[int]:
    """Return the rows of each of `num_files` equal files of a split; ValueError if it has fewer rows."""
    num_rows = rows.spec.splits[split].num_rows
    # A CSV file is not counted before it is read.
    num_rows = num_rows or sum(len(chunk.labels) for chunk in rows.chunks(split))
    if num_rows < num_files:
        raise ValueError(
            f"files_per_split={num_files}: split '{split}' has {num_rows:,} rows, and a file needs one; lower it"
        )
    ends = [num_rows * number // num_files for number in range(num_files + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def _write_dataset(
    rows: Rows, output: Path, config: PreprocConfig, progress: Progress
) -> dict[str, SplitSummary]:
    spec = rows.spec
    assert spec.root is not None
    summaries = {}
    part_rows = None
    if config.files_per_split is not None:
        num_files = config.files_per_split
        part_rows = {split: _part_rows(rows, split, num_files) for split in spec.splits}
    with write_dataset(
        output,
        categorical=spec.categorical,
        numerical=spec.numerical,
        label=spec.labels,
        weight=spec.weight.name if spec.weight else None,
        keep_rate=spec.keep_rate.name if spec.keep_rate else None,
        teacher=[column.name for column in spec.teachers],
        numerical_dtype=spec.numerical_dtype.name,
        file_format=config.to.name,
        splits=tuple(spec.splits),
        metadata={
            key: value for key, value in spec.metadata.items() if key not in ("rows", "files")
        }
        | ({"left_out": list(rows.left_out)} if rows.left_out else {}),
        overwrite=config.overwrite,
        absent={split: files.absent for split, files in spec.splits.items()},
        part_rows=part_rows,
        # Rows get events of their own, which pools have chosen.
        sequences=tuple(replace(group, pools=None) for group in spec.sequences),
    ) as dataset:
        for split, files in spec.splits.items():
            if (spec.root / kept_file_name(split)).exists():
                dataset.copy_file(kept_file_name(split), spec.root)
            has_labels = spec.labels[0].name not in files.absent
            sums = {label.name: LabelSum(0, label.is_binary) for label in spec.labels if has_labels}
            summary = summaries[split] = SplitSummary(0, sums)
            with progress.phase(f"write {split}") as phase:
                for chunk in rows.chunks(split):
                    dataset[split].append(
                        numerical=chunk.numerical,
                        labels=chunk.labels if has_labels else None,
                        weights=chunk.weights if _has(spec.weight, files) else None,
                        keep_rates=chunk.keep_rates if _has(spec.keep_rate, files) else None,
                        teachers={n: v for n, v in chunk.teachers.items() if n not in files.absent},
                        ids=chunk.ids,
                        lengths=chunk.lengths,
                        events=chunk.events,
                        moments=chunk.moments,
                    )
                    summary.rows += len(chunk.labels)
                    for label, values in zip(
                        sums.values(), np.atleast_2d(chunk.labels.T), strict=False
                    ):
                        label.add(values)
                    phase.update(summary.rows, rows=summary.rows)
                phase.name = f"write {split}: {summary.rows:,} rows"
    return summaries


def _has(column: RowColumn | None, files: SplitFiles) -> bool:
    return column is not None and column.name not in files.absent


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
