"""Writing of rows of any input as a dataset directory, in chunks."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.kept_columns import kept_file_name
from preproc.convert.rows import Rows
from preproc.report.console import LabelSum, Progress, SplitSummary


def _part_rows(rows: Rows, split: str, num_files: int) -> list[int]:
    """Return the rows of each of `num_files` equal files of a split; ValueError if it has fewer rows."""
    num_rows = rows.spec.splits[split].num_rows
    # A CSV file is not counted before it is read.
    num_rows = num_rows or sum(chunk.num_rows for chunk in rows.chunks(split))
    if num_rows < num_files:
        raise ValueError(
            f"files_per_split={num_files}: split '{split}' has {num_rows:,} rows, and a file needs one; lower it"
        )
    ends = [num_rows * number // num_files for number in range(num_files + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def write_rows(
    rows: Rows, output: Path, config: PreprocConfig, progress: Progress
) -> dict[str, SplitSummary]:
    """Write rows, and the columns that are kept beside them, as a dataset directory; return what each split has."""
    spec = rows.spec
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
            if spec.root and (spec.root / kept_file_name(split)).exists():
                dataset.copy_file(kept_file_name(split), spec.root)
            has_labels = spec.labels[0].name not in files.absent
            sums = {label.name: LabelSum(0, label.is_binary) for label in spec.labels if has_labels}
            summary = summaries[split] = SplitSummary(0, sums)
            with progress.phase(f"write {split}") as phase:
                for chunk in rows.chunks(split):
                    dataset[split].append(**chunk._asdict())
                    summary.rows += chunk.num_rows
                    if chunk.labels is not None:
                        for label, values in zip(
                            sums.values(), np.atleast_2d(chunk.labels.T), strict=True
                        ):
                            label.add(values)
                    phase.update(summary.rows, rows=summary.rows)
                phase.name = f"write {split}: {summary.rows:,} rows"
    return summaries
