"""Profile of some steps: one torch.profiler trace per rank with a time breakdown, or NVTX ranges for Nsight Systems.

run_dir/profile/rank0.json.gz   Chrome trace of one rank, for https://ui.perfetto.dev
run_dir/profile/summary.json    `Breakdown` of every rank
run_dir/profile/summary.txt     the breakdown as a table, which the run also prints
"""

import json
from collections.abc import Container
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text
from torch.cuda import nvtx
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from configs.messages import printable
from configs.schema import ProfileConfig
from dataloading.dataset.durable_files import replace_file, replace_text
from nn.distributed.process_group import Ranks
from nn.observability.annotations import use_annotations
from nn.observability.trace_breakdown import break_down, format_breakdown, read_trace
from nn.observers.observer import Loop, Observer, Trained

WARM_UP_STEPS = 3
"""Steps traced and discarded: the first traced steps include the start of the tracer."""


def profiled_steps(config: ProfileConfig, start_step: int) -> range:
    """Return the steps that run under the profiler, including its warm-up.

    `start_step`: step that the run resumes from; 0 for a new run.
    """
    first = start_step + config.start_step
    return range(first - min(WARM_UP_STEPS, config.start_step), first + config.steps)


def check_profile(
    config: ProfileConfig,
    start_step: int,
    last_step: int,
    evaluations: Container[int],
    ranks: Ranks,
) -> None:
    """Check the profiler options against the run.

    `start_step`: step that the run resumes from; 0 for a new run. Raises ValueError: the profiled steps exceed the run, an
    evaluation falls between them, or NVTX is requested without a GPU.
    """
    if not config.steps:
        return
    steps = profiled_steps(config, start_step)
    if steps.stop > last_step:
        raise ValueError(
            f"profile.start_step={config.start_step} and profile.steps={config.steps} end after step "
            f"{steps.stop}, but this run ends after {last_step}; lower profile.start_step"
        )
    inside = next((step for step in steps[1:] if step in evaluations), None)
    if inside is not None:
        raise ValueError(
            f"the run evaluates after step {inside}, within the profiled steps {steps.start} to "
            f"{steps.stop - 1} (including warm-up); move profile.start_step or evaluate less often"
        )
    if config.nvtx and ranks.device.type != "cuda":
        raise ValueError(
            "profile.nvtx=true requires a GPU; without it the profile is a torch.profiler trace"
        )


class Profiler(Observer):
    """Profiler of the training loop.

    `start_step`: step that the run resumes from; 0 for a new run. `steps`: those that run under the profiler, including its
    warm-up. They do not count for throughput.
    """

    def __init__(
        self, config: ProfileConfig, start_step: int, run_dir: Path, console: Console, ranks: Ranks
    ) -> None:
        self.steps = profiled_steps(config, start_step)
        self._num_steps = config.steps
        self._for_nsight = config.nvtx
        self._directory = run_dir / "profile"
        self._console = console
        self._ranks = ranks
        self._left = len(self.steps)
        self._profile: profile | None = None
        self._open = ExitStack()

    def on_step_begin(self, loop: Loop) -> None:
        if loop.num_steps == self.steps.start:
            loop.pause_speed()
            self.start()

    def on_step(self, loop: Loop, trained: Trained) -> None:
        """Count a step of the profile; measure throughput again after the last one."""
        if loop.num_steps - 1 in self.steps:
            self.step()
            if loop.num_steps == self.steps.stop:
                loop.resume_speed()

    def start(self) -> None:
        if self._for_nsight:
            self._open.enter_context(use_annotations(nvtx.range))
        else:
            self._open.enter_context(use_annotations(record_function))
            on_gpu = self._ranks.device.type == "cuda"
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
                schedule=schedule(
                    wait=0, warmup=self._left - self._num_steps, active=self._num_steps, repeat=1
                ),
            )
            self._profile.start()

    def step(self) -> None:
        """Count a step; write all files after the last one."""
        self._left -= 1
        if self._left in (0, self._num_steps):
            # An idle device at both ends makes the trace hold exactly the kernels of the kept steps.
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

    def _write(self, trace: profile) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank{self._ranks.rank}.json.gz"
        temporary = path.with_name(f".{path.name}")  # torch compresses by the end of the name
        trace.export_chrome_trace(str(temporary))
        replace_file(temporary, path)
        breakdowns = self._ranks.gather_objects(break_down(read_trace(path)))
        if breakdowns is None:
            return
        text = format_breakdown(breakdowns)
        replace_text(self._directory / "summary.txt", text, synced=False)
        content = json.dumps([asdict(breakdown) for breakdown in breakdowns], indent=2)
        replace_text(self._directory / "summary.json", content + "\n", synced=False)
        lines = Text(f"\nprofile: {printable(str(self._directory))}\n{text}")
        self._console.print(lines, soft_wrap=True)

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
