"""Where the time of a step goes, from the trace that torch.profiler wrote: kernels by phase, overlap, idle time.

Inside a CUDA graph nothing but the names of kernels is visible, so a phase is a pattern of names (`PHASES`). A CPU has
no kernels; there the marks of the step (`nn.observability.annotations`) take their place. Imports no torch: a trace can be read anywhere.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEP = "train step"
"""Mark around one step; a trace has as many steps as such marks."""
DATA_WAIT = "data wait"
"""Mark around the wait for the loader, and the phase of a GPU that idles meanwhile."""
OTHER = "other"

# The first pattern found in a kernel's name decides, so the special ones come first. Ours are Triton kernels
# (`_pooled_lookup`, `_dot_forward`, ...), `split_embedding*` are FBGEMM's, `triton_*` are inductor's.
PHASES = {
    "all-reduce": r"nccl\w*(AllReduce|ReduceScatter|AllGather|Broadcast)",
    "all-to-all": r"nccl",
    "sort": r"RadixSort|RunLengthEncode|ReduceByKey|find_long_segments|count_unique|linearize_index"
    r"|DeviceScan|DeviceSelect|^_sort",
    "table update": r"^_segment_update|^_table|embedding\w*backward|grad_mean",
    "lookup": r"^_pooled_lookup|embedding\w*forward|bounds_check_indices",
    "id expansion": r"^_expand|^_ids|index_?select|gather_kernel|permute_\dD|recat",
    "interaction": r"^_(dot_)?(forward|backward)\b",
    "copies": r"Memcpy|Memset|copy_kernel|copy_device|multi_tensor_apply.*\bCopy<|CatArrayBatched|FillFunctor"
    r"|permute_pooled_embs|^_(stack|join)",
    "dense optimizer": r"multi_tensor_apply|Fused(Sgd|Adam|Adagrad)|^_dense",
    "MLPs and cross": r"^_(relu|logit|cross)_(?!entropy)|nvjet|gemm|gemv|cutlass|xmma|cublas|splitK|^triton_|at::native.*(elementwise|reduce)_kernel",
}
KERNEL_PHASES = (*PHASES, OTHER)
_PATTERNS = {phase: re.compile(pattern, re.IGNORECASE) for phase, pattern in PHASES.items()}
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def phase_of(kernel: str) -> str:
    """Return the phase that a kernel of this name belongs to."""
    return next((phase for phase, each in _PATTERNS.items() if each.search(kernel)), OTHER)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran from `start_us` to `end_us`, both in microseconds of the trace's clock."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Trace:
    """What a breakdown needs of a trace.

    Attributes:
        kernels: kernels, copies and fills of the GPU, in any order; empty on a CPU.
        marks: ranges that `nn.observability.annotations` put around parts of the step, on the host's clock, which is the same.
    """

    kernels: tuple[Span, ...]
    marks: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Time of one phase, a mean over the steps of the trace.

    Attributes:
        phase: one of `KERNEL_PHASES`, `DATA_WAIT`, or on a CPU the name of a mark.
        ms: summed over its kernels, those that ran beside each other counted each.
        exposed_ms: while nothing of another phase ran: what the step would gain, at most, without the phase.
        num_kernels: kernels a step.
    """

    phase: str
    ms: float
    exposed_ms: float
    num_kernels: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One rank's step: `step_ms` is the sum of all exposed times, `overlap_ms` and `idle_ms`.

    Attributes:
        on_gpu: whether phases are kernels, or marks of the host.
        num_steps: steps of the trace.
        step_ms: from the first kernel's start to the last one's end, a step.
        overlap_ms: while kernels of two phases or more ran.
        idle_ms: while none ran, the wait for data left out: the host was late, or had nothing to do.
        phases: longest first.
        kernels: kernels with most time: (name, phase, ms a step).
    """

    on_gpu: bool
    num_steps: int
    step_ms: float
    overlap_ms: float
    idle_ms: float
    phases: tuple[PhaseTime, ...]
    kernels: tuple[tuple[str, str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)

    def phase(self, name: str) -> PhaseTime:
        """Return a phase's time, zero for one that does not occur."""
        found = (each for each in self.phases if each.phase == name)
        return next(found, PhaseTime(name, 0.0, 0.0, 0.0))


