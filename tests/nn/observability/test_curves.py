"""curves.png: it is drawn for any run, and shows the recorded values."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from nn.observability.curves import (
    MAX_POINTS,
    draw_curves,
    limits,
    series,
    smoothed,
    thinned,
)

HEADER = {"recipe": "dlrm", "teacher_auc": 0.83}


def records_of(num_train: int, num_test: int) -> list[dict]:
    train = [
        {
            "step": 10 * i,
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


def write(path: Path, records: list[dict], header: dict = HEADER) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in (header, *records)))
    return path


def size_of(png: Path) -> tuple[int, int]:
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


@pytest.mark.parametrize(
    ("num_train", "num_test"),
    [(0, 0), (0, 1), (1, 0), (3, 1), (30, 12), (2000, 30)],
)
def test_a_run_of_any_length_is_drawn(tmp_path, num_train, num_test):
    metrics = write(tmp_path / "metrics.jsonl", records_of(num_train, num_test))
    draw_curves(metrics, tmp_path / "curves.png")
    assert size_of(tmp_path / "curves.png") == (1560, 1020)


def test_a_metrics_file_without_a_line_is_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert size_of(tmp_path / "curves.png") == (1560, 1020)


def test_a_restored_model_is_marked(tmp_path, monkeypatch):
    labels = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda *arguments, **options: (
            labels.append(options.get("label")) or plot(*arguments, **options)
        ),
    )
    for header in ({"restored": "step_8", "start_step": 0}, {"restored": None, "start_step": 0}):
        metrics = write(tmp_path / "metrics.jsonl", records_of(3, 2), HEADER | header)
        draw_curves(metrics, tmp_path / "curves.png")
    assert labels.count("restored model: 0.7000") == 1


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
    code = "import sys, nn.observability.curves; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("value", [None, "0.5", [1], {"a": 1}, True, math.nan, math.inf, 10**400])
def test_a_value_that_is_no_finite_number_is_left_out(value):
    steps, values = series([{"step": 1, "loss": value}, {"step": 2, "loss": 0.5}], "loss")
    assert (steps.tolist(), values.tolist()) == ([2], [0.5])


def test_a_final_evaluation_is_no_point_of_a_curve():
    """It is recorded last, of other rows and of the model of an earlier step."""
    records = [{"step": 8, "test_auc": 0.7}, {"step": 4, "test_auc": 0.8, "final": True}]
    steps, values = series(records, "test_auc")
    assert (steps.tolist(), values.tolist()) == ([8], [0.7])


def test_the_first_auc_of_several_labels_is_drawn_and_else_the_first_rmse(tmp_path, monkeypatch):
    titles, labels = [], []
    plot, set_title = Axes.plot, Axes.set_title
    monkeypatch.setattr(
        Axes,
        "plot",
        lambda *arguments, **options: (
            labels.append(options.get("label")) or plot(*arguments, **options)
        ),
    )
    monkeypatch.setattr(
        Axes,
        "set_title",
        lambda self, title, **options: titles.append(title) or set_title(self, title, **options),
    )
    several = [
        {"step": step, "test_rmse.r": 2.0 - step, "test_auc.b": 0.6, "test_auc.c": 0.9}
        for step in (0, 1)
    ]
    alone = [{"step": step, "test_rmse": 2.0 - step} for step in (0, 1)]
    for records in (several, alone):
        metrics = write(tmp_path / "metrics.jsonl", records)
        draw_curves(metrics, tmp_path / "curves.png")
    assert titles[1::4] == ["b AUC", "RMSE"]
    assert {"best test b AUC: 0.6000 at step 0", "best test RMSE: 1.0000 at step 1"} <= set(labels)
