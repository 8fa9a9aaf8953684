"""Kernel branches of the built-in table optimizers: `_segment_update` calls one for a row when its gradient is summed.

A branch takes a row's weights, the sum of its gradients, with L2 if that is on, and the optimizer's states; it returns the
new weights and states. All are float32 [columns], a state with one number per row a scalar. A branch returns the states that
its optimizer does not have as they came.

Scalars: `rate` is the learning rate. `scalars[1]` and `scalars[2]` are 1 / (1 - beta ** step) for beta1 and beta2;
`scalars[5]` and those after it are the options that the optimizer's `TableRule` names. `rest1` and `rest2` are 1 - beta,
computed on the host, since single precision keeps four digits only. `width` is the number of columns. If it is no power of
two, there are more columns here: weights, gradients and states are 0 in them.

`nn.embedding.optimizer` has the same arithmetic in plain torch.
"""

import triton
import triton.language as tl


@triton.jit
def sgd(
    weight,
    gradient,
    state1,
    state2,
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
    return weight - rate * gradient, state1, state2


@triton.jit
def adagrad(
    weight,
    gradient,
    state1,
    state2,
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
    total = state1 + gradient * gradient
    return weight - rate * gradient / (tl.sqrt(total) + eps), total, state2


@triton.jit
def rowwise_adagrad(
    weight,
    gradient,
    state1,
    state2,
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
    total = state1 + tl.sum(gradient * gradient, 0) / width
    return weight - (rate / (tl.sqrt(total) + eps)) * gradient, total, state2


@triton.jit
def adam(
    weight,
    gradient,
    state1,
    state2,
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
    mean = beta1 * state1 + rest1 * gradient
    variance = beta2 * state2 + rest2 * gradient * gradient
    corrected_mean = mean * tl.load(scalars + 1)
    corrected_variance = variance * tl.load(scalars + 2)
    return weight - rate * corrected_mean / (tl.sqrt(corrected_variance) + eps), mean, variance


@triton.jit
def ftrl(
    weight,
    gradient,
    state1,
    state2,
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
    n = state2
    sign = tl.where(weight > 0, 1.0, tl.where(weight < 0, -1.0, 0.0))
    of_weight = -(weight * (beta / alpha + l2) + sign * l1)
    z = tl.where(n == 0, of_weight, state1)
    root = tl.sqrt(n)
    n += gradient * gradient
    new_root = tl.sqrt(n)
    z += gradient * (rate / alpha) - weight * ((new_root - root) / alpha)
    sign = tl.where(z > 0, 1.0, -1.0)
    solved = (sign * l1 - z) / ((beta + new_root) / alpha + l2)
    return tl.where(tl.abs(z) <= l1, 0.0, solved), z, n
