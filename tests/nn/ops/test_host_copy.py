"""Numbers that the host writes are read by the pass that loads them, captured or not."""

import pytest
import torch

from nn.ops.host_copy import DeviceValues


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
