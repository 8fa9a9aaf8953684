"""AUC and log loss against scikit-learn in float64, over one process and over two."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from nn.metrics.measured_rows import MeasuredRows, RowGather
from nn.metrics.ranking import KeptRows, roc_auc
from tests.helpers.composed import ranks_of_cpu
from tests.helpers.distributed import run_distributed

CPU = torch.device("cpu")


class OneRank:
    """The collectives of a process without others."""

    rank, world_size = 0, 1

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast_object(self, value: object) -> object:
        return value


def totals(kept: KeptRows, ranks: Any = None) -> dict[str, float]:
    gather = RowGather(kept.device, ranks or OneRank())
    measured = MeasuredRows(*kept.kept(), None, torch.empty(0), gather).totals
    return {name: value for name, value in measured.items() if name != "weight"}


def clicks(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that say something about the labels: AUC about 0.76."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num_rows, generator=generator) < 0.25).float()
    return torch.randn(num_rows, generator=generator) + labels - 1, labels


def expected(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    # Imported here, since the ranks import this file and would wait for it.
    from sklearn.metrics import log_loss, roc_auc_score

    probabilities = torch.sigmoid(logits.double()).numpy()
    return {
        "auc": roc_auc_score(labels.numpy(), logits.double().numpy()),
        "log_loss": log_loss(labels.numpy(), probabilities),
        "rows": len(labels),
        "label_mean": labels.double().mean().item(),
    }


def test_auc_of_four_rows_is_what_one_counts_by_hand():
    # Pairs (positive, negative): 0.8>0.1, 0.8>0.4, 0.35>0.1 in order; 0.35<0.4 is not.
    assert roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1])) == 0.75


def test_ties_count_half():
    assert roc_auc(torch.tensor([2.0, 2.0, 1.0]), torch.tensor([1, 0, 0])) == 0.75
    assert roc_auc(torch.zeros(10), torch.arange(10) % 2) == 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_auc_equals_scikit_learn_at_every_width(dtype):
    logits, labels = clicks(5_000)
    logits = logits.to(dtype)
    if dtype == torch.bfloat16:
        assert len(logits.unique()) < 2_000
    assert roc_auc(logits, labels) == pytest.approx(expected(logits, labels)["auc"], abs=1e-12)


def test_auc_does_not_depend_on_the_order_of_rows_to_the_last_bit():
    logits, labels = clicks(5_000)
    order = torch.randperm(5_000)
    assert roc_auc(logits[order], labels[order]) == roc_auc(logits, labels)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_auc_of_one_class_is_nan_and_the_rest_is_still_reported(label):
    metrics = KeptRows(CPU)
    metrics.update(torch.zeros(8), torch.full((8,), label), num_valid=8)
    result = totals(metrics)
    assert math.isnan(result.pop("auc"))
    assert result == {
        "log_loss": pytest.approx(math.log(2)),
        "rows": 8,
        "label_mean": label,
    }


def test_a_nan_logit_makes_both_metrics_nan_and_not_a_wrong_number():
    metrics = KeptRows(CPU)
    metrics.update(torch.tensor([math.nan, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]), num_valid=3)
    result = totals(metrics)
    assert math.isnan(result["auc"])
    assert math.isnan(result["log_loss"])


def test_batches_add_up_and_padding_is_not_counted():
    logits, labels = clicks(1_000)
    metrics = KeptRows(CPU)
    metrics.update(logits[:600], labels[:600], num_valid=600)
    padded_logits = torch.cat([logits[600:], torch.full((24,), 9.0)])
    padded_labels = torch.cat([labels[600:], torch.zeros(24)])
    metrics.update(padded_logits, padded_labels, num_valid=400)
    assert totals(metrics) == pytest.approx(expected(logits, labels), abs=1e-9)


def test_bf16_logits_give_the_metrics_of_the_rounded_values():
    logits, labels = clicks(3_000)
    logits = logits.bfloat16()
    metrics = KeptRows(CPU)
    metrics.update(logits, labels, num_valid=3_000)
    assert totals(metrics) == pytest.approx(expected(logits, labels), abs=1e-9)


def test_log_loss_of_far_logits_is_neither_clipped_nor_infinite():
    logits = torch.tensor([50.0, -50.0, 50.0, -50.0])
    labels = torch.tensor([1.0, 0.0, 0.0, 1.0])
    metrics = KeptRows(CPU)
    metrics.update(logits, labels, num_valid=4)
    # Two rows right (a loss of 2e-22 each) and two wrong by 50; scikit-learn clips at 36.
    assert totals(metrics)["log_loss"] == pytest.approx(25.0, abs=1e-9)
    metrics = KeptRows(CPU)
    metrics.update(logits[:2], labels[:2], num_valid=2)
    assert totals(metrics)["log_loss"] == pytest.approx(math.exp(-50), rel=1e-9)


def test_the_buffers_of_a_step_may_be_overwritten_after_update():
    logits, labels = clicks(100)
    metrics = KeptRows(CPU)
    wanted = expected(logits, labels)
    metrics.update(logits, labels, num_valid=100)
    logits.zero_()
    labels.zero_()
    assert totals(metrics) == pytest.approx(wanted, abs=1e-9)


def test_no_rows_are_nan():
    result = totals(KeptRows(CPU))
    assert result.pop("rows") == 0
    assert all(math.isnan(value) for value in result.values())


def rows_of(rank: int, case: str) -> tuple[torch.Tensor, torch.Tensor]:
    """300 rows split unevenly.

    `idle`: rank 1 has none. `classes`: one class on either rank. `no clicks`: one class on both.
    """
    logits, labels = clicks(300)
    logits = (logits * 8).round() / 8  # ties across ranks
    if case == "no clicks":
        return logits[rank::2], torch.zeros(150)
    if case == "classes":
        mine = labels == rank
        return logits[mine], labels[mine]
    mine = {"uneven": [slice(0, 170), slice(170, 300)], "idle": [slice(None), slice(0, 0)]}
    return logits[mine[case][rank]], labels[mine[case][rank]]


def compute_every_case() -> dict[str, dict[str, float]]:
    """Metrics that this rank computes from its share of each case."""
    results = {}
    with ranks_of_cpu() as ranks:
        for case in ("uneven", "idle", "classes", "no clicks"):
            logits, labels = rows_of(ranks.rank, case)
            metrics = KeptRows(CPU)
            if len(logits):
                metrics.update(logits, labels, num_valid=len(logits))
            results[case] = totals(metrics, ranks)
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, float]]]:
    return run_distributed(compute_every_case, 2)


@pytest.mark.parametrize("case", ["uneven", "idle", "classes"])
def test_two_ranks_tell_the_same_numbers_as_one_process_with_all_rows(two_ranks, case):
    first, second = (results[case] for results in two_ranks)
    assert first == second
    logits = torch.cat([rows_of(rank, case)[0] for rank in (0, 1)])
    labels = torch.cat([rows_of(rank, case)[1] for rank in (0, 1)])
    assert first == pytest.approx(expected(logits, labels), abs=1e-9)
    assert first["auc"] == roc_auc(logits, labels)


def test_two_ranks_without_a_click_tell_the_log_loss_and_no_auc(two_ranks):
    for result in (results["no clicks"] for results in two_ranks):
        assert math.isnan(result["auc"])
        assert (result["rows"], result["label_mean"]) == (300, 0.0)
        assert math.isfinite(result["log_loss"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_update_does_not_wait_for_the_gpu_and_compute_equals_scikit_learn():
    device = torch.device("cuda")
    logits, labels = clicks(4_096)
    metrics = KeptRows(device)
    on_device = logits.bfloat16().to(device), labels.to(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics.update(*on_device, num_valid=4_000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = expected(logits.bfloat16()[:4_000], labels[:4_000])
    assert totals(metrics) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_hundred_million_scores_keep_exact_counts():
    num_rows = 100_000_000
    scores = torch.arange(num_rows, device="cuda", dtype=torch.int32).remainder_(1 << 24).float()
    labels = (scores >= (1 << 23)).float()
    assert roc_auc(scores, labels) == 1.0
    assert roc_auc(-scores, labels) == 0.0
    labels[:] = 0
    labels[::2] = 1
    positive = np.arange(num_rows, dtype=np.int64)[::2] % (1 << 24)
    negative = np.arange(num_rows, dtype=np.int64)[1::2] % (1 << 24)
    positive_counts, negative_counts = (
        np.bincount(x, minlength=1 << 24) for x in (positive, negative)
    )
    below = np.concatenate([[0], np.cumsum(negative_counts)[:-1]])
    twice = int((positive_counts * (2 * below + negative_counts)).sum())
    assert roc_auc(scores, labels) == twice / (2 * len(positive) * len(negative))
