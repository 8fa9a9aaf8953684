"""HSTU by its formulas, sample after sample, apart from the project's own layers: what the model is compared with."""

import math

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, silu


def norm(x: Tensor, weights: dict[str, Tensor], name: str, eps: float = 1e-5) -> Tensor:
    return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def dense(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def mlp(x: Tensor, weights: dict[str, Tensor], name: str, *, last_norm: bool = True) -> Tensor:
    x = dense(x, weights, f"{name}.first")
    x = dense(x * norm(x, weights, f"{name}.swish.norm").sigmoid(), weights, f"{name}.second")
    return norm(x, weights, f"{name}.norm") if last_norm else x


def mask(length: int, num_candidates: int) -> Tensor:
    seen = torch.ones(length, length).tril()
    last = length - num_candidates
    seen[last:, last:] = torch.eye(num_candidates)
    return seen


def stu_layer(
    x: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    n: float,
    num_candidates: int = 1,
    bias: Tensor | float = 0.0,
    *,
    silu_all: bool = False,
    concat: bool = True,
) -> Tensor:
    """Map the positions of one sample, [L, D]."""
    u, v, q, k = dense(norm(x, weights, "input_norm", 1e-6), weights, "uvqk").chunk(4, 1)
    u = silu(u)
    if silu_all:
        v, q, k = silu(v), silu(q), silu(k)
    attended = []
    for head_v, head_q, head_k in zip(
        v.chunk(heads, 1), q.chunk(heads, 1), k.chunk(heads, 1), strict=True
    ):
        scores = head_q @ head_k.T / math.sqrt(head_q.shape[1]) + bias
        attended.append(silu(scores) / n * mask(len(x), num_candidates) @ head_v)
    a = torch.cat(attended, 1)
    gated = u * norm(a, weights, "attention_norm", 1e-6)
    y = torch.cat([u, a, gated], 1) if concat else gated
    return x + y @ weights["output.weight"].T


def inner(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {
        key.removeprefix(f"{name}."): value
        for key, value in weights.items()
        if key.startswith(f"{name}.")
    }


def user_item_logits(
    weights: dict[str, Tensor],
    *,
    heads: int,
    layers: int,
    n: float,
    context: Tensor,
    events: list[Tensor],
    candidates: list[Tensor],
    actions: list[int],
    bits: list[int],
    seconds: Tensor,
    hours: float,
    ages: Tensor | None = None,
    **variant: bool,
) -> Tensor:
    """Return the logits [M, tasks] of a sample.

    `context`: [K, E]. `events`: [n, E] of each feature, `candidates` [M, E]. `seconds`: from events to the query. `ages`: of all
    positions, for the biases of the research code.
    """
    item, *others = (torch.cat(pair) for pair in zip(events, candidates, strict=True))
    vectors = mlp(item, weights, "items.item")
    if others:
        vectors = vectors + mlp(torch.cat(others, 1), weights, "items.additional")
    of_bits, count = weights["actions.of_bits"], len(candidates[0])
    done = [[bool(action & bit) for bit in bits] for action in actions]
    inputs = torch.tensor(done, dtype=item.dtype).view(-1, len(bits), 1) * of_bits
    inputs = torch.cat([inputs.flatten(1), weights["actions.of_candidate"].expand(count, -1)])
    vectors = vectors + mlp(inputs, weights, "actions.mlp")
    of_context = [
        vector @ matrix + shift
        for vector, matrix, shift in zip(
            context, weights["context.matrices"], weights["context.biases"], strict=True
        )
    ]
    x = torch.cat([torch.stack(of_context), vectors]) * math.sqrt(vectors.shape[1])
    length, first = len(x), len(context)
    places = weights["places.positions"]
    index = [
        j if j < first else length - count - min(j, length - count) + first for j in range(length)
    ]
    x = x + places[[min(i, len(places) - 1) for i in index]]
    times = weights["places.times"]
    passed = [hours * 3600.0] * first + seconds.tolist() + [0.0] * count
    x = x + times[[min(int(math.sqrt(max(t, 1e-6) / 60)), len(times) - 1) for t in passed]]
    for layer in range(layers):
        bias = 0.0
        if ages is not None:
            of_layer = inner(weights, f"biases.{layer}")
            far = (ages[:, None] - ages).abs().clamp(min=1).log() / 0.301
            place = torch.arange(length).clamp(max=length - count)
            apart = (place[:, None] - torch.arange(length)).clamp(min=0)
            bias = of_layer["positions"][apart] + of_layer["times"][far.clamp(max=128).long()]
        of_layer = inner(weights, f"layers.{layer}")
        x = stu_layer(x, of_layer, heads, n, count, bias, **variant)
    day, hour = math.floor(hours / 24) % 7 / 7, math.floor(hours) % 24 / 24
    clock = [
        part for turn in (hour, day) for part in (math.cos(6.28 * turn), math.sin(6.28 * turn))
    ]
    last = torch.cat([x[-count:], torch.tensor([clock], dtype=x.dtype).expand(count, 4)], 1)
    user = norm(dense(last, weights, "user.linear"), weights, "user.norm")
    product = user * mlp(torch.cat(candidates, 1), weights, "candidate")
    return mlp(product, weights, "head", last_norm=False)
