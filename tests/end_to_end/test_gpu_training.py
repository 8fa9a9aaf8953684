"""GPUs, precisions and layouts do not change what is learnt: NCCL against one GPU, a GPU against the CPU, 16 bits against 32."""

from itertools import product
from unittest import mock

import pytest

from nn.training import gradient_bucket
from tests.helpers.composed import losses_and_changes_of_cases, worst_difference
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import (
    CASES,
    NUM_STEPS,
    ON_GPU,
    SEED,
    TWO_EPOCHS,
    TWO_EPOCHS_STEPS,
    gpu_cases,
    needs_one_gpu,
    worlds,
)
from tests.nn.sharding.test_sharded_embeddings import case

# Tolerances of losses, and of table changes relative to their norm. fp32: sums are in another order, and Adam's quotient
# magnifies the difference where a gradient is close to 0. bf16: the all-to-all rounds embeddings and gradients to 8 bits.
TOLERANCE = {"off": (2e-5, 5e-3), "bf16": (2e-2, 5e-2)}
# Row-wise tables: in bf16 the partial pooled sum of each rank is rounded.
ROW_WISE_FACTOR = {"off": 1, "bf16": 2}


def learnt_with_early_sums(cases: list[list[str]], num_steps: int) -> list:
    """Train with the dense gradients summed in two parts, as those of large models are."""
    with mock.patch.object(gradient_bucket, "EARLY_BYTES", 0):
        return losses_and_changes_of_cases(cases, num_steps)


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list]:
    cases = [case for amp in TOLERANCE for case in gpu_cases(amp, "table_wise")]
    learnt = run_distributed(losses_and_changes_of_cases, 1, cases, NUM_STEPS)[0]
    return {amp: learnt[index * len(CASES) :][: len(CASES)] for index, amp in enumerate(TOLERANCE)}


def assert_alike(expected, measured, amp: str) -> None:
    loss_tolerance, table_tolerance = TOLERANCE[amp]
    for options, (losses, changes), (their_losses, their_changes) in zip(
        CASES, expected, measured, strict=True
    ):
        assert their_losses == pytest.approx(losses, rel=loss_tolerance), "-".join(options)
        allowed = table_tolerance * (ROW_WISE_FACTOR[amp] if "row_wise" in options else 1)
        assert worst_difference(changes, their_changes) < allowed, "-".join(options)


@pytest.mark.parametrize("amp", TOLERANCE)
@pytest.mark.parametrize("world_size", worlds(2, 4))
def test_many_gpus_train_as_one(one_gpu, world_size, amp):
    many = run_distributed(learnt_with_early_sums, world_size, gpu_cases(amp), NUM_STEPS)[0]
    assert_alike(one_gpu[amp], many, amp)


def test_two_processes_train_as_one():
    """The comparison of many GPUs with one also works where there is none."""
    cases = [[*case(*parts), SEED] for parts in CASES]
    one, two = (
        run_distributed(learnt_with_early_sums, ranks, cases, NUM_STEPS)[0] for ranks in (1, 2)
    )
    assert_alike(one, two, "off")


@needs_one_gpu
def test_a_gpu_trains_as_the_cpu(one_gpu):
    cpu = losses_and_changes_of_cases(
        [[*case(*chosen_case[:3], "table_wise"), SEED] for chosen_case in CASES], NUM_STEPS
    )
    for chosen_case, (losses, changes), (expected, wanted) in zip(
        CASES, one_gpu["off"], cpu, strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-4), "-".join(chosen_case)
        assert worst_difference(wanted, changes) < 1e-2, "-".join(chosen_case)


@needs_one_gpu
def test_bf16_and_fp16_stay_close_to_fp32(one_gpu):
    fp16 = [[*case, "train.loss_scale=1024"] for case in gpu_cases("fp16", "table_wise")]
    learnt = run_distributed(losses_and_changes_of_cases, 1, fp16, NUM_STEPS)[0]
    for measured in (learnt, one_gpu["bf16"]):
        for options, (losses, changes), (expected, wanted) in zip(
            CASES, measured, one_gpu["off"], strict=True
        ):
            assert losses == pytest.approx(expected, rel=3e-2), "-".join(options)
            for name, (length, *_) in wanted.items():
                assert changes[name][0] == pytest.approx(length, rel=0.15), "-".join(options)
            # The other optimizers divide by the gradient's magnitude, and rounding decides the sign of the smallest gradients.
            if options[2] == "sgd":
                assert worst_difference(wanted, changes) < 0.2, "-".join(options)


@pytest.mark.parametrize("world_size", worlds(2, 4))
def test_many_gpus_train_two_epochs_with_partial_batches_as_one(world_size):
    kinds = list(product(["sgd", "adagrad", "rowwise_adagrad", "adam"], ["fp32", "bf16"]))
    cases = [
        [
            *case("dlrm", "multi_hot", rule, "table_wise"),
            *ON_GPU,
            *TWO_EPOCHS,
            f"model.embedding_dtype={dtype}",
        ]
        for rule, dtype in kinds
    ]
    one, many = (
        run_distributed(losses_and_changes_of_cases, ranks, cases, TWO_EPOCHS_STEPS)[0]
        for ranks in (1, world_size)
    )
    for kind, (losses, changes), (expected, wanted) in zip(kinds, many, one, strict=True):
        assert losses == pytest.approx(expected, rel=2e-5 if kind[1] == "fp32" else 1e-3), kind
        tolerance = 5e-3 if kind[1] == "fp32" else 5e-2
        assert worst_difference(wanted, changes) < tolerance, kind


@needs_one_gpu
def test_gpus_round_tables_of_16_bits_as_the_cpu_does():
    kinds = list(product(["sgd", "adagrad", "rowwise_adagrad", "adam"], ["bf16", "fp16"]))
    cases = [
        [*case("dlrm", "multi_hot", rule, "table_wise"), f"model.embedding_dtype={dtype}"]
        for rule, dtype in kinds
    ]
    on_gpu = run_distributed(
        losses_and_changes_of_cases,
        1,
        [[*chosen_case, *ON_GPU] for chosen_case in cases],
        NUM_STEPS,
    )
    on_cpu = losses_and_changes_of_cases(cases, NUM_STEPS)
    for kind, (losses, changes), (expected, wanted) in zip(kinds, on_gpu[0], on_cpu, strict=True):
        assert losses == pytest.approx(expected, rel=1e-3), kind
        assert worst_difference(wanted, changes) < 5e-2, kind
