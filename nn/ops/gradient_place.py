"""Memory in which the backward pass writes a parameter's gradient, where it is wanted: nobody copies it there afterwards."""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_places = WeakTensorKeyDictionary()
"""Parameter -> place of its next gradient."""


def offer_place(parameter: Tensor, place: Tensor) -> None:
    """Offer the place of a parameter's next gradient, contiguous and of its shape and dtype."""
    _places[parameter] = place


def withdraw_place(parameter: Tensor) -> None:
    """Withdraw the place if nobody took it."""
    _places.pop(parameter, None)


def take_place(parameter: Tensor) -> Tensor | None:
    """Return the place of a parameter's gradient, and None if there is none or it is taken: then gradients are added up.

    The tensor has no other reference, so that autograd keeps it as the parameter's gradient instead of copying it.
    """
    place = _places.pop(parameter, None)
    return None if place is None else place.view_as(place)
