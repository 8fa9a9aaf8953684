"""A table optimizer is one record and one branch of the kernel: a fifth one, defined in this file alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig
from nn.build import build_plan, open_source, planned_hardware
from nn.checks import check_optimizers
from nn.embedding.optimizer import StateField, TableRule, table_rule
from nn.export.tables import export_tables
from nn.ops.optional_triton import jit, tl
from nn.training.dense_optimizer import DenseRule
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_no_gpu
from tests.nn.checkpoint.test_state import restored, save
from tests.nn.embedding.test_triton_embedding_bag import compare

NUM_STEPS = 6
HERE = "tests.nn.embedding.test_fifth_optimizer"


def _momentum(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        state["velocity"].mul_(group["beta1"]).add_(gradient)
        state["peak"].copy_(torch.maximum(state["peak"], gradient.abs().amax(dim=1)))
        table.sub_(group["lr"] * state["velocity"] / (state["peak"] + group["eps"])[:, None])


@jit
def momentum_kernel(weight, gradient, state1, state2, step):
    velocity = step.beta1 * state1 + gradient
    peak = tl.maximum(state2, tl.max(tl.abs(gradient), 0))
    return weight - step.rate * velocity / (peak + step.eps), velocity, peak


MOMENTUM = TableRule(
    name="momentum",
    update=_momentum,
    kernel=momentum_kernel,
    states=(StateField("velocity"), StateField("peak", per_row=True)),
    columns_may_be_cut=False,
)


def _sign(
    tables: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Tensor]],
    group: dict[str, Any],
) -> None:
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        state["mean"].lerp_(gradient, 1 - group["beta1"])
        table.sub_(group["lr"] * state["mean"].sign())


SIGN = TableRule(name="sign", update=_sign, states=(StateField("mean"),))


def _nadam(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.NAdam(parameters, lr=config.lr)


def _broken(parameters):
    raise AssertionError("has two arguments")


BROKEN = DenseRule(name="broken", build=_broken, states_per_weight=0)
NADAM = DenseRule(name="nadam", build=_nadam, states_per_weight=2)


def options(rule: str, *overrides: str) -> list[str]:
    return [
        *(*TINY, f"optimizer.embedding_name={HERE}:{rule}", "optimizer.name=adagrad"),
        *("optimizer.lr=0.05", "optimizer.embedding_lr=0.002", "optimizer.eps=0.01"),
        *("data.synthetic.hotness=[3,1,2,5,1]", "log.loggers=[]", *overrides),
    ]


def trained(overrides: list[str]) -> tuple[list[float], list[str]]:
    """Return the losses and the names of the tables' state."""
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        return built.train(0, NUM_STEPS), sorted(built.step.tables.optimizer_state())


