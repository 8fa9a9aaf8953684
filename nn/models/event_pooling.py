"""Pooling of the events of a feature in models that read a vector per feature (`model.sequence_pooling`)."""

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from configs.messages import shown
from configs.schema import EventPooling, ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables, embedding_columns, hands_out_rows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import SequencePooling, pool_weighted
from nn.models.features import chosen_features
from nn.models.model import Activations, Model, Wrapper
from nn.ops.fused_linear import as_autocast


def pooled_tables(tables: Tables, options: ModelConfig, spec: FeatureSpec) -> Tables:
    """Return the tables with the pooling that `options` names for the features of sequence groups.

    Raises ValueError: no table sums such a feature, or one does with a feature of another kind that has several ids, or the
    dataset lacks a group or a number of `event_weights`.
    """
    from torchrec.modules.embedding_configs import PoolingType

    how = options.sequence_pooling
    group_of = {name for group in spec.sequences for name in group.features}
    groups = {group.name: group for group in spec.sequences}
    for name in chosen_features("model.event_weights", list(options.event_weights), list(groups)):
        numbers = [column.name for column in groups[name].numbers]
        chosen_features(f"model.event_weights.{name}", [options.event_weights[name]], numbers)
    weighed = {of for name in options.event_weights for of in groups[name].features}
    single = {feature.name for feature in spec.categorical if feature.hotness == 1}
    found, pooled_here = [], set[str]()
    for table in tables:
        names = {*table.feature_names}
        is_weighed = bool(names & weighed)
        changes = how is not EventPooling.sum or is_weighed
        if changes and table.pooling.name == "SUM" and names & group_of:
            for name in sorted(names - group_of - single):
                raise ValueError(
                    f"model.sequence_pooling={how.value}: feature {shown(name)} shares table {shown(table.name)} with events and "
                    "has several ids per row; make it a sequence group, or give it a table of its own"
                )
            pooled_here |= names
            is_mean = how is EventPooling.mean and not is_weighed
            pooling = PoolingType.MEAN if is_mean else PoolingType.NONE
            table = replace(table, pooling=pooling)
        found.append(table)
    if how is not EventPooling.sum and found == list(tables):
        raise ValueError(
            f"model.sequence_pooling={how.value} has no effect: no table sums a feature of a sequence group; leave it out"
        )
    for group in spec.sequences:
        if group.name in options.event_weights and not pooled_here & {*group.features}:
            raise ValueError(
                f"model.event_weights={options.event_weights} has no effect on {shown(group.name)}: no table of "
                f"model.name={options.name} sums a feature of it; leave it out"
            )
    return found


class WithPooledEvents(Wrapper):
    """A model whose vectors of events are pooled here, from rows: weighed, by the last event or by attention.

    `declared`: its tables before `pooled_tables`.
    """

    def __init__(
        self, model: Model, declared: Tables, options: ModelConfig, spec: FeatureSpec
    ) -> None:
        super().__init__(model)
        how, self._weights = options.sequence_pooling, options.event_weights
        self._is_mean = how is EventPooling.mean
        self._reads_events = any(hands_out_rows(table, spec) for table in declared)
        group_of = {name: group.name for group in spec.sequences for name in group.features}
        # Of the model's columns, those of tables that pool, or table, feature, group of events.
        self._pieces: list[int | tuple[str, str, str | None]] = []
        self.poolings, self._kept = nn.ModuleDict(), Counter[str]()
        for before, table in zip(declared, pooled_tables(declared, options, spec), strict=True):
            if table.pooling == before.pooling or table.pooling.name == "MEAN":
                columns = embedding_columns([table], spec)
                self._pieces += [columns] if columns else []
                continue
            self._pieces += [(table.name, name, group_of.get(name)) for name in table.feature_names]
            self.poolings[table.name] = SequencePooling(how.value, table.embedding_dim)
            kept = (1 if how is EventPooling.last else 4) * table.embedding_dim
            for group in (group_of[name] for name in table.feature_names if name in group_of):
                self._kept[group] += kept

    def activations(self) -> Activations:
        """Return those of the model, with a copy of its input, and what the pooling keeps per event."""
        of_model = self.model.activations()
        kept = self._kept + Counter(of_model.event_columns)
        return replace(of_model, reread_columns=0, event_columns=dict(kept))

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        assert isinstance(embeddings, PooledEmbeddings), "a table hands out rows"
        widths = [piece for piece in self._pieces if isinstance(piece, int)]
        pooled = iter(embeddings.matrix().split(widths, dim=1) if widths else ())
        vectors = []
        for piece in self._pieces:
            if isinstance(piece, int):
                vectors.append(as_autocast(next(pooled)))
                continue
            table, name, group = piece
            rows = embeddings.distinct_rows(table, name)
            if group is None:
                vectors.append(as_autocast(rows.by_sample()))
            else:
                events, found = embeddings.sequence(group), as_autocast(rows.by_id())
                # Events may have a spare position, which the rows of a further table have not.
                spare = events.samples.shape[0] - found.shape[0]
                found = nn.functional.pad(found, (0, 0, 0, spare))
                if group in self._weights:
                    weights = events.numbers[self._weights[group]]
                    weighed = pool_weighted(found, weights, events, is_mean=self._is_mean)
                    vectors.append(as_autocast(weighed))
                else:
                    vectors.append(self.poolings[table](found, events))
        x = torch.cat(vectors, dim=1)
        return self.model(numerical, embeddings.with_matrix(x) if self._reads_events else x)
