"""Clipping of the dense gradient by its norm: equality with torch, the loss scale, resuming."""

import pytest
import torch

from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.nn.training.plain_training import local_state, resumes_bit_by_bit, train_and_compare

NORM = 0.25
OPTIONS = [*TINY, "optimizer.name=sgd", "optimizer.lr=0.2", f"train.clip_norm={NORM}"]
LAYOUTS = {
    "whole": "sharding.tables={cat_0:table_wise,cat_1:data_parallel}",
    # A row-wise table requires the dynamic step.
    "rows": "sharding.tables={cat_1:data_parallel,cat_2:row_wise}",
}


class Clip:
    """Clips gradients, and counts how often they were too long."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.norms: list[float] = []

    def step(self) -> None:
        self.norms.append(torch.nn.utils.clip_grad_norm_(self.parameters, NORM).item())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("path", LAYOUTS)
def test_it_trains_as_torch_does(path, num_ranks):
    clips = []

    def updates(tables, dense):
        clips.append(Clip(dense))
        return [torch.optim.SGD(tables, lr=0.2), *clips, torch.optim.SGD(dense, lr=0.2)]

    train_and_compare([*OPTIONS, LAYOUTS[path]], updates, num_ranks)
    norms = clips[0].norms
    assert min(norms) < NORM < max(norms), "the case clips always or never"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, [*OPTIONS, LAYOUTS["whole"]], num_ranks)


@pytest.mark.parametrize("path", LAYOUTS)
def test_gradients_are_clipped_after_the_loss_scale_is_divided_out(path, monkeypatch):
    """A power of two changes no bit; on a CPU only a test can set one."""
    states = []
    with ranks_of_cpu():
        for scale in (1.0, 1024.0):
            for module in ("nn.training.train_step", "nn.build"):
                monkeypatch.setattr(f"{module}.loss_scale", lambda config, scale=scale: scale)
            built = build(compose_config(*OPTIONS, LAYOUTS[path]))
            built.train(0, 4)
            states.append(local_state(built))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
