"""Layers whose work depends on the step, in training: equal for numbers of ranks, on both paths, captured and resumed."""

from itertools import product
from pathlib import Path

import pytest
import torch

from nn.build import device_type
from nn.checkpoint import state as checkpoint
from nn.distributed.errors import DivergedError
from nn.distributed.process_group import process_group, ranks_from_environment
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.command import run_command
from tests.helpers.composed import (
    DCNV2,
    TINY,
    Built,
    build,
    compose_config,
    losses_of_cases,
    ranks_of_cpu,
)
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, TWO_EPOCHS, TWO_EPOCHS_STEPS, worlds
from tests.helpers.runs import stored_bytes, summary

# The last batch of an epoch has 5 rows: 3 for one rank, 2 for the other. With row-wise tables the step is dynamic.
LAYERS = {
    "dropout": ["model.dropout=0.5"],
    "batch_norm": ["model.batch_norm=true"],
    "both": ["model.dropout=0.2", "model.batch_norm=true"],
}
LAYOUTS = ["table_wise", "row_wise"]
MODELS = {
    "dlrm": [],
    "dcnv2": DCNV2,
    "parallel": [*DCNV2, "model.cross.structure=parallel"],
}
# On two ranks, every two of layer, model and layout occur together.
ON_TWO = [
    (layer, model, LAYOUTS[index % 2])
    for index, (layer, model) in enumerate(product(LAYERS, MODELS))
]
# Both layouts of each layer, of each model.
BOTH_LAYOUTS = list(zip(LAYERS, MODELS, strict=True))
ON_ONE = list(
    dict.fromkeys([*ON_TWO, *((*each, layout) for each in BOTH_LAYOUTS for layout in LAYOUTS)])
)
# Two full batches and the tail of 5 rows, twice; GPUs train TWO_EPOCHS.
SHORT, NUM_STEPS = ["data.synthetic.train_rows=133", "train.epochs=2"], 6


def options(layer: str, model: str, layout: str) -> list[str]:
    return [
        *TINY,
        *SHORT,
        *MODELS[model],
        *LAYERS.get(layer, []),
        "model.top_mlp=[32,16,1]",
        f"sharding.types=[{layout}]",
        "optimizer.name=adagrad",
        "optimizer.lr=0.05",
        "optimizer.eps=0.01",
    ]


@pytest.fixture(scope="module")
def losses() -> dict[int, dict[tuple[str, str, str], list[float]]]:
    """World size -> case -> losses."""
    one = losses_of_cases([options(*case) for case in ON_ONE], NUM_STEPS)
    two = run_distributed(losses_of_cases, 2, [options(*case) for case in ON_TWO], NUM_STEPS)
    assert two[0] == two[1], "ranks disagree about the global loss"
    return {1: dict(zip(ON_ONE, one, strict=True)), 2: dict(zip(ON_TWO, two[0], strict=True))}


@pytest.fixture(scope="module")
def without() -> dict[str, float]:
    """Model -> first loss without a layer."""
    first = losses_of_cases([options("none", model, "table_wise") for model in MODELS], 1)
    return {model: loss for model, (loss,) in zip(MODELS, first, strict=True)}


@pytest.mark.parametrize("case", ON_TWO, ids="-".join)
def test_two_ranks_train_as_one_and_unlike_without_the_layer(losses, without, case):
    assert losses[2][case] == pytest.approx(losses[1][case], rel=1e-6)
    assert losses[1][case][0] != pytest.approx(without[case[1]], rel=1e-6)


