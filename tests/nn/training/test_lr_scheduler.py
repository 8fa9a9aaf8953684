import pytest
import torch

from configs.schema import DecayShape, SchedulerConfig
from nn.training.lr_scheduler import learning_rate_factor

NVIDIA = SchedulerConfig(warmup_steps=8000, decay_start_step=48_000, decay_steps=24_000)


def published(s, warmup=8000, start=48_000, steps=24_000, warmup_factor=0, end_factor=0.0):
    """LearningRateScheduler of NVIDIA's PyTorch recipe, counter s from 1."""
    if s <= warmup:
        return 1 - (warmup - s) / (warmup * 2**warmup_factor)
    if s <= start:
        return 1.0
    if s <= start + steps:
        return max(((start + steps - s) / steps) ** 2, end_factor)
    return end_factor


@pytest.mark.parametrize(
    "step", [0, 1, 3999, 7998, 7999, 8000, 47_999, 48_000, 60_000, 64_013, 71_998, 71_999, 72_000]
)
def test_it_is_the_published_schedule(step):
    assert learning_rate_factor(step, NVIDIA) == pytest.approx(published(step + 1), abs=1e-12)


def test_the_first_update_already_moves_the_weights():
    assert learning_rate_factor(0, NVIDIA) == 1 / 8000


def test_the_end_of_one_epoch_of_criteo_lies_on_the_decay():
    assert learning_rate_factor(64_012, NVIDIA) == pytest.approx(0.1108, abs=1e-4)


@pytest.mark.parametrize("step", [72_000, 95_999, 96_000, 128_026, 10**9])
def test_the_rate_never_rises_again_after_the_decay(step):
    assert learning_rate_factor(step, NVIDIA) == 0


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_factor(0, SchedulerConfig()) == 1


def test_without_a_decay_the_rate_is_held():
    assert learning_rate_factor(10**9, SchedulerConfig(warmup_steps=10)) == 1


def test_the_first_step_of_the_decay_is_the_one_named():
    config = SchedulerConfig(decay_start_step=5, decay_steps=10, decay_power=1)
    assert [learning_rate_factor(step, config) for step in (4, 5, 6)] == [1, 0.9, 0.8]


def test_the_cosine_decay_is_that_of_torch():
    config = SchedulerConfig(
        warmup_steps=3, decay_start_step=5, decay_steps=10, decay=DecayShape.cosine
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    wanted = []
    for _ in range(11):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    # Update 4 is the last before the decay, update 14 the first at zero; the rate stays there.
    factors = [learning_rate_factor(step, config) for step in range(4, 18)]
    assert factors == pytest.approx([*wanted, 0, 0, 0], abs=1e-12)
    assert factors[10:] == [0, 0, 0, 0]
    assert [learning_rate_factor(step, config) for step in range(4)] == [1 / 3, 2 / 3, 1, 1]


def test_a_schedule_from_0_is_that_of_mlperf_for_sequences():
    config = SchedulerConfig(warmup_steps=24_000, first_step=0)
    assert learning_rate_factor(0, config) == 0
    assert 1e-6 * learning_rate_factor(49, config) == pytest.approx(2.0416667e-9, rel=1e-7)
    assert learning_rate_factor(24_000, config) == 1
    assert learning_rate_factor(0, SchedulerConfig(first_step=0)) == 1
