"""What only a GPU can show: NCCL, bf16, fp16, and that ranks and layouts do not change what is learnt there either."""

import json
from itertools import product

import pytest
import torch

from nn.distributed import process_group, ranks_from_environment
from nn.feed import Feed
from tests.command import run_command
from tests.composed import TINY, build, compose_config, losses_of_cases
from tests.distributed import run_distributed
from tests.test_sharding import CASES, NUM_STEPS, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

ON_GPU = ["device=cuda", "train.tf32=false"]
# fp32: sums in another order. bf16: embeddings and their gradients are rounded to 8 bits on their way.
TOLERANCE = {"off": 2e-5, "bf16": 2e-2}


def gpu_cases(amp: str) -> list[list[str]]:
    return [[*case(*each), *ON_GPU, f"train.amp={amp}"] for each in CASES]


@pytest.fixture(scope="module")
def one_gpu() -> dict[str, list[list[float]]]:
    wanted = {
        amp: [[*case(*each[:3], "table_wise"), *ON_GPU, f"train.amp={amp}"] for each in CASES]
        for amp in TOLERANCE
    }
    cases = [each for amp in TOLERANCE for each in wanted[amp]]
    losses = run_distributed(losses_of_cases, 1, cases, NUM_STEPS)[0]
    return {amp: losses[index * len(CASES) :][: len(CASES)] for index, amp in enumerate(TOLERANCE)}


@pytest.mark.parametrize(("world_size", "amp"), list(product([2, 4], TOLERANCE)))
def test_many_gpus_train_as_one(one_gpu, world_size, amp):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    many = run_distributed(losses_of_cases, world_size, gpu_cases(amp), NUM_STEPS)[0]
    for each, one, several in zip(CASES, one_gpu[amp], many, strict=True):
        assert several == pytest.approx(one, rel=TOLERANCE[amp]), "-".join(each)


def test_a_gpu_trains_as_the_cpu(one_gpu):
    cpu = losses_of_cases([case(*each[:3], "table_wise") for each in CASES], NUM_STEPS)
    for each, expected, measured in zip(CASES, cpu, one_gpu["off"], strict=True):
        assert measured == pytest.approx(expected, rel=1e-4), "-".join(each)


def test_bf16_and_fp16_stay_close_to_fp32(one_gpu):
    fp16 = [
        [*case(*each[:3], "table_wise"), *ON_GPU, "train.amp=fp16", "train.loss_scale=1024"]
        for each in CASES
    ]
    losses = run_distributed(losses_of_cases, 1, fp16, NUM_STEPS)[0]
    for measured in (losses, one_gpu["bf16"]):
        for each, expected, actual in zip(CASES, one_gpu["off"], measured, strict=True):
            assert actual == pytest.approx(expected, rel=3e-2), "-".join(each)


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
