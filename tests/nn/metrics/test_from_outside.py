"""A metric and a loss of a user, in this file alone: training, the best evaluation, several ranks, resuming, compare."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from dataloading.dataset.row_columns import RowColumn
from nn.distributed.process_group import Ranks
from nn.layers.task_losses import loss_of
from nn.metrics.measured_rows import MeasuredRows
from nn.metrics.task_metrics import TaskMetrics
from nn.models.metric import METRICS, Metric, further_metrics, metrics_of_facts
from nn.models.tasks import tasks_of
from tests.helpers.command import run_command, run_module
from tests.helpers.composed import TINY, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import jsonl, killed_at, records, summary, timeless
from tests.nn.metrics.test_task_metrics import CLICK, RATING, ROWS, SHARES, batch_of, drawn

HERE = "tests.nn.metrics.test_from_outside"


def brier(rows: MeasuredRows) -> float:
    squares, weight = rows.sums(
        lambda logits, labels, weights: [
            ((logits.sigmoid() - labels).square() * weights).sum(),
            weights.sum(),
        ]
    )
    return squares / weight if weight > 0 else math.nan


BRIER = Metric(
    name="brier", title="Brier score", compute=brier, larger_is_better=False, while_training=True
)
SECOND = Metric(name="brier", title="Brier score", compute=brier)
TAKEN = Metric(name="auc", title="test AUC", compute=brier)
WITHOUT = Metric(name="brier", title="Brier score")
OF_NUMBERS = Metric(name="bias", title="bias", compute=brier, is_binary=False)


def exponential(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return AdaBoost's loss of each row."""
    return torch.exp(torch.where(labels > 0.5, -logits, logits).clamp(max=10.0) / 2)


def mean_of_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return exponential(logits, labels).mean()


