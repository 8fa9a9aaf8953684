"""predictions.png: it is drawn for every kind of evaluation, and names what is undefined."""

import pytest
import torch
from matplotlib.figure import Figure

from nn.metrics.prediction_curves import describe_predictions, score_buckets
from nn.plots.predictions import MOST_TASKS, draw_predictions
from tests.nn.metrics.test_prediction_curves import OneRank


def document(**tasks: tuple[torch.Tensor, torch.Tensor]) -> dict:
    described = {
        name: describe_predictions(score_buckets(*rows, None, OneRank()))
        for name, rows in tasks.items()
    }
    named = {"recipe": "shop_clicks", "model": "deepfm", "data": "data/shop"}
    return named | {"split": "test", "step": 8, "tasks": described}


LOGITS = torch.linspace(-3, 3, 500)
GOOD = LOGITS, torch.arange(500) % 7 < LOGITS + 2
RARE = LOGITS - 6, torch.arange(500) % 100 == 99


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draw without rendering, and return the figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def drawn(**tasks: tuple[torch.Tensor, torch.Tensor]) -> Figure:
        draw_predictions(document(**tasks), tmp_path / "predictions.png")
        return figures[-1]

    return drawn


def shown(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_a_label_has_calibration_gain_and_lift(tmp_path):
    draw_predictions(document(label=GOOD), tmp_path / "predictions.png")
    content = (tmp_path / "predictions.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 1560


def test_labels_have_a_row_each_and_rare_ones_logarithmic_axes(draw):
    figure = draw(click=GOOD, buy=RARE)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("click: calibration", "", "gain", "lift"),
        *("buy: calibration", "", "gain", "lift"),
    ]
    assert [figure.axes[index].get_xscale() for index in (0, 4)] == ["linear", "log"]
    # The histogram below shares the axis.
    assert [figure.axes[index].get_xlim() for index in (0, 4)] == [
        figure.axes[index].get_xlim() for index in (1, 5)
    ]
    assert (
        figure.texts[0].get_text() == "deepfm on shop   ·   predictions of split test after step 8"
    )


def test_what_is_undefined_is_named(draw):
    figure = draw(label=(LOGITS, torch.zeros(500, dtype=torch.bool)))
    assert shown(figure.axes[2]) == shown(figure.axes[3]) == ["undefined: no row is labelled 1"]
    empty = draw(label=(LOGITS[:0], GOOD[1][:0]))
    assert shown(empty.axes[0]) == ["no row has a weight"]


def test_many_labels_are_cut_with_a_note(draw):
    figure = draw(**{f"t{n}": (LOGITS[:5], GOOD[1][:5]) for n in range(MOST_TASKS + 2)})
    assert len(figure.axes) == 4 * MOST_TASKS
    assert "the first 8 of 10 labels" in figure.texts[1].get_text()
