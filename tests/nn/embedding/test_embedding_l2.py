"""L2 of the rows that a step looks up: equality with a plain reference, resuming, the kernel, and refusals."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from configs.schema import OptimizerConfig, OptimizerName
from nn.build import build_plan, open_source, planned_hardware
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.gpus import needs_no_gpu
from tests.nn.embedding import test_triton_embedding_bag as kernels
from tests.nn.training.plain_training import RowUpdates, resumes_bit_by_bit, train_and_compare

L2 = 0.3
EPS = 0.01
RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
# A table of one rank, a replicated one, a row-wise one and, unless the optimizer has one state per row, a column-wise one.
LAYOUTS = "cat_0:table_wise,cat_1:data_parallel,cat_2:row_wise"


def options(rule: str) -> list[str]:
    layouts = LAYOUTS if rule == "rowwise_adagrad" else f"{LAYOUTS},cat_3:column_wise"
    return [
        *(*TINY, "optimizer.name=sgd", "optimizer.lr=0.05", f"optimizer.eps={EPS}"),
        *(f"optimizer.embedding_name={rule}", f"optimizer.embedding_lr={RATES[rule]}"),
        *(f"optimizer.embedding_l2={L2}", f"sharding.tables={{{layouts}}}"),
    ]


class WithL2(RowUpdates):
    """Each optimizer by its formula, with L2 added to the gradient."""

    def __init__(self, tables: list[torch.nn.Parameter], rule: str) -> None:
        super().__init__(tables)
        self.rule = rule
        self.states = [[torch.zeros_like(table) for _ in "ab"] for table in tables]
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        super().step()

    def new_rows(self, index: int, rows: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:
        lr, (first, second) = RATES[self.rule], self.states[index]
        gradients = gradients + L2 * weights
        if self.rule == "sgd":
            return weights - lr * gradients
        if self.rule == "adam":
            first[rows] = 0.9 * first[rows] + (1 - 0.9) * gradients
            second[rows] = 0.999 * second[rows] + (1 - 0.999) * gradients**2
            mean = first[rows] / (1 - 0.9**self.num_steps)
            variance = second[rows] / (1 - 0.999**self.num_steps)
            return weights - lr * mean / (variance.sqrt() + EPS)
        squares = gradients**2
        if self.rule == "rowwise_adagrad":
            squares = squares.mean(dim=1, keepdim=True).expand_as(squares)
        first[rows] += squares
        return weights - lr * gradients / (first[rows].sqrt() + EPS)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("rule", RATES)
def test_it_trains_as_a_plain_reference(rule):
    def updates(tables, dense):
        return [WithL2(tables, rule), torch.optim.SGD(dense, lr=0.05)]

    train_and_compare(options(rule), updates, 2)  # and one rank


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, options("adagrad"), num_ranks)


def test_rows_that_are_not_looked_up_keep_their_weights():
    with ranks_of_cpu():
        built = build(compose_config(*options("sgd")))
        (batch,) = built.train_loader.batches(0, 1)
        before = {shard.table: shard.weight.clone() for shard in built.step.tables.shards()}
        built.train(0, 1)
        after = {shard.table: shard.weight for shard in built.step.tables.shards()}
    for index in range(5):
        ids = batch.ids.values().view(5, -1)[index].long()
        changed = before[f"cat_{index}"].ne(after[f"cat_{index}"]).any(dim=1)
        assert torch.equal(changed.nonzero().flatten(), ids.unique())


def compare(monkeypatch, rule, *arguments) -> None:
    """Compare the kernel with plain torch as the tests of the kernels do, with L2."""
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "OptimizerConfig", partial(OptimizerConfig, embedding_l2=L2))
        kernels.compare(rule, *arguments)


@needs_no_gpu
# L2 is added before the rules, which tests/nn/embedding/test_triton_embedding_bag.py compares.
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_the_interpreted_kernel_equals_plain_torch(rule, monkeypatch):
    pytest.importorskip("triton")
    compare(monkeypatch, rule, kernels.SAMPLES, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("rule", "dtype"), list(product(kernels.RULES, [torch.float32, torch.bfloat16]))
)
def test_the_kernel_equals_plain_torch_on_a_gpu(rule, dtype, monkeypatch):
    compare(monkeypatch, rule, 20_000, "cuda", dtype)


def test_frozen_tables_ignore_it_in_any_layout():
    config = compose_config(
        *TINY,
        f"optimizer.embedding_l2={L2}",
        "train.freeze=[tables]",
        "sharding.types=[row_wise]",
        "sharding.world_size=2",
    )
    assert config.effective_optimizer.embedding_l2 == 0
    assert config.effective_optimizer.table_name == OptimizerName.sgd
    build_plan(config, open_source(config), planned_hardware(config))
