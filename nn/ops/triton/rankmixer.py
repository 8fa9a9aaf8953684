"""A block of RankMixer with one network per token on a GPU; the PyTorch version is in `nn.models.rankmixer`.

Between its products every value is read and written once: a norm adds what it normalises, reads the mixed tokens where they
lie, and is one kernel a direction, as is the activation with its bias. The backward pass adds them up again. The kernels
add the gradients of biases and norms over their samples, and `column_sums` those of all programs: every sum has one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nn.ops.fused_linear import weight_gradient
from nn.ops.triton.column_sums import column_sums
from nn.ops.triton.layer_norm import (
    Shape,
    columns_of,
    input_gradient,
    load,
    normalise,
    parameters,
    shape_of,
    store,
    store_sums,
    zeros,
)
from nn.ops.triton.parameters import cast_parameters

# B: samples, T: tokens, D: columns of a token, K: columns of its hidden layer, P: programs of a token

BLOCK_B, BLOCK_C, BLOCKS_OF_ROWS = tl.constexpr(16), tl.constexpr(128), tl.constexpr(16)
"""A program of the activation processes `BLOCKS_OF_ROWS` blocks of a token in sequence and accumulates in registers."""
FORWARD, BACKWARD = 4096, 1024  # numbers of a norm, and of its gradient, that are read at once
PIECE = 256
"""Columns of a piece of a row: 16 bytes of each thread of a warp, so that each warp has whole rows and waits for no other."""
NORM, NORM_GRADIENT = {"num_warps": 4}, {"num_warps": 1, "maxnreg": 168}
PROGRAMS = 1584  # at most of a norm's gradient: 12 for each multiprocessor of an H100
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


class Parameters(NamedTuple):
    """Parameters of a block: `up` [T, D, K], `down` [T, K, D], biases [T, 1, K] and [T, 1, D], and those of norms [D]."""

    up: Tensor
    down: Tensor
    up_bias: Tensor
    down_bias: Tensor
    mixing_weight: Tensor
    mixing_bias: Tensor
    network_weight: Tensor
    network_bias: Tensor


class Terms(NamedTuple):
    """Terms of the sum that a norm reads: x, y and its bias, or without a bias x and the mixed tokens of x."""

    x: Tensor
    y: Tensor | None = None
    y_bias: Tensor | None = None


def mixer_block(x: Tensor, eps: float, of: Parameters, network: Any = None) -> Tensor:
    """Map tokens [T, B, D] to the same, as `nn.models.rankmixer.RankMixerBlock` with one expert and GELU.

    `network`: a pass of the networks in 8 bits, of which `_Network` has the methods; None for the dtype of x.
    """
    return _Block.apply(x, eps, network, *of)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, network: Any, *parameters: Tensor) -> Tensor:
        x, of = x.contiguous(), Parameters(*parameters)
        ctx.network = _Network(of) if network is None else network
        s = _add_norm(Terms(x), (of.mixing_weight, of.mixing_bias), eps)
        y, kept = ctx.network.forward(s)
        ctx.save_for_backward(x, s, y, *kept)
        ctx.parameters, ctx.eps = of, eps
        return _add_norm(Terms(s, y, of.down_bias), (of.network_weight, of.network_bias), eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, s, y, *kept = ctx.saved_tensors
        of = ctx.parameters
        norm = of.network_weight, of.network_bias
        terms = Terms(s, y, of.down_bias)
        of_sum, *of_norm, down_bias = _norm_gradient(grad, terms, norm, ctx.eps)
        of_s, *products, up_bias = ctx.network.backward(of_sum, kept)
        norm = of.mixing_weight, of.mixing_bias
        of_mixed, *of_mixing, _ = _norm_gradient(of_sum, Terms(x, of_s), norm, ctx.eps)
        of_x = torch.empty_like(x)
        programs, shape = _norm_layout(x, FORWARD, mixes=True)
        _add_mixed[(programs * len(x),)](of_mixed, of_x, x.shape[1], shape, **NORM)
        small = zip((up_bias, down_bias, *of_mixing, *of_norm), of[2:], strict=True)
        return of_x, None, None, *products, *(one.view_as(p).to(p.dtype) for one, p in small)


@dataclass(frozen=True, slots=True)
class _Network:
    """A pass of the networks in the dtype of s."""

    of: Parameters

    def forward(self, s: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Map s [T, B, D] to the output without its bias, and return what `backward` needs."""
        up, down = cast_parameters(s.dtype, self.of[:2])
        hidden = torch.bmm(s, up)
        activated = torch.empty_like(hidden)
        grid, sizes = _activation_layout(hidden)
        _activate[grid](hidden, self.of.up_bias, activated, *sizes)
        return torch.bmm(activated, down), [s, hidden, activated, up, down]

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of s, `up`, `down` and `up_bias`; None for the first, which is added to `grad`."""
        s, hidden, activated, up, down = kept
        of_down = weight_gradient(activated, grad, self.of.down)
        of_hidden = torch.bmm(grad, down.mT)
        grid, sizes = _activation_layout(hidden)
        sums = hidden.new_empty(grid[2], len(s), hidden.shape[2], dtype=torch.float32)
        _activation_gradient[grid](of_hidden, hidden, self.of.up_bias, sums, *sizes)
        of_up = weight_gradient(s, of_hidden, self.of.up)
        grad.baddbmm_(of_hidden, up.mT)  # s is read by the network and beside it
        return None, of_up, of_down, column_sums(sums.flatten(1))


def _add_norm(terms: Terms, norm: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Return LN(sum of the terms), [T, B, D]; `norm`: weight and bias."""
    x, out = terms.x, torch.empty_like(terms.x)
    programs, shape = _norm_layout(x, FORWARD, mixes=terms.y_bias is None)
    _norm[(programs * len(x),)](terms, *norm, out, x.shape[1], eps, shape, **NORM)
    return out


