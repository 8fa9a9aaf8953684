"""FTRL-Proximal of tables against its paper, in a run, in the kernel, and where it is refused."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from configs.schema import OptimizerConfig, OptimizerName
from nn.embedding.torch_optimizer import TableOptimizer
from nn.export.tables import export_tables
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.nn.checkpoint.test_state import save
from tests.nn.training.plain_training import RowUpdates, resumes_bit_by_bit, train_and_compare

ALPHA, BETA, L1, L2 = 0.3, 0.5, 0.02, 0.1
LAYOUTS = "sharding.tables={cat_0:table_wise,cat_1:data_parallel,cat_3:column_wise}"
OPTIONS = [
    *(*TINY, "optimizer.name=sgd", "optimizer.lr=0.05", LAYOUTS),
    *("optimizer.embedding_name=ftrl", f"optimizer.embedding_lr={ALPHA}"),
    *(f"optimizer.ftrl_beta={BETA}", f"optimizer.ftrl_l1={L1}", f"optimizer.ftrl_l2={L2}"),
]


def ftrl(lr: float = ALPHA, beta: float = BETA, l1: float = L1, l2: float = L2) -> OptimizerConfig:
    return OptimizerConfig(
        embedding_name="ftrl", embedding_lr=lr, ftrl_beta=beta, ftrl_l1=l1, ftrl_l2=l2
    )


def algorithm_1(gradients: list[float]) -> list[float]:
    """Return the weight of one coordinate before each gradient and after the last, as the paper computes it."""
    z = n = 0.0
    weights = []
    for gradient in [*gradients, 0.0]:
        if abs(z) <= L1:
            weight = 0.0
        else:
            rate = 1 / ((BETA + math.sqrt(n)) / ALPHA + L2)
            weight = -rate * (z - math.copysign(1, z) * L1)
        weights.append(weight)
        sigma = (math.sqrt(n + gradient**2) - math.sqrt(n)) / ALPHA
        z += gradient - sigma * weight
        n += gradient**2
    return weights


def test_a_weight_that_starts_at_zero_follows_algorithm_1():
    gradients = torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0)) * 0.1
    table = nn.Parameter(torch.zeros(4, 3))
    optimizer = TableOptimizer([table], ftrl())
    weights = [table.detach().clone()]
    for gradient in gradients:
        table.grad = gradient.clone()
        optimizer.step()
        weights.append(table.detach().clone())
    for row in range(4):
        for column in range(3):
            wanted = algorithm_1(gradients[:, row, column].tolist())
            got = [weight[row, column].item() for weight in weights]
            assert got == pytest.approx(wanted, abs=1e-6)
            assert [value == 0 for value in got] == [value == 0 for value in wanted]


class Ftrl(RowUpdates):
    """Algorithm 1 in double precision; a weight that starts elsewhere starts with the z whose weight it is."""

    def __init__(self, tables: list[nn.Parameter]) -> None:
        super().__init__(tables)
        starts = [table.detach().double() for table in tables]
        self.z = [-(start * (BETA / ALPHA + L2) + start.sign() * L1) for start in starts]
        self.n = [torch.zeros_like(start) for start in starts]

    def new_rows(self, index: int, rows: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:
        z, n, gradients = self.z[index], self.n[index], gradients.double()
        sigma = ((n[rows] + gradients**2).sqrt() - n[rows].sqrt()) / ALPHA
        z[rows] += gradients - sigma * weights
        n[rows] += gradients**2
        solved = -(z[rows] - z[rows].sign() * L1) / ((BETA + n[rows].sqrt()) / ALPHA + L2)
        return torch.where(z[rows].abs() <= L1, 0, solved).float()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_trains_as_a_plain_reference(num_ranks):
    def updates(tables, dense):
        return [Ftrl(tables), torch.optim.SGD(dense, lr=0.05)]

    train_and_compare(OPTIONS, updates, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, OPTIONS, num_ranks)


def test_its_states_are_exported(tmp_path):
    with ranks_of_cpu():
        built = build(compose_config(*OPTIONS))
        built.train(0, 2)
        export_tables(save(tmp_path / "saved", built, 2), tmp_path / "npy")
    for state in ("z", "n"):
        assert np.load(tmp_path / f"npy/cat_0.{state}.npy").any()


def test_l1_makes_weights_exactly_zero_and_they_stay_so_without_gradients():
    table = nn.Parameter(torch.full((2, 2), 0.01))
    optimizer = TableOptimizer([table], ftrl(l1=1.0, l2=0.0))
    table.grad = torch.tensor([[0.9, 0.9], [0.0, 0.0]])
    optimizer.step()
    assert table.tolist() == [[0, 0], [pytest.approx(0.01)] * 2]


def test_a_rate_of_zero_changes_no_weight():
    """The schedule may end at zero; with a smaller alpha the weights would shrink to zero."""
    table = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
    optimizer = TableOptimizer([table], ftrl())
    for step in range(12):
        if step == 6:
            before = table.detach().clone()
            optimizer.param_groups[0]["lr"] = 0.0
        table.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    torch.testing.assert_close(table.detach(), before, rtol=1e-5, atol=1e-6)
    assert torch.equal(table == 0, before == 0)


def test_restored_weights_without_state_are_kept_by_a_small_gradient():
    table = nn.Parameter(torch.full((1, 2), 0.7))
    optimizer = TableOptimizer([table], ftrl())
    table.grad = torch.full((1, 2), 1e-6)
    optimizer.step()
    assert table.tolist() == [[pytest.approx(0.7, abs=1e-5)] * 2]


def test_frozen_tables_have_no_state():
    config = compose_config(*OPTIONS, "train.freeze=[tables]").effective_optimizer
    assert (config.table_name, config.ftrl_l1, config.ftrl_beta) == (OptimizerName.sgd, 0, 1)