def trained_and_saved(directory: Path, overrides: list[str]) -> tuple[str, list[float]]:
    """Save a checkpoint after half of the steps; return its path and the losses of the other steps."""
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        built.train(0, NUM_STEPS // 2)
        path = save(directory, built, NUM_STEPS // 2)
        return str(path), built.train(NUM_STEPS // 2, NUM_STEPS // 2)


@pytest.mark.parametrize(
    ("rule", "layouts"),
    [
        ("MOMENTUM", "cat_0:table_wise,cat_1:data_parallel,cat_2:row_wise"),
        ("SIGN", "cat_0:table_wise,cat_1:data_parallel,cat_2:column_wise"),
    ],
)
def test_two_ranks_train_as_one(rule, layouts):
    """The tolerance is the rounding of sums in another order."""
    one, names = trained(options(rule))
    assert f"cat_0.{table_rule(f'{HERE}:{rule}').state_names[0]}" in names
    assert one[-1] != one[0]
    two = run_distributed(trained, 2, options(rule, f"sharding.tables={{{layouts}}}"))
    assert two[0] == two[1]
    assert two[0][0] == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit_and_the_state_is_exported(num_ranks, tmp_path):
    overrides = options("MOMENTUM", "sharding.tables={cat_1:data_parallel}")
    path, rest = run_distributed(trained_and_saved, num_ranks, tmp_path / "saved", overrides)[0]
    assert run_distributed(resumed, num_ranks, Path(path), overrides)[0] == rest
    export_tables(Path(path), tmp_path / "npy")
    assert np.load(tmp_path / "npy/cat_0.velocity.npy").shape == (500, 8)
    assert np.load(tmp_path / "npy/cat_1.peak.npy").shape == (40,)


def resumed(path: Path, overrides: list[str]) -> list[float]:
    with ranks_of_cpu():
        return restored(path, *overrides).train(NUM_STEPS // 2, NUM_STEPS // 2)


def test_a_table_whose_rows_have_one_state_is_not_cut_by_columns():
    with pytest.raises(
        ValueError, match="cat_0 would be column_wise, but momentum keeps one state per row"
    ):
        run_plan("MOMENTUM", "sharding.tables={cat_0:column_wise}", "sharding.world_size=2")


def test_two_states_of_one_name_are_refused():
    with pytest.raises(ValueError, match="twice has two states a, one name in a checkpoint"):
        TableRule(name="twice", update=_momentum, states=(StateField("a"), StateField("a")))


def test_a_rule_without_kernel_is_planned_for_cpus_only():
    on_cpus = compose_config(*options("SIGN"), "mode=plan", "device=cpu")
    check_optimizers(on_cpus)
    on_gpus = compose_config(*options("SIGN"), "mode=plan", "device=cuda", "sharding.hbm_gib=80")
    with pytest.raises(ValueError, match="sign has no kernel for GPUs"):
        check_optimizers(on_gpus)


def _fails(tables, gradients, states, group):
    states[0]["velocity"].add_(1)


def _not_in_place(tables, gradients, states, group):
    for number, gradient in enumerate(gradients):
        tables[number] = tables[number] - group["lr"] * gradient


def _sets_data(tables, gradients, states, group):
    for table, gradient in zip(tables, gradients, strict=True):
        table.data = table - group["lr"] * gradient


def _new_state(tables, gradients, states, group):
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        state["velocity"] = state["velocity"] + gradient
        table.sub_(state["velocity"], alpha=group["lr"])


FAILS = TableRule(name="fails", update=_fails)
NOT_IN_PLACE = TableRule(name="not_in_place", update=_not_in_place)
SETS_DATA = TableRule(name="sets_data", update=_sets_data)
NEW_STATE = TableRule(name="new_state", update=_new_state, states=(StateField("velocity"),))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("FAILS", r"FAILS has failed \(KeyError: 'velocity', at .*test_fifth_optimizer.py:\d+\)"),
        *(
            (name, f"{name} leaves a table or its state as it was; its update must change them in")
            for name in ("NOT_IN_PLACE", "SETS_DATA", "NEW_STATE")
        ),
    ],
)
def test_a_rule_that_fails_or_changes_nothing_is_refused(rule, problem):
    with pytest.raises(ValueError, match=problem):
        check_optimizers(compose_config(*options(rule)))
    check_optimizers(compose_config(*options("SIGN"), "optimizer.embedding_lr=1e-30"))


def run_plan(rule: str, *overrides: str) -> None:
    config = compose_config(*options(rule, *overrides))
    build_plan(config, open_source(config), planned_hardware(config))


def test_a_dense_optimizer_may_lie_outside_too():
    losses, _ = trained([*options("SIGN"), f"optimizer.name={HERE}:NADAM"])
    assert losses[0] != losses[-1]
    with pytest.raises(ValueError, match=r"BROKEN has failed \(TypeError: _broken\(\) takes 1"):
        check_optimizers(compose_config(*options("SIGN"), f"optimizer.name={HERE}:BROKEN"))


@pytest.mark.skipif(tl is None, reason="needs Triton")
@needs_no_gpu
def test_its_interpreted_branch_equals_plain_torch():
    compare(f"{HERE}:MOMENTUM", 40, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_its_branch_equals_plain_torch_on_a_gpu():
    compare(f"{HERE}:MOMENTUM", 20_000, "cuda", torch.float32)
