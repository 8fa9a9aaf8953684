"""Replicated tables updated by one kernel, against plain torch: under Triton's interpreter on a CPU, compiled on a GPU."""

import math

import pytest
import torch
from torch import nn

from configs.schema import OptimizerConfig, table_optimizers
from nn.embedding.local_tables import UpdateScalars
from nn.embedding.torch_optimizer import TableOptimizer
from nn.sharding.owned_shard import adjacent
from nn.sharding.sharded_tables import ShardedTables
from nn.training.gradient_bucket import GradientBucket
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.gpus import needs_no_gpu, needs_one_gpu

SHAPES = [torch.Size(shape) for shape in ((7, 12), (1, 12), (6, 8), (5, 12))]
STEP, RATE = 3, 0.1


def optimizer_of(config: OptimizerConfig, device: str) -> TableOptimizer:
    """Return that of tables of two widths, one of which does not lie beside its like, with weights and states of a seed."""
    torch.manual_seed(0)
    widths, floats = [columns for _, columns in SHAPES], [torch.float32] * len(SHAPES)
    tables = [nn.Parameter(of) for of in adjacent(SHAPES, widths, floats, torch.device(device))]
    optimizer = TableOptimizer(tables, config)
    for table in tables:
        table.data.copy_(torch.randn(table.shape))
        for state in optimizer.state[table].values():
            state.copy_(torch.rand(state.shape) * 0.01)
    return optimizer


def gradients_of(device: str) -> list[torch.Tensor]:
    """Return those of the tables, adjacent to each other, of which some rows have none."""
    torch.manual_seed(1)
    flat = torch.randn(sum(shape.numel() for shape in SHAPES))
    parts = flat.to(device).split([shape.numel() for shape in SHAPES])
    gradients = [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]
    for gradient in gradients:
        gradient[1:4] = 0
    gradients[0][2, 5] = 1e-3
    return gradients


def numbers_of(optimizer: TableOptimizer) -> list[torch.Tensor]:
    """Return weights and states, without the number of updates, which the kernel reads elsewhere."""
    tables = optimizer.param_groups[0]["params"]
    states = [of for table in tables for of in optimizer.state[table].values() if of.dim()]
    return [number.detach().clone() for number in [*tables, *states]]


def check(config: OptimizerConfig, device: str) -> None:
    plain, ours = optimizer_of(config, device), optimizer_of(config, device)
    gradients = gradients_of(device)
    scalars = UpdateScalars(config, 1.0, torch.device(device))
    scalars.set(STEP, RATE)
    before, is_good = numbers_of(ours), torch.zeros(1, dtype=torch.int32, device=device)
    ours.step_by_kernels(gradients, scalars, is_good)
    torch.testing.assert_close(numbers_of(ours), before, rtol=0, atol=0)
    ours.step_by_kernels(gradients, scalars, is_good + 1)
    # Of gradients that stay as they are.
    torch.testing.assert_close(gradients, gradients_of(device), rtol=0, atol=0)
    plain.prepare(STEP, RATE)
    for table, gradient in zip(plain.param_groups[0]["params"], gradients, strict=True):
        table.grad = gradient
    plain.step()
    torch.testing.assert_close(numbers_of(ours), numbers_of(plain), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(numbers_of(ours)[0][3], before[0][3], rtol=0, atol=0)


def config_of(rule: str, l2: float) -> OptimizerConfig:
    own = {"ftrl_l1": 0.05} if rule == "ftrl" else {}
    return OptimizerConfig(embedding_name=rule, embedding_lr=RATE, eps=1e-3, embedding_l2=l2, **own)


@needs_no_gpu
@pytest.mark.parametrize("rule", table_optimizers())
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_one_kernel_updates_the_rows_that_have_a_gradient(rule, l2):
    check(config_of(rule, l2), "cpu")


@needs_one_gpu
@pytest.mark.parametrize("rule", table_optimizers())
def test_one_kernel_updates_the_rows_that_have_a_gradient_on_a_gpu(rule):
    check(config_of(rule, 0.1), "cuda")


@needs_no_gpu
def test_a_gradient_that_is_no_number_is_none_of_zero():
    optimizer = optimizer_of(config_of("sgd", 0.0), "cpu")
    gradients = [gradient.zero_() for gradient in gradients_of("cpu")]
    gradients[2][4, 0] = math.nan
    scalars = UpdateScalars(config_of("sgd", 0.0), 1.0, torch.device("cpu"))
    scalars.set(STEP, RATE)
    optimizer.step_by_kernels(gradients, scalars, torch.ones(1, dtype=torch.int32))
    found = [of.isnan().sum().item() for of in numbers_of(optimizer)]
    assert found == [0, 0, 1, 0]


@needs_no_gpu
def test_neighbours_in_the_gradient_bucket_take_one_launch(monkeypatch):
    optimizer = optimizer_of(config_of("sgd", 0.0), "cpu")
    bucket = GradientBucket([nn.Parameter(torch.zeros(3, 5))], SHAPES)
    scalars = UpdateScalars(config_of("sgd", 0.0), 1.0, torch.device("cpu"))
    rows = []
    monkeypatch.setattr(
        "nn.embedding.triton_launcher.update_table",
        lambda table, *_: rows.append(len(table.weight)),
    )
    optimizer.step_by_kernels(bucket.further, scalars, torch.ones(1, dtype=torch.int32))
    assert rows == [8, 6, 5]


@needs_no_gpu
@pytest.mark.parametrize(
    "options",
    [
        ["optimizer.name=adam"],
        ["optimizer.name=adagrad", "optimizer.embedding_l2=1e-3", "train.clip_norm=0.01"],
        ["optimizer.name=sgd", "train.freeze=[tables]"],
    ],
    ids=str,
)
def test_a_pass_with_the_kernel_trains_as_plain_torch(options, monkeypatch):
    """As on a GPU: inside the pass, behind the check, with the scalars of the step."""
    results = []
    with ranks_of_cpu():
        for in_pass in (False, True):
            is_in_pass = property(lambda _, found=in_pass: found)
            monkeypatch.setattr(ShardedTables, "_updates_replicated_in_pass", is_in_pass)
            built = build(compose_config(*TINY, *options, "sharding.types=[data_parallel]"))
            losses = built.train(0, 4)
            weights = [shard.weight.clone() for shard in built.step.tables.shards()]
            results.append((losses, weights))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert results[0][0][0] != results[0][0][-1]
