"""Time breakdown of a step from a torch.profiler trace: kernels by phase, overlap, idle time.

Inside a CUDA graph only kernel names are visible, so a phase is a pattern of kernel names (`PHASES`). On a CPU there are
no kernels; phases are the annotations of the step (`nn.observability.annotations`). The module does not import torch, so
a trace can be read on any machine.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "train step"
"""Annotation around one step; their number is the number of steps in a trace."""
DATA_WAIT = "data wait"
"""Annotation around the wait for the loader; also the phase of a GPU that is idle during it."""
OTHER = "other"
MOST_KERNELS = 20  # that a breakdown lists

# The first matching pattern decides, so specific patterns come first. `_pooled_lookup`, `_dot_forward`, ... are this
# project's Triton kernels, `split_embedding*` FBGEMM's, `triton_*` TorchInductor's.
PHASES = {
    "all-reduce": r"nccl\w*(AllReduce|ReduceScatter|AllGather|Broadcast)",
    "all-to-all": r"nccl",
    "host rows": r"^_(release|find_missing|count_found|list_found|take_slots|to_slots)\b|^_(exchange|copy)_rows\b",
    "sort": r"(Radix|Bitonic|Merge)Sort|RunLengthEncode|ReduceByKey|find_long_segments|count_unique|linearize_index"
    r"|DeviceScan|DeviceSelect|^_sort",
    "table update": r"^_segment_update|^_table|embedding\w*backward|grad_mean",
    "lookup": r"^_pooled_lookup|embedding\w*forward|bounds_check_indices",
    "id expansion": r"^_expand|^_ids|index_?select|gather_kernel|permute_\dD|recat",
    "interaction": r"^_(dot_)?(forward|backward)\b",
    "copies": r"Memcpy|Memset|copy_kernel|copy_device|multi_tensor_apply.*\bCopy<|CatArrayBatched|FillFunctor"
    r"|permute_pooled_embs|^_(stack|join)",
    "dense optimizer": r"multi_tensor_apply|Fused(Sgd|Adam|Adagrad)|^_dense",
    "MLPs and cross": r"^_(relu|logit|cross)_(?!entropy)|^_(quantise|add_product)\b"
    r"|nvjet|gemm|gemv|cutlass|xmma|cublas|splitK|^triton_"
    r"|at::native.*(elementwise|reduce)_kernel",
}
KERNEL_PHASES = (*PHASES, OTHER)
_PATTERNS = {phase: re.compile(pattern, re.IGNORECASE) for phase, pattern in PHASES.items()}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def phase_of(kernel: str) -> str:
    return next((phase for phase, pattern in _PATTERNS.items() if pattern.search(kernel)), OTHER)


@dataclass(frozen=True, slots=True)
class Span:
    """Named range from `start_us` to `end_us`, in microseconds of the trace's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Kernels and annotations of a trace, on one clock."""

    kernels: tuple[Span, ...]  # kernels, copies and fills of the GPU, in any order; empty on a CPU
    annotations: tuple[Span, ...]  # ranges on the host, from `nn.observability.annotations`


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Time of one phase per step, a mean over the steps of the trace."""

    phase: str  # one of `KERNEL_PHASES`, `DATA_WAIT`, or on a CPU the name of an annotation
    ms: float  # sum of the durations of its kernels, also of kernels that overlap
    exposed_ms: float  # time during which no other phase ran: an upper bound of the gain from removing the phase
    num_kernels: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Time breakdown of one rank; `step_ms` is the sum of all exposed times, `overlap_ms` and `idle_ms`."""

    on_gpu: bool  # True if phases are GPU kernels, False if they are annotations of the host
    num_steps: int
    step_ms: float  # time from the first kernel's start to the last kernel's end, per step
    overlap_ms: float  # time per step with kernels of two or more phases running
    idle_ms: float  # time per step without a running kernel, excluding `DATA_WAIT`
    phases: tuple[PhaseTime, ...]  # times by phase, longest first
    # kernels with the most time: (name, phase, ms per step)
    kernels: tuple[tuple[str, str, float], ...]

    def phase(self, name: str) -> PhaseTime:
        """Return the time of a phase; zero if the phase does not occur."""
        matches = (time for time in self.phases if time.phase == name)
        return next(matches, PhaseTime(name, 0.0, 0.0, 0.0))


