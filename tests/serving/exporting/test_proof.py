"""The proof of an export accepts no score that is not finite, on either side."""

from types import SimpleNamespace

import pytest
import torch

from serving.exporting import proof
from serving.exporting.proof import prove

NAN, INF = float("nan"), float("inf")


class Scores:
    """Either path: the same scores for every batch."""

    manifest = SimpleNamespace(dtype="fp32")

    def __init__(self, *scores: float) -> None:
        self._scores = torch.tensor(scores)[:, None]

    def scores(self, _: object) -> torch.Tensor:
        return self._scores


@pytest.fixture(autouse=True)
def _same_rows(monkeypatch):
    monkeypatch.setattr(proof, "rows_of", lambda batch, served: batch)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("trained", "served", "message"),
    [
        ((0.5, 0.5), (0.5, NAN), "row 1 of split test has the score nan by the export"),
        ((0.5, 0.5), (INF, 0.5), "row 0 of split test has the score inf by the export"),
        ((0.5, NAN), (0.5, NAN), "row 1 of split test has the score nan by the training path"),
        ((0.5, NAN), (0.5, 0.5), "the training has diverged; export an earlier checkpoint"),
        ((-INF, 0.5), (-INF, 0.5), "row 0 of split test has the score -inf by the training path"),
        ((3e38, 0.5), (-3e38, 0.5), "differs from the training path by inf"),
    ],
)
def test_scores_that_are_not_finite_are_refused(trained, served, message, elsewhere):
    with pytest.raises(ValueError, match=message):
        prove([None], Scores(*trained), Scores(*served), "test", elsewhere=elsewhere)


def test_finite_scores_are_compared():
    found = prove([None, None], Scores(0.5, 0.25), Scores(0.5, 0.25 + 2**-22), "test")
    assert (found.rows, found.largest_difference) == (4, 2**-22)
