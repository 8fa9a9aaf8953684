"""Sums of rows at positions are those of plain PyTorch: interpreted here, compiled on a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from nn.ops.dropout_mask import DropoutMask
from tests.helpers.gpus import check_same_bits, needs_no_gpu, needs_one_gpu
from tests.nn.ops.test_triton_layer_norm import dropout_of

FORMS = ["whole", "gate with dropout", "gate with dropout of dealt rows"]
SCALES = (22.5, 22.5, 1.0)
# The second table is summed by a product.
ROWS = (301, 9, 70)


def inputs_of(count: int, columns: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return three tables, of which one is float32, and an index of each."""
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randn(rows, columns, generator=generator) for rows in ROWS]
    indices = [torch.randint(rows, (count,), generator=generator) for rows in ROWS]
    indices[0] = indices[0].int()
    tables[:2] = [table.to(dtype) for table in tables[:2]]
    return [*(table.to(device) for table in tables), *(index.to(device) for index in indices)]


def gradients_of(run: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    out = run([*leaves, *inputs[3:]])
    draw = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    return [out.detach(), *torch.autograd.grad(out, leaves, draw.to(out))]


def check(
    run: Callable[..., Tensor], form: str, count: int, columns: int, device: str, dtype: torch.dtype
) -> None:
    inputs = inputs_of(count, columns, device, dtype)
    mask, at = dropout_of(form, count, device)

    def plain(of: list[Tensor]) -> Tensor:
        total = sum(
            scale * embedding(i, t) for scale, t, i in zip(SCALES, of, of[3:], strict=False)
        )
        return total if mask is None or not count else mask.apply(total, at)

    ours = gradients_of(lambda of: run(of[:3], of[3:], SCALES, mask, at), inputs)
    exact = gradients_of(plain, [*(each.double() for each in inputs[:3]), *inputs[3:]])
    assert [each.dtype for each in ours] == [dtype, dtype, dtype, torch.float32]
    for one, wanted in zip(ours, exact, strict=True):
        error = ((one.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)).item()
        assert error < (1e-6 if dtype is torch.float32 else 5e-3), (count, columns, error)


@needs_no_gpu
@pytest.mark.parametrize("form", FORMS)
def test_interpreted_sums_are_exact(form, monkeypatch):
    from nn.ops.triton import row_sums as kernels

    monkeypatch.setattr(kernels, "BLOCK", 64)
    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 8)
    for columns in (16, 100):
        for count in (0, 1, 50):
            check(kernels.sum_of_rows, form, count, columns, "cpu", torch.float32)


@needs_no_gpu
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_interpreted_gradients_of_few_rows_are_exact(rows, monkeypatch):
    """Also in programs without positions, and in blocks of positions that have none of a program's rows."""
    from nn.ops.triton import row_sums as kernels

    monkeypatch.setattr(kernels, "SUM_PROGRAMS", 8)
    generator = torch.Generator().manual_seed(rows)
    for count, columns in ((1, 3), (700, 20)):
        index = torch.randint(rows, (count,), generator=generator).sort()[0]
        grad = torch.randn(count, columns, generator=generator)
        exact = torch.zeros(rows, columns, dtype=torch.float64).index_add_(0, index, grad.double())
        found = kernels.row_sums(grad, index, rows)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@needs_no_gpu
def test_an_interpreted_sum_of_rows_has_a_base():
    from nn.ops.triton.row_sums import sum_of_rows

    base, table = torch.randn(9, 3, requires_grad=True), torch.randn(5, 3)
    index = torch.arange(9) % 5
    out = sum_of_rows([table], [index], [2.0], None, (index, index), base)
    torch.testing.assert_close(out, base + 2 * table[index])
    assert torch.equal(torch.autograd.grad(out.sum(), base)[0], torch.ones(9, 3))


@needs_one_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_sums_are_exact(form, dtype, monkeypatch):
    from nn.ops.triton.row_sums import sum_of_rows

    # No sum of float32 is rounded to the ten bits that products may have.
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.bfloat16):
        for columns in (16, 100, 512, 3000):
            for count in (0, 1, 20_011):
                check(sum_of_rows, form, count, columns, "cuda", dtype)


@needs_one_gpu
def test_on_a_gpu_two_runs_and_a_graph_give_the_same_bits():
    from nn.ops.triton.row_sums import sum_of_rows

    inputs = inputs_of(100_003, 512, "cuda", torch.bfloat16)
    mask: DropoutMask | None
    mask, at = dropout_of("gate with dropout", 100_003, "cuda")
    leaves = [each.requires_grad_() for each in inputs[:3]]

    def once() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            out = sum_of_rows(leaves, inputs[3:], SCALES, mask, at)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]

    check_same_bits(once)