@pytest.mark.parametrize(("layer", "model"), BOTH_LAYOUTS)
def test_both_paths_train_alike(losses, layer, model):
    static, dynamic = (losses[1][layer, model, layout] for layout in LAYOUTS)
    assert dynamic == pytest.approx(static, rel=1e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_an_evaluation_between_steps_changes_nothing(losses, layer):
    case = next(each for each in ON_TWO if each[:2] == (layer, "dlrm"))
    with ranks_of_cpu():
        built = build(compose_config(*options(*case)))
        measured = built.train(0, 2)
        built.score(1)
        measured += built.train(2, NUM_STEPS - 2)
    assert measured == losses[1][case]


def run_of_both(layout: str, run_dir: Path, num_steps: int) -> Path:
    case = options("both", "dlrm", layout)
    ended = run_command(*case, "log.every=4", f"run_dir={run_dir}", f"train.max_steps={num_steps}")
    assert (ended.exit_code, ended.err) == (0, "")
    return run_dir


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> dict[str, Path]:
    """Layout -> run of both layers over five steps."""
    root = tmp_path_factory.mktemp("complete")
    return {layout: run_of_both(layout, root / layout, 5) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_both_layers_resumes_bit_by_bit(complete, layout, tmp_path):
    wanted = stored_bytes(complete[layout])
    assert stored_bytes(run_of_both(layout, tmp_path / "run", 2)) != wanted
    assert stored_bytes(run_of_both(layout, tmp_path / "run", 5)) == wanted


def buffers_of_cases(cases: list[list[str]], num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Return per case the running statistics after training."""
    results = []
    config = compose_config(*cases[0])
    with process_group(ranks_from_environment(device_type(config))):
        for case in cases:
            built = build(compose_config(*case))
            built.train(0, num_steps)
            results.append(buffers(built))
            built.step.close()
    return results


def buffers(built: Built) -> dict[str, torch.Tensor]:
    saved = built.step.dense.saved_buffers()
    state = built.step.state_dict(with_optimizer=False)
    assert {f"dense.{name}" for name in saved} <= state.keys()
    return {name: value.cpu().clone() for name, value in saved.items()}


def assert_alike(one: list[dict], other: list[dict], tolerance: float) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert [name.rpartition(".")[2] for name in ours] == ["running_mean", "running_var"] * 2
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def test_ranks_and_paths_have_the_same_running_statistics():
    cases = [options("batch_norm", "dlrm", layout) for layout in LAYOUTS]
    one = buffers_of_cases(cases, NUM_STEPS)
    two = run_distributed(buffers_of_cases, 2, cases, NUM_STEPS)
    assert_alike(one, two[0], 1e-6)
    for first, second in zip(*two, strict=True):
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert_alike(one[:1], one[1:], 1e-6)
    assert (one[0]["top.norms.0.running_var"] != 1).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_is_not_applied_changes_no_running_statistics(layout):
    with ranks_of_cpu():
        built = build(compose_config(*options("batch_norm", "dlrm", layout)))
        built.train(0, 1)
        before = buffers(built)
        with torch.no_grad():
            built.step.dense.top.layers[-1].bias.fill_(torch.inf)
        with pytest.raises(DivergedError):
            built.train(1, 1)
        after = buffers(built)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_frozen_dense_component_keeps_its_running_statistics():
    [kept] = buffers_of_cases(
        [[*options("batch_norm", "dlrm", "table_wise"), "train.freeze=[dense]"]], 3
    )
    assert torch.equal(kept["top.norms.0.running_var"], torch.ones(32))


def test_a_saved_model_is_evaluated_with_its_running_statistics(complete, tmp_path):
    case = [*options("both", "dlrm", "table_wise"), "log.every=4"]
    wanted = summary(complete["table_wise"])
    restore = f"checkpoint.restore={complete['table_wise']}/checkpoints/step_5"
    ended = run_command(*case, "mode=eval", restore, f"run_dir={tmp_path}/eval")
    assert (ended.exit_code, ended.err) == (0, "")
    evaluated = summary(tmp_path / "eval")
    for key in ("steps", "test_auc", "test_log_loss", "test_rows"):
        assert evaluated[key] == wanted[key], key


MOVED = options("both", "dlrm", "table_wise")


def saved_after_training(directory: Path) -> dict[str, torch.Tensor]:
    with ranks_of_cpu() as ranks:
        built = build(compose_config(*MOVED))
        built.train(0, 3)
        save_checkpoint(directory, built.step, 3, built.source.spec, ranks)
        return buffers(built)


def test_one_rank_loads_the_running_statistics_of_two(tmp_path):
    saved, _ = run_distributed(saved_after_training, 2, tmp_path)
    with ranks_of_cpu():
        built = build(compose_config(*MOVED))
        checkpoint.restore(tmp_path / "step_3", built.step, with_optimizer=False)
        restored = buffers(built)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(value, restored[name]) for name, value in saved.items())


def test_a_checkpoint_without_batch_normalization_is_refused(tmp_path):
    ended = run_command(
        *options("dropout", "dlrm", "table_wise"),
        "log.every=4",
        f"run_dir={tmp_path}/run",
        "train.max_steps=2",
    )
    assert (ended.exit_code, ended.err) == (0, "")
    restore = f"checkpoint.restore={tmp_path}/run/checkpoints/step_2"
    case = [*options("both", "dlrm", "table_wise"), "mode=eval", restore]
    ended = run_command(*case, f"run_dir={tmp_path}/eval")
    assert ended.exit_code == 2
    assert "no dense.top.norms.0.weight" in ended.err


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_capturing_changes_no_running_statistics(world_size):
    each = [*options("batch_norm", "dlrm", "table_wise"), *ON_GPU, *TWO_EPOCHS]
    cases = [[*each, f"train.capture={capture}"] for capture in ("true", "false")]
    measured = run_distributed(buffers_of_cases, world_size, cases, TWO_EPOCHS_STEPS)[0]
    assert_alike(measured[:1], measured[1:], 2e-5)


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_captured_step_equals_a_launched_one(world_size):
    kinds = list(product(LAYERS, MODELS, ["off", "bf16"]))
    cases = [
        [
            *options(layer, model, "table_wise"),
            *ON_GPU,
            *TWO_EPOCHS,
            f"train.amp={amp}",
            f"train.capture={capture}",
        ]
        for layer, model, amp in kinds
        for capture in ("true", "false")
    ]
    measured = run_distributed(losses_of_cases, world_size, cases, TWO_EPOCHS_STEPS)[0]
    for kind, captured, plain in zip(kinds, measured[::2], measured[1::2], strict=True):
        assert captured == pytest.approx(plain, rel=2e-5), kind


def streams_asked_for(overrides: list[str]) -> tuple[list[float], int]:
    """Return the losses of eight steps, and how often the last four ask for a stream in Python."""
    asked = []
    with process_group(ranks_from_environment("cuda")), pytest.MonkeyPatch.context() as patched:
        built = build(compose_config(*overrides))
        prefetcher = built.prefetcher(0, 8)
        losses = [built.step.train(step, prefetcher).loss for step in range(4)]
        for name in ("current_stream", "stream"):
            of_torch = getattr(torch.cuda, name)
            patched.setattr(
                torch.cuda, name, lambda *a, f=of_torch, **k: (asked.append(a), f(*a, **k))[1]
            )
        losses += [built.step.train(step, prefetcher).loss for step in range(4, 8)]
        built.step.close()
    return losses, len(asked)


@pytest.mark.parametrize("world_size", worlds(1))
def test_a_captured_step_asks_for_no_stream_in_python(world_size):
    """Torch finds device and stream there in a longer time than it takes for a small launch."""
    options_of = [*options("dropout", "dlrm", "table_wise"), "data.synthetic.train_rows=2048"]
    [(losses, asked)] = run_distributed(streams_asked_for, world_size, [*options_of, *ON_GPU])
    assert losses == pytest.approx(losses_of_cases([options_of], 8)[0], rel=1e-4)
    assert asked == 0


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_gpu_trains_as_a_cpu(world_size):
    cases = [
        [*options(layer, model, "table_wise"), *TWO_EPOCHS]
        for layer, model in product(LAYERS, MODELS)
    ]
    on_gpus = [[*case, *ON_GPU] for case in cases]
    measured = run_distributed(losses_of_cases, world_size, on_gpus, TWO_EPOCHS_STEPS)[0]
    expected = losses_of_cases(cases, TWO_EPOCHS_STEPS)
    for one, other in zip(measured, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
