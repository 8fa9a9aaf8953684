"""Logger to Weights & Biases. Project, entity, mode and login are the library's own business: WANDB_PROJECT, WANDB_MODE."""

from collections.abc import Mapping
from typing import Any

from nn.loggers.run_logger import LoggedRun

STEP = "step"


class WandbLogger:
    """Logger to one run of Weights & Biases, which a resumed training continues.

    The x axis of all charts is the number of steps, so that numbers of steps that are trained again may follow.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._is_finished = False

    def start(self, run: LoggedRun) -> None:
        """Open or continue the run. Raises RuntimeError: there is no login, which the library would ask for on the terminal."""
        import wandb

        is_online = wandb.setup().settings.mode == "online"
        if is_online and not wandb.login(prompt=False):
            raise RuntimeError(
                "there is no login; run `wandb login`, or set WANDB_MODE=offline to write files and sync them later"
            )
        self._run = wandb.init(
            id=run.key,
            name=run.name,
            group=str(run.config.get("recipe") or "") or None,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("*", step_metric=STEP)

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **{f"{group}/{name}": value for name, value in numbers.items()}})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(
            {key: value for key, value in summary.items() if value is not None}
        )
        self._is_finished = True

    def close(self) -> None:
        """End the run; one that has not finished is shown as failed until it resumes."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._is_finished else 1)