def read_trace(path: Path) -> Trace:
    """Read a chrome trace of torch.profiler, plain or gzipped."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        events = [each for each in json.load(stream)["traceEvents"] if each.get("ph") == "X"]
    return Trace(
        kernels=tuple(_spans(events, DEVICE_CATEGORIES)),
        marks=tuple(
            each for each in _spans(events, ("user_annotation",)) if "#" not in each.name
        ),  # torch's own are called ProfilerStep#1 and Optimizer.step#SGD.step
    )


def break_down(trace: Trace, num_kernels: int = 20) -> Breakdown:
    """Attribute the time of a trace to phases.

    Args:
        trace: of whole steps, the device idle at both ends.
        num_kernels: how many of the longest kernels to name.

    Raises:
        ValueError: a trace without a step.
    """
    steps = [each for each in trace.marks if each.name == STEP]
    if not steps:
        raise ValueError(
            f"the trace holds no range called '{STEP}'; take it with profile.steps=10 in mode=train"
        )
    on_gpu = bool(trace.kernels)
    parts = [each for each in trace.marks if each.name != STEP]
    spans = list(trace.kernels) if on_gpu else parts
    label = phase_of if on_gpu else str
    window = trace.kernels if on_gpu else steps
    start, end = min(each.start_us for each in window), max(each.end_us for each in window)
    waits = [(each.start_us, each.end_us) for each in parts if each.name == DATA_WAIT]
    a_step = 1e3 * len(steps)  # us of the trace to ms a step

    labelled = [(label(each.name), each.start_us, each.end_us) for each in spans]
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
    for each in trace.kernels:
        by_kernel[each.name] += each.end_us - each.start_us
    longest = sorted(by_kernel.items(), key=lambda item: -item[1])[:num_kernels]
    return Breakdown(
        on_gpu=on_gpu,
        num_steps=len(steps),
        step_ms=(end - start) / a_step,
        overlap_ms=overlap / a_step,
        idle_ms=idle / a_step,
        phases=tuple(
            PhaseTime(phase, ms / a_step, exposed[phase] / a_step, count[phase] / len(steps))
            for phase, ms in sorted(total.items(), key=lambda item: -item[1])
        ),
        kernels=tuple((name, label(name), us / a_step) for name, us in longest),
    )


def _spans(events: Iterable[dict[str, Any]], categories: Sequence[str]) -> Iterator[Span]:
    for each in events:
        if each.get("cat") in categories:
            yield Span(each["name"], each["ts"], each["ts"] + each["dur"])


def _slices(
    labelled: Sequence[tuple[str, float, float]], start: float, end: float
) -> Iterator[tuple[float, float, list[str]]]:
    """Cut [start, end] wherever something starts or ends; yield each piece with the phases that run in it."""
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
    """Lay out rank 0's step as a text table, with the least and the most of all ranks where there are several.

    Args:
        ranks: one a rank, rank 0 first.
    """
    first = ranks[0]
    what = "GPU time" if first.on_gpu else "host time"
    several = len(ranks) > 1
    names = [each.phase for each in first.phases]
    width = max(map(len, [*names, "two phases at once"]))
    head = f"{'phase':{width}}  {'ms':>8}  {'exposed ms':>10}  {'kernels' if first.on_gpu else 'calls':>7}"
    lines = [
        f"{what} of {first.num_steps} steps, a mean a step; rank 0"
        + (f" of {len(ranks)}" * several),
        "",
        head + "  ms, least to most of all ranks" * several,
    ]
    for each in first.phases:
        line = f"{each.phase:{width}}  {each.ms:8.3f}  {each.exposed_ms:10.3f}  {each.num_kernels:7.1f}"
        if several:
            all_ms = [rank.phase(each.phase).ms for rank in ranks]
            line += f"  {min(all_ms):.3f} to {max(all_ms):.3f}"
        lines.append(line)
    idle = "GPU idle" if first.on_gpu else "between marks"
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
