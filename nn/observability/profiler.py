"""A profile of some steps: torch.profiler's trace a rank and where the time went, or marks for Nsight Systems.

run_dir/profile/rank0.json.gz   chrome trace of a rank, for https://ui.perfetto.dev
run_dir/profile/summary.json    `Breakdown` of every rank
run_dir/profile/summary.txt     the same as a table, which the run prints too
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from torch.cuda import nvtx
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from configs.schema import ProfileConfig
from nn.distributed.process_group import Ranks
from nn.observability.annotations import annotations_shown_by
from nn.observability.trace_breakdown import break_down, format_breakdown, read_trace

WARM_UP_STEPS = 3
"""Steps traced and thrown away: the first ones pay for the tracing's own start."""


def steps_of(config: ProfileConfig, start_step: int) -> range:
    """Steps that run under the profiler, its warm-up included.

    Args:
        config: which steps of the run.
        start_step: steps done before the run, after a restore.
    """
    first = start_step + config.start_step
    return range(first - min(WARM_UP_STEPS, config.start_step), first + config.steps)


def check_profile(
    config: ProfileConfig, start_step: int, last_step: int, evaluations: Iterable[int], ranks: Ranks
) -> None:
    """Refuse a profile that cannot be taken, before anything is started.

    Args:
        config: which steps of the run.
        start_step: steps done before the run, after a restore.
        last_step: where the run ends.
        evaluations: steps after which the run evaluates.
        ranks: this process.

    Raises:
        ValueError: the steps are not in the run, an evaluation lies among them, or there is no GPU for NVTX marks.
    """
    if not config.steps:
        return
    steps = steps_of(config, start_step)
    if steps.stop > last_step:
        raise ValueError(
            f"profile.start_step={config.start_step} and profile.steps={config.steps} end after step "
            f"{steps.stop}, but this run ends after {last_step}; lower profile.start_step"
        )
    inside = [each for each in evaluations if steps.start < each < steps.stop]
    if inside:
        raise ValueError(
            f"the run evaluates after step {inside[0]}, among the profiled steps {steps.start} to "
            f"{steps.stop - 1} (warm-up included); move profile.start_step or lower eval.per_epoch"
        )
    if config.nvtx and ranks.device.type != "cuda":
        raise ValueError(
            "profile.nvtx=true needs a GPU; leave it out, and the profile is a trace of torch's profiler"
        )


class Profiler:
    """Call `start` before the first step of `steps` and `step` after each of them; every rank alike.

    Args:
        config: which steps, and for whom.
        start_step: steps done before this run, after a restore.
        run_dir: gets a folder `profile`.
        console: prints the table.
        ranks: this process.

    Attributes:
        steps: the steps that run under the profiler, its warm-up included; no measure of the run's speed.
    """

    def __init__(
        self,
        config: ProfileConfig,
        start_step: int,
        run_dir: Path,
        console: Console,
        ranks: Ranks,
    ) -> None:
        self.steps = steps_of(config, start_step)
        self._num_steps = config.steps
        self._for_nsight = config.nvtx
        self._directory = run_dir / "profile"
        self._console = console
        self._ranks = ranks
        self._left = len(self.steps)
        self._profile: profile | None = None
        self._open = ExitStack()

    def start(self) -> None:
        """Begin to trace."""
        if self._for_nsight:
            self._open.enter_context(annotations_shown_by(nvtx.range))
        else:
            self._open.enter_context(annotations_shown_by(record_function))
            on_gpu = self._ranks.device.type == "cuda"
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
                schedule=schedule(
                    wait=0, warmup=self._left - self._num_steps, active=self._num_steps, repeat=1
                ),
            )
            self._profile.start()

    def step(self) -> None:
        """Count a step; after the last one all files are written."""
        self._left -= 1
        if self._left in (0, self._num_steps):
            # The device is idle where the kept steps begin and end: they are all there, and nothing else is.
            self._synchronize()
        if self._left == 0:
            self._open.close()
        if self._profile is not None:
            self._profile.step()
            if self._left == 0:
                self._write(self._profile)
        elif self._left == self._num_steps:
            torch.cuda.profiler.start()
        elif self._left == 0:
            torch.cuda.profiler.stop()

    def _write(self, taken: profile) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = self._directory / f"rank{self._ranks.rank}.json.gz"
        taken.export_chrome_trace(str(trace))
        measured = self._ranks.gather_objects(break_down(read_trace(trace)))
        if measured is None:
            return
        text = format_breakdown(measured)
        (self._directory / "summary.txt").write_text(text)
        content = json.dumps([each.as_dict() for each in measured], indent=2)
        (self._directory / "summary.json").write_text(content + "\n")
        self._console.print(f"\nprofile: {self._directory}\n{text}", soft_wrap=True)

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
