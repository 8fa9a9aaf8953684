"""The study of a sweep: Optuna's ask and tell over its journal, which survives a kill at any moment."""

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from configs.many_runs_schema import Pruner, Sampler, SweepConfig
from configs.options import require
from dataloading.dataset.documents import read_json
from dataloading.dataset.durable_files import AppendedFile, replace_json
from dataloading.dataset.file_states import changed_data
from nn.models.metric import Metric
from sweep.proposals import best_until, gains, promising_values, spread_values
from sweep.space import Space, all_of, as_plain, grid_of

JOURNAL, SETTINGS, DATA = "journal.log", "settings.json", "data"
MAX_STARTUP_TRIALS = 10
LEAST_COMPLETE = 2
"""Complete trials before the first one is ended by what they gained."""


class ReachPruner(optuna.pruners.BasePruner):
    """Ends a trial that would not reach the best one if it gained as much from now on as any complete trial did."""

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        last = trial.last_step
        if last is None or len(complete) < LEAST_COMPLETE:
            return False
        sign = 1.0 if study.direction is optuna.study.StudyDirection.MAXIMIZE else -1.0
        best = max(sign * (other.value or 0.0) for other in complete)
        return best_until(trial, last, sign) + max(gains(complete, last, sign)) < best


PRUNERS: dict[Pruner, Callable[[], optuna.pruners.BasePruner]] = {
    Pruner.none: optuna.pruners.NopPruner,
    Pruner.reach: ReachPruner,
    Pruner.median: optuna.pruners.MedianPruner,
    Pruner.asha: lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
    Pruner.hyperband: optuna.pruners.HyperbandPruner,
}


