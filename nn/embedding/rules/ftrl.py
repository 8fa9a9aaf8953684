"""FTRL-Proximal (McMahan et al., Ad Click Prediction, 2013, algorithm 1) with per-coordinate rates.

It solves for the weight whose sum of gradients is `z`, with `n` the sum of their squares. Two things differ from the paper,
and neither if weights start at zero and the learning rate is constant. A weight that starts elsewhere starts with the `z`
whose weight it is; with `z` = 0 its first update would move it towards zero. A schedule multiplies the gradient in `z` and
leaves alpha alone: a smaller alpha would shrink all weights.
"""

import torch

from nn.embedding.optimizer import Group, StateField, States, TableRule, Tensors
from nn.ops.optional_triton import jit, tl

OPTIONS = ("table_lr", "ftrl_beta", "ftrl_l1", "ftrl_l2")


def _update(tables: Tensors, gradients: Tensors, states: States, group: Group) -> None:
    alpha, beta, l1, l2 = (group[name] for name in OPTIONS)
    for table, gradient, state in zip(tables, gradients, states, strict=True):
        touched = gradient.ne(0).any(dim=1, keepdim=True)
        z, n = state["z"], state["n"]
        of_weight = -(table * (beta / alpha + l2) + table.sign() * l1)
        root, new_n = n.sqrt(), n + gradient.square()
        new_root = new_n.sqrt()
        new_z = torch.where(n == 0, of_weight, z)
        new_z = new_z + gradient * (group["lr"] / alpha) - table * ((new_root - root) / alpha)
        weight = (new_z.sign() * l1 - new_z) / ((beta + new_root) / alpha + l2)
        weight = torch.where(new_z.abs() <= l1, 0, weight)
        for old, new in ((table, weight), (z, new_z), (n, new_n)):
            old.copy_(torch.where(touched, new, old))


@jit
def _kernel(weight, gradient, state1, state2, step):
    alpha = tl.load(step.scalars + 5)
    beta = tl.load(step.scalars + 6)
    l1 = tl.load(step.scalars + 7)
    l2 = tl.load(step.scalars + 8)
    n = state2
    sign = tl.where(weight > 0, 1.0, tl.where(weight < 0, -1.0, 0.0))
    of_weight = -(weight * (beta / alpha + l2) + sign * l1)
    z = tl.where(n == 0, of_weight, state1)
    root = tl.sqrt(n)
    n += gradient * gradient
    new_root = tl.sqrt(n)
    z += gradient * (step.rate / alpha) - weight * ((new_root - root) / alpha)
    sign = tl.where(z > 0, 1.0, -1.0)
    solved = (sign * l1 - z) / ((beta + new_root) / alpha + l2)
    solved = tl.where(tl.abs(z) <= l1, 0.0, solved)
    # Solving for the weight rounds it.
    return tl.where(tl.max(tl.abs(gradient), 0) == 0, weight, solved), z, n


RULE = TableRule(
    name="ftrl",
    update=_update,
    kernel=_kernel,
    states=(StateField("z"), StateField("n")),
    options=OPTIONS,
    leaves_untouched_rows=True,
)
