"""The tables' optimizer in plain torch against FBGEMM's fused optimizers and torch's Adam."""

from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from configs.schema import OptimizerConfig, OptimizerName, table_optimizers
from nn.embedding.optimizer import table_rule
from nn.embedding.torch_optimizer import TableOptimizer

ROWS, DIM, STEPS = 20, 8, 5


def batches():
    """Yield (ids, offsets, gradient of the bags) with repeated ids, an empty bag and rows never looked up."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 2, 2, 5, 6])
    for _ in range(STEPS):
        ids = torch.randint(0, ROWS - 5, (6,), generator=generator)
        yield ids, offsets, torch.randn(4, DIM, generator=generator)


def table_config(name, lr):
    return OptimizerConfig(embedding_name=name, embedding_lr=lr)


def look_up(table, ids, offsets):
    return nn.functional.embedding_bag(ids, table, offsets[:-1], mode="sum")


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        (OptimizerName.sgd, EmbOptimType.EXACT_SGD),
        (OptimizerName.adagrad, EmbOptimType.EXACT_ADAGRAD),
        (OptimizerName.rowwise_adagrad, EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_a_step_equals_that_of_the_fused_optimizer(name, fused):
    # A large eps makes its position in the formula matter.
    settings = {"eps": 0.1} if name is not OptimizerName.sgd else {}
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=fused,
        learning_rate=0.5,
        **settings,
    )
    (weight,) = tables.split_embedding_weights()
    weight.normal_(generator=torch.Generator().manual_seed(1))
    table = nn.Parameter(weight.clone())
    optimizer = TableOptimizer([table], OptimizerConfig(name=name, lr=0.5, **settings))
    for ids, offsets, grad in batches():
        tables(ids, offsets).backward(grad)
        optimizer.zero_grad()
        look_up(table, ids, offsets).backward(grad)
        optimizer.step()
        torch.testing.assert_close(table.detach(), weight, rtol=0, atol=1e-6)
    for (key, state), fused_state in zip(
        optimizer.state[table].items(),
        tables.split_optimizer_states()[0] if settings else [],
        strict=True,
    ):
        assert key == "momentum1"
        torch.testing.assert_close(state, fused_state, rtol=0, atol=1e-6)


def test_adam_updates_the_rows_of_the_batch_only():
    lr, eps, beta1, beta2 = 0.1, 0.1, 0.8, 0.99
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    table = nn.Parameter(start.clone())
    config = OptimizerConfig(name=OptimizerName.adam, lr=lr, eps=eps, beta1=beta1, beta2=beta2)
    optimizer = TableOptimizer([table], config)
    weight, mean, variance = start.double(), torch.zeros(ROWS, DIM), torch.zeros(ROWS, DIM)
    mean, variance = mean.double(), variance.double()
    for count, (ids, offsets, grad) in enumerate(batches(), start=1):
        optimizer.zero_grad()
        look_up(table, ids, offsets).backward(grad)
        optimizer.step()
        for row in set(ids.tolist()):
            g = table.grad[row].double()
            mean[row] = beta1 * mean[row] + (1 - beta1) * g
            variance[row] = beta2 * variance[row] + (1 - beta2) * g * g
            mean_hat = mean[row] / (1 - beta1**count)
            variance_hat = variance[row] / (1 - beta2**count)
            weight[row] -= lr * mean_hat / (variance_hat.sqrt() + eps)
        torch.testing.assert_close(table.detach().double(), weight, rtol=0, atol=1e-6)
    state = optimizer.state[table]
    torch.testing.assert_close(state["momentum1"].double(), mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(state["momentum2"].double(), variance, rtol=0, atol=1e-6)
    assert state["iter"].item() == STEPS
    assert torch.equal(table[ROWS - 5 :], start[ROWS - 5 :])


def test_adam_on_rows_seen_in_every_batch_is_torch_adam():
    start = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pairs = [
        (ours, TableOptimizer([ours], OptimizerConfig(name=OptimizerName.adam, lr=0.01))),
        (theirs, torch.optim.Adam([theirs], lr=0.01, eps=1e-8)),
    ]
    for _, _, grad in batches():
        for table, optimizer in pairs:
            table.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", table_optimizers())
def test_a_table_without_gradient_is_not_changed(name):
    table = nn.Parameter(torch.ones(3, 4))
    TableOptimizer([table], table_config(name, 1.0)).step()
    assert torch.equal(table, torch.ones(3, 4))


@pytest.mark.parametrize("name", table_optimizers())
def test_the_learning_rate_may_be_a_tensor_that_changes(name):
    results = []
    for as_tensor in (False, True):
        table = nn.Parameter(torch.ones(3, 4))
        rate = torch.tensor(0.5)
        optimizer = TableOptimizer([table], table_config(name, 0.5))
        if as_tensor:
            optimizer.param_groups[0]["lr"] = rate
        for lr in (0.5, 0.25):
            if as_tensor:
                rate.fill_(lr)
            else:
                optimizer.param_groups[0]["lr"] = lr
            table.grad = torch.full((3, 4), 0.3)
            optimizer.step()
        results.append(table.detach())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        (OptimizerName.sgd, {}),
        (OptimizerName.adagrad, {"momentum1": (3, 4)}),
        (OptimizerName.rowwise_adagrad, {"momentum1": (3,)}),
        (OptimizerName.adam, {"momentum1": (3, 4), "momentum2": (3, 4), "iter": ()}),
    ],
)
def test_state_is_allocated_before_the_first_step(name, shapes):
    table = nn.Parameter(torch.ones(3, 4))
    state = TableOptimizer([table], table_config(name, 1.0)).state[table]
    assert {key: tuple(value.shape) for key, value in state.items()} == shapes


@pytest.mark.parametrize("name", table_optimizers())
def test_a_restored_optimizer_resumes_bit_by_bit(name):
    def new(weight):
        table = nn.Parameter(weight.clone())
        return table, TableOptimizer([table], table_config(name, 0.1))

    def run(table, optimizer, gradients):
        for grad in gradients:
            table.grad = grad
            optimizer.step()

    gradients = [grad for _, _, grad in batches()]
    table, optimizer = new(torch.ones(4, DIM))
    run(table, optimizer, gradients[:2])
    again, restored = new(table.detach())
    for state, value in optimizer.state[table].items():
        restored.state[again][state].copy_(value)
    run(table, optimizer, gradients[2:])
    run(again, restored, gradients[2:])
    assert torch.equal(table, again)


@pytest.mark.parametrize("are_together", [True, False])
@pytest.mark.parametrize("name", table_optimizers())
def test_adjacent_tables_are_updated_as_one(name, are_together, monkeypatch):
    """Their weights and state are those of tables that lie apart, also where gradients lie apart or are missing."""
    sizes, config = [5, 1, 4, 3], table_config(name, 0.1)
    config = replace(config, embedding_l2=0.01)
    start = torch.randn(sum(sizes), DIM, generator=torch.Generator().manual_seed(1))
    apart = [nn.Parameter(rows.clone()) for rows in start.split(sizes)]
    adjacent = [nn.Parameter(rows) for rows in start.clone().split(sizes)]
    optimizers = [TableOptimizer(tables, config) for tables in (apart, adjacent)]
    counts = []
    rule = table_rule(config.table_name)

    def counting(tables, *others):
        counts.append(len(tables))
        rule.update(tables, *others)

    monkeypatch.setattr(optimizers[1], "_rule", replace(rule, update=counting))
    for step in range(3):
        gradients = torch.randn(sum(sizes), DIM, generator=torch.Generator().manual_seed(step))
        gradients[step] = 0
        for tables, optimizer in zip((apart, adjacent), optimizers, strict=True):
            own = gradients.clone()
            for table, gradient in zip(tables, own.split(sizes), strict=True):
                table.grad = gradient if are_together else gradient.clone()
            if not are_together:
                tables[2].grad = None
            optimizer.prepare(step, 0.1)
            optimizer.step()
    assert counts == [1] * 3
    for one, other in zip(apart, adjacent, strict=True):
        assert torch.equal(one, other)
        for state in rule.state_names:
            assert torch.equal(optimizers[0].state[one][state], optimizers[1].state[other][state])
