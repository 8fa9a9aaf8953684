"""The command of a recipe: compose the configuration, check it, run it, and end with a message and an exit code."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # A `configs` where the user works is not ours.
    if (ours := str(Path(__file__).resolve().parent)) != sys.path[0]:
        sys.path.insert(0, ours)
    # First, since the imports below take a moment, and may find no library.
    from configs.messages import report_load_errors
    from configs.stop_signals import end_at_once_on_signals

    report_load_errors()
    end_at_once_on_signals()

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.arguments import as_written
from configs.built_in import MODELS
from configs.command_line import SAVED_FLAG, composed_command, lasting_imports, written_options
from configs.exit_codes import (
    DIVERGED_EXIT_CODE,
    FAULT_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    LOST_RANK_EXIT_CODE,
    RESUME_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
)
from configs.messages import load_error_text, on_one_line, os_error_text
from configs.overrides import WrittenOption, drop_replaced, refuse_unresolved, texts_of, to_config
from configs.schema import Config, Mode
from configs.stop_signals import INTERRUPTED, restore_signals
from nn.days import UnfinishedDaysError, train_days
from nn.distributed.errors import (
    DeviceError,
    DivergedError,
    LostRankError,
    RankError,
    SharedError,
    StoppedError,
)
from nn.distributed.launcher import (
    ask_launcher_to_end,
    check_variables,
    end_with_launcher,
    is_launched,
    is_node_leader,
    leave_launcher,
    refuse_elastic_nodes,
)
from nn.multirun import JOBS, begin_command

# A launcher ends all ranks when the first one fails; the rank that prints the error must not be ended before it has.
SILENT_RANK_WAIT_S = 2.0


@contextmanager
def _process() -> Iterator[None]:
    """Set up the process as a rank, and end it as the launcher expects."""
    # Otherwise OpenMP's waiting threads spin, and the loader's threads get no core where cores are few. OpenMP reads it
    # when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    end_with_launcher()
    signal.signal(signal.SIGUSR1, _stop_at_once)
    try:
        check_variables()
    except ValueError as error:
        _end(str(error), USER_ERROR_EXIT_CODE)  # every process reports its own
    try:
        refuse_elastic_nodes()
        yield
    except ValueError as error:
        _end_together(str(error), USER_ERROR_EXIT_CODE)
    if len(JOBS.exit_codes) > 1:
        _compare(JOBS.exit_codes)
    problem = JOBS.problem()
    if problem is not None:
        _end(*problem)
    if is_launched():
        leave_launcher()


def _compare(run_dirs: Iterable[str]) -> None:
    from compare.report import print_comparison
    from compare.run_record import RunRecord
    from nn.observability.console import make_console

    found = []
    for path in map(Path, run_dirs):
        if path.is_dir():
            try:
                found.append(RunRecord.read(path))
            # The result of the jobs is not lost with one's records.
            except (OSError, ValueError) as error:
                print(f"warning: {on_one_line(str(error))}", file=sys.stderr)
    if trained := [run for run in found if run.records and run.is_training]:
        print_comparison(make_console(0), trained, None)


def command(config_name: str) -> Callable[[], None]:
    """Return the function that runs the recipe `configs/<config_name>.yaml` with the overrides of the command line."""
    begin_command()
    composed = composed_command(
        _run,
        Config,
        "schema",
        config_name,
        groups=("experiment", "data"),
        section_classes={"model": _model_options},
        read_saved=_saved_options,
    )
    return _process()(composed)


def _model_options(model: DictConfig) -> type:
    from nn.models.registry import find_options

    return find_options(model.name)


def _saved_options(path: Path) -> dict[str, Any]:
    from nn.saved_config import read_saved_config

    return read_saved_config(path)


@contextmanager
def _exit_codes(composed: DictConfig) -> Iterator[None]:
    """End the process with a message and an exit code for every error that the run `composed` may raise."""
    try:
        yield
    except RankError as error:
        _end(str(error), USER_ERROR_EXIT_CODE)
    except DeviceError as error:
        # Which call failed may help.
        traceback.print_exception(error.__cause__)
        _end(str(error), FAULT_EXIT_CODE)
    except LostRankError as error:
        _end(str(error) or None, LOST_RANK_EXIT_CODE)
    except (ValueError, SharedError) as error:
        # Every rank of a node, if not of all nodes, has met the same error; one of them prints it.
        _end_together(str(error), USER_ERROR_EXIT_CODE)
    except MemoryError as error:
        _end(f"out of memory: {str(error) or 'Python has none left'}", USER_ERROR_EXIT_CODE)
    except ImportError as error:
        text = load_error_text(error)
        if text is None:
            raise
        _end_together(text, USER_ERROR_EXIT_CODE)
    except OSError as error:
        text = load_error_text(error) or os_error_text(error, _where(composed))
        _end(text, USER_ERROR_EXIT_CODE)
    except UnfinishedDaysError as error:
        if not str(error):
            sys.exit(error.exit_code)  # the day has printed its message
        _end(str(error), error.exit_code)
    except DivergedError as error:
        _end_together(str(error), DIVERGED_EXIT_CODE)
    except StoppedError as error:
        _end_together(str(error), RESUME_EXIT_CODE)
    except KeyboardInterrupt:
        kept = (
            "the same command resumes from the latest checkpoint, if there is one; records are kept"
        )
        if composed.mode is Mode.predict:
            kept = "the scores so far are kept beside the output, and the same command resumes"
        text = f"{INTERRUPTED}: {kept}"
        _end_together(text, INTERRUPTED_EXIT_CODE)


def _run(composed: DictConfig) -> None:
    with _exit_codes(composed):
        if JOBS.has_several():
            JOBS.run(composed, _run)
            return
        refuse_unresolved(composed)
        if composed.days:
            to_config(composed)  # which checks the options before any day
            train_days(composed, _run)
            return
        # Here, not above: torch and TorchRec take seconds to import, and neither options nor paths need them.
        from nn.early_checks import check_inputs
        from nn.library_warnings import quiet_libraries
        from nn.models.registry import typed_config
        from nn.versions import require_stack

        # The run directory records the command as it was written.
        sys.argv = as_written([argument for argument in sys.argv if argument != SAVED_FLAG])
        written: list[WrittenOption] = []
        # A program that composes the options itself has no command line.
        if HydraConfig.initialized():
            overrides = texts_of(HydraConfig.get().overrides.task)
            drop_replaced(composed, overrides, Config)
            written = written_options(overrides, HydraConfig.get())
        config = to_config(composed)
        if config.mode is Mode.predict and "run_dir" in [option.name for option in written]:
            raise ValueError(
                f"run_dir={config.run_dir}: mode=predict writes output and no run directory; the model of a run is named by "
                "config=RUN/config.yaml and checkpoint.restore=RUN/checkpoints/best"
            )
        if composed.model.name in MODELS:  # the options of another one need torch
            config = typed_config(composed, written, config)
        check_inputs(config)
        if config.mode is Mode.predict and config.source and config.fitted:
            from preproc.transformed_rows import check_sources

            check_sources(Path(config.fitted), Path(config.source))
        if config.mode is Mode.predict and config.predict.average:
            from nn.scores.average import average

            average(config, sys.argv[1:])
            return
        require_stack()
        quiet_libraries()
        if sys.stdout.isatty() and is_node_leader() and "torch" not in sys.modules:
            # A line of its own: what comes next may be shorter, or an error.
            print("loading torch and TorchRec ...", flush=True)
        with lasting_imports():
            config = typed_config(composed, written, config)
            composed.model = OmegaConf.structured(config.model)
            from nn.build import global_batch_size
            from nn.run import MODES

            config.train.batch_size = composed.train.batch_size = global_batch_size(config)
            run = _predict if config.mode is Mode.predict else MODES[config.mode]
        restore_signals()
        run(config, OmegaConf.to_yaml(composed, resolve=True))


def _predict(config: Config, config_yaml: str) -> None:
    """Write the scores of a split, or of raw files: `nn` scores rows and knows nothing of preprocessing."""
    from nn.distributed.process_group import process_rank
    from nn.observability.console import make_console
    from nn.scores.run import predict
    from nn.scores.terminal import print_scores

    console = make_console(process_rank())
    raw = None
    if config.source is not None and config.fitted is not None:
        from preproc.transformed_rows import open_transformed_rows

        try:
            raw = open_transformed_rows(
                Path(config.fitted),
                [Path(config.source)],
                config.predict.columns,
                config.model.event_weights,
            )
        except ValueError as error:  # preprocessing keeps columns that its description names
            text = str(error).replace("table.keep: ", "predict.columns: ")
            raise ValueError(text) from None
    print_scores(console, config, predict(config, console, raw))


def _where(composed: DictConfig) -> str:
    """Return what a run reads and writes, for an error of the system that names no file."""
    run_dir = composed.run_dir or f"runs/{composed.recipe}"
    data = f" or data.path={composed.data.path}" if composed.data.path else ""
    return f"a file of run_dir={run_dir}{data}"


def _stop_at_once(signum: int, frame: FrameType | None) -> None:
    """End the process: before training starts there is nothing to save. Training installs its own handler.

    It raises nothing and prints without Python's buffers: the signal may arrive in an import, which may turn any exception into
    another one, or inside a print.
    """
    for ending in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ending, signal.SIG_IGN)
    if is_node_leader():
        name = signal.Signals(signum).name
        text = f"stopped by {name} before training started; rerun the same command\n"
        os.write(sys.stderr.fileno(), text.encode())
    ask_launcher_to_end()
    os._exit(RESUME_EXIT_CODE)


def _end_together(message: str, exit_code: int) -> NoReturn:
    """End with an error that all ranks of the node have met; one of them prints it."""
    _end(message if is_node_leader() else None, exit_code)


def _end(message: str | None, exit_code: int) -> NoReturn:
    if message is not None:
        sign = "" if exit_code in (RESUME_EXIT_CODE, INTERRUPTED_EXIT_CODE) else "error: "
        print(on_one_line(f"{sign}{message}"), file=sys.stderr, flush=True)
    if message is None or (exit_code == LOST_RANK_EXIT_CODE and is_launched()):
        # The launcher reports the rank that ends first, which should be the one that was lost.
        time.sleep(SILENT_RANK_WAIT_S)
    if exit_code == RESUME_EXIT_CODE:
        ask_launcher_to_end()
    if is_launched():
        leave_launcher(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    command("dlrm")()
