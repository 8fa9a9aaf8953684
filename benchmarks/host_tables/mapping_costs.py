"""Costs of mapping per step, from a trace of the profiler: time, launches and waits of the host, time of the device."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MAPPING = "map rows"
"""Annotation of the calls that map ids."""
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"^(cuda|cu)(LaunchKernel|GraphLaunch|MemcpyAsync|MemsetAsync)")
WAIT = re.compile(r"^cuda(Stream|Event|Device)Synchronize|^cudaMemcpy$")
ROW_COPY = re.compile(r"^_(copy|exchange)_rows")


def traced(tier: Any, train: Callable[[], object], steps: int) -> str:
    """Train some steps under the profiler, and return a line about them.

    Args:
        tier: the tables in host memory, whose `map` is annotated.
        train: trains a step.
        steps: number of them.
    """
    plain = tier.map

    def annotated(*args: Any) -> Any:
        with record_function(MAPPING):
            return plain(*args)

    tier.map = annotated
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                train()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    tier.map = plain
    found = mapping_costs(events, steps)
    return ", ".join(f"{name} {value:.3g}" for name, value in found.items())


def mapping_costs(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, float]:
    """Return means per step.

    Args:
        events: of a trace of torch's profiler.
        steps: in it.

    Returns:
        Of the mapping alone: ms of the host under the profiler, launches, waits and their ms, ms of the kernels that map, and ms
        of those that copy rows. Of the whole step: waits of the thread that maps, and their ms.
    """
    events = [event for event in events if event.get("ph") == "X"]
    ranges = [event for event in events if event["name"] == MAPPING and _is_of_host(event)]
    threads = {event["tid"] for event in ranges}
    calls = [event for event in events if event.get("cat") in RUNTIME and event["tid"] in threads]
    inside = [
        call for call in calls if any(r["ts"] <= call["ts"] <= r["ts"] + r["dur"] for r in ranges)
    ]
    launched = {
        call["args"]["correlation"] for call in inside if "correlation" in call.get("args", {})
    }
    kernels = [
        event
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and event["args"].get("correlation") in launched
    ]
    copies = [kernel for kernel in kernels if ROW_COPY.match(kernel["name"])]
    waits = [call for call in inside if WAIT.match(call["name"])]
    all_waits = [call for call in calls if WAIT.match(call["name"])]
    sums = {
        "host ms": _ms(ranges),
        "launches": sum(bool(LAUNCH.match(call["name"])) for call in inside),
        "waits": len(waits),
        "wait ms": _ms(waits),
        "mapping kernels ms": _ms(kernels) - _ms(copies),
        "row copies ms": _ms(copies),
        "waits of the step": len(all_waits),
        "their ms": _ms(all_waits),
    }
    return {name: value / steps for name, value in sums.items()}


def _is_of_host(event: Mapping[str, Any]) -> bool:
    """Return whether an annotation is the host's; the profiler repeats it for the device."""
    return event.get("cat") != "gpu_user_annotation"


def _ms(events: Iterable[Mapping[str, Any]]) -> float:
    return sum(event["dur"] for event in events) / 1e3
