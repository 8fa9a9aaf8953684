"""Jobs of `--multirun`: one process and one run directory for each combination of values, one after the other.

Hydra calls the command's function once for each job, in one process. Here that call forks a process for the job, which has
memory, signals and a process group of its own: an unsuccessful job, also one that is killed, does not end the others.
"""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from configs.exit_codes import INTERRUPTED_EXIT_CODE, RESUME_EXIT_CODE
from configs.messages import on_one_line
from configs.option_values import short_names
from configs.overrides import refuse_unresolved, texts_of, to_config
from nn.distributed.launcher import is_launched
from nn.shared_imports import import_for_runs

MAX_NAME_CHARS = 120
STOPPING = {signal.SIGINT: INTERRUPTED_EXIT_CODE, signal.SIGTERM: RESUME_EXIT_CODE}


@dataclass(slots=True)
class Jobs:
    """Jobs of this command so far.

    `exit_codes`: by run directory, in the order of the jobs.
    `signum`: signal that ends the command after the job that is running.
    """

    exit_codes: dict[str, int] = field(default_factory=dict)
    is_job: bool = False
    signum: int = 0

    def has_several(self) -> bool:
        """Return whether this process starts jobs: the command has --multirun, and this is none of its jobs."""
        return (
            not self.is_job
            and HydraConfig.initialized()
            and HydraConfig.get().mode is RunMode.MULTIRUN
        )

    def run(self, composed: DictConfig, work: Callable[[DictConfig], None]) -> None:
        """Run one job in a process of its own, and wait for it; do nothing after a signal.

        Raises ValueError: a launcher has started this process.
        """
        if is_launched():
            raise ValueError(
                "--multirun starts one process per job, and a launcher one per rank; start the jobs one by one under the "
                "launcher"
            )
        if self.signum:
            return
        composed.run_dir = job_directory(composed, sys.argv[1:])
        print(on_one_line(f"job {HydraConfig.get().job.num}: {composed.run_dir}"), flush=True)
        written = texts_of(HydraConfig.get().overrides.task)
        with suppress(ValueError):  # the job reports it
            refuse_unresolved(composed)
            to_config(composed)
            import_for_runs()
        self.exit_codes[str(composed.run_dir)] = self.fork(lambda: work(composed), written)

    def fork(self, work: Callable[[], None], arguments: Sequence[str]) -> int:
        """Do some work in a process of its own, as a command with these arguments.

        Returns:
            Its exit code, 128 + N after signal N.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self.is_job = True
            sys.argv[1:] = arguments
            end_process(work)
        return self._wait(pid)

    def problem(self) -> tuple[str, int] | None:
        """Return the message and the exit code of a command of which some job was unsuccessful, or None."""
        bad = {run_dir: code for run_dir, code in self.exit_codes.items() if code}
        if self.signum:
            name = signal.Signals(self.signum).name
            text = f"stopped by {name} after {len(self.exit_codes)} jobs; with run_dir=DIR the same command resumes"
            return text, STOPPING[signal.Signals(self.signum)]
        if not bad:
            return None
        shown = ", ".join(f"{run_dir} (exit code {code})" for run_dir, code in bad.items())
        return f"{len(bad)} of {len(self.exit_codes)} jobs were unsuccessful: {shown}", max(
            bad.values()
        )

    def _wait(self, pid: int) -> int:
        """Wait for a job, and pass signals on to it; return its exit code, 128 + N after signal N."""

        def forward(signum: int, frame: FrameType | None) -> None:
            self.signum = signum
            # The terminal sends Ctrl-C to the job too.
            if signum != signal.SIGINT:
                os.kill(pid, signum)

        with on_stop(forward):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if code >= 0 else 128 - code


@contextmanager
def on_stop(handle: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handle) for signum in STOPPING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


JOBS = Jobs()


def begin_command() -> None:
    """Forget the jobs of an earlier command, and register `${multirun_folder:}`, the folder of the jobs' run directories.

    It is `run_dir`, or a new one below `multirun/`.
    """
    JOBS.exit_codes.clear()
    JOBS.is_job, JOBS.signum = False, 0
    new = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")

    def folder(*, _root_: DictConfig) -> str:
        named = _as_written(_root_, "run_dir")
        differs = not named or "${" in named
        return f"multirun/{_root_.recipe}/{new}" if differs else named

    OmegaConf.register_new_resolver("multirun_folder", folder, replace=True)


def job_directory(composed: DictConfig, arguments: Sequence[str]) -> str:
    """Return the run directory of the job that Hydra has composed.

    It is the user's where `run_dir` differs by job. Otherwise it lies below `run_dir`, or below `hydra.sweep.dir`, and its name
    has the values by which the job differs from the others.
    """
    hydra = HydraConfig.get()
    written = [text for text in arguments if not text.startswith("-")]
    # The last one of an option applies.
    sweeps = {o.get_key_element(): o.is_sweep_override() for o in map(_parsed, written)}
    differing = {
        o.get_key_element(): o.get_value_element_as_str()
        for o in map(_parsed, texts_of(hydra.overrides.task))
        if sweeps.get(o.get_key_element(), True)
    }
    if "run_dir" in differing or "${" in _as_written(composed, "run_dir"):
        refuse_unresolved(composed)
        return str(composed.run_dir)
    return str(Path(hydra.sweep.dir) / named(hydra.job.num, differing))


def named(number: int, values: dict[str, Any]) -> str:
    """Return a file name such as `00-lr=0.01,dropout=0.5`: a number and the values, by the last part of their names.

    Two names with the same last part are written completely. Brackets, quotes and spaces are left out; other characters that
    paths or shells treat otherwise become `_`.
    """
    short = short_names([option.lstrip("+") for option in values])
    text = ",".join(
        f"{option}={value}" for option, value in zip(short, values.values(), strict=True)
    )
    text = re.sub(r"[\[\]{}'\"\s]", "", text)
    safe = re.sub(r"[^\w.,=+-]+", "_", text, flags=re.ASCII).strip("_")
    return f"{number:02d}-{safe[:MAX_NAME_CHARS]}".rstrip("-")


def _as_written(config: DictConfig, option: str) -> str:
    """Return an option before interpolation, as text; empty if it is null."""
    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    return str(values[option] or "")


def _parsed(text: str) -> Any:
    return OverridesParser.create().parse_override(text)


def end_process(work: Callable[[], None]) -> None:
    """Do the work and end this process, whose parent continues with the next job."""
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