def detached(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return exponential(logits, labels).detach()


def exiting(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


BINS = Metric(
    name="bins",
    title="bins",
    compute=lambda rows: rows.sums(lambda x, y, w: [w.new_zeros(20), w.sum()])[1],
)
SHAPES = Metric(
    name="shapes", title="shapes", compute=lambda rows: torch.ones(2, 3) @ torch.ones(2, 3)
)
# Where a rank has exited, torch.distributed raises in this way.
LOST = Metric(
    name="lost", title="lost", compute=lambda rows: torch.distributed.broadcast(torch.ones(1), 9)
)
NOTHING = Metric(name="nothing", title="nothing", compute=lambda rows: None)
COUNTED = Metric(name="rows", title="rows", compute=brier)

OPTIONS = [
    *TINY,
    f"eval.metrics=[{HERE}:BRIER,calibration]",
    "eval.best_metric=brier",
    "eval.per_epoch=4",
    f"tasks={{label: {{loss: '{HERE}:exponential'}}}}",
    "log.every=8",
    "optimizer.lr=0.05",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("outside") / "run"
    ended = run_command(*OPTIONS, f"run_dir={run_dir}")
    assert ended.exit_code == 0, ended.err
    assert "Brier score" in ended.out
    return run_dir


def test_records_and_the_best_evaluation_have_the_metric(trained):
    evaluations = [record for record in records(trained) if "test_auc" in record]
    values = [record["test_brier"] for record in evaluations]
    assert len(values) == 5
    assert all(0 < value < 1 for value in values)
    result = summary(trained)
    assert result["best_test_brier"] == min(values)
    assert result["best_step"] == evaluations[int(np.argmin(values))]["step"]
    assert list(evaluations[0]).index("test_calibration") < list(evaluations[0]).index("test_brier")
    assert all("train_brier" in record for record in records(trained) if "loss" in record)


def test_the_loss_is_that_of_the_user(trained, tmp_path):
    ended = run_command(*OPTIONS, f"run_dir={tmp_path}", "tasks=null")
    assert ended.exit_code == 0, ended.err
    ours, plain = (
        next(record["loss"] for record in records(run_dir) if "loss" in record)
        for run_dir in (trained, tmp_path)
    )
    headers = (
        json.loads((run_dir / "metrics.jsonl").read_text().partition("\n")[0])
        for run_dir in (trained, tmp_path)
    )
    assert [header["trains_log_loss"] for header in headers] == [False, True]
    # Of logits near 0: exp(0), and ln 2.
    assert abs(ours - 1) < 0.2
    assert abs(plain - math.log(2)) < 0.2
    logits, labels = torch.linspace(-3, 3, 7), torch.tensor([0, 1, 0, 1, 0, 1, 1.0])
    task = tasks_of([RowColumn("click")], {"click": _options()})[0]
    share = task.loss_share(logits, labels, 5, 10)
    assert share.item() == pytest.approx(exponential(logits, labels)[:5].sum().item() / 10)


def _options():
    from configs.schema import TaskConfig

    return TaskConfig.of("tasks.click", {"loss": f"{HERE}:exponential"})


def test_compare_reads_the_metric_without_its_code(trained, monkeypatch, tmp_path):
    def refuse(*_: object) -> None:
        raise AssertionError("compare executes nothing that a run names")

    monkeypatch.setattr("nn.models.metric.load_user_object", refuse)
    table = tmp_path / "runs.json"
    ended = run_module("compare", str(trained), "metric=brier", f"json={table}")
    assert ended.exit_code == 0, ended.err
    assert "best brier" in ended.out
    (row,) = json.loads(table.read_text())
    assert row["best_brier"] == summary(trained)["best_test_brier"]
    assert run_module("compare", str(trained)).out.count("best brier") == 1  # eval.best_metric


def test_damaged_facts_of_a_metric_are_left_out():
    facts = {"a": 1, "b": {"title": "b"}, "c": {"title": "c", "larger_is_better": False}}
    assert [metric.name for metric in metrics_of_facts(facts)] == ["c"]
    assert metrics_of_facts(["x"]) == []


def test_a_run_resumes_with_the_same_metric(trained, tmp_path):
    run = [*OPTIONS, f"run_dir={tmp_path}", "checkpoint.save_every=8"]
    with killed_at(20):
        run_command(*run)
    ended = run_command(*run)
    assert ended.exit_code == 0, ended.err
    ours = [timeless(record) for record in records(trained)]
    assert [timeless(record) for record in records(tmp_path)] == ours
    assert jsonl(tmp_path / "metrics.jsonl")[0]["metrics"] == {
        "brier": {"title": "Brier score", "larger_is_better": False}
    }


def measured_on(ranks: Ranks, name: str) -> float:
    """Return the metric of this rank's rows; padding does not count."""
    tasks = tasks_of([CLICK, RATING], further=[f"{HERE}:{name}"])
    metrics = TaskMetrics(tasks, torch.device("cpu"), ranks, has_weights=True)
    share = SHARES[ranks.rank] if ranks.world_size > 1 else slice(0, ROWS)
    metrics.update(*batch_of(list(range(*share.indices(ROWS))), padding=3, rates=False))
    return metrics.compute()["brier.click"]


def measured() -> float:
    with ranks_of_cpu() as ranks:
        return measured_on(ranks, "BRIER")


def test_two_ranks_measure_what_one_does():
    logits, labels, weights, _, _ = (values.double() for values in drawn())
    squares = (logits[:, 0].sigmoid() - labels[:, 0]) ** 2
    want = ((squares * weights).sum() / weights.sum()).item()
    assert [measured(), *run_distributed(measured, 2)] == pytest.approx([want] * 3)


def errors_on_a_rank() -> list[str]:
    errors = []
    # In one group: a second one would meet at the port of the first, which another rank may not have left yet.
    with ranks_of_cpu() as ranks:
        for name in ("SHAPES", "LOST"):
            with pytest.raises((RuntimeError, ValueError)) as raised:
                measured_on(ranks, name)
            errors.append(str(raised.value))
    return errors


def test_an_error_of_two_ranks_is_the_metrics_unless_a_rank_is_lost():
    for shapes, lost in run_distributed(errors_on_a_rank, 2):
        assert "metric shapes of eval.metrics has failed (RuntimeError: mat1 and mat2" in shapes
        assert "eval.metrics" not in lost


def test_a_fault_in_a_metric_of_the_project_is_not_called_the_users(monkeypatch):
    def fails(rows: MeasuredRows) -> float:
        raise TypeError("a fault of the project")

    monkeypatch.setattr("nn.metrics.measures.log_loss", fails)
    with pytest.raises(TypeError, match="a fault of the project"):
        measured()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["ndcg"],
            "names ndcg, which is none of pr_auc, normalised_entropy, calibration, mae, nor",
        ),
        ([f"{HERE}:missing"], "has no missing"),
        ([f"{HERE}:brier"], "is no nn.models.metric.Metric with a compute"),
        ([f"{HERE}:WITHOUT"], "is no nn.models.metric.Metric with a compute"),
        ([f"{HERE}:TAKEN"], "its name is auc; want letters"),
        ([f"{HERE}:BRIER", f"{HERE}:SECOND"], "its name is brier; want letters"),
    ],
)
def test_what_is_no_further_metric_is_refused(names, message):
    with pytest.raises(ValueError, match=message):
        further_metrics(names)


