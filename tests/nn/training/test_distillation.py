"""Learning from a teacher's scores: the loss and the training against plain PyTorch, resuming, and what is refused."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as plain_bce

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from nn.checks import open_checked
from nn.models.ranking_model import RankingModel
from nn.models.registry import declared_tables
from nn.models.tasks import tasks_of
from tests.helpers.composed import build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.preproc_command import preproc
from tests.nn.training.plain_training import resumes_bit_by_bit

STEPS = 4
TASKS = (
    "tasks={click: {teacher: old_click, teacher_weight: 0.3, teacher_temperature: 2}, "
    "buy: {weight: 2, teacher: old_buy, label_smoothing: 0.1}}"
)
HOW = {"click": (1, 0.3, 2.0, 0.0), "buy": (2, 0.5, 1.0, 0.1)}


def write_rows(root: Path, **options) -> Path:
    random = np.random.default_rng(2)
    features = [CategoricalFeature.of("item", 90), CategoricalFeature.of("tags", 30, None)]
    with write_dataset(
        root,
        categorical=features,
        numerical=("n",),
        label=[RowColumn("click"), RowColumn("buy")],
        weight="importance",
        teacher=["old_click", "old_buy"],
        absent={"test": ["old_click", "old_buy"]},
        **options,
    ) as directory:
        for split, rows in (("train", 229), ("test", 70)):
            lengths = random.integers(0, 4, rows)
            scores = random.random((2, rows))
            scores[:, :3] = [[0, 1, 0.5], [1, 1, 0]]
            directory[split].append(
                numerical=random.normal(size=(rows, 1)),
                labels=random.random((rows, 2)) < 0.4,
                weights=random.random(rows),
                teachers=dict(zip(["old_click", "old_buy"], scores, strict=True))
                if split == "train"
                else None,
                ids={
                    "item": random.integers(0, 90, rows),
                    "tags": random.integers(0, 30, lengths.sum()),
                },
                lengths={"tags": lengths},
            )
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("teachers") / "data")


def overrides(data: Path, *others: str) -> list[str]:
    return [
        "model.name=shared_bottom",
        "model.embedding_dim=8",
        "model.hidden=[8]",
        "model.tower_hidden=[4]",
        f"data.path={data}",
        "train.batch_size=64",
        "eval.batch_size=64",
        "optimizer.name=sgd",
        "optimizer.lr=0.3",
        "device=cpu",
        "log.pictures=false",
        *(others if any(o.startswith("tasks=") for o in others) else (TASKS, *others)),
    ]


def plain_losses(data: Path) -> list[float]:
    built = build(compose_config(*overrides(data)))
    declared = declared_tables(built.config.model, built.source.spec)
    model = RankingModel(declared, built.step.dense, built.config.seed, [], ())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for batch in built.train_loader.batches(0, STEPS):
        valid, loss = slice(batch.num_valid), torch.zeros(())
        weights, logits = batch.weights[valid], model(batch)[valid]
        for index, (name, (factor, w, temperature, s)) in enumerate(HOW.items()):
            labels = batch.labels[valid, index] * (1 - s) + s / 2
            score = batch.teachers[f"old_{name}"][valid]
            odds = (score / (1 - score)) ** (1 / temperature)
            soft = torch.where(score == 1, 1.0, odds / (1 + odds))
            of_label, of_teacher = (
                plain_bce(logits[:, index], target, weights, reduction="sum")
                for target in (labels, soft)
            )
            loss = loss + factor * ((1 - w) * of_label + w * of_teacher) / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    built.step.close()
    return losses


def test_a_student_trains_as_in_plain_pytorch(data):
    with ranks_of_cpu():
        wanted = plain_losses(data)
    layouts = ["sharding.types=[row_wise]", "train.accumulate=3"]
    cases = [overrides(data, layout) for layout in layouts]
    for world_size in (1, 2):
        for found in run_distributed(losses_of_cases, world_size, cases, STEPS):
            for losses in found:
                np.testing.assert_allclose(losses, wanted, rtol=2e-6, atol=2e-6)


def test_it_resumes_bit_by_bit(data, tmp_path):
    assert resumes_bit_by_bit(tmp_path, overrides(data), 1)


def test_of_a_teacher_alone_its_scores_are_the_labels():
    (task,) = tasks_of(
        [RowColumn("y")], compose_config("tasks={y: {teacher: t, teacher_weight: 1}}").task_options
    )
    logits = torch.tensor([0.3, -2.0, 40.0], requires_grad=True)
    scores = torch.tensor([0.0, 0.4, 1.0])
    loss = task.loss_share(logits, torch.zeros(3), 3, 3, teachers={"t": scores})
    torch.testing.assert_close(loss, plain_bce(logits, scores))
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (logits.detach().sigmoid() - scores) / 3)


@pytest.mark.parametrize("to", ["parquet", "binary"])
def test_scores_pass_through_other_formats(data, tmp_path, to):
    source = data
    if to == "binary":
        source = write_rows(tmp_path / "parquet", file_format="parquet")
    preproc("mode=convert", f"path={source}", f"output={tmp_path / 'out'}", f"to={to}")
    wanted, found = (
        open_dataset(FeatureSpec.load(root)).read("train", np.array([[0, 229]]))
        for root in (data, tmp_path / "out")
    )
    np.testing.assert_array_equal(found.teachers, wanted.teachers)
    assert np.unique(found.teachers).size > 400
    preproc("mode=verify", f"path={tmp_path / 'out'}")
    assert FeatureSpec.load(tmp_path / "out").splits["test"].absent == {"old_click", "old_buy"}


@pytest.mark.parametrize("value", [-0.01, 1.5, np.nan])
def test_a_score_outside_0_and_1_is_named(tmp_path, value):
    root = write_rows(tmp_path / "data")
    scores = np.fromfile(root / "train/old_buy.bin", "<f4")
    scores[7] = value
    scores.tofile(root / "train/old_buy.bin")
    source = open_dataset(FeatureSpec.load(root))
    with pytest.raises(
        ValueError,
        match=r"^teacher 'old_buy' .* at row 7 of .*old_buy.bin; want a number from 0 to 1",
    ):
        source.read("train", np.array([[0, 229]]))
    root = write_rows(tmp_path / "other", file_format="parquet")
    (path,) = (root / "train").glob("*.parquet")
    table = pq.read_table(path)
    index = table.schema.get_field_index("old_buy")
    changed = table["old_buy"].to_numpy().copy()
    changed[7] = value
    pq.write_table(table.set_column(index, "old_buy", [changed]), path)
    with pytest.raises(ValueError, match="row 7 of"):
        open_dataset(FeatureSpec.load(root)).read("train", np.array([[0, 229]]))


REFUSED = [
    ("{click: {teacher: new}}", "tasks.click.teacher=new: the training rows have no such scores of a teacher, only"),
    ("{click: {teacher_weight: 0.3}}", "tasks.click.teacher_weight has no effect without tasks.click.teacher"),
    ("{click: {teacher: old_click, teacher_weight: 1.5}}", "tasks.click.teacher_weight"),
    ("{click: {teacher: old_click, teacher_temperature: 0}}", "tasks.click.teacher_temperature"),
    ("{click: {teacher: old_click, keep_rate: 0.5}}", "tasks.click: a teacher's scores are probabilities, and pos"),
    ("{click: {teacher: 3}}", "tasks.click.teacher: got 3, want text or null"),
]  # fmt: skip


@pytest.mark.parametrize(("tasks", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_the_run(data, tasks, message):
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        open_checked(compose_config(*overrides(data, f"tasks={tasks}")))
    assert "\n" not in str(refused.value)


def test_evaluation_needs_no_teacher(data):
    open_checked(compose_config(*overrides(data, "tasks={click: {teacher: new}}", "mode=plan")))
