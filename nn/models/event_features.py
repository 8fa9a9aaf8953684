"""Candidates and events among the features of a dataset."""

from typing import NamedTuple

from configs.messages import shown
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from nn.models.features import chosen_features
from nn.models.options import HSTUOptions


class EventFeatures(NamedTuple):
    """A candidate's features, those of the events, and the features beside them."""

    group: SequenceGroup
    items: list[
        str
    ]  # names of the candidate's features; of several candidates, each has as many ids
    histories: list[str]  # names of the events' features, in the same order
    others: list[str]  # names of the other categorical features
    num_candidates: int
    hour: int | None  # index among the numerical features
    numbers: list[int]  # indices of the other numerical features


def find_events(options: HSTUOptions, spec: FeatureSpec) -> EventFeatures:
    """Return the features that the options name.

    Raises ValueError: the dataset has no such group or feature, or the features do not fit each other.
    """
    by_name = {feature.name: feature for feature in spec.categorical}
    groups = {group.name: group for group in spec.sequences}
    where = f"model.name={options.name}"
    if options.history not in groups:
        raise ValueError(
            f"model.history={shown(options.history)}: the dataset has no such sequence group, only "
            f"{', '.join(groups) or 'none'}; name a group of its sequence_spec"
        )
    group = groups[options.history]
    items = chosen_features("model.item_features", options.item_features, list(by_name))
    histories = chosen_features(
        "model.history_features", options.history_features, list(group.features)
    )
    if not items or len(items) != len(histories):
        raise ValueError(
            f"{where} needs a feature of the events per feature of the candidate, got model.item_features={items} and "
            f"model.history_features={histories}; name features of {', '.join(by_name)}"
        )
    num_candidates = by_name[items[0]].hotness
    for item, history in zip(items, histories, strict=True):
        if not num_candidates or by_name[item].hotness != num_candidates:
            raise ValueError(
                f"{where}: item feature {shown(item)} has {by_name[item].hotness or 'varying'} ids per row, and "
                f"{shown(items[0])} {num_candidates or 'varying'}; all need one per candidate"
            )
        if by_name[history].cardinality != by_name[item].cardinality:
            raise ValueError(
                f"{where}: history {shown(history)} has {by_name[history].cardinality} ids and {shown(item)} "
                f"{by_name[item].cardinality}; they share a table, so preprocess both with one vocabulary"
            )
    assert num_candidates, "checked above"
    if len(spec.labels) % num_candidates:
        raise ValueError(
            f"{where}: {len(spec.labels)} labels are no multiple of {num_candidates} candidates; list each task's label of the "
            "first candidate, then those of the second"
        )
    if options.action is not None:
        columns = [column.name for column in group.numbers]
        chosen_features("model.action", [options.action], columns)
    hour = None
    if options.hour is not None:
        chosen_features("model.hour", [options.hour], spec.numerical)
        hour = spec.numerical.index(options.hour)
    return EventFeatures(
        group,
        items,
        histories,
        [name for name in by_name if name not in (*items, *histories)],
        num_candidates,
        hour,
        [column for column in range(len(spec.numerical)) if column != hour],
    )
