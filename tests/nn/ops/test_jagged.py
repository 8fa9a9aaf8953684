"""Sums, softmax and attention over the positions of samples are those of each sample alone, in float64 with gradients."""

import re

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from nn.layers.sequence import rows_at
from nn.ops import jagged
from nn.ops.jagged import Positions
from nn.ops.jagged_attention import ScoreBias, attend, time_bucket
from tests.helpers.command import ROOT
from tests.helpers.gpus import needs_one_gpu
from tests.nn.ops.jagged_samples import drawn, is_used, samples_of

LENGTHS = [3, 0, 1, 5, 2]
POSITIONS = [samples_of(LENGTHS), samples_of(LENGTHS, gap=2)]
WIDE = torch.float64


def of_each(values: Tensor, at: Positions) -> list[Tensor]:
    ends = (at.starts + at.lengths).tolist()
    return [values[start:end] for start, end in zip(at.starts.tolist(), ends, strict=True)]


def check(function, *inputs: Tensor) -> None:
    """Check gradients by differences; NaN that belongs to no sample is not moved and gets no gradient."""
    fixed = [each.isnan() for each in inputs]
    leaves = [each.nan_to_num().requires_grad_() for each in inputs]

    def with_nan(*leaves: Tensor) -> Tensor:
        return function(
            *(x.masked_fill(nan, torch.nan) for x, nan in zip(leaves, fixed, strict=True))
        )

    assert gradcheck(with_nan, leaves, fast_mode=True)
    exact = [each.clone().requires_grad_() for each in inputs]
    result = function(*exact)
    assert result.isfinite().all()
    for each, nan in zip(torch.autograd.grad(result.sum(), exact), fixed, strict=True):
        assert each.isfinite().all()
        assert not each[nan].any()


@pytest.mark.parametrize("at", POSITIONS)
def test_pooling_and_its_reverse(at):
    values = drawn(at, 2, dtype=WIDE)
    for how, wanted in (
        ("sum", lambda x: x.sum(0)),
        ("mean", lambda x: x.sum(0) / max(len(x), 1)),
        ("last", lambda x: x[-1] if len(x) else x.new_zeros(2)),
    ):
        found = jagged.pool(values, at, how)
        torch.testing.assert_close(found, torch.stack([wanted(x) for x in of_each(values, at)]))
        check(lambda x, how=how: jagged.pool(x, at, how), values)
    vectors = torch.randn(5, 2, dtype=WIDE)
    found = jagged.expand(vectors, at)
    for number, rows in enumerate(of_each(found, at)):
        assert torch.equal(rows, vectors[number].expand_as(rows))
    assert not found[~is_used(at)].any()
    check(lambda x: jagged.expand(x, at), vectors)


@pytest.mark.parametrize("at", POSITIONS)
def test_softmax_within_each_sample(at):
    scores = drawn(at, 2, dtype=WIDE) * 100
    for one in (scores, scores[:, 0]):
        found = jagged.softmax(one, at)
        for ours, rows in zip(of_each(found, at), of_each(one, at), strict=True):
            torch.testing.assert_close(ours, rows.softmax(0))
        assert not found[~is_used(at)].any()
    check(lambda x: jagged.softmax(x, at), scores / 100)


@pytest.mark.parametrize("at", POSITIONS)
def test_one_more_vector_comes_behind_the_last(at):
    values, one = drawn(at, 2, dtype=WIDE), torch.randn(5, 2, dtype=WIDE)
    found, longer = jagged.append(values, one, at)
    assert longer.lengths.tolist() == [length + 1 for length in LENGTHS]
    for number, (ours, rows) in enumerate(
        zip(of_each(found, longer), of_each(values, at), strict=True)
    ):
        assert torch.equal(ours, torch.cat([rows, one[number : number + 1]]))
    assert not found[~is_used(longer)].any()
    check(lambda x, y: jagged.append(x, y, at)[0], values, one)