def test_a_metric_of_another_kind_of_label_is_refused():
    with pytest.raises(ValueError, match="bias is of regression labels, and the dataset has none"):
        tasks_of([RowColumn("click")], further=[f"{HERE}:OF_NUMBERS"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "hinge"}, "tasks.click.loss=hinge is none of cross_entropy, the losses of bin"),
        ({"loss": "squared_error"}, "is none of cross_entropy"),
        ({"loss": f"{HERE}:HERE"}, "is no function of predictions and labels"),
        ({"loss": f"{HERE}:exponential", "focal_gamma": 2}, "are of cross_entropy; leave them out"),
        ({"loss": 3}, "tasks.click.loss: got 3, want text or null"),
    ],
)
def test_what_is_no_loss_is_refused(values, message):
    from configs.schema import TaskConfig

    with pytest.raises(ValueError, match=message):
        tasks_of([RowColumn("click")], {"click": TaskConfig.of("tasks.click", values)})


def test_a_named_loss_is_that_of_the_project():
    from configs.schema import TaskConfig

    named = loss_of(TaskConfig(loss="cross_entropy"), is_binary=True, key="loss")
    logits, labels = torch.tensor([1.0, -2.0]), torch.tensor([1.0, 0.0])
    torch.testing.assert_close(named(logits, labels), -logsigmoid(torch.tensor([1.0, 2.0])))


def test_the_help_names_every_metric_that_may_be_named():
    from configs.options import describe
    from configs.schema import Config

    meanings = dict(describe(Config))
    named = [m.name for m in METRICS if not m.is_default and m.name != "gauc"]
    assert all(name in meanings["eval.metrics"] for name in named)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (f"tasks={{label: {{loss: '{HERE}:mean_of_rows'}}}}", "returns [] for [64] predictions"),
        (f"tasks={{label: {{loss: '{HERE}:detached'}}}}", "returns losses without a gradient"),
        (f"tasks={{label: {{loss: '{HERE}:exiting'}}}}", "has failed (SystemExit: 3, at "),
        (
            f"eval.metrics=[{HERE}:NOTHING]",
            "the metric nothing of eval.metrics has failed (TypeError: ",
        ),
        (
            f"eval.metrics=[{HERE}:BINS]",
            "rows.sums: the function returns shapes [[20], []], want a list of scalars; write",
        ),
        (
            f"eval.metrics=[{HERE}:COUNTED]",
            "its name is rows; want letters, digits and _, and none of",
        ),
        ("eval.metrics=[nn.nope:X]", "nn.nope cannot be imported (ModuleNotFoundError: "),
    ],
)
def test_what_fails_or_returns_no_number_a_row_ends_the_run_in_one_line(option, message, tmp_path):
    ended = run_command(*TINY, "log.pictures=false", option, f"run_dir={tmp_path}/run")
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1), ended.err
    assert message in ended.err
