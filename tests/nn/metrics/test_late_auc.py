"""The AUC beside the step is exactly the one that waits for the device."""

import math
from types import SimpleNamespace

import pytest
import torch

from dataloading.dataset.row_columns import RowColumn
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.metrics.late_auc import LateAuc, RankRows
from nn.metrics.ranking import roc_auc
from nn.metrics.task_metrics import TaskMetrics
from nn.models.tasks import tasks_of
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_gpus

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 40


def late_auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    rows = logits.to(DEVICE), labels.to(DEVICE) > 0.5
    alone = RankRows(lambda of_rank: [of_rank], lambda counts: counts)
    return LateAuc([*rows], lambda: rows, DEVICE, alone).value()


@pytest.mark.parametrize("distinct", [3, 40, 10**6])
def test_it_is_exact_with_and_without_ties(distinct):
    generator = torch.Generator().manual_seed(distinct)
    logits = torch.randint(distinct, (1001,), generator=generator).float() - distinct / 2
    labels = (torch.rand(1001, generator=generator) < 0.2).float()
    assert late_auc(logits, labels) == roc_auc(logits, labels)


@pytest.mark.parametrize(
    ("logits", "labels"),
    [([], []), ([1.0, 2.0], [1.0, 1.0]), ([1.0, 2.0], [0.0, 0.0]), ([1.0, math.nan], [0.0, 1.0])],
)
def test_it_is_nan_where_it_is_not_defined(logits, labels):
    assert math.isnan(late_auc(torch.tensor(logits), torch.tensor(labels)))


def batch_of(ranks: Ranks, number: int, *, is_full: bool) -> tuple[torch.Tensor, SimpleNamespace]:
    """Logits and labels of a rank with ties; a batch that is not full has rows on the first rank only."""
    generator = torch.Generator().manual_seed(10 * number + ranks.rank)
    logits = torch.randn(BATCH, generator=generator).mul(4).round()
    labels = (torch.rand(BATCH, generator=generator) < 0.3).float()
    return logits.to(ranks.device), SimpleNamespace(
        labels=labels.to(ranks.device),
        num_valid=BATCH if is_full or ranks.is_rank0 else 0,
        global_valid=BATCH * ranks.world_size if is_full else BATCH,
        weights=None,
    )


def started_and_computed(device: str) -> list[tuple[bool, float, float]]:
    """Return whether the AUC is late, it, and the one that waits: of full batches, with one that is not, and resumed."""
    results = []
    ranks = ranks_from_environment(device)
    with process_group(ranks):
        tasks = tasks_of([RowColumn("click")], {})
        for are_full, is_resumed in (([True, True], False), ([True, False], False), ([True], True)):
            metrics = TaskMetrics(tasks, ranks.device, ranks, while_training=True)
            if is_resumed:
                rows = {"logits": torch.tensor([0.5, 9.0]), "labels": torch.tensor([1.0, 0.0])}
                metrics.restore(rows if ranks.is_rank0 else {})
            for number, is_full in enumerate(are_full):
                metrics.update(*batch_of(ranks, number, is_full=is_full))
            started = metrics.start()
            is_late = "auc" not in started._values
            results.append((is_late, started.values()["auc"], metrics.compute()["auc"]))
    return results


@pytest.mark.parametrize(
    ("device", "world_size"),
    [("cpu", 1), ("cpu", 2), *(pytest.param("cuda", n, marks=needs_gpus(n)) for n in (1, 2))],
)
def test_it_covers_the_rows_of_all_ranks(device, world_size):
    of_ranks = run_distributed(started_and_computed, world_size, device)
    assert all(each == of_ranks[0] for each in of_ranks)
    assert [is_late for is_late, *_ in of_ranks[0]] == [True, world_size == 1, world_size == 1]
    for _, late, waited in of_ranks[0]:
        assert late == waited
        assert 0.3 < late < 0.7
