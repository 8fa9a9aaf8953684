"""Kernel branches of the built-in table optimizers: `_segment_update` calls one for a row when its gradient is summed.

A branch takes the row's weights and the sum of its gradients, with L2 if that is on, float32 [WARPS, columns], and returns the
new weights. It loads and stores the optimizer's states itself: `state1` and `state2` are pointers with their masks, [WARPS,
columns], or [WARPS] if the state has one number per row. A branch ignores the states that its optimizer does not have.

Scalars: `rate` is the learning rate. `scalars[1]` and `scalars[2]` are 1 / (1 - beta ** step) for beta1 and beta2;
`scalars[5]` and those after it are the options that the optimizer's `TableRule` names. `rest1` and `rest2` are 1 - beta,
computed on the host, since single precision keeps four digits only. `width` [WARPS] is the number of columns.

`nn.embedding.optimizer` has the same arithmetic in plain torch.
"""

import triton
import triton.language as tl


@triton.jit
def sgd(
    weight,
    gradient,
    state1,
    mask1,
    state2,
    mask2,
    width,
    rate,
    scalars,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
):
    """Descend the gradient."""
    return weight - rate * gradient


@triton.jit
def adagrad(
    weight,
    gradient,
    state1,
    mask1,
    state2,
    mask2,
    width,
    rate,
    scalars,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
):
    """Divide by the root of the sum of squares of each element."""
    total = tl.load(state1, mask=mask1, other=0.0) + gradient * gradient
    tl.store(state1, total, mask=mask1)
    return weight - rate * gradient / (tl.sqrt(total) + eps)


@triton.jit
def rowwise_adagrad(
    weight,
    gradient,
    state1,
    mask1,
    state2,
    mask2,
    width,
    rate,
    scalars,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
):
    """Divide by the root of the sum of each row's mean squares."""
    mean_square = tl.sum(gradient * gradient, 1) / width
    total = tl.load(state1, mask=mask1, other=0.0) + mean_square
    tl.store(state1, total, mask=mask1)
    return weight - (rate / (tl.sqrt(total) + eps))[:, None] * gradient


@triton.jit
def adam(
    weight,
    gradient,
    state1,
    mask1,
    state2,
    mask2,
    width,
    rate,
    scalars,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
):
    """Step along the corrected mean, divided by the root of the corrected variance."""
    mean = tl.load(state1, mask=mask1, other=0.0)
    variance = tl.load(state2, mask=mask2, other=0.0)
    mean = beta1 * mean + rest1 * gradient
    variance = beta2 * variance + rest2 * gradient * gradient
    tl.store(state1, mean, mask=mask1)
    tl.store(state2, variance, mask=mask2)
    mean = mean * tl.load(scalars + 1)
    variance = variance * tl.load(scalars + 2)
    return weight - rate * mean / (tl.sqrt(variance) + eps)


@triton.jit
def ftrl(
    weight,
    gradient,
    state1,
    mask1,
    state2,
    mask2,
    width,
    rate,
    scalars,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
):
    """Solve for the weight whose sum of gradients is z, with n the sum of their squares."""
    alpha = tl.load(scalars + 5)
    beta = tl.load(scalars + 6)
    l1 = tl.load(scalars + 7)
    l2 = tl.load(scalars + 8)
    n = tl.load(state2, mask=mask2, other=0.0)
    sign = tl.where(weight > 0, 1.0, tl.where(weight < 0, -1.0, 0.0))
    of_weight = -(weight * (beta / alpha + l2) + sign * l1)
    z = tl.where(n == 0, of_weight, tl.load(state1, mask=mask1, other=0.0))
    root = tl.sqrt(n)
    n += gradient * gradient
    new_root = tl.sqrt(n)
    z += gradient * (rate / alpha) - weight * ((new_root - root) / alpha)
    tl.store(state1, z, mask=mask1)
    tl.store(state2, n, mask=mask2)
    sign = tl.where(z > 0, 1.0, -1.0)
    solved = (sign * l1 - z) / ((beta + new_root) / alpha + l2)
    return tl.where(tl.abs(z) <= l1, 0.0, solved)
