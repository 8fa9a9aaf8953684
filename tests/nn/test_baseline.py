"""The logistic regression beside a run: its quality, its rows, and where it stands."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.row_columns import Channel, RowColumn
from nn.baseline import baseline, most_rows
from nn.build import open_source
from nn.models.tasks import tasks_of_run
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config

ROWS = {"train": 8_000, "test": 3_000}
EVERY_ROW = 10**9
LABELS = [
    RowColumn("click", Channel.label, np.dtype("bool")),
    RowColumn("buy", Channel.label, np.dtype("bool")),
    RowColumn("rating", Channel.label, np.dtype("float32")),
]


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """Write clicks drawn from an effect per id, a smooth effect of a number and one per id of a list; return their columns."""
    draw = np.random.default_rng(0)
    effects, kept = draw.normal(size=(2, 300)), {}
    root = tmp_path_factory.mktemp("data")
    users = CategoricalFeature.of("user", 300), CategoricalFeature.of("tags", 50, hotness=None)
    settings = {"numerical": ("n",), "numerical_dtype": "float32", "categorical": users}
    one = write_dataset(root / "one", **settings)
    several = write_dataset(
        root / "several", **settings, label=LABELS, weight="importance", keep_rate="kept"
    )
    with one as single, several as weighted:
        for split, count in ROWS.items():
            user, lengths = draw.integers(0, 300, count), draw.integers(0, 4, count)
            number = draw.normal(size=count).astype(np.float32)
            tags = draw.integers(0, 50, lengths.sum())
            logits = effects[0, user] + np.sin(2 * number) - 1
            np.add.at(logits, np.repeat(np.arange(count), lengths), effects[1, tags] / 2)
            click, buy = draw.random((2, count)) < 1 / (1 + np.exp(-logits + [[0], [2]]))
            columns = {
                "numerical": number[:, None],
                "ids": {"user": user, "tags": tags},
                "lengths": {"tags": lengths},
            }
            single[split].append(**columns, labels=click)
            weights, rates = draw.choice([0.5, 1, 4], count), draw.choice([0.25, 1], count)
            labels = np.stack([click, buy, logits], axis=1)
            weighted[split].append(**columns, labels=labels, weights=weights, keep_rates=rates)
            kept[split] = user, number, tags, lengths, click
    return root, kept


def measured(root, *overrides, trained=EVERY_ROW, test=ROWS["test"]):
    config = compose_config(f"data.path={root}", *overrides)
    source = open_source(config)
    tasks = tasks_of_run(config, source.spec)
    return baseline(source, tasks, "test", test, trained)


def one_hot(user, number, tags, lengths, _):
    """Return users, 64 bins of the number and tags as a matrix, for scikit-learn."""
    matrix = np.zeros((len(user), 414))
    matrix[np.arange(len(user)), user] = 1
    matrix[np.arange(len(user)), 300 + np.searchsorted(np.linspace(-2.5, 2.5, 63), number)] = 1
    np.add.at(matrix, (np.repeat(np.arange(len(user)), lengths), 364 + tags), 1)
    return matrix


def test_it_is_as_good_as_a_tuned_logistic_regression(clicks):
    root, columns = clicks
    found = measured(root / "one")
    train, test = columns["train"], columns["test"]
    scores = [
        LogisticRegression(C=c, max_iter=300)
        .fit(one_hot(*train), train[-1])
        .predict_proba(one_hot(*test))[:, 1]
        for c in (0.03, 0.1, 0.3, 1)
    ]
    assert found["baseline_test_auc"] > max(roc_auc_score(test[-1], s) for s in scores) - 0.005
    assert found["baseline_test_log_loss"] < min(log_loss(test[-1], s) for s in scores) + 0.005
    assert found["baseline_rows"] == ROWS["train"]


def test_the_same_rows_give_the_same_bits_with_any_number_of_threads(clicks):
    before = torch.get_num_threads()
    first = measured(clicks[0] / "one", trained=3_072, test=500)
    torch.set_num_threads(3)
    try:
        assert measured(clicks[0] / "one", trained=3_072, test=500) == first
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert first["baseline_rows"] == 3_072


def test_every_binary_label_has_one_with_weights_and_keep_rates(clicks):
    found = measured(clicks[0] / "several", "model.name=shared_bottom")
    keys = [
        f"baseline_test_{metric}.{label}"
        for label in ("click", "buy")
        for metric in ("auc", "log_loss")
    ]
    assert list(found) == ["baseline_rows", *keys]
    assert min(found[key] for key in keys if "auc" in key) > 0.65


def test_it_stands_in_the_result_of_a_run_and_can_be_left_out(clicks, tmp_path):
    root = clicks[0] / "one"
    command = (*TINY, f"data.path={root}", "checkpoint.save=false", "log.pictures=false")
    ended = run_command(*command, "train.max_steps=20", f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0, ended.err
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    auc, loss = summary["baseline_test_auc"], summary["baseline_test_log_loss"]
    (line,) = [line for line in ended.out.splitlines() if line.startswith("baseline")]
    shown = f"test AUC {auc:.4f}  log loss {loss:.4f}  (logistic regression on the ids of "
    assert line.split(maxsplit=1)[1].startswith(shown)
    # Synthetic clicks have a ceiling instead.
    for options in (["eval.baseline=false"], ["data.path=null"]):
        ended = run_command(
            *command, "train.max_steps=2", *options, f"run_dir={tmp_path / options[0]}"
        )
        assert ended.exit_code == 0, ended.err
        assert "baseline" not in (tmp_path / options[0] / "summary.json").read_text()


def test_rows_of_many_ids_are_read_in_parts_that_lie_in_memory(clicks, monkeypatch):
    # 1.5 tags on average, a user, a number and the bias.
    monkeypatch.setattr("nn.baseline.MOST_IDS", 20_000)
    monkeypatch.setattr("nn.baseline.MOST_HELD_IDS", 8_000)
    config = compose_config(f"data.path={clicks[0] / 'one'}")
    source = open_source(config)
    assert 1_600 < most_rows(source.spec) < 2_000
    read, rows_of = source.read, []

    def counted(split, runs, *args, **kwargs):
        rows_of.append(int((runs[:, 1] - runs[:, 0]).sum()))
        return read(split, runs, *args, **kwargs)

    monkeypatch.setattr(source, "read", counted)
    found = baseline(source, tasks_of_run(config, source.spec), "test", 1_000, EVERY_ROW)
    assert 4_000 < rows_of[0] < 5_000
    assert max(rows_of[1:]) <= 1_024
    assert 4_000 < found["baseline_rows"] < 5_200
