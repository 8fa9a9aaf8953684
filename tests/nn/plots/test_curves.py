"""curves.png: it is drawn for any run, and shows the recorded values."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nn.plots.curves import RunRecords, draw_curves
from nn.plots.series import MAX_POINTS, limits, series, smoothed, thinned

HEADER = {"recipe": "dlrm", "teacher_auc": 0.83, "data": "data/x", "batch_size": 4096, "seed": 7}


def records_of(num_train: int, num_test: int) -> list[dict]:
    train = [
        {
            "step": 10 * i,
            "epoch": i / 8,
            "loss": 0.5 / i,
            "train_auc": None if i == 1 else 0.7,
            "lr": 0.1,
            "samples_per_s": 1e6,
        }
        for i in range(1, num_train + 1)
    ]
    test = [
        {"step": 50 * i, "test_auc": 0.7 + 0.01 * i, "test_log_loss": 0.5} for i in range(num_test)
    ]
    return train + test


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draw records without rendering them, and return the figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def drawn(
        records: list[dict],
        header: dict = HEADER,
        restarts: tuple[int, ...] = (),
        days: tuple[int, ...] = (),
    ) -> Figure:
        draw_curves(RunRecords(header, records, restarts, days), tmp_path / "curves.png")
        return figures[-1]

    return drawn


def test_the_picture_is_a_png_of_a_fixed_width(tmp_path):
    run = RunRecords(HEADER, records_of(30, 4), [50])
    draw_curves(run, tmp_path / "curves.png")
    assert size_of(tmp_path / "curves.png") == (1560, 1027)


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def labels(axes: Axes) -> list[str]:
    return axes.get_legend_handles_labels()[1]


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


@pytest.mark.parametrize(
    ("num_train", "num_test", "num_empty"),
    [(0, 0, 3), (0, 1, 1), (1, 0, 1), (3, 1, 0), (30, 12, 0), (2000, 30, 0)],
)
def test_a_run_of_any_length_is_drawn(draw, num_train, num_test, num_empty):
    figure = draw(records_of(num_train, num_test))
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert shown.count("no records") == num_empty


def test_a_run_without_a_header_is_drawn(draw):
    assert texts(draw([], {})) == "run\n0 steps"


def test_the_title_names_last_and_best_value_dataset_batch_and_seed(draw):
    records = records_of(4, 3)
    records[-1]["test_auc"] = 0.705
    text = texts(draw(records, HEADER | {"model": "deepfm"}, (10, 20)))
    assert "deepfm on x   ·   test AUC 0.7050, best 0.7100 at step 50   ·   log loss 0.5000" in text
    assert "dlrm   ·   batch 4,096   ·   seed 7   ·   learning rate 0.1   ·   100 steps" in text
    assert "resumed 2 times (dotted)" in text
    assert "test AUC 0.7200, the best" in texts(draw(records_of(4, 3)))


def test_restarts_are_lines_in_every_panel_and_epochs_an_axis(draw):
    records = records_of(8, 2)
    records[1]["lr"] = 0.05
    figure = draw(records, HEADER, (30, 30, 60))
    assert figure.axes[-1].get_title(loc="left") == "learning rate"
    for axes in figure.axes:
        upright = [line.get_xdata() for line in axes.lines if list(line.get_ydata()) == [0, 1]]
        assert sorted(first for first, last in upright if first == last) == [30, 60]
    epochs = [child for axes in figure.axes for child in axes.child_axes]
    assert [axes.get_xlabel() for axes in epochs] == ["epoch", "epoch"]
    # Step 80 is the end of the first epoch.
    figure.axes[-1].figure.draw_without_rendering()
    ends = [child.get_xlim()[1] / figure.axes[0].get_xlim()[1] for child in epochs]
    assert ends == pytest.approx([1 / 80] * 2)


def test_days_are_lines_and_no_restarts(draw):
    records = records_of(4, 2)
    records[-1]["day"] = 1
    figure = draw(records, HEADER, days=(20,))
    assert " steps on 2 days (dotted)" in texts(figure)
    assert "resumed" not in texts(figure)
    assert any(list(line.get_xdata()) == [20, 20] for line in figure.axes[0].lines)


def test_a_single_record_has_its_value_beside_it(draw):
    figure = draw(records_of(1, 0))
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert {"0.5000", "1,000,000"} <= set(shown)


def test_points_outside_the_frame_are_marked_with_their_range(draw):
    records = records_of(40, 0)
    for index, record in enumerate(records):
        record["loss"] = 34.5 if index == 0 else 0.45 + 0.001 * (index % 7)
    loss = draw(records).axes[0]
    assert loss.get_ylim()[1] < 1
    assert loss.get_title(loc="right") == "▲ up to 34.5"
    (triangles,) = [line for line in loss.lines if line.get_marker() == "^"]
    assert triangles.get_xdata().tolist() == [10]
    assert draw(records[1:]).axes[0].get_title(loc="right") == ""


def test_a_legend_hides_no_point(draw):
    figure = draw(records_of(30, 12))
    figure.draw_without_rendering()
    for axes in figure.axes[:2]:
        frame, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert legend.y0 >= frame.y1 - 1
        assert (
            axes.title.get_window_extent().y1 == 0
            or axes._left_title.get_window_extent().y0 >= legend.y1 - 1
        )


def test_a_restored_model_is_marked(draw):
    for restored, count in (("step_8", 1), (None, 0)):
        figure = draw(records_of(3, 2), HEADER | {"restored": restored, "start_step": 0})
        assert labels(figure.axes[1]).count("restored model: 0.7000") == count


def test_a_metric_that_is_never_defined_is_named(draw):
    records = [{"step": 1, "test_auc": None, "test_log_loss": 0.5}] * 3
    assert draw(records).axes[1].get_title(loc="left") == "ROC AUC, undefined in all 3 evaluations"


def test_a_series_holds_the_records_with_a_number():
    steps, values = series(records_of(3, 2), "train_auc")
    assert steps.tolist() == [20, 30]
    assert values.tolist() == [0.7, 0.7]
    assert [len(value) for value in series([], "loss")] == [0, 0]


def test_smoothing_keeps_a_level_to_its_ends_and_takes_out_noise():
    noise = np.random.default_rng(0).normal(0, 1, 1000)
    assert smoothed(np.full(20, 3.0)) == pytest.approx(np.full(20, 3.0))
    assert smoothed(5 + noise).std() < noise.std() / 3
    assert smoothed(5 + noise).mean() == pytest.approx(5, abs=0.1)


def test_thinning_keeps_order_ends_and_the_one_outlier():
    values = np.sin(np.arange(100_000) / 50)
    values[77_777] = 9.0
    steps, kept = thinned((np.arange(100_000.0), values))
    assert len(kept) <= MAX_POINTS
    assert (np.diff(steps) > 0).all()
    assert kept.max() == 9.0
    assert steps[kept.argmax()] == 77_777
    assert steps[-1] > 99_800


def test_a_short_line_is_not_thinned():
    line = (np.arange(3.0), np.ones(3))
    assert thinned(line) is line


def test_the_way_down_from_the_untrained_model_does_not_set_the_range():
    steps = np.arange(100.0)
    loss = np.where(steps < 4, 50.0, 0.45 + 0.01 * np.sin(steps))
    low, high = limits((steps, loss))
    assert 0.4 < low < 0.45 < high < 0.5


def test_a_short_run_is_shown_whole_and_a_level_line_has_room():
    steps = np.arange(3.0)
    low, high = limits((steps, np.array([0.7, 0.5, 0.45])))
    assert low < 0.45
    assert high > 0.7
    low, high = limits((steps, np.zeros(3)))
    assert low < 0 < high
    assert limits((np.array([]), np.array([]))) is None
    assert all(math.isfinite(value) for value in limits((steps, np.full(3, 24.0))))


def test_matplotlib_is_imported_by_drawing_only():
    code = "import sys, nn.plots.curves; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("value", [None, "0.5", [1], {"a": 1}, True, math.nan, math.inf, 10**400])
def test_a_value_that_is_no_finite_number_is_left_out(value):
    steps, values = series([{"step": 1, "loss": value}, {"step": 2, "loss": 0.5}], "loss")
    assert (steps.tolist(), values.tolist()) == ([2], [0.5])


def test_each_task_has_a_panel_of_its_main_metric(draw):
    several = [
        {"step": step, "test_rmse.r": 2.0 - step, "test_auc.b": 0.6, "test_auc.c": 0.9 - step / 9}
        for step in (0, 1)
    ]
    figure = draw(several)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        *("loss, the sum over tasks", "r RMSE", "b AUC", "c AUC", "samples/s")
    ]
    assert "best: 1.0000 at step 1" in labels(figure.axes[1])
    assert "best: 0.9000 at step 0" in labels(figure.axes[3])
    assert "test c AUC 0.7889, best 0.9000" in texts(figure)
    alone = draw([{"step": step, "test_rmse": 2.0 - step} for step in (0, 1)])
    assert alone.axes[1].get_title(loc="left") == "RMSE"


def test_many_tasks_are_cut_with_a_note(draw):
    figure = draw([{"step": 1, "epoch": 1.0, **{f"test_auc.t{n}": 0.5 for n in range(14)}}])
    assert len(figure.axes) == 1 + 11 + 1
    assert "11 more tasks" in texts(figure)
    assert "the first 11 of 14 tasks" in texts(figure)


def test_a_loss_of_training_that_is_no_log_loss_is_not_called_one(draw):
    titles = [
        draw(records_of(3, 2), HEADER | {"trains_log_loss": same}).axes[0].get_title(loc="left")
        for same in (True, False)
    ]
    assert titles == ["log loss", "loss of training, log loss of test"]
