"""What only a GPU can show: NCCL, bf16, fp16, and that ranks and layouts do not change what is learnt there either."""

import json
from itertools import product

import pytest
import torch

from nn.distributed import process_group, ranks_from_environment
from nn.feed import Feed
from tests.command import run_command
from tests.composed import TINY, build, compose_config, learnt_in_cases, worst_difference
from tests.distributed import run_distributed
from tests.test_sharding import case

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


def gpu_cases(amp: str, layout: str | None = None) -> list[list[str]]:
    return [[*case(*each[:3], layout or each[3]), *ON_GPU, f"train.amp={amp}"] for each in CASES]


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list]:
    cases = [each for amp in TOLERANCE for each in gpu_cases(amp, "table_wise")]
    learnt = run_distributed(learnt_in_cases, 1, cases, NUM_STEPS)[0]
    return {amp: learnt[index * len(CASES) :][: len(CASES)] for index, amp in enumerate(TOLERANCE)}


def assert_alike(expected, measured, amp: str) -> None:
    of_loss, of_tables = TOLERANCE[amp]
    for each, (losses, changes), (their_losses, their_changes) in zip(
        CASES, expected, measured, strict=True
    ):
        assert their_losses == pytest.approx(losses, rel=of_loss), "-".join(each)
        assert worst_difference(changes, their_changes) < of_tables, "-".join(each)


@pytest.mark.parametrize(("world_size", "amp"), list(product([2, 4], TOLERANCE)))
def test_many_gpus_train_as_one(one_gpu, world_size, amp):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    many = run_distributed(learnt_in_cases, world_size, gpu_cases(amp), NUM_STEPS)[0]
    assert_alike(one_gpu[amp], many, amp)


def test_a_gpu_trains_as_the_cpu(one_gpu):
    cpu = learnt_in_cases([case(*each[:3], "table_wise") for each in CASES], NUM_STEPS)
    for each, (losses, changes), (expected, wanted) in zip(CASES, one_gpu["off"], cpu, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4), "-".join(each)
        assert worst_difference(wanted, changes) < 1e-2, "-".join(each)


def test_bf16_and_fp16_stay_close_to_fp32(one_gpu):
    fp16 = [[*each, "train.loss_scale=1024"] for each in gpu_cases("fp16", "table_wise")]
    learnt = run_distributed(learnt_in_cases, 1, fp16, NUM_STEPS)[0]
    for measured in (learnt, one_gpu["bf16"]):
        for each, (losses, changes), (expected, wanted) in zip(
            CASES, measured, one_gpu["off"], strict=True
        ):
            assert losses == pytest.approx(expected, rel=3e-2), "-".join(each)
            for name, (length, *_) in wanted.items():
                assert changes[name][0] == pytest.approx(length, rel=0.15), "-".join(each)
            # The others divide by the gradient's own size, and rounding decides the sign of the smallest.
            if each[2] == "sgd":
                assert worst_difference(wanted, changes) < 0.2, "-".join(each)


def losses_around_an_evaluation(cases: list[list[str]]) -> list[tuple[bool, list[float]]]:
    """Of each case: whether the dense pass was captured, and losses before and after scoring a test batch."""
    results = []
    with process_group(ranks_from_environment("cuda")):
        for each in cases:
            built = build(compose_config(*each))
            losses = built.train(0, 5)
            built.step.set_training(False)
            batch, ids = next(
                Feed(built.test_loader.batches(0, 1), built.step.tables, built.ranks.device)
            )
            built.step.predict(batch, ids)
            built.step.set_training(True)
            losses += built.train(5, NUM_STEPS - 5)
            captured = [type(each).__name__ == "Captured" for each in built.step._passes.values()]
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
        [*each, f"train.capture={capture}"] for each in chosen for capture in ("true", "false")
    ]
    results = run_distributed(losses_around_an_evaluation, world_size, cases)[0]
    for each, captured, plain in zip(chosen, results[::2], results[1::2], strict=True):
        assert (captured[0], plain[0]) == (True, False)
        assert captured[1] == pytest.approx(plain[1], rel=2e-5), each


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
