"""Inputs of a model of histories: events of a sequence group, or histories of fixed hotness."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.messages import shown
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from nn.embedding.declared_tables import Tables, one_table_per_feature, table_name
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import pool
from nn.layers.sequence_events import SequenceEvents
from nn.models.features import chosen_features, chosen_group
from nn.models.options import DINOptions
from nn.ops.fused_linear import as_autocast

# B: samples, N: numerical features, C: positions of the events of all samples, D: columns of a table


class SequenceParts(NamedTuple):
    """Inputs of a model of events, cast as autocast would."""

    candidate: Tensor  # vectors of the candidate's features side by side, [B, P * D]
    events: SequenceEvents
    vectors: Tensor  # vectors of the group's features side by side, of which the candidate's come first, [C, columns]
    times: Tensor | None  # ages of the events in seconds, if the group has times, float32 [C]
    others: Tensor  # vectors of all other features, then the numerical features, [B, num_others]


@dataclass(frozen=True, slots=True)
class SequenceInput:
    """Candidate, events and other features of a model with a sequence group.

    Tables of the group's features have no pooling; item feature i looks up that of the group's feature i. A further feature of
    such a table is pooled here: one with an id per row, or a feature of another group, whose events are summed.
    """

    group: SequenceGroup
    items: Sequence[str]
    tables: Mapping[str, str]  # by feature, those without pooling
    beside: Mapping[str, str | None]  # further features of `tables`, with their groups
    item_columns: int  # P * D
    columns: int  # of an event
    num_pooled: int  # vectors of the tables that pool
    num_others: int
    mean_events: float  # per sample
    num_candidates: int  # ids of each of `items` in a row

    @classmethod
    def of(cls, options: Any, spec: FeatureSpec, *, several: bool = False) -> "SequenceInput":
        """Return what `options` names; `several` candidates may be in a row.

        Raises ValueError: the dataset lacks it, or candidate and events do not fit.
        """
        group = chosen_group(options, spec)
        assert group is not None, "no histories of fixed hotness"
        by_name = {feature.name: feature for feature in spec.categorical}
        items = chosen_features("model.item_features", options.item_features, list(by_name))
        if not 0 < len(items) <= len(group.features):
            raise ValueError(
                f"model.name={options.name} needs a candidate for the events of {', '.join(group.features)}, got "
                f"model.item_features={items}; name features of {', '.join(by_name)} in this order"
            )
        table_of = {
            feature.name: table for table, names in spec.table_features.items() for feature in names
        }
        candidates = by_name[items[0]].hotness or 1 if several else 1
        ids = "one id" if candidates == 1 else f"{candidates} ids"
        for item, feature in zip(items, group.features, strict=False):
            if by_name[item].hotness != candidates or table_of[item] != table_of[feature]:
                fits = [
                    name
                    for name, of in by_name.items()
                    if of.hotness == candidates and table_of[name] == table_of[feature]
                ]
                raise ValueError(
                    f"item feature {shown(item)} needs {ids} per row and the table of {shown(feature)}, got "
                    f"{by_name[item].hotness or 'varying'} ids and table {shown(table_of[item])}; name item features in the "
                    f"order of {', '.join(group.features)}: here {' or '.join(fits) or 'none fits'}, or set table: "
                    f"{table_of[feature]} in the feature spec"
                )
        handed_out = {table_of[feature] for feature in group.features}
        group_of = {name: each.name for each in spec.sequences for name in each.features}
        tables = {name: table for name, table in table_of.items() if table in handed_out}
        beside = {
            name: group_of.get(name) for name in tables if name not in (*items, *group.features)
        }
        for name, of_group in beside.items():
            if of_group is None and by_name[name].hotness != 1:
                raise ValueError(
                    f"feature {shown(name)} shares the table of {shown(group.name)} and has several ids per row; make it a "
                    "sequence group, or give it a table of its own"
                )
        dim, num_pooled = options.embedding_dim, len(by_name) - len(tables)
        return cls(
            group=group,
            items=items,
            tables={name: table_name(table) for name, table in tables.items()},
            beside=beside,
            item_columns=len(items) * dim,
            columns=len(group.features) * dim,
            num_pooled=num_pooled,
            num_others=len(spec.numerical) + (num_pooled + len(beside)) * dim,
            mean_events=by_name[group.features[0]].mean_hotness,
            num_candidates=candidates,
        )

    def declare(self, options: Any, spec: FeatureSpec) -> Tables:
        """Return a table per feature, of which those of `tables` have no pooling."""
        from torchrec.modules.embedding_configs import PoolingType

        declared = one_table_per_feature(options, spec)
        for table in declared:
            if table.name in self.tables.values():
                table.pooling = PoolingType.NONE
        return declared

    def read(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> SequenceParts:
        assert isinstance(embeddings, PooledEmbeddings), "a table hands out rows"
        events = embeddings.sequence(self.group.name)
        return SequenceParts(
            torch.cat([self._vector(embeddings, name) for name in self.items], dim=1),
            events,
            torch.cat([as_autocast(events.rows[name].by_id()) for name in self.group.features], 1),
            None if self.group.time is None else events.numbers[self.group.time],
            torch.cat([*self.others(embeddings), as_autocast(numerical)], dim=1),
        )

    def others(self, embeddings: PooledEmbeddings) -> list[Tensor]:
        """Return the vectors of all features but those of candidate and events, side by side: [B, columns] each."""
        others = [as_autocast(embeddings.matrix())] if self.num_pooled else []
        for name, group in self.beside.items():
            if group is None:
                others.append(self._vector(embeddings, name))
            else:
                found = embeddings.sequence(group)
                others.append(pool(as_autocast(found.rows[name].by_id()), found, "sum"))
        return others

    def _vector(self, embeddings: PooledEmbeddings, name: str) -> Tensor:
        return as_autocast(embeddings.distinct_rows(self.tables[name], name).by_sample())


class FixedHistories(NamedTuple):
    """An item's features, their histories of fixed hotness and the features beside them."""

    items: list[str]  # names of the candidate's features
    histories: list[str]  # names of their histories, in the same order
    positions: int  # L
    others: list[str]  # names of the other categorical features
    # index of the history's length among the numerical features; None if all histories have L items
    length: int | None


def find_history(options: DINOptions, spec: FeatureSpec) -> SequenceInput | FixedHistories:
    """Return the features that the options name.

    Raises ValueError: they name no history, or one that the dataset lacks or that does not fit its item.
    """
    if chosen_group(options, spec) is not None:
        return SequenceInput.of(options, spec)
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
    return FixedHistories(items, histories, positions, others, length)


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
            f"{where} is ragged; name its sequence group by model.sequence, or give it fixed hotness and the true length as "
            "a numerical feature"
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
