"""Command `python -m sweep`: try values of options in runs of their own, and test the best one."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

import signal

from configs.arguments import quoted
from configs.command_line import command, end_command
from configs.console import command_console
from configs.exit_codes import INTERRUPTED_EXIT_CODE, RESUME_EXIT_CODE
from configs.many_runs_schema import SweepConfig
from configs.messages import require_package
from configs.options import describe
from configs.overrides import no_option
from configs.schema import Config
from configs.stop_signals import INTERRUPTED, restore_signals


def run(config: SweepConfig) -> None:
    require_package("optuna", "python -m sweep")
    # Imported here: --help needs no Optuna.
    from sweep.driver import StoppedSweepError
    from sweep.run import run_sweep

    restore_signals()
    try:
        run_sweep(config, command_console())
    except StoppedSweepError as error:
        is_interrupt = error.signum == signal.SIGINT
        end_command(str(error), INTERRUPTED_EXIT_CODE if is_interrupt else RESUME_EXIT_CODE)


def with_trial_options(arguments: list[str]) -> list[str]:
    """Return the arguments with the options of the trials as one option, `overrides`.

    Raises ValueError: an argument is an option neither of the sweep nor of a run.
    """
    own = {option for option, _ in describe(SweepConfig)}
    of_runs = [option for option, _ in describe(Config)]
    others: list[str] = []
    trials: list[str] = []
    for argument in arguments:
        option = argument.partition("=")[0].lstrip("+~")
        is_own = (
            argument.startswith("-") or option in own or option.startswith("hydra.") or not argument
        )
        if not is_own and "." not in option and option not in (*of_runs, "experiment", "data"):
            raise no_option(option, [*own, *of_runs])
        (others if is_own else trials).append(argument)
    # An interpolation among them is one of the trial's options, not of the sweep's.
    texts = [trial.replace("${", r"\${") for trial in trials]
    return [*others, f"overrides=[{','.join(map(quoted, texts))}]"] if trials else others


if __name__ == "__main__":
    command(
        run,
        SweepConfig,
        "sweep",
        interrupted=f"{INTERRUPTED}: the same command resumes",
        arguments=with_trial_options,
    )
