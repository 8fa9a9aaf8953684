"""Numbers that the host writes are read by the pass that loads them, captured or not; copies to the host are waited for."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from nn.ops.host_copy import DeviceValues, HostCopy


def test_on_a_cpu_a_number_is_there_when_it_is_written():
    values = DeviceValues([1.0, 2.0], torch.device("cpu"))
    values.write_float(1, 0.1)
    values.write_integer(2**31 - 1)
    assert values.floats.tolist() == [1.0, torch.tensor(0.1).item()]
    assert values.integer.tolist() == [2**31 - 1]
    values.load()
    assert values.integer.tolist() == [2**31 - 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_pass_reads_what_was_written_before_its_replay():
    values = DeviceValues([1.0, 2.0], torch.device("cuda"))
    read = torch.zeros(3, device="cuda")

    def run() -> None:
        values.load()
        torch.cat([values.floats, values.integer.float()], out=read)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for step in range(3):
        values.write_float(0, step / 4)
        values.write_integer(step)
        graph.replay()
        assert read.tolist() == [step / 4, 2.0, step]
    values.write_float(1, 5.0)
    assert values.floats.tolist()[1] == 2.0
    values.load_now()
    assert values.floats.tolist()[1] == 5.0


def test_a_copy_is_waited_for_on_the_device_of_its_values(monkeypatch):
    """In a new thread the current device is the first one, whatever rank has started it."""
    recorded = []
    memory = SimpleNamespace(copy_=lambda *_, **options: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **options: memory)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    device = torch.device("cuda:1")
    HostCopy(SimpleNamespace(device=device, shape=(1,), dtype=torch.int32))
    assert recorded == [device]


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_new_thread_waits_for_the_copy_from_another_gpu():
    """As the threads do that write a checkpoint's blocks."""
    values = torch.zeros(2**26, device="cuda:1")
    for number in range(1, 9):
        torch.cuda.synchronize(1)
        with torch.cuda.device(1):
            torch.cuda._sleep(10**8)
        values.fill_(number)
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(lambda: HostCopy(values).read()[-1].item())
            assert read.result() == number
