"""Checkpoint manager: training waits only for a copy in host memory, and a thread writes the files."""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import Logger
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor

from configs.schema import CheckpointConfig
from dataloading.dataset.durable_files import append_line
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import changed_files, file_states
from nn.checkpoint.directory import (
    SAVED,
    UnreadableError,
    commit,
    list_checkpoints,
    prune,
    step_of,
    unfinished,
)
from nn.checkpoint.mirror import CheckpointMirror
from nn.checkpoint.staging import StagingBuffer, num_bytes, stored_bytes
from nn.checkpoint.state import TRAINER, Trained, incomplete_tensors, restore, write
from nn.distributed.errors import SharedError
from nn.distributed.preemption import Heartbeat
from nn.distributed.process_group import HostChannel, Ranks
from nn.distributed.sharded_tensor import State

THREAD_NAME = "checkpoint-writer"
SPARE_MEMORY = 0.8
"""Fraction of a node's available memory that copies of the state may take."""

BYTES_PER_S = 1e9
"""What a disk is expected to write, until a checkpoint was written."""


@dataclass(frozen=True, slots=True)
class SavedRun:
    facts: Mapping[str, Any]
    spec: FeatureSpec
    mirror: CheckpointMirror | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Time for which training stands still for a save; times are those of `time.perf_counter`."""

    stopped_at: float
    # for deltas, since the checkpoint before; None without deltas
    for_deltas_s: float | None = None
    # after the last step, when the files begin to be written; None while it waits
    continues_at: float | None = None

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds as they are recorded, those so far while training waits."""
        end = time.perf_counter() if self.continues_at is None else self.continues_at
        seconds = {"paused_s": end - self.stopped_at}
        if self.for_deltas_s is not None:
            seconds["deltas_paused_s"] = self.for_deltas_s
        return seconds


