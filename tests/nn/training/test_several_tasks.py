"""Training of several tasks with sample weights: equal to plain PyTorch on 1 and 2 ranks, resumed bit by bit, and refusals."""

import copy
import json
import math

import pytest
import torch

from nn.distributed.process_group import process_group, ranks_from_environment
from tests.helpers.command import run_command
from tests.helpers.composed import build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import worlds
from tests.helpers.runs import killed_at
from tests.nn.training.two_heads import TWO_HEADS, plain_losses, write_two_labels

ROWS = {"train": 100, "test": 60}
STEPS = 8
TASKS = "tasks={click:{weight:2.0,label_smoothing:0.1,focal_gamma:2.0},rating:{weight:0.5}}"


def overrides(root, *more, tasks=TASKS):
    return [
        *("device=cpu", TWO_HEADS, f"data.path={root}", "model.embedding_dim=4"),
        *("optimizer.name=sgd", "optimizer.lr=0.5", "scheduler.warmup_steps=0"),
        *("scheduler.decay_start_step=null", "scheduler.decay_steps=0", "train.tf32=false"),
        *("train.batch_size=32", "eval.batch_size=32", "train.epochs=2", "data.shuffle_block=8"),
        *("log.loggers=[]", "log.pictures=false", "log.every=3", tasks),
        *more,
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_two_labels(tmp_path_factory.mktemp("tasks") / "data", ROWS)


def losses_of(cases: list[list[str]]) -> list[list[float]]:
    with ranks_of_cpu():
        return [build(compose_config(*case)).train(0, STEPS) for case in cases]


def formula(logits, labels, weights):
    """The documented loss, in terms of p."""
    x, label, total = logits[:, 0], labels[:, 0] * 0.9 + 0.05, weights.sum()
    p = torch.sigmoid(x)
    click = -(label * (1 - p) ** 2 * torch.log(p) + (1 - label) * p**2 * torch.log(1 - p))
    rating = (logits[:, 1] - labels[:, 1]) ** 2
    return 2 * (click * weights).sum() / total + 0.5 * (rating * weights).sum() / total


def test_one_and_two_ranks_equal_plain_pytorch(root):
    layouts = [
        "sharding.tables={user:table_wise,item:data_parallel}",
        "sharding.tables={user:row_wise}",
    ]
    cases = [overrides(root, layout) for layout in layouts]
    with ranks_of_cpu():
        built = build(compose_config(*cases[0]))
        tables = {shard.table: shard.weight.detach() for shard in built.step.tables.shards()}
        tables = {name: tables[name] for name in ("user", "item")}
        batches = [built.train_loader.batch(step) for step in range(STEPS)]
        assert batches[3].num_valid == 4
        plain = plain_losses(copy.deepcopy(built.step.dense), tables, batches, 0.5, formula)
    for losses in (
        *losses_of(cases),
        *(each for rank in run_distributed(losses_of, 2, cases) for each in rank),
    ):
        assert losses == pytest.approx(plain, rel=1e-5)
    assert len({round(loss, 3) for loss in plain}) == STEPS


def test_a_run_records_each_task_and_resumes_bit_by_bit(root, tmp_path):
    options = overrides(
        root,
        *("eval.metrics=[normalised_entropy,calibration,mae]", "eval.group=user"),
        *("eval.per_epoch=2", "eval.at_start=true", "eval.best_metric=rmse.rating"),
        "checkpoint.save_every=1",
    )
    ended = run_command(*options, f"run_dir={tmp_path / 'whole'}")
    assert ended.exit_code == 0, ended.err
    assert "click AUC" in ended.out
    assert "best rating RMSE" in ended.out
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    names = ["auc", "log_loss", "gauc", "normalised_entropy", "calibration"]
    keys = [*(f"test_{name}.click" for name in names), "test_rmse.rating", "test_mae.rating"]
    assert all(math.isfinite(summary[key]) for key in keys)
    assert summary["best_test_rmse.rating"] <= summary["test_rmse.rating"]
    assert math.isfinite(summary["untrained_test_auc"])
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()[1:]
    train = [record for record in map(json.loads, lines) if "loss" in record]
    assert all(math.isfinite(record["train_auc.click"]) for record in train[:1])
    assert all(math.isfinite(record["train_rmse.rating"]) for record in train)
    # Between two records, so that the rows of the next one are in the checkpoint.
    with killed_at(5):
        run_command(*options, f"run_dir={tmp_path / 'parts'}")
    assert run_command(*options, f"run_dir={tmp_path / 'parts'}").exit_code == 0
    again = json.loads((tmp_path / "parts/summary.json").read_text())
    assert {key: again[key] for key in keys} == {key: summary[key] for key in keys}
    changed = (tmp_path / "parts/metrics.jsonl").read_text().splitlines()[1:]
    quality = ("loss", "train_auc.click", "train_rmse.rating", *keys)
    assert [[(key, record.get(key)) for key in quality] for record in map(json.loads, changed)] == [
        [(key, record.get(key)) for key in quality] for record in map(json.loads, lines)
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["model.name=dlrm", "model.bottom_mlp=[8,4]", "model.top_mlp=[8,1]"],
            "model.name=dlrm predicts one label, and the dataset has 2 (click, rating); set model.name to a model of several: "
            "shared_bottom, mmoe, ple",
        ),
        (
            ["tasks={bought:{weight:2}}"],
            "tasks.bought: the dataset has no label 'bought', only click, rating",
        ),
        (
            ["tasks={click:{keep_rate:0.5}}"],
            "tasks.click.keep_rate=0.5: the dataset has a column of keep rates, 'kept'",
        ),
        (["eval.group=movie"], "eval.group=movie: the dataset has no such categorical feature"),
        (["eval.best_metric=auc"], "eval.best_metric=auc is not measured"),
        (
            ["eval.metrics=[ndcg]"],
            "eval.metrics names ndcg, which is none of pr_auc, normalised_entropy, calibration, mae",
        ),
        (
            ["tasks={click:{keep_rate:1.5}}"],
            "tasks.click.keep_rate must lie in (0, 1] or be null, got 1.5",
        ),
        (
            ["tasks={click:{alpha:1}}"],
            "tasks.click.alpha: no such option; want one of weight, loss, label_smoothing",
        ),
        (["tasks=[click]"], "tasks must map labels to options"),
    ],
)
def test_bad_input_is_one_line(root, tmp_path, more, message):
    tasks = next((text for text in more if text.startswith("tasks=")), TASKS)
    others = [text for text in more if text != tasks]
    ended = run_command(*overrides(root, *others, tasks=tasks), f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 2
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_evaluation_shifts_predictions_and_training_does_not(tmp_path):
    from tests.nn.training.two_heads import LABELS

    root = write_two_labels(
        tmp_path / "data", ROWS, has_weights=False, has_rates=False, labels=LABELS[:1]
    )
    results = {}
    for name, tasks in (("plain", "tasks=null"), ("kept", "tasks={click:{keep_rate:0.1}}")):
        more = ("eval.metrics=[calibration]", f"run_dir={tmp_path / name}")
        options = overrides(root, *more, tasks=tasks)
        assert run_command(*options).exit_code == 0
        results[name] = json.loads((tmp_path / name / "summary.json").read_text())
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[1:]
        results[name]["losses"] = [json.loads(line).get("loss") for line in lines]
    plain, kept = results["plain"], results["kept"]
    assert kept["losses"] == plain["losses"]
    assert kept["test_auc"] == pytest.approx(plain["test_auc"], abs=1e-3)
    assert kept["test_calibration"] < 0.5 * plain["test_calibration"]
    assert kept["test_log_loss"] > plain["test_log_loss"]


def captured_losses(cases: list[list[str]]) -> list[tuple[str | None, list[float]]]:
    """Return per case why the step is no CUDA graph, and its losses."""
    results = []
    with process_group(ranks_from_environment("cuda")):
        for case in cases:
            built = build(compose_config(*case))
            results.append((built.step.capture_blocker, built.train(0, STEPS)))
            built.step.close()
    return results


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_captured_step_of_several_tasks_equals_a_launched_one(root, world_size):
    cases = [
        overrides(root, "device=cuda", f"train.capture={capture}") for capture in ("true", "false")
    ]
    captured, plain = run_distributed(captured_losses, world_size, cases)[0]
    assert (captured[0], plain[0]) == (None, "train.capture=false")
    assert captured[1] == pytest.approx(plain[1], rel=2e-5)
    # One epoch has four steps, the last of four rows; weights and labels change from step to step.
    assert len({round(loss, 3) for loss in captured[1]}) == STEPS