def _norm_gradient(
    grad: Tensor, terms: Terms, norm: tuple[Tensor, Tensor], eps: float
) -> tuple[Tensor, ...]:
    """Return the gradients of the terms' sum, of weight and bias [D], and of the bias of y [T * D], float32.

    Without a bias y is added to `grad` instead, if there is one.
    """
    x = terms.x
    tokens, samples, columns = x.shape
    of_sum = torch.empty_like(x)
    programs, shape = _norm_layout(x, BACKWARD, mixes=terms.y_bias is None)
    programs = min(programs, max(PROGRAMS // tokens, 1))
    # A program without samples writes sums of zero.
    of_norm = x.new_empty(programs * tokens, 2 * columns, dtype=torch.float32)
    of_bias = x.new_empty(programs, tokens * columns, dtype=torch.float32)
    # That of the mean over the tokens is the same for each of them, and lies there once.
    grad = grad if grad[0].is_contiguous() else grad.contiguous()
    tensors = grad, terms, *norm, of_sum, of_norm, of_bias, grad.stride(0)
    # Of wider rows one warp has too few registers.
    wide = {"num_warps": shape.BLOCK_C // 512, "maxnreg": 128}
    launch = NORM_GRADIENT if shape.BLOCK_C <= BACKWARD else wide
    _norm_backward[(programs * tokens,)](*tensors, samples, eps, shape, **launch)
    of_y_bias = of_bias if terms.y_bias is None else column_sums(of_bias)
    return of_sum, *column_sums(of_norm).chunk(2), of_y_bias


def _norm_layout(x: Tensor, elements: int, *, mixes: bool) -> tuple[int, Shape]:
    """Return a token's programs if each reads one block of samples, and the kernel's constants."""
    piece = min(triton.next_power_of_2(x.shape[2]), PIECE)
    shape = shape_of(x, elements, T=len(x), MIXES=mixes, PIECE=piece)
    return max(triton.cdiv(x.shape[1], shape.BLOCK_R), 1), shape


def _activation_layout(hidden: Tensor) -> tuple[tuple[int, int, int], tuple[int, int]]:
    """Return the grid, blocks of columns, tokens and programs of a token, and the numbers of samples and columns."""
    tokens, samples, columns = hidden.shape
    programs = max(triton.cdiv(samples, BLOCK_B * BLOCKS_OF_ROWS), 1)
    return (triton.cdiv(columns, BLOCK_C), tokens, programs), (samples, columns)


@triton.jit
def _place(block, column, samples, S: tl.constexpr):
    """Return where a program's token has a block of samples, and which of these are there.

    Neighbouring programs have different tokens of the same samples, so that mixing reads what a cache holds.
    """
    sample = block * S.BLOCK_R + tl.arange(0, S.BLOCK_R)[:, None]
    row = (tl.program_id(0) % S.T).to(tl.int64) * samples + sample
    return row * S.C + column, (sample < samples) & (column < S.C)


@triton.jit
def _load_mixed(x, block, column, samples, inside, S: tl.constexpr):
    """Load the tokens that heads make: column t * D / T + k of token h is column h * D / T + k of token t."""
    HEAD: tl.constexpr = S.C // S.T
    sample = block * S.BLOCK_R + tl.arange(0, S.BLOCK_R)[:, None]
    row = (column // HEAD).to(tl.int64) * samples + sample
    return load(x, row * S.C + tl.program_id(0) % S.T * HEAD + column % HEAD, inside)


@triton.jit
def _shift(terms, column, S: tl.constexpr):
    """Return the bias of y of a program's token; 0 without y."""
    at = tl.program_id(0) % S.T * S.C + column
    return 0.0 if S.MIXES else load(terms.y_bias, at, column < S.C)


@triton.jit
def _load_sum(terms, shift, block, column, samples, S: tl.constexpr):
    offset, inside = _place(block, column, samples, S)
    values = load(terms.x, offset, inside)
    if S.MIXES:
        values += _load_mixed(terms.x, block, column, samples, inside, S)
    else:
        values += load(terms.y, offset, inside) + shift
    return values


@triton.jit(do_not_specialize=["samples"])
def _norm(terms, weight, bias, out, samples, eps, S: tl.constexpr):
    column, factor, shift = parameters(weight, bias, S)
    block = tl.program_id(0) // S.T
    offset, inside = _place(block, column, samples, S)
    values = _load_sum(terms, _shift(terms, column, S), block, column, samples, S)
    store(out, offset, normalise(values, column < S.C, eps, S)[0] * factor + shift, inside)


@triton.jit(do_not_specialize=["samples"])
def _norm_backward(
    grad, terms, weight, bias, of_sum, of_norm, of_bias, grad_stride, samples, eps, S: tl.constexpr
):
    column, factor, _ = parameters(weight, bias, S)
    of_weight, of_shift, of_token = zeros(S), zeros(S), zeros(S)
    token = tl.program_id(0) % S.T
    # Offsets contain the token's samples.
    grad += token.to(tl.int64) * (grad_stride - samples * S.C)
    # In the loop it would be loaded for each block, by other threads than those that add it.
    y_shift = _shift(terms, column, S)
    first, programs = tl.program_id(0) // S.T, tl.num_programs(0) // S.T
    for block in range(first, tl.cdiv(samples, S.BLOCK_R), programs):
        offset, inside = _place(block, column, samples, S)
        values = _load_sum(terms, y_shift, block, column, samples, S)
        slope = load(grad, offset, inside)
        if S.MIXES and terms.y is not None:
            slope += load(terms.y, offset, inside)
        # Rows that are not there have no slope.
        centred, rstd = normalise(values, column < S.C, eps, S)
        of_weight += slope * centred
        of_shift += slope
        result = input_gradient(slope * factor, centred, rstd, S)
        of_token += result
        store(of_sum, offset, result, inside)
    store_sums(of_norm, of_weight, of_shift, column, S)
    if not S.MIXES:
        at = tl.program_id(0) * S.C + column
        store(of_bias, at, tl.sum(of_token, -2, keep_dims=True), column < S.C)


@triton.jit(do_not_specialize=["samples"])
def _add_mixed(x, out, samples, S: tl.constexpr):
    """Compute x and its mixed tokens: mixing twice gives x, so it is its own gradient."""
    column = columns_of(S)
    block = tl.program_id(0) // S.T
    offset, inside = _place(block, column, samples, S)
    store(out, offset, _load_sum(Terms(x), 0.0, block, column, samples, S), inside)


@triton.jit
def _block(bias, block, samples, columns):
    """Return the offsets of a block of a token's hidden layer, which of them are there, and the biases."""
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    sample = block * BLOCK_B + tl.arange(0, BLOCK_B)[:, None]
    row = tl.program_id(1).to(tl.int64) * samples + sample
    shift = load(bias, tl.program_id(1) * columns + column, column < columns)
    return row * columns + column, (sample < samples) & (column < columns), shift


@triton.jit
def _activate(hidden, bias, out, samples, columns):
    for number in range(BLOCKS_OF_ROWS):
        block = tl.program_id(2) * BLOCKS_OF_ROWS + number
        offset, inside, shift = _block(bias, block, samples, columns)
        values = load(hidden, offset, inside) + shift
        store(out, offset, gelu(values, out.dtype.element_ty == tl.float32), inside)


@triton.jit
def _activation_gradient(grad, hidden, bias, sums, samples, columns):
    """Overwrite the gradient of what `_activate` returns by that of what it reads."""
    total = tl.zeros((BLOCK_B, BLOCK_C), tl.float32)
    for number in range(BLOCKS_OF_ROWS):
        block = tl.program_id(2) * BLOCKS_OF_ROWS + number
        offset, inside, shift = _block(bias, block, samples, columns)
        values = load(hidden, offset, inside) + shift
        slope = gelu_slope(values, grad.dtype.element_ty == tl.float32)
        result = load(grad, offset, inside) * slope
        store(grad, offset, result, inside)
        total += result
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    token = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    store(sums, token * columns + column, tl.sum(total, 0)[None, :], column < columns)


@triton.jit
def gelu(x, EXACT: tl.constexpr):
    """Return GELU(x), unless `EXACT` to 1e-6: `tl.erf` has more instructions, which take longer than the memory's bytes."""
    if EXACT:
        return x * 0.5 * (1 + tl.erf(x * ROOT_HALF))
    return tl.maximum(x, 0.0) - tl.abs(x) * _tail(x)


@triton.jit
def gelu_slope(x, EXACT: tl.constexpr):
    """Return the derivative of `gelu`."""
    if EXACT:
        share = 0.5 * (1 + tl.erf(x * ROOT_HALF))
    else:
        beyond = _tail(x)
        share = tl.where(x < 0, beyond, 1 - beyond)
    return share + x * DENSITY_AT_0 * tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def _tail(x):
    """Return the normal distribution's share beyond |x|; it and |x| times it are exact to 1e-6.

    Its logarithm is near to a polynomial, whose coefficients are fitted to both.
    """
    x = tl.abs(x)
    slope = -0.0523880646 + x * (0.00730068004 + x * -0.000502870884)
    return tl.exp2(x * (-1.15107012 + x * (-0.459368169 + x * slope)) - 1)
