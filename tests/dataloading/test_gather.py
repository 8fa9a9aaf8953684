"""Selected runs of rows, against the rows one by one."""

import numpy as np
import pytest

from dataloading.gather import Selection

COLUMN = np.arange(2400).reshape(800, 3)


@pytest.mark.parametrize(
    "runs",
    [
        [[3, 90]],
        [[0, 64], [128, 192], [64, 128]],  # in blocks
        [[7, 8], [5, 6], [199, 200], [0, 1]],  # single rows
        [[3, 44], [150, 199], [60, 101]],  # runs that begin anywhere
        [[3, 244], [450, 699], [260, 501]],  # long ones
        [[3, 44], [9, 9], [60, 101], [44, 45]],
    ],
)
def test_a_selection_has_the_rows_of_its_runs(runs):
    selection = Selection(np.array(runs))
    wanted = [row for first, end in runs for row in range(first, end)]
    for column in (COLUMN, COLUMN[:, 0].copy()):
        found = np.empty_like(column[: len(wanted)])
        for span, piece in selection.pieces(column):
            found[span] = piece
        assert np.array_equal(found, column[wanted])
    assert [selection.row_at(position) for position in range(len(wanted))] == wanted