class Study:
    """Trials of a sweep directory, which the caller holds alone.

    `own_values` are those of the recipe, for the first trial; None if the space lacks one of them. Raises ValueError: the
    directory holds another sweep, or the sampler cannot search this space.
    """

    def __init__(
        self,
        directory: Path,
        config: SweepConfig,
        space: Space,
        metric: Metric,
        own_values: dict[str, Any] | None = None,
    ) -> None:
        self.config, self._space, self._own_values = config, space, own_values
        self.direction = "maximize" if metric.larger_is_better else "minimize"
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        # constant_liar, which keeps trials that run at once apart, is one of them.
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        path = directory / JOURNAL
        # A killed process leaves its lock, and perhaps a part of a line. Nobody else writes here.
        Path(f"{path}.lock").unlink(missing_ok=True)
        AppendedFile(path, is_text=True).close()
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name="sweep",
            direction=self.direction,
            sampler=self._sampler(0),
            pruner=PRUNERS[config.pruner](),
            load_if_exists=True,
        )
        # Of fewer combinations than trials each is tried once, whatever the sampler: it would repeat some.
        size = math.prod(len(all_of(values) or ()) or math.inf for values in space.values())
        self._takes_each = config.sampler is Sampler.grid or size <= config.trials
        self.num_trials = config.trials
        if self._takes_each:
            left = islice(self._untried(), config.trials)
            self.num_trials = min(config.trials, len(self.trials()) + len(list(left)))

    def _untried(self) -> Iterator[dict[str, Any]]:
        """Yield the combinations of the space that no trial has, one that only waits included."""
        asked = [{**t.system_attrs.get("fixed_params", {}), **t.params} for t in self.trials()]
        tried = {tuple(values.get(option) for option in self._space) for values in asked}
        return (values for values in grid_of(self._space) if tuple(values.values()) not in tried)

    def has_more(self) -> bool:
        is_waiting = bool(self.trials(TrialState.WAITING))
        return is_waiting or len(self.trials()) < self.num_trials

    def ask(self) -> Trial:
        """Return a new trial with its values; those of a trial that was asked for before a kill are completed."""
        number = len(self.trials())
        # A sampler that is seeded once would draw the same values again after a restart.
        self._study.sampler = self._sampler(number)
        if not self.trials(TrialState.WAITING) and (values := self._values(number)) is not None:
            self._study.enqueue_trial(values)
        return self._study.ask(dict(self._space))

    def resume(self, frozen: FrozenTrial) -> Trial:
        self._study.sampler = self._sampler(frozen.number)
        trial = Trial(self._study, frozen._trial_id)
        for option, values in self._space.items():
            trial._suggest(option, values)  # those that it has already are kept
        return trial

    def tell(self, trial: Trial, state: TrialState, value: float | None = None) -> None:
        self._study.tell(trial, value, state=state)

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def best(self) -> FrozenTrial | None:
        """Return the complete trial with the best value; of equal ones the first."""
        complete = [trial for trial in self.trials(TrialState.COMPLETE) if trial.value is not None]
        sign = -1.0 if self.direction == "maximize" else 1.0
        return min(complete, key=lambda trial: sign * (trial.value or 0.0), default=None)

    def importances(self) -> dict[str, float]:
        """Return the share of each option in the variance of the metric; empty if too few trials are complete."""
        with suppress(ValueError, RuntimeError):
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            return dict(optuna.importance.get_param_importances(self._study, evaluator=evaluator))
        return {}

    def _values(self, number: int) -> dict[str, Any] | None:
        """Return the values of a new trial; None if Optuna's sampler draws them."""
        config, space = self.config, self._space
        is_model_based = config.sampler in (Sampler.gp, Sampler.tpe)
        if is_model_based and number == 0 and self._own_values is not None:
            return self._own_values
        if self._takes_each:
            return next(self._untried())
        if config.sampler is not Sampler.gp:
            return None
        values = None
        if number > len(space):  # those before are spread evenly
            seed = self._seed(number)
            values = promising_values(self.trials(), space, self.direction, seed)
        return values or spread_values(space, number, config.sampler_seed)

    def _seed(self, number: int) -> int:
        return self.config.sampler_seed * 1_000_003 + number

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Return the sampler of a trial; trials differ in their seeds."""
        config = self.config
        seed = self._seed(number)
        match config.sampler:
            case Sampler.tpe:
                startup = max(1, min(MAX_STARTUP_TRIALS, config.trials // 4))
                return optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=startup, constant_liar=config.parallel > 1
                )
            case Sampler.qmc:
                # The sequence counts its points in the journal.
                return optuna.samplers.QMCSampler(seed=config.sampler_seed, scramble=True)
            case Sampler.random | Sampler.grid | Sampler.gp:
                return optuna.samplers.RandomSampler(seed=seed)


def keep_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Record what a sweep searches, or raise ValueError if an earlier start has recorded another sweep, or other data.

    `settings` are from `settings_of`, and the state of the data as `DATA`.
    """
    path = directory / SETTINGS
    now = json.loads(json.dumps(settings))
    if not path.exists():
        require(
            not any(directory.iterdir()),
            f"output={directory} is not empty and holds no sweep; set another output",
        )
        replace_json(path, now)
        return
    before = read_json(path)
    data = now.pop(DATA)
    check_same_data(directory, before.get(DATA, data), data)
    options = sorted(set(now["overrides"]) ^ set(before.get("overrides", [])))
    require(
        not options,
        f"output={directory} holds a sweep of trials with other options (they differ in {', '.join(options)}); set another "
        "output, or repeat that one",
    )
    for key in sorted((now.keys() | before.keys()) - {DATA}):
        require(
            now.get(key) == before.get(key),
            f"output={directory} holds a sweep with another {key}: {before.get(key)} instead of {now.get(key)}; set another "
            "output, or repeat that one",
        )
    if DATA not in before:  # an earlier version did not record them
        replace_json(path, before | {DATA: data})


def check_same_data(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to compare trials on the data `now` with those on the data `before` (`file_states.data_state`)."""
    changed = changed_data(before, now)
    require(
        not changed,
        f"output={directory} holds a sweep of trials on other data, with which new ones cannot be compared: "
        f"{', '.join(changed[:3])}; restore the data, or set another output",
    )


def settings_of(config: SweepConfig, space: Space, metric: Metric, split: str) -> dict[str, Any]:
    """Return what may not change between two starts of a sweep; trials, parallel, sampler and pruner may."""
    return {
        "recipe": config.recipe,
        "space": as_plain(space),
        "overrides": sorted(config.overrides),
        "metric": metric.key,
        "split": split,
    }
