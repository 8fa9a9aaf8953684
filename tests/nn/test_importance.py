"""Importance of features by permutation: the rows that are read, the result on 1 and 2 ranks, and the command."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import BatchTarget
from dataloading.permuted_source import PermutedSource
from nn.build import build_test_loader
from nn.models.metric import AUC, METRICS
from nn.modes.importance import measure_importance
from nn.next_day import KnownIdsSource
from nn.training.evaluator import Evaluator, predictions
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.datasets import write_clicks
from tests.helpers.distributed import run_distributed
from tests.nn.metrics.test_task_metrics import gauc_by_loop

LOG_LOSS = METRICS[1]

ROWS = 50
ALL = np.array([[0, ROWS]])


@pytest.fixture
def source(tmp_path):
    """Rows whose every value is the number of the row."""
    features = [
        CategoricalFeature.of("user", ROWS),
        CategoricalFeature.of("pair", ROWS, hotness=2),
        CategoricalFeature.of("tags", ROWS, hotness=None),
    ]
    rows = np.arange(ROWS)
    lengths = rows % 3
    with write_dataset(
        tmp_path / "data", categorical=features, numerical=("n", "m"), weight="w"
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(
                labels=rows % 2,
                weights=rows,
                numerical=np.stack([rows, rows], 1),
                ids={"user": rows, "pair": np.stack([rows, rows], 1), "tags": rows.repeat(lengths)},
                lengths={"tags": lengths},
            )
    return open_dataset(FeatureSpec.load(tmp_path / "data"))


@pytest.mark.parametrize("feature", ["n", "m", "user", "pair", "tags"])
def test_one_feature_is_permuted_and_all_else_stays(source, feature):
    plain = source.read("test", ALL)
    permuted = PermutedSource(source, feature, (1, 2), block_rows=20)
    columns = permuted.read("test", ALL, into=BatchTarget(ROWS + 3))
    views = {"n": lambda c: c.numerical[:ROWS, 0], "m": lambda c: c.numerical[:ROWS, 1]}
    views |= {name: lambda c, i=i: c.ids[i] for i, name in enumerate(("user", "pair", "tags"))}
    for name, view in views.items():
        same = np.array_equal(view(columns), view(plain))
        assert same == (name != feature)
    assert np.array_equal(np.sort(views[feature](columns)), np.sort(views[feature](plain)))
    assert np.array_equal(columns.weights[:ROWS], plain.weights)
    assert np.array_equal(columns.labels[:ROWS], plain.labels)
    assert not columns.labels[ROWS:].any()
    if feature == "user":
        # Within its block.
        assert np.array_equal(columns.ids[0] // 20, np.arange(ROWS) // 20)
    if feature == "tags":
        assert columns.lengths[2][:ROWS].sum() == plain.lengths[2].sum()


def test_the_rows_do_not_depend_on_how_they_are_read(source):
    permuted = PermutedSource(source, "user", (1, 2), block_rows=20)
    whole = permuted.read("test", ALL).ids[0]
    parts = [permuted.read("test", np.array([[a, a + 7]])).ids[0] for a in range(0, 49, 7)]
    assert np.array_equal(np.concatenate(parts), whole[:49])
    other = PermutedSource(source, "user", (1, 3), block_rows=20).read("test", ALL).ids[0]
    assert not np.array_equal(other, whole)


def test_features_are_ordered_by_the_loss_of_the_first_metric(source):
    values = {"n": 0.7, "m": 0.8, "user": 0.5, "pair": 0.85, "tags": 0.79}

    def evaluate(rows):
        return {"test_auc": values.get(getattr(rows, "_feature", ""), 0.8)}

    found = measure_importance(source, "test", evaluate, [AUC], seed=1, repeats=2)
    assert list(found["features"]) == ["user", "n", "tags", "m", "pair"]
    assert found["features"]["user"]["auc"] == pytest.approx({"mean": -0.3, "deviation": 0})
    assert found["unpermuted"] == {"auc": 0.8}
    assert SimpleNamespace(**found).permuted_within_rows == ROWS


def importance_of_this_rank() -> dict:
    """Importance of the features of synthetic clicks, of a model trained for a few steps."""
    config = compose_config(*TINY, "optimizer.lr=0.1")
    with ranks_of_cpu() as ranks:
        built = build(config)
        built.train(0, 4)

        def evaluate(source):
            loader = build_test_loader(config, source, ranks)
            return Evaluator(built.step, loader, ranks, config.eval).run()

        return measure_importance(
            built.source, "test", evaluate, [AUC, LOG_LOSS], seed=1, repeats=1
        )


def test_two_ranks_find_the_importance_that_one_finds():
    first, second = run_distributed(importance_of_this_rank, 2)
    assert first == second
    one = importance_of_this_rank()
    for name, changes in one["features"].items():
        for key, numbers in changes.items():
            assert first["features"][name][key] == pytest.approx(numbers, abs=2e-4)


@pytest.mark.parametrize("change", ["permuted", "known"])
def test_groups_are_those_of_the_stored_rows(change):
    config = compose_config(*TINY, "optimizer.lr=0.1", "eval.group=cat_0")
    with ranks_of_cpu() as ranks:
        built = build(config)
        built.train(0, 4)
        sizes = {feature.name: feature.cardinality for feature in built.source.spec.categorical}
        changed = {
            "permuted": PermutedSource(built.source, "cat_0", (1, 2)),
            # As the rows of a new day, of which a model knows no user but three.
            "known": KnownIdsSource(built.source, sizes | {"cat_0": 3}),
        }[change]
        loader = build_test_loader(config, changed, ranks)
        found, of_batches = (
            Evaluator(built.step, loader, ranks, config.eval, stored=stored).run()["test_gauc"]
            for stored in (built.source, None)
        )
        batches = predictions(built.step, loader.batches(0, loader.steps_per_epoch), ranks.device)
        scores, labels = zip(
            *((x[: b.num_valid].clone(), b.labels[: b.num_valid].clone()) for b, x in batches),
            strict=True,
        )
        rows = np.array([[0, built.source.num_rows("test")]])
        groups = built.source.read("test", rows).ids[0]
        clicks = torch.cat(labels).numpy()
        expected = gauc_by_loop(torch.cat(scores).numpy(), clicks, groups, np.ones(len(groups)))
    assert found == pytest.approx(expected, abs=1e-6)
    assert abs(found - of_batches) > 1e-4


def test_the_command_finds_the_feature_that_labels_depend_on(tmp_path):
    root = write_clicks(tmp_path / "data")
    options = [
        *(text for text in TINY if not text.startswith("data.synthetic")),
        *(f"data.path={root}", "log.loggers=[]"),
        *("optimizer.name=adam", "optimizer.lr=0.02", "train.epochs=20"),
    ]
    trained = run_command(*options, f"run_dir={tmp_path / 'run'}")
    assert trained.exit_code == 0, trained.err
    (last,) = sorted((tmp_path / "run/checkpoints").glob("step_*"))[-1:]
    more = [
        "mode=importance",
        f"checkpoint.restore={last}",
        "eval.importance_repeats=2",
        "log.pictures=true",
    ]
    ended = run_command(*options, *more, f"run_dir={tmp_path / 'one'}")
    assert ended.exit_code == 0, ended.err
    found = json.loads((tmp_path / "one/importance.json").read_text())
    assert next(iter(found["features"])) == "user"
    assert found["features"]["user"]["auc"]["mean"] < -0.05
    assert found["features"]["user"]["log_loss"]["mean"] > 0
    assert abs(found["features"]["item"]["auc"]["mean"]) < 0.05
    assert (tmp_path / "one/importance.png").read_bytes().startswith(b"\x89PNG")
    lines = list(csv.reader((tmp_path / "one/importance.csv").open()))
    assert lines[0] == [
        "feature",
        "auc mean",
        "auc deviation",
        "log_loss mean",
        "log_loss deviation",
    ]
    assert [line[0] for line in lines[1:]] == list(found["features"])
    assert "feature permuted" in ended.out
    refused = run_command(*options, "mode=importance", f"run_dir={tmp_path / 'none'}")
    assert refused.exit_code == 2
    assert "mode=importance needs a trained model" in refused.err
