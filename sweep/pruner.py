"""Pruners: they end trials early, by their evaluations."""

from collections.abc import Callable

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from configs.many_runs_schema import Pruner
from sweep.proposals import best_until, gains

LEAST_COMPLETE = 2
"""Complete trials before the first one is ended by what they gained."""


class ReachPruner(optuna.pruners.BasePruner):
    """Ends a trial that would not reach the best one if it gained as much from now on as any complete trial did."""

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        last = trial.last_step
        if last is None or len(complete) < LEAST_COMPLETE:
            return False
        sign = 1.0 if study.direction is optuna.study.StudyDirection.MAXIMIZE else -1.0
        best = max(sign * (other.value or 0.0) for other in complete)
        return best_until(trial, last, sign) + max(gains(complete, last, sign)) < best


def pruner_of(name: Pruner) -> optuna.pruners.BasePruner:
    kinds: dict[Pruner, Callable[[], optuna.pruners.BasePruner]] = {
        Pruner.none: optuna.pruners.NopPruner,
        Pruner.reach: ReachPruner,
        Pruner.median: optuna.pruners.MedianPruner,
        Pruner.asha: lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
        Pruner.hyperband: optuna.pruners.HyperbandPruner,
    }
    return kinds[name]()