class CheckpointManager:
    """Writer of one checkpoint at a time, by all ranks alike; one that fails is reported, and the next save tries again."""

    def __init__(
        self,
        directory: Path,
        step: Trained,
        run: SavedRun,
        config: CheckpointConfig,
        ranks: Ranks,
        logger: Logger,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.directory = directory
        self._step = step
        self._facts = dict(run.facts)
        self._spec = run.spec
        self._mirror = run.mirror
        self._config = config
        self._ranks = ranks
        self._logger = logger
        self._heartbeat = heartbeat or Heartbeat()
        self._channel = HostChannel()
        self.copy = StagingBuffer(ranks.device)
        # Of the latest checkpoint, or what the first is expected to take; on rank 0.
        self.write_s = 0.0
        self._has_room: bool | None = None
        self._thread: Thread | None = None
        self._problem: str | None = None
        self._is_last = False
        self._error: BaseException | None = None

    def check_room(self) -> None:
        """Print a warning on rank 0 if the disk has no room for one checkpoint, a quota apart."""
        if not self._ranks.is_rank0:
            return
        # Of tables on disk only changed rows are written, which nobody has counted.
        on_disk = tuple(name.removesuffix("weight") for name in self._step.initial_rows)
        state = self._step.state_dict().items()
        needed = stored_bytes({name: of for name, of in state if not name.startswith(on_disk)})
        self.write_s = needed / BYTES_PER_S
        existing = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            self._logger.warning(
                f"{self.directory} has {free / 2**20:,.1f} MiB free, and a checkpoint takes {needed / 2**20:,.1f} MiB: free "
                "some space before the first save, or set checkpoint.save=false"
            )

    def save(
        self,
        num_steps: int,
        trainer: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        is_last: bool = False,
        chain: Callable[[], dict[str, Any]] | None = None,
        pause: Pause | None = None,
    ) -> None:
        """Start a checkpoint when the previous one is written; without a copy after the last step.

        `chain` waits for the delta of this step and returns its `chain`; ValueError if there is none. Raises SharedError: a file
        of the dataset has changed since the run began. Raises RuntimeError: another rank has ended.
        """
        pause = pause or Pause(time.perf_counter())
        self.wait()
        self._is_last = is_last

        def changes() -> list[str]:
            try:
                return changed_files(self._facts["data_files"], file_states(self._spec))
            except OSError as error:
                return [str(error)]

        if changed := self._ranks.run_on_rank0(changes):
            raise SharedError(
                f"files of {self._spec.root} were changed while the run was reading them: {', '.join(changed[:3])}; nothing was "
                "saved since. Restore the files (their times may differ), and rerun the same command"
            )
        state = self._step.state_dict()
        state |= {f"{TRAINER}{name}": value for name, value in tensors.items()}
        in_background = not is_last and self._fits(state)
        if in_background:
            state = self.copy.take(state)
        facts = self._facts | {"num_steps": num_steps, "trainer": dict(trainer)}
        waits = not (in_background or is_last)
        if not waits:
            pause = replace(pause, continues_at=time.perf_counter())
        self._thread = Thread(
            target=self._write,
            args=(num_steps, state, facts, pause, chain),
            name=THREAD_NAME,
            daemon=True,
        )
        self._thread.start()
        if waits:
            self._join()

    def wait(self) -> str | None:
        """Wait for the checkpoint that is being written; return why it could not be, or None. RuntimeError: a rank has ended."""
        self._join()
        if self._error is not None:
            raise self._error
        return self._problem

    def load_best(self, best_step: int) -> bool:
        """Load the checkpoint of the best evaluation after `wait`, on all ranks; warn and return False if there is none."""
        path = self.directory / f"step_{best_step}"
        if not self._ranks.run_on_rank0(path.exists):
            if self._ranks.is_rank0:
                self._logger.warning(
                    f"the best evaluation was after step {best_step:,}, and there is no checkpoint of that step: the "
                    "result is that of the last model"
                )
            return False
        try:
            restore(path, self._step, with_optimizer=True, is_own=True)
        except ValueError as error:
            raise SharedError(str(error)) from None
        return True

    @property
    def is_writing(self) -> bool:
        """Return whether this rank's writer is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def latest(self) -> Path | None:
        """Return the newest complete checkpoint that is visible on this host; None if the directory cannot be read."""
        try:
            return next(iter(list_checkpoints(self.directory)), None)
        except UnreadableError:
            return None

    def _join(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.2)
            self._heartbeat.beat()
        self._thread = None

    def _write(
        self,
        num_steps: int,
        state: State,
        facts: dict[str, Any],
        pause: Pause,
        chain: Callable[[], dict[str, Any]] | None,
    ) -> None:
        """Write the files, and commit on rank 0; all ranks receive the result. Runs in the thread."""
        started = time.perf_counter()
        try:
            problem = None
            try:
                write(self.directory, num_steps, state, self._step, self._channel)
            except ValueError as error:
                problem = str(error)
            if chain is not None:
                # Before the commit: deltas reach every checkpoint.
                try:
                    facts = facts | {"chain": chain()}
                except ValueError as error:
                    problem = problem or str(error)
            # Fails if a rank has exited.
            of_ranks = self._channel.gather(pause.seconds)
            if problem is None and self._ranks.is_rank0:
                self.write_s = time.perf_counter() - started
                record = {
                    "step": num_steps,
                    "bytes": stored_bytes(state),
                    # The others wait for the rank that stands still longest.
                    **_longest(of_ranks),
                    "write_s": self.write_s,
                }
                problem = self._commit(num_steps, state, facts, record, pause)
            self._problem = self._channel.broadcast(problem)
        except BaseException as error:
            # `wait` raises it in the training loop.
            self._error = error
            return
        if self._problem is not None and self._ranks.is_rank0:
            shutil.rmtree(unfinished(self.directory, num_steps), ignore_errors=True)
            latest = self.latest
            fallback = "there is none yet"
            if latest is not None:
                fallback = f"the latest is of step {step_of(latest)}"
            further = "" if self._is_last else ". The run continues, and the next save tries again"
            self._logger.warning(
                f"the checkpoint of step {num_steps} could not be written: {self._problem}; {fallback}{further}"
            )

    def _commit(
        self,
        num_steps: int,
        state: State,
        facts: dict[str, Any],
        record: dict[str, Any],
        pause: Pause,
    ) -> str | None:
        try:
            incomplete = incomplete_tensors(unfinished(self.directory, num_steps), state)
            assert not incomplete, f"a checkpoint without {incomplete[:4]}"
            commit(self.directory, num_steps, facts)
        except (OSError, ValueError) as error:
            return str(error)
        best = facts["trainer"]["best_step"]
        removal = partial(prune, self.directory, num_steps, self._config.keep, best)
        try:
            try:
                removal()
            except OSError:
                # An error may pass, and no later save would repeat this after the last one.
                removal()
            record |= _longest([record, pause.seconds])
            append_line(self.directory / SAVED, json.dumps(record))
        except (OSError, UnreadableError) as error:
            self._logger.warning(
                f"the checkpoint of step {num_steps} was written, but not all that follows it: {error}. The next save "
                "or the next start removes older checkpoints"
            )
        if self._mirror is not None:
            self._mirror.start()
        return None

    def _fits(self, state: State) -> bool:
        """Return whether every node has memory for the copies; checked once, before any rank allocates them."""
        if self._has_room is None:
            needed = num_bytes(state, with_files=False) * self._ranks.local_world_size
            with open("/proc/meminfo") as stream:  # the file cache included
                (line,) = [line for line in stream if line.startswith("MemAvailable:")]
            free = int(line.split()[1]) * 1024
            self._has_room = all(self._channel.gather(needed < SPARE_MEMORY * free))
            if not self._has_room and self._ranks.is_rank0:
                self._logger.info(
                    f"checkpoints: no room in host memory for a copy of {needed / 2**30:,.1f} GiB, so that "
                    "training waits while they are written"
                )
        return self._has_room


def _longest(pauses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the longest seconds of each kind; the last pause has all kinds, and no others."""
    return {name: max(pause[name] for pause in pauses) for name in pauses[-1]}
