"""Reuse of the captured id exchange's memory; GPU tests compare its results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, tensor

from nn.sharding.id_all_to_all import CapturedIdAllToAll
from nn.sharding.local_ids import LocalIds
from tests.helpers.composed import ranks_of_cpu


class FakeGraph:
    """Repeats what was launched while it was recorded."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


@pytest.fixture
def exchange(monkeypatch) -> CapturedIdAllToAll:
    """One that multiplies ids by 10."""
    launches: list[Callable[[], Tensor]] = []

    def send(ids: Tensor) -> tuple[LocalIds, None]:
        owned = ids * 10
        launches.append(lambda: owned.copy_(ids * 10))
        return LocalIds(owned, ids + 1), None

    @contextmanager
    def record(graph: FakeGraph, **_: object) -> Iterator[None]:
        yield
        graph.replay = launches[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    stream = SimpleNamespace(wait_event=lambda _: None, wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    return CapturedIdAllToAll(send, tensor([1]))


def test_ids_that_wait_are_not_overwritten_by_the_next_exchange(exchange):
    first, _ = exchange(tensor([2]))
    second, _ = exchange(tensor([3]))
    assert (first.owned.item(), second.owned.item()) == (20, 30)
    assert second.release is None, "it has memory of its own"
    first.release()
    third, _ = exchange(tensor([4]))
    assert third.owned is first.owned
    assert third.owned.item() == 40


def test_a_closed_exchange_is_free_while_its_ids_are_referenced(exchange):
    held, _ = exchange(tensor([2]))
    exchange.close()
    assert held.release is not None
    assert exchange._graph._graph.is_reset
    assert exchange._graph._function is None, "it would keep the tables' memory"


def test_the_end_of_a_process_group_closes_graphs_that_are_still_referenced(exchange):
    with ranks_of_cpu():
        exchange(tensor([2]))
    assert exchange._graph._graph.is_reset
