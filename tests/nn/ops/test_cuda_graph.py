"""While a graph is captured, no memory of an earlier one is freed, which threads that allocate pinned memory would notice."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from nn.ops.cuda_graph import CudaGraph
from tests.helpers.gpus import needs_one_gpu


class Step:
    """Refers to itself, as a step does."""

    def __init__(self, device: str = "cpu") -> None:
        self.itself = self
        self.host = torch.ones(256, pin_memory=device == "cuda")
        self.values = torch.zeros(256, device=device)

    def run(self) -> torch.Tensor:
        self.values.copy_(self.host, non_blocking=True)
        return self.values


def collect() -> None:
    """Collect as Python may at any allocation."""
    if gc.isenabled():
        gc.collect()


@pytest.fixture
def cpu_graphs(monkeypatch) -> SimpleNamespace:
    """A stream with which a graph can be made on a CPU, whose function is called."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return stream


def test_a_capture_frees_no_cycles(cpu_graphs):
    kept = []

    def run() -> torch.Tensor:
        step = ref(Step())
        collect()
        kept.append(step() is not None)
        return torch.zeros(1)

    CudaGraph(run, stream=cpu_graphs)
    assert kept == [False] * 3 + [True], "three passes warm up"
    assert gc.isenabled()


def test_a_failed_capture_lets_python_collect_again(cpu_graphs):
    def run() -> torch.Tensor:
        if not gc.isenabled():
            raise MemoryError
        return torch.zeros(1)

    with pytest.raises(MemoryError):
        CudaGraph(run, stream=cpu_graphs)
    assert gc.isenabled()


def test_captures_of_two_threads_follow_each_other(cpu_graphs):
    """As of a model that is loaded and one that grows: nobody collects during the second, because the first has ended."""
    order: list[str] = []
    is_first, is_second = Event(), Event()

    def first() -> torch.Tensor:
        if not gc.isenabled():
            is_first.set()
            is_second.wait(0.5)
            order.append("first")
        return torch.zeros(1)

    def second() -> torch.Tensor:
        calls.append(gc.isenabled())
        if len(calls) == 4:
            order.append("second")
            is_second.set()
        return torch.zeros(1)

    calls: list[bool] = []
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(CudaGraph, first, stream=cpu_graphs)
        assert is_first.wait(10)
        pool.submit(CudaGraph, second, stream=cpu_graphs).result()
        one.result()
    assert order == ["first", "second"]
    assert not calls[-1]
    assert gc.isenabled()


@needs_one_gpu
def test_threads_allocate_pinned_memory_while_graphs_are_captured():
    """A step that is freed in the capture of the next one fails in the thread, or at the capture after that."""
    ends, closed = Event(), []

    def allocate() -> int:
        count = 0
        while not ends.is_set():
            for size in range(1, 2**20, 2**12):
                torch.empty(size, dtype=torch.uint8, pin_memory=True)
            count += 1
        return count

    def run() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            closed.clear()
            collect()
        return step.run() + 1

    with ThreadPoolExecutor(1) as pool:
        allocated = pool.submit(allocate)
        try:
            for _ in range(30):
                step = Step("cuda")
                graph = CudaGraph(run)
                assert graph.replay().tolist() == [2.0] * 256
                graph.close()
                closed.append(step)
        finally:
            ends.set()
        assert allocated.result() > 0
