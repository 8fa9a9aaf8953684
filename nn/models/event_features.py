"""Candidates and events among the features of a dataset."""

from typing import NamedTuple

from configs.messages import shown
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from nn.embedding.declared_tables import table_name
from nn.models.features import chosen_features
from nn.models.options import HSTUOptions


class EventFeatures(NamedTuple):
    """Candidates, whose features share tables with those of the events in the same order, and the features beside them."""

    group: SequenceGroup
    items: list[str]  # names of the candidates' features
    tables: list[str]  # of each
    num_others: int  # other categorical features
    num_candidates: int  # ids of each of `items` in a row
    mean_events: float  # per sample
    hour: int | None  # index among the numerical features
    numbers: list[int]  # indices of the other numerical features


def find_events(options: HSTUOptions, spec: FeatureSpec) -> EventFeatures:
    """Return the features that the options name.

    Raises ValueError: the dataset has no such group or feature, or the features do not fit each other.
    """
    groups = {group.name: group for group in spec.sequences}
    if options.sequence not in groups:
        raise ValueError(
            f"model.sequence={options.sequence} is no sequence group of the dataset; it has {', '.join(groups) or 'none'}"
        )
    group = groups[options.sequence]
    by_name = {feature.name: feature for feature in spec.categorical}
    items = chosen_features("model.item_features", options.item_features, list(by_name))
    if len(items) != len(group.features):
        raise ValueError(
            f"model.name={options.name} needs a candidate for the events of {', '.join(group.features)}, got "
            f"model.item_features={items}; name features of {', '.join(by_name)} in this order"
        )
    table_of = {
        feature.name: table for table, names in spec.table_features.items() for feature in names
    }
    num_candidates = by_name[items[0]].hotness or 0
    for item, feature in zip(items, group.features, strict=True):
        of_item, table, ids = (
            by_name[item],
            table_of[feature],
            num_candidates or "a fixed number of",
        )
        if not num_candidates or of_item.hotness != num_candidates or table_of[item] != table:
            raise ValueError(
                f"item feature {shown(item)} needs {ids} ids per row, one per candidate, and the table of {shown(feature)}, got "
                f"{of_item.hotness or 'varying'} ids and table {shown(table_of[item])}; set table: {table} in the feature spec"
            )
    handed_out = {table_of[item] for item in items}
    others = [name for name in by_name if name not in (*items, *group.features)]
    for name in others:
        if table_of[name] in handed_out:
            raise ValueError(
                f"feature {shown(name)} shares the table of {shown(group.name)} and is context; give it a table of its own"
            )
    if len(spec.labels) % num_candidates:
        raise ValueError(
            f"{len(spec.labels)} labels are no multiple of {num_candidates} candidates; list the labels of the first candidate, "
            "then those of the second"
        )
    if options.action is not None:
        columns = [column.name for column in group.numbers]
        chosen_features("model.action", [options.action], columns)
    hour = None
    if options.hour is not None:
        chosen_features("model.hour", [options.hour], spec.numerical)
        hour = spec.numerical.index(options.hour)
    return EventFeatures(
        group=group,
        items=items,
        tables=[table_name(table_of[item]) for item in items],
        num_others=len(others),
        num_candidates=num_candidates,
        mean_events=by_name[group.features[0]].mean_hotness,
        hour=hour,
        numbers=[column for column in range(len(spec.numerical)) if column != hour],
    )