def read_trace(path: Path) -> Trace:
    """Read a Chrome trace of torch.profiler, plain or gzipped."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    return Trace(
        kernels=tuple(_spans(events, DEVICE_CATEGORIES)),
        # Names with "#" are torch's own annotations: ProfilerStep#1, Optimizer.step#SGD.step.
        annotations=tuple(
            span for span in _spans(events, ("user_annotation",)) if "#" not in span.name
        ),
    )


def break_down(trace: Trace) -> Breakdown:
    """Attribute the time of a trace to phases. Raises ValueError: the trace has no step."""
    steps = [span for span in trace.annotations if span.name == STEP]
    if not steps:
        raise ValueError(
            f"the trace contains no range called '{STEP}'; record it with profile.steps=10 in mode=train"
        )
    on_gpu = bool(trace.kernels)
    annotations = [span for span in trace.annotations if span.name != STEP]
    spans = list(trace.kernels) if on_gpu else annotations
    label = phase_of if on_gpu else str
    window = trace.kernels if on_gpu else steps
    start, end = min(span.start_us for span in window), max(span.end_us for span in window)
    waits = [(span.start_us, span.end_us) for span in annotations if span.name == DATA_WAIT]
    us_per_ms_step = 1e3 * len(steps)  # from us of the trace to ms per step

    labelled = [(label(span.name), span.start_us, span.end_us) for span in spans]
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for phase, since, until in labelled:
        total[phase] += until - since
        count[phase] += 1
    exposed: dict[str, float] = defaultdict(float)
    overlap = idle = 0.0
    for since, until, running in _slices(labelled, start, end):
        if len(running) == 1:
            exposed[running[0]] += until - since
        elif running:
            overlap += until - since
        elif on_gpu:
            waited = sum(max(0.0, min(until, b) - max(since, a)) for a, b in waits)
            exposed[DATA_WAIT] += waited
            idle += until - since - waited
        else:
            idle += until - since
    if on_gpu and waits:
        total[DATA_WAIT] = sum(until - since for since, until in waits)
    by_kernel: dict[str, float] = defaultdict(float)
    for kernel in trace.kernels:
        by_kernel[kernel.name] += kernel.end_us - kernel.start_us
    longest = sorted(by_kernel.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    return Breakdown(
        on_gpu=on_gpu,
        num_steps=len(steps),
        step_ms=(end - start) / us_per_ms_step,
        overlap_ms=overlap / us_per_ms_step,
        idle_ms=idle / us_per_ms_step,
        phases=tuple(
            PhaseTime(
                phase,
                ms / us_per_ms_step,
                exposed[phase] / us_per_ms_step,
                count[phase] / len(steps),
            )
            for phase, ms in sorted(total.items(), key=lambda item: -item[1])
        ),
        kernels=tuple((name, label(name), us / us_per_ms_step) for name, us in longest),
    )


def _spans(events: Iterable[dict[str, Any]], categories: Sequence[str]) -> Iterator[Span]:
    for event in events:
        if event.get("cat") in categories:
            yield Span(event["name"], event["ts"], event["ts"] + event["dur"])


def _slices(
    labelled: Sequence[tuple[str, float, float]], start: float, end: float
) -> Iterator[tuple[float, float, list[str]]]:
    """Cut [start, end] at every start and end of a range; yield every interval with its running phases."""
    changes = sorted(
        change
        for phase, since, until in labelled
        for change in ((since, 1, phase), (until, -1, phase))
    )
    running: dict[str, int] = defaultdict(int)
    position = start
    for time, change, phase in [*changes, (end, 0, "")]:
        time = min(max(time, start), end)
        if time > position:
            yield position, time, [name for name, number in running.items() if number]
            position = time
        if change:
            running[phase] += change


def format_breakdown(ranks: Sequence[Breakdown]) -> str:
    """Format rank 0's breakdown as a table, with minimum and maximum over ranks if there are several.

    `ranks`: one breakdown per rank, rank 0 first.
    """
    first = ranks[0]
    title = "GPU time" if first.on_gpu else "host time"
    several = len(ranks) > 1
    names = [time.phase for time in first.phases]
    width = max(map(len, [*names, "two phases at once"]))
    head = f"{'phase':{width}}  {'ms':>8}  {'exposed ms':>10}  {'kernels' if first.on_gpu else 'calls':>7}"
    lines = [
        f"{title} of {first.num_steps} steps, mean per step; rank 0"
        + (f" of {len(ranks)}" * several),
        "",
        head + "  ms, minimum to maximum over ranks" * several,
    ]
    for time in first.phases:
        line = f"{time.phase:{width}}  {time.ms:8.3f}  {time.exposed_ms:10.3f}  {time.num_kernels:7.1f}"
        if several:
            all_ms = [rank.phase(time.phase).ms for rank in ranks]
            line += f"  {min(all_ms):.3f} to {max(all_ms):.3f}"
        lines.append(line)
    idle = "GPU idle" if first.on_gpu else "not annotated"
    for name, value in (
        ("two phases at once", first.overlap_ms),
        (idle, first.idle_ms),
        ("step", first.step_ms),
    ):
        lines.append(f"{name:{width}}  {'':8}  {value:10.3f}")
    if first.kernels:
        lines += ["", "longest kernels"]
        lines += [
            f"{ms:8.3f} ms  {phase:{width}}  {name[:80]}" for name, phase, ms in first.kernels
        ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
