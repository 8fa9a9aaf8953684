"""Layers whose work depends on the step, in training: equal for numbers of ranks, on both paths, captured and resumed."""

from itertools import product

import pytest

from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, TWO_EPOCHS, TWO_EPOCHS_STEPS, worlds
from tests.helpers.runs import stored_bytes

# The last batch of an epoch has 5 rows: 3 for one rank, 2 for the other. With row-wise tables the step is dynamic.
LAYERS = {"dropout": ["model.dropout=0.5"]}
LAYOUTS = ["table_wise", "row_wise"]
MODELS = {
    "dlrm": [],
    "dcnv2": ["model.name=dcnv2"],
    "parallel": ["model.name=dcnv2", "model.cross.structure=parallel"],
}
CASES = list(product(LAYERS, MODELS, LAYOUTS))


def options(layer: str, model: str, layout: str) -> list[str]:
    return [
        *TINY,
        *TWO_EPOCHS,
        *MODELS[model],
        *LAYERS.get(layer, []),
        "model.top_mlp=[32,16,1]",
        f"sharding.types=[{layout}]",
        "optimizer.name=adagrad",
        "optimizer.lr=0.05",
        "optimizer.eps=0.01",
    ]


@pytest.fixture(scope="module")
def losses() -> dict[int, list[list[float]]]:
    """World size -> case -> losses."""
    cases = [options(*case) for case in CASES]
    one = losses_of_cases(cases, TWO_EPOCHS_STEPS)
    two = run_distributed(losses_of_cases, 2, cases, TWO_EPOCHS_STEPS)
    assert two[0] == two[1], "ranks disagree about the global loss"
    return {1: one, 2: two[0]}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_two_ranks_train_as_one_and_unlike_without_the_layer(losses, case):
    index = CASES.index(case)
    assert losses[2][index] == pytest.approx(losses[1][index], rel=1e-6)
    assert losses[1][index][0] != losses_of_cases([options("none", *case[1:])], 1)[0][0]


@pytest.mark.parametrize(("layer", "model"), product(LAYERS, MODELS))
def test_both_paths_train_alike(losses, layer, model):
    static, dynamic = (losses[1][CASES.index((layer, model, layout))] for layout in LAYOUTS)
    assert dynamic == pytest.approx(static, rel=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_an_evaluation_between_steps_changes_nothing(losses, layer):
    case = (layer, "dlrm", "table_wise")
    with ranks_of_cpu():
        built = build(compose_config(*options(*case)))
        measured = built.train(0, 3)
        built.score(2)
        measured += built.train(3, TWO_EPOCHS_STEPS - 3)
    assert measured == losses[1][CASES.index(case)]


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "dlrm"], ids="-".join)
def test_a_run_resumes_bit_by_bit(case, tmp_path):
    def run(name: str, steps: int) -> bytes:
        ended = run_command(
            *options(*case), "log.every=4", f"run_dir={tmp_path}/{name}", f"train.max_steps={steps}"
        )
        assert (ended.exit_code, ended.err) == (0, "")
        return stored_bytes(tmp_path / name)

    complete = run("complete", 7)
    assert run("resumed", 3) != complete
    assert run("resumed", 7) == complete


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_captured_step_equals_a_launched_one(world_size):
    kinds = list(product(LAYERS, MODELS, ["off", "bf16"]))
    cases = [
        [
            *options(layer, model, "table_wise"),
            *ON_GPU,
            f"train.amp={amp}",
            f"train.capture={capture}",
        ]
        for layer, model, amp in kinds
        for capture in ("true", "false")
    ]
    measured = run_distributed(losses_of_cases, world_size, cases, TWO_EPOCHS_STEPS)[0]
    for kind, captured, plain in zip(kinds, measured[::2], measured[1::2], strict=True):
        assert captured == pytest.approx(plain, rel=2e-5), kind


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_gpu_trains_as_a_cpu(world_size):
    cases = [options(layer, model, "table_wise") for layer, model in product(LAYERS, MODELS)]
    on_gpus = [[*case, *ON_GPU] for case in cases]
    measured = run_distributed(losses_of_cases, world_size, on_gpus, TWO_EPOCHS_STEPS)[0]
    expected = losses_of_cases(cases, TWO_EPOCHS_STEPS)
    for one, other in zip(measured, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
