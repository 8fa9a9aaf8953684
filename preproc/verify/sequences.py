"""Checks of the files of sequence groups: their numbers, and the slices of the rows, which must end before their moments."""

from pathlib import Path

import numpy as np

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.split_files import SplitFiles, mapped
from preproc.verify.column import Column

SLICE = np.dtype("<i8")


def event_checks(
    spec: FeatureSpec, files: SplitFiles, num_rows: int
) -> dict[Path, tuple[int, Column]]:
    """Return bytes and check of the files of numbers, slices and moments of a split."""
    checks: dict[Path, tuple[int, Column]] = {}
    dtypes = {feature.name: feature.dtype for feature in spec.categorical}
    for group in spec.sequences:
        first = group.features[0]
        num_events = files.ids[first].stat().st_size // dtypes[first].itemsize
        for column in group.numbers:
            checks[files.events[column.name]] = (
                num_events * column.dtype.itemsize,
                Column(
                    column.dtype.newbyteorder("<"),
                    lambda items: ~np.isfinite(items),
                    f"numbers of '{column.name}' that are not finite",
                    lambda index: f"event {index:,}",
                ),
            )
        checks[files.slices[group.name]] = (
            2 * num_rows * SLICE.itemsize,
            _slices(group, files, num_events),
        )
        if group.time is not None:
            moments = Column(SLICE, lambda items: np.zeros(len(items), bool), "moments", str)
            checks[files.moments[group.name]] = (num_rows * SLICE.itemsize, moments)
    return checks


def _slices(group: SequenceGroup, files: SplitFiles, num_events: int) -> Column:
    times = moments = np.zeros(0, SLICE)
    if group.time is not None:
        times = mapped(files.events[group.time], SLICE)
        moments = mapped(files.moments[group.name], SLICE)
    row = 0

    def wrong(items: np.ndarray) -> np.ndarray:
        nonlocal row
        items = items[: len(items) // 2 * 2]  # a truncated file
        start, stop = items[::2], items[1::2]
        bad = (start < 0) | (stop < start) | (stop > num_events) | (stop - start > group.max_length)
        if group.time is not None and len(moments) >= row + len(start):
            seen = np.flatnonzero(~bad & (stop > start) & (stop <= len(times)))
            bad[seen] = times[stop[seen] - 1] >= moments[row + seen]
        row += len(start)
        return np.repeat(bad, 2)

    late = " or end with one at or after the row's moment" * (group.time is not None)
    kind = f"slices of '{group.name}' that are not of its {num_events:,} events, are longer than {group.max_length:,}{late}"
    return Column(SLICE, wrong, kind, lambda index: f"row {index // 2:,}")
