"""Features that HSTU reads: candidates, events, and what is beside them."""

from typing import NamedTuple

from dataloading.dataset.feature_spec import FeatureSpec
from nn.models.features import chosen_features
from nn.models.options import HSTUOptions, ItemMLPs
from nn.models.sequences import SequenceInput


class EventFeatures(NamedTuple):
    """Candidates, events and context of a sample."""

    inputs: SequenceInput
    num_features: int  # other categorical features
    hour: int | None  # index among the numerical features
    numbers: list[int]  # indices of the other numerical features


def find_events(options: HSTUOptions, spec: FeatureSpec) -> EventFeatures:
    """Return the features that the options name.

    Raises ValueError: the dataset has no such group or feature, or the features do not fit each other.
    """
    inputs = SequenceInput.of(options, spec, several=True)
    items, features = len(inputs.items), len(inputs.group.features)
    if options.item_mlps is ItemMLPs.item and items < features:
        raise ValueError(
            f"model.item_mlps=item: the events have {features} features and the candidate {items}, so they do not follow from "
            "the item; set model.item_mlps=row"
        )
    if len(spec.labels) % inputs.num_candidates:
        raise ValueError(
            f"{len(spec.labels)} labels are no multiple of {inputs.num_candidates} candidates; list the labels of the first "
            "candidate, then those of the second"
        )
    if options.action is not None:
        columns = [column.name for column in inputs.group.numbers]
        chosen_features("model.action", [options.action], columns)
    hour = None
    if options.hour is not None:
        chosen_features("model.hour", [options.hour], spec.numerical)
        hour = spec.numerical.index(options.hour)
    numbers = [column for column in range(len(spec.numerical)) if column != hour]
    return EventFeatures(inputs, inputs.num_pooled + len(inputs.beside), hour, numbers)
