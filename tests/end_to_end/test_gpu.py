"""What only a GPU can show: NCCL, bf16, fp16, and that ranks and layouts do not change what is learnt there either."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from nn.build import build_test_loader
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.training.prefetch import Prefetcher
from nn.training.static_path import CapturedPass
from tests.helpers.command import run_command
from tests.helpers.composed import (
    TINY,
    build,
    compose_config,
    losses_and_changes_of_cases,
    worst_difference,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import records
from tests.nn.checkpoint.test_reshard import RATES, contents
from tests.nn.sharding.test_sharded_embeddings import case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ON_GPU = ["device=cuda", "train.tf32=false"]
NUM_STEPS = 12
CASES = [
    ("dlrm", "one_hot", "sgd", "table_wise"),
    ("dlrm", "multi_hot", "adagrad", "column_wise"),
    ("dlrm", "multi_hot", "rowwise_adagrad", "table_wise"),
    ("dlrm", "one_hot", "adam", "data_parallel"),
    ("dlrm", "multi_hot", "sgd", "row_wise"),
    ("dcnv2", "one_hot", "sgd", "data_parallel"),
    ("dcnv2", "multi_hot", "adam", "table_wise"),
    ("dcnv2", "one_hot", "adagrad", "column_wise"),
]
# Of losses, and of what each table learnt in lengths of its change. fp32: sums in another order, which Adam's quotient
# magnifies where a gradient is next to nothing. bf16: embeddings and their gradients are rounded to 8 bits on their way.
TOLERANCE = {"off": (2e-5, 5e-3), "bf16": (2e-2, 5e-2)}
# In bf16 each rank's part of a pooled sum is rounded, of row-wise tables.
ROW_WISE_FACTOR = {"off": 1, "bf16": 2}


def gpu_cases(amp: str, layout: str | None = None) -> list[list[str]]:
    return [
        [*case(*chosen_case[:3], layout or chosen_case[3]), *ON_GPU, f"train.amp={amp}"]
        for chosen_case in CASES
    ]


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list]:
    cases = [case for amp in TOLERANCE for case in gpu_cases(amp, "table_wise")]
    learnt = run_distributed(losses_and_changes_of_cases, 1, cases, NUM_STEPS)[0]
    return {amp: learnt[index * len(CASES) :][: len(CASES)] for index, amp in enumerate(TOLERANCE)}


def assert_alike(expected, measured, amp: str) -> None:
    of_loss, of_tables = TOLERANCE[amp]
    for options, (losses, changes), (their_losses, their_changes) in zip(
        CASES, expected, measured, strict=True
    ):
        assert their_losses == pytest.approx(losses, rel=of_loss), "-".join(options)
        allowed = of_tables * (ROW_WISE_FACTOR[amp] if "row_wise" in options else 1)
        assert worst_difference(changes, their_changes) < allowed, "-".join(options)


@pytest.mark.parametrize(("world_size", "amp"), list(product([2, 4], TOLERANCE)))
def test_many_gpus_train_as_one(one_gpu, world_size, amp):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    many = run_distributed(losses_and_changes_of_cases, world_size, gpu_cases(amp), NUM_STEPS)[0]
    assert_alike(one_gpu[amp], many, amp)


def test_a_gpu_trains_as_the_cpu(one_gpu):
    cpu = losses_and_changes_of_cases(
        [case(*chosen_case[:3], "table_wise") for chosen_case in CASES], NUM_STEPS
    )
    for chosen_case, (losses, changes), (expected, wanted) in zip(
        CASES, one_gpu["off"], cpu, strict=True
    ):
        assert losses == pytest.approx(expected, rel=1e-4), "-".join(chosen_case)
        assert worst_difference(wanted, changes) < 1e-2, "-".join(chosen_case)


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
            # The others divide by the gradient's own size, and rounding decides the sign of the smallest.
            if options[2] == "sgd":
                assert worst_difference(wanted, changes) < 0.2, "-".join(options)


def losses_around_an_evaluation(cases: list[list[str]]) -> list[tuple[bool, list[float]]]:
    """Of each case: whether the dense pass was captured, and losses before and after scoring a test batch."""
    results = []
    with process_group(ranks_from_environment("cuda")):
        for case in cases:
            built = build(compose_config(*case))
            losses = built.train(0, 5)
            built.score(1)
            losses += built.train(5, NUM_STEPS - 5)
            captured = [
                isinstance(step_pass, CapturedPass)
                for step_pass in built.step.path._passes.values()
            ]
            results.append((all(captured), losses))
            built.step.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_captured_step_computes_what_an_uncaptured_one_does(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    chosen = [
        [*case(model, hotness, rule, "table_wise"), *ON_GPU, f"train.compile={compiled}"]
        for model, hotness, rule, compiled in (
            ("dlrm", "one_hot", "sgd", "false"),
            ("dlrm", "multi_hot", "adam", "true"),
            ("dcnv2", "multi_hot", "adagrad", "true"),
        )
    ]
    cases = [
        [*chosen_case, f"train.capture={capture}"]
        for chosen_case in chosen
        for capture in ("true", "false")
    ]
    results = run_distributed(losses_around_an_evaluation, world_size, cases)[0]
    for options, captured, plain in zip(chosen, results[::2], results[1::2], strict=True):
        assert (captured[0], plain[0]) == (True, False)
        assert captured[1] == pytest.approx(plain[1], rel=2e-5), options


MIXED = (
    "sharding.tables={cat_0:column_wise,cat_1:data_parallel,cat_2:data_parallel,cat_3:column_wise}"
)
# 197 rows in batches of 64: three whole ones and a tail of 5, padded on 2 and on 4 ranks.
TWO_EPOCHS, TWO_EPOCHS_STEPS = ["data.synthetic.train_rows=197", "train.epochs=2"], 8


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_tables_learn_the_same_captured_and_not_over_epochs_with_tails(world_size):
    """Replicated tables and cut ones, under fp16, whose gradients are scaled and judged late; with tables of all dtypes."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    kinds = list(product(["adagrad", "adam"], ["fp32", "bf16", "fp16"]))
    cases = [
        [
            *case("dlrm", "multi_hot", rule, "table_wise"),
            *ON_GPU,
            *TWO_EPOCHS,
            MIXED,
            "train.amp=fp16",
            "train.loss_scale=1024",
            f"model.embedding_dtype={dtype}",
            f"train.capture={capture}",
        ]
        for rule, dtype in kinds
        for capture in ("true", "false")
    ]
    learnt = run_distributed(losses_and_changes_of_cases, world_size, cases, TWO_EPOCHS_STEPS)[0]
    for kind, captured, plain in zip(kinds, learnt[::2], learnt[1::2], strict=True):
        assert captured[0] == pytest.approx(plain[0], rel=2e-5), kind
        # Of 16 bits, a weight whose sum differs in its last bit is now and then rounded the other way.
        tolerance = 5e-3 if kind[1] == "fp32" else 5e-2
        assert worst_difference(plain[1], captured[1]) < tolerance, kind


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_gpus_train_two_epochs_with_their_tails_as_one(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
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


def predicted_between_steps(
    cases: list[list[str]],
) -> list[tuple[list[float], list[torch.Tensor], int]]:
    """Of each case: losses, logits of batches of two sizes between the steps, and how many forward graphs are left."""
    results = []
    with process_group(ranks_from_environment("cuda")):
        for case in cases:
            built = build(compose_config(*case, "mode=inference", "inference.batch_sizes=[64,128]"))
            losses, logits = [], []
            for step in range(6):
                losses += built.train(step, 1)
                built.step.set_training(False)
                for size in (64, 128):
                    loader = replace_batch_size(built, size)
                    prefetcher = Prefetcher(
                        loader.batches(step % 2, 1), built.step.path, built.ranks.device
                    )
                    batch, ids = next(prefetcher)
                    logits.append(built.step.predict(batch, ids).float().cpu())
                built.step.set_training(True)
            results.append((losses, logits, len(built.step.path.forwards)))
            built.step.close()
    return results


def replace_batch_size(built, size: int):
    config = replace(built.config, eval=replace(built.config.eval, batch_size=size))
    return build_test_loader(config, built.source, built.ranks)


@pytest.mark.parametrize("world_size", [1, 2])
def test_recordings_that_share_memory_do_not_disturb_each_other(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    each = [*case("dlrm", "multi_hot", "adam", "table_wise"), *ON_GPU]
    cases = [[*each, f"train.capture={capture}"] for capture in ("true", "false")]
    captured, plain = run_distributed(predicted_between_steps, world_size, cases)[0]
    assert captured[2] == 1
    assert captured[0] == pytest.approx(plain[0], rel=2e-5)
    for one, other in zip(captured[1], plain[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


RESUMED = [
    ("dlrm", "adam", "off"),
    ("dcnv2", "adagrad", "off"),
    ("dlrm", "rowwise_adagrad", "bf16"),
]
# Of every number in the records. The same ranks do the same sums, so that what is left is the order of atomic additions in
# libraries.
RESUME_TOLERANCE = {"off": 2e-5, "bf16": 2e-3}


def started_on_gpus(recipe: str, rule: str, amp: str, run_dir: Path, last_step: int) -> str:
    """What a start of a run with checkpoints in the background says."""
    ended = run_command(
        *(option for option in TINY if not option.startswith("device")),
        *ON_GPU,
        *(f"optimizer.name={rule}", f"optimizer.lr={RATES[rule]}", "optimizer.eps=0.01"),
        *(f"train.amp={amp}", f"train.max_steps={last_step}", f"run_dir={run_dir}"),
        *("log.every=1", "log.tensorboard=false", "checkpoint.save_every=4", "checkpoint.keep=9"),
        recipe=recipe,
    )
    assert ended.exit_code == 0, ended.err
    return ended.out


@pytest.mark.parametrize(("recipe", "rule", "amp"), RESUMED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path, world_size, recipe, rule, amp):
    """Through the captured step, from a checkpoint that was copied and written while later steps ran."""
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")

    def start(name: str, last_step: int) -> str:
        case = (recipe, rule, amp, tmp_path / name, last_step)
        return run_distributed(started_on_gpus, world_size, *case)[0]

    assert "step: a CUDA graph" in start("whole", 24)
    start("parts", 11)
    # As if it had been killed there.
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_11")
    assert "step_8, 8 steps" in start("parts", 24)
    whole, parts = (
        [record for record in records(tmp_path / name) if "loss" in record]
        for name in ("whole", "parts")
    )
    assert [record["step"] for record in parts] == list(range(1, 25))
    losses = [[record["loss"] for record in run] for run in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=RESUME_TOLERANCE[amp])
    stored = [contents(tmp_path / name / "checkpoints", 24) for name in ("whole", "parts")]
    assert stored[0].keys() == stored[1].keys()
    equal = [name for name, value in stored[0].items() if np.array_equal(value, stored[1][name])]
    print(
        f"{recipe} {rule} {amp} on {world_size}: losses equal to the bit: {losses[0] == losses[1]}, tensors equal "
        f"to the bit: {len(equal)} of {len(stored[0])}"
    )
    for name, value in stored[0].items():
        if name.startswith("tables") and name.endswith("weight"):
            distance = np.abs(value - stored[1][name]).max()
            assert distance <= 10 * RESUME_TOLERANCE[amp] * np.abs(value).max(), name


def losses_while_another_feed_runs(cases: list[list[str]]) -> list[list[float]]:
    """Of each case: losses of training with batches that wait while batches of the same size are scored."""
    results = []
    with process_group(ranks_from_environment("cuda")):
        for case in cases:
            built = build(compose_config(*case))
            prefetcher = built.prefetcher(0, NUM_STEPS)
            losses = [built.step.train(step, prefetcher).loss for step in range(5)]
            built.score(2)
            losses += [built.step.train(step, prefetcher).loss for step in range(5, NUM_STEPS)]
            results.append(losses)
            built.step.close()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_waiting_batch_keeps_its_ids_while_others_are_scored(world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    same_size = [*gpu_cases("off")[0], "eval.batch_size=64", "train.batch_size=64"]
    cases = [[*same_size, f"train.capture={capture}"] for capture in ("true", "false")]
    recorded, launched = run_distributed(losses_while_another_feed_runs, world_size, cases)[0]
    assert recorded == pytest.approx(launched, rel=2e-5)


def test_inference_takes_the_batch_sizes_of_training_and_evaluation_too(tmp_path):
    sizes = ["inference.batch_sizes=[1,64,128]", "inference.steps=3", "inference.warmup_steps=1"]
    run_dir = tmp_path / "run"
    ended = run_command(*TINY, *ON_GPU, "mode=inference", f"run_dir={run_dir}", *sizes)
    assert ended.exit_code == 0, ended.err
    results = json.loads((run_dir / "summary.json").read_text())["inference"]
    assert [result["batch_size"] for result in results] == [1, 64, 128]


def profiled_on_gpus(run_dir: str) -> int:
    options = [*TINY, "device=cuda", "train.amp=bf16", "train.max_steps=20", "eval.per_epoch=1"]
    profile = ["profile.steps=5", "profile.start_step=10", "log.tensorboard=false"]
    return run_command(*options, *profile, "checkpoint.save=false", f"run_dir={run_dir}").exit_code


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_profile_knows_the_kernels_of_a_step(tmp_path, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    run_dir = tmp_path / "run"
    codes = run_distributed(profiled_on_gpus, world_size, str(run_dir))
    assert codes == [0] * world_size
    ranks = json.loads((run_dir / "profile/summary.json").read_text())
    assert len(ranks) == world_size
    for rank in ranks:
        assert (rank["on_gpu"], rank["num_steps"]) == (True, 5)
        ms = {phase["phase"]: phase["ms"] for phase in rank["phases"]}
        wanted = {"lookup", "sort", "table update", "interaction", "MLPs and cross"}
        wanted |= {"all-to-all", "all-reduce"} if world_size > 1 else set()
        assert wanted <= set(ms), rank["kernels"]
        assert ms.get("other", 0) < 0.1 * sum(ms.values()), rank["kernels"]
    (memory, *_) = json.loads((run_dir / "memory.json").read_text())
    assert memory["total"] > memory["tables"] > 0
