"""The time that is left, by a scripted clock: right within a quarter from a tenth of the run on."""

import random

import pytest

from nn.observability.time_left import TimeLeft
from nn.training.limits import EvalSteps

STEPS, EVERY = 400, 40
CHECKPOINT_S = 30.0


def scripted(step_s, evaluation_s, saves_best):
    """Run a loop by a clock of its own; return (estimate, truth) after every step."""
    now, seen = 0.0, []
    evaluations = EvalSteps(STEPS, STEPS // 2, STEPS // 2 // EVERY)
    left = TimeLeft(STEPS, evaluations.remaining, 5.0, lambda: CHECKPOINT_S, clock=lambda: now)
    for step in range(1, STEPS + 1):
        now += 25.0 if step == 1 else step_s(step)  # the first one compiles
        left.count(step)
        seen.append((left.seconds(), now))
        if step in evaluations:
            left.begin_evaluation()
            now += evaluation_s
            now += 4.0 if saves_best and step < STEPS else 0.0
    end = now + CHECKPOINT_S
    return [(estimate, end - at) for estimate, at in seen]


def noisy(step):
    """Steps between 0.2 and 1.6 s, as on a machine that others use."""
    return random.Random(step).choice([0.2, 0.3, 0.5, 0.9, 1.6])


@pytest.mark.parametrize(
    ("step_s", "evaluation_s", "saves_best"),
    [
        (lambda _: 0.5, 2.0, False),
        (lambda _: 0.5, 60.0, True),
        (noisy, 5.0, True),
        # Caches fill during the first steps.
        (lambda step: 2.0 if step < 10 else 0.4, 2.0, False),
    ],
)
def test_it_is_right_within_a_quarter_after_a_tenth_of_the_run(step_s, evaluation_s, saves_best):
    seen = scripted(step_s, evaluation_s, saves_best)
    # The first evaluation follows the tenth of the run; the step after it knows what it takes.
    for step, (estimate, truth) in enumerate(seen[STEPS // 10 :], start=STEPS // 10 + 1):
        assert estimate == pytest.approx(truth, rel=0.25), step


def test_without_an_evaluation_so_far_a_share_of_steps_stands_for_it():
    now = 0.0
    left = TimeLeft(100, lambda _: 2.0, steps_per_evaluation=10.0, clock=lambda: now)
    assert left.seconds() is None
    for step in range(1, 11):
        now += 1.0
        left.count(step)
    assert left.seconds() == pytest.approx(90 + 20)


def test_a_resumed_run_counts_its_own_steps_only():
    now = 100.0
    left = TimeLeft(100, clock=lambda: now)
    left.count(61)
    assert left.seconds() is None
    now += 2.0
    left.count(62)
    assert left.seconds() == pytest.approx(38 * 2)


@pytest.mark.parametrize("every", [None, 7])
@pytest.mark.parametrize("per_epoch", [1, 3, 500])
def test_the_evaluations_to_come_are_counted(every, per_epoch):
    evaluations = EvalSteps(230, 100, per_epoch, every)
    for step in range(1, 231):
        wanted = sum(later in evaluations for later in range(step, 231))
        assert abs(evaluations.remaining(step) - wanted) <= (0 if every or per_epoch == 1 else 1)
