"""Histories of items among the features of a dataset."""

from typing import NamedTuple

from configs.messages import shown
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from nn.models.features import chosen_features
from nn.models.options import DINOptions


class Sequences(NamedTuple):
    """An item's features, their histories and the features beside them."""

    items: list[str]  # names of the candidate's features
    histories: list[str]  # names of their histories, in the same order
    positions: int  # L
    others: list[str]  # names of the other categorical features
    # index of the history's length among the numerical features; None if all histories have L items
    length: int | None


def find_sequences(options: DINOptions, spec: FeatureSpec) -> Sequences:
    """Return the features that the options name.

    Raises ValueError: they name no history, or one that the dataset lacks or that does not fit its item.
    """
    by_name = {feature.name: feature for feature in spec.categorical}
    items = chosen_features("model.item_features", options.item_features, list(by_name))
    histories = chosen_features("model.history_features", options.history_features, list(by_name))
    if not items or len(items) != len(histories):
        raise ValueError(
            f"model.name=din needs a history per item feature, got model.item_features={items} and "
            f"model.history_features={histories}; name features of {', '.join(by_name)}"
        )
    for item, history in zip(items, histories, strict=True):
        _check_pair(by_name[item], by_name[history], by_name[histories[0]])
    first = by_name[histories[0]]
    positions = first.hotness or 0
    if options.history_positions is not None and options.history_positions > positions:
        raise ValueError(
            f"model.history_positions={options.history_positions} is longer than history {shown(first.name)}, which has "
            f"{positions} positions; use at most {positions}, or null for all"
        )
    length = None
    if options.history_length is not None:
        chosen_features("model.history_length", [options.history_length], spec.numerical)
        length = spec.numerical.index(options.history_length)
    others = [name for name in by_name if name not in (*items, *histories)]
    return Sequences(items, histories, positions, others, length)


def _check_pair(
    item: CategoricalFeature, history: CategoricalFeature, first: CategoricalFeature
) -> None:
    where = f"history {shown(history.name)}"
    if item.hotness != 1:
        raise ValueError(
            f"item feature {shown(item.name)} has {item.hotness or 'varying'} ids per row; din needs one"
        )
    if history.hotness is None:
        raise ValueError(
            f"{where} is ragged; din requires fixed hotness, and the true length as a numerical feature"
        )
    if history.hotness != first.hotness:
        raise ValueError(
            f"{where} has {history.hotness} positions and {shown(first.name)} {first.hotness}; all must be equal"
        )
    if history.cardinality != item.cardinality:
        raise ValueError(
            f"{where} has {history.cardinality} ids and {shown(item.name)} {item.cardinality}; they share a table, so "
            "preprocess both with one vocabulary"
        )