def of_one_sample(q, k, v, causal, scale, position, time, times) -> Tensor:
    """Attention pair by pair."""
    rows = []
    for i in range(len(q)):
        scores, offset = [], i + len(k) - len(q)
        keys = range(offset + 1 if causal else len(k))
        for j in keys:
            centre = 0 if causal else position.shape[1] // 2
            column = min(max(offset - j + centre, 0), position.shape[1] - 1)
            bucket = time_bucket((times[offset] - times[j]).float(), time.shape[1])
            scores.append((q[i] * k[j]).sum(-1) * scale + position[:, column] + time[:, bucket])
        weights = torch.stack(scores).softmax(0)
        rows.append((weights[..., None] * v[keys.start : keys.stop]).sum(0))
    return torch.stack(rows) if rows else q.new_zeros(0, *v.shape[1:])


ONE = Positions(torch.arange(5), torch.tensor(LENGTHS).clamp(max=1), torch.arange(5), 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", [None, ONE])
def test_attention_within_each_sample(causal, queries):
    for at in POSITIONS:
        query_at = queries or at
        q, k, v = (
            drawn(each, 2, 3, seed=s, dtype=WIDE) for s, each in enumerate((query_at, at, at))
        )
        position, time = torch.randn(2, 3, dtype=WIDE), torch.randn(2, 32, dtype=WIDE)
        times = drawn(at).abs() * 1e6

        def run(q, k, v, position, time, at=at, times=times):
            bias = ScoreBias(position, time, times)
            return attend(q, k, v, at, queries or at, causal, 0.7, bias)

        found = run(q, k, v, position, time)
        for ours, *rows in zip(
            *(of_each(found, query_at), of_each(q, query_at)),
            *(of_each(each, at) for each in (k, v, times)),
            strict=True,
        ):
            wanted = of_one_sample(*rows[:3], causal, 0.7, position, time, rows[3])
            torch.testing.assert_close(ours, wanted)
    check(run, q, k, v, position, time)


def test_buckets_of_times_double():
    times = torch.tensor([0.0, -0.5, 1, 1.49, 1.5, 2, -3, 4, 7.9, 2.0**31, 1e20])
    assert time_bucket(times, 32).tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 31, 31]
    assert time_bucket(times, 64).tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 62, 63]
    assert time_bucket(times, 16).tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 15, 15]


def check_row_sums(device: str, rows: int, positions: int) -> None:
    """Gradients of rows have the bits of two runs, and are as exact as sums in 32 bits."""
    generator = torch.Generator().manual_seed(rows)
    # Most positions have one of a few rows: that of a missing value, the oldest bucket.
    index = (torch.rand(positions, generator=generator) ** 4 * rows).long().to(device)
    grad = torch.randn(positions, 16, generator=generator).to(device)
    table = torch.randn(rows, 16, generator=generator).to(device).requires_grad_()
    torch.set_float32_matmul_precision("highest")
    found = []
    for _ in range(3):
        out = rows_at(table, index)
        assert torch.equal(out, table[index])
        found += torch.autograd.grad(out, table, grad)
    assert all(torch.equal(found[0], other) for other in found[1:])
    wanted = torch.zeros(rows, 16, dtype=torch.float64, device=device)
    wanted.index_add_(0, index, grad.double())
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-4, atol=1e-2)
    assert not torch.are_deterministic_algorithms_enabled()


def test_rows_at_positions_compile_without_a_graph_break():
    table, index = torch.randn(5, 3), torch.tensor([0, 1, 1, 4])
    compiled = torch.compile(rows_at, fullgraph=True, backend="eager")
    assert torch.equal(compiled(table, index), table[index])


def test_gradients_of_rows_at_positions_are_their_sums():
    for rows in (1, 64, 65, 700):
        check_row_sums("cpu", rows, 5_000)


@needs_one_gpu
def test_on_a_gpu_gradients_of_rows_at_positions_have_the_same_bits():
    """Also where rows are few and positions many, for which torch has a way by atomics."""
    for rows in (1, 64, 65, 100, 130, 200, 1_000, 3_000):
        check_row_sums("cuda", rows, 300_000)


def test_models_look_no_rows_up_whose_gradients_torch_would_add_up_in_any_order():
    for path in (*ROOT.glob("nn/layers/**/*.py"), *ROOT.glob("nn/models/**/*.py")):
        assert not re.search(r"import .*\bembedding\b|functional\.embedding", path.read_text()), (
            path
        )
