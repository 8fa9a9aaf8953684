"""Reuse of the captured id exchange's memory; GPU tests compare its results."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, tensor

from nn.sharding.id_all_to_all import CapturedIdAllToAll
from nn.sharding.local_ids import ALIGN_BYTES, LocalIds, RequestedIds
from tests.helpers.composed import ranks_of_cpu


class FakeGraph:
    """Repeats what was launched while it was recorded."""

    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


@pytest.fixture
def exchange(monkeypatch) -> CapturedIdAllToAll:
    """One that multiplies ids by 10."""

    def send(ids: Tensor) -> tuple[LocalIds, None]:
        return LocalIds(ids * 10, ids + 1), None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **options: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    stream = SimpleNamespace(wait_event=lambda _: None, wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    exchange = CapturedIdAllToAll(send, tensor([1]))
    for captured in (place._graph for place in exchange._places):
        function, outputs = captured._function, captured.outputs
        assert function is not None
        assert outputs is not None
        replay = partial(replayed, outputs, function, captured._inputs)
        vars(captured._graph)["replay"] = replay
    return exchange


def replayed(outputs: Tensor, function: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    outputs.copy_(function(*inputs))


def test_ids_that_wait_are_not_overwritten_and_turns_have_their_memory(exchange):
    first = exchange(tensor([2]), 0)
    # Of an evaluation, while the first batch waits.
    second, third = (exchange(tensor([number]), turn) for number, turn in ((3, 0), (5, 1)))
    assert [rows.ids.owned.item() for rows in (first, second, third)] == [20, 30, 50]
    assert [rows.turn for rows in (first, second, third)] == [0, None, 1]
    for rows in (first, third):
        rows.ids_are_read()
    fourth, fifth = (exchange(tensor([number]), turn) for number, turn in ((4, 1), (6, 0)))
    assert fourth.ids.owned is third.ids.owned
    assert fifth.ids.owned is first.ids.owned
    assert [rows.ids.owned.item() for rows in (fourth, fifth)] == [40, 60]


def test_a_batch_without_a_turn_leaves_the_latest_ids(exchange):
    latest = exchange(tensor([2]), 1)
    latest.ids_are_read()
    announced = exchange(tensor([3]), None)
    assert (announced.turn, announced.ids.owned.item()) == (None, 30)
    assert latest.ids.owned.item() == 20, "its pass may still read them"


def test_a_closed_exchange_is_free_while_its_ids_are_referenced(exchange):
    held = exchange(tensor([2]), 0)
    exchange.close()
    assert held.ids.owned.item() == 20
    for place in exchange._places:
        assert place._graph._graph.is_reset
        assert place._graph._function is None, "it would keep the tables' memory"


def test_the_end_of_a_process_group_closes_graphs_that_are_still_referenced(exchange):
    with ranks_of_cpu():
        exchange(tensor([2]), 0)
    assert all(place._graph._graph.is_reset for place in exchange._places)


def test_ids_of_several_types_are_copied_as_one_memory():
    requested = RequestedIds(
        *(torch.arange(size, dtype=torch.int64) for size in (3, 0, 5, 1, 0, 2))
    )
    owned, replicated = torch.arange(7, dtype=torch.int32), torch.arange(9, dtype=torch.int64)
    ids = LocalIds(owned, replicated, (requested,))
    memory = ids.joined()
    joined = ids.of_memory(memory.clone())
    assert joined.joined() is joined.memory
    for place, copied in zip(joined.tensors, ids.tensors, strict=True):
        assert place.dtype == copied.dtype
        assert torch.equal(place, copied)
        assert place.storage_offset() * place.itemsize % ALIGN_BYTES == 0
