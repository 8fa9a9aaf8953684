"""Layers over events of samples: pooling of each kind, one query per sample, and programs that run at other sizes."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from configs.schema import EventPooling
from nn.layers.initialization import initialise_dense
from nn.layers.sequence import (
    LayerNorm,
    Positions,
    ScoreBias,
    SequencePooling,
    attend,
    attend_once,
    expand,
)
from tests.nn.ops.jagged_samples import drawn, samples_of

LENGTHS = [3, 0, 1, 5]


@pytest.mark.parametrize("how", [how.value for how in EventPooling])
def test_pooling_of_events(how):
    at = samples_of(LENGTHS)
    # Positions behind the last event hold zeros in a step.
    values = drawn(at, 4).nan_to_num(0)
    layer = SequencePooling(how, 4)
    initialise_dense(layer, seed=1)
    found = layer(values, at)
    for number, (start, length) in enumerate(zip(at.starts, LENGTHS, strict=True)):
        rows = values[start : start + length]
        if not length:
            wanted = torch.zeros(4)
        elif how == "attention":
            weights = layer.score(torch.tanh(layer.hidden(rows))).softmax(0)
            wanted = (weights * rows).sum(0)
        else:
            wanted = {"sum": rows.sum(0), "mean": rows.mean(0), "last": rows[-1]}[how]
        torch.testing.assert_close(found[number], wanted)


def test_a_pooling_without_a_formula_is_no_sum():
    with pytest.raises(AssertionError, match="largest"):
        SequencePooling("largest", 4)


def test_one_query_attends_to_all_events():
    at = samples_of(LENGTHS)
    q, k, v = drawn(at, 2, 3)[:4], drawn(at, 2, 3), drawn(at, 2, 3, seed=2)
    found = attend_once(q, k, v, at)
    scores = (q[0] * k[:3]).sum(2) / 3**0.5
    torch.testing.assert_close(found[0], (scores.softmax(0)[:, :, None] * v[:3]).sum(0))
    assert not found[1].any()


class Block(nn.Module):
    """Takes the positions as tensors, as a served model does."""

    def __init__(self) -> None:
        super().__init__()
        self.pooling = SequencePooling("attention", 4)
        self.position = nn.Parameter(torch.randn(2, 5))
        self.time = nn.Parameter(torch.randn(2, 32))

    def forward(self, values, candidate, ages, starts, lengths, samples):
        at = Positions(starts, lengths, samples, 5)
        bias = ScoreBias(self.position, self.time, ages)
        heads = values.unflatten(1, (2, 2))
        mixed = attend(heads, heads, heads, at, bias=bias)
        chosen = attend_once(candidate.unflatten(1, (2, 2)), heads, heads, at)
        return self.pooling(mixed.flatten(1) + expand(candidate, at), at) + chosen.flatten(1)


def test_an_exported_program_takes_other_numbers_of_samples_and_events():
    block = Block()

    def inputs(lengths: list[int]):
        at = samples_of(lengths)
        candidate = torch.randn(len(lengths), 4)
        return (
            drawn(at, 4).nan_to_num(0),
            candidate,
            drawn(at).abs(),
            at.starts,
            at.lengths,
            at.samples,
        )

    events, rows = {0: Dim("events", min=2)}, {0: Dim("rows", min=2)}
    program = export(
        block, inputs(LENGTHS), dynamic_shapes=(events, rows, events, rows, rows, events)
    )
    for lengths in ([2, 5], [1, 0, 0, 4, 3, 5]):
        given = inputs(lengths)
        torch.testing.assert_close(program.module()(*given), block(*given))


@pytest.mark.parametrize("arguments", [((3, 4),), (4, 1e-5, False)], ids=str)
def test_a_layer_norm_takes_only_what_its_kernels_know(arguments):
    with pytest.raises(TypeError):
        LayerNorm(*arguments)
    norm = LayerNorm(4, eps=0.5)
    assert (norm.eps, norm.weight.shape, norm.bias.shape) == (0.5, (4,), (4,))
