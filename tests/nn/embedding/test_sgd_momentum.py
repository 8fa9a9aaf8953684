"""Momentum of tables against torch's SGD, on rows that every batch looks up, and on others."""

import pytest
import torch
from torch import nn

from configs.schema import OptimizerConfig
from nn.embedding.torch_optimizer import TableOptimizer
from tests.helpers.composed import TINY
from tests.nn.training.plain_training import RowUpdates, resumes_bit_by_bit, train_and_compare

RATE = 0.05
OPTIONS = ["optimizer.embedding_name=sgd_momentum", f"optimizer.embedding_lr={RATE}"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_rows_of_every_batch_move_as_those_of_torch(nesterov):
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"nesterov": 1, "momentum": 0.8} if nesterov else {}
    config = OptimizerConfig(
        embedding_name="sgd_momentum", embedding_lr=RATE, embedding_options=options
    )
    momentum = 0.8 if nesterov else 0.9
    pairs = [
        (ours, TableOptimizer([ours], config)),
        (theirs, torch.optim.SGD([theirs], lr=RATE, momentum=momentum, nesterov=nesterov)),
    ]
    for step in range(5):
        for table, optimizer in pairs:
            table.grad = (start + step).cos()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


class PlainRows(RowUpdates):
    """Nesterov's form on the rows of a batch."""

    def __init__(self, tables):
        super().__init__(tables)
        self.buffers = [torch.zeros(table.shape) for table in tables]

    def new_rows(self, index, rows, weights, gradients):
        buffer = self.buffers[index]
        buffer[rows] = 0.9 * buffer[rows] + gradients
        return weights - RATE * (gradients + 0.9 * buffer[rows])


NESTEROV = [*TINY, *OPTIONS, "optimizer.embedding_options={nesterov: 1}", "optimizer.name=sgd"]
NESTEROV += ["optimizer.lr=0.1"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_trains_the_rows_of_a_batch(num_ranks):
    def updates(tables, dense):
        return [PlainRows(tables), torch.optim.SGD(dense, lr=0.1)]

    train_and_compare(NESTEROV, updates, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, NESTEROV, num_ranks)
