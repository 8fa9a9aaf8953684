"""Values of the next trial: evenly spread ones first, then those that a Gaussian process finds most promising.

The process is Optuna's. It is given all trials, not only complete ones: a pruned or running trial counts with the value that
it would have at its end, if it gained as much as complete trials did on average from its last evaluation on.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweep.space import Space, value_at

# A value below the middle half of the values by so many times its distance to the best one tells as little as a worse one.
FAR_BELOW = 1.5


def spread_values(space: Space, number: int, seed: int) -> dict[str, Any]:
    """Return the values of a trial that is one of evenly spread ones: a point of a scrambled Sobol sequence."""
    # SciPy takes a moment to import.
    from scipy.stats import qmc

    # Powers of two spread evenly.
    points = qmc.Sobol(len(space), scramble=True, seed=seed).random_base2(number.bit_length())
    shares = points[number]
    return {
        option: value_at(space[option], float(s)) for option, s in zip(space, shares, strict=True)
    }


def promising_values(
    trials: Sequence[FrozenTrial], space: Space, direction: str, seed: int
) -> dict[str, Any] | None:
    """Return the values that promise most after these trials; None if none of them has a value yet."""
    sign = 1.0 if direction == "maximize" else -1.0
    known = final_values(trials, sign)
    if not known:
        return None
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GPSampler(seed=seed, n_startup_trials=1)
    )
    distributions: dict[str, BaseDistribution] = dict(space)
    values = np.array([*known.values()])
    low = np.quantile(values, 0.25)
    worst = float(max(values.min(), low - FAR_BELOW * (values.max() - low)))
    middle = float(np.median(values))
    for trial in trials:
        # Failed ones have the worst value, those that just started the middle one.
        missing = worst if trial.state is TrialState.FAIL else middle
        value = max(known.get(trial.number, missing), worst)
        if trial.params.keys() == distributions.keys():
            study.add_trial(
                create_trial(params=trial.params, distributions=distributions, value=value)
            )
    return study.ask(distributions).params


def final_values(trials: Sequence[FrozenTrial], sign: float) -> dict[int, float]:
    """Return the value of each trial by its number, the larger the better: of unfinished ones the expected value.

    Trials without a value are left out; `sign` is -1 if a smaller value of the metric is better.
    """
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    values = {trial.number: sign * trial.value for trial in complete if trial.value is not None}
    if not values:
        return {}
    for trial in trials:
        if trial.state in (TrialState.PRUNED, TrialState.RUNNING) and trial.intermediate_values:
            last = max(trial.intermediate_values)
            gain = float(np.mean(gains(complete, last, sign)))
            values[trial.number] = best_until(trial, last, sign) + gain
    return values


def gains(complete: Sequence[FrozenTrial], evaluation: int, sign: float) -> list[float]:
    """Return how much each complete trial gained after an evaluation."""
    return [
        sign * (trial.value or 0.0) - best_until(trial, evaluation, sign)
        for trial in complete
        if trial.intermediate_values
    ] or [0.0]


def best_until(trial: FrozenTrial, evaluation: int, sign: float) -> float:
    """Return the best value of a trial up to an evaluation, or its first one, the larger the better."""
    until = [v for number, v in trial.intermediate_values.items() if number <= evaluation]
    first = trial.intermediate_values[min(trial.intermediate_values)]
    return max(sign * value for value in until or [first])
