"""Memory in which the backward pass writes a parameter's gradient, where it is wanted: nobody copies it there afterwards."""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_buffers = WeakTensorKeyDictionary()
"""Parameter -> buffer of its next gradient."""


def offer_buffer(parameter: Tensor, buffer: Tensor) -> None:
    """Offer the buffer of a parameter's next gradient, contiguous and of its shape and dtype."""
    _buffers[parameter] = buffer


def withdraw_buffer(parameter: Tensor) -> None:
    """Withdraw the buffer if nobody took it."""
    _buffers.pop(parameter, None)


def take_buffer(parameter: Tensor) -> Tensor | None:
    """Return the buffer of a parameter's gradient, and None if there is none or it is taken: then gradients are added up.

    The tensor has no other reference, so that autograd keeps it as the parameter's gradient instead of copying it.
    """
    buffer = _buffers.pop(parameter, None)
    return None if buffer is None else buffer.view_as(buffer)
