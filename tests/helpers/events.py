"""Embeddings with the events of sequence groups, made by hand for dense components."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.distinct_rows import DistinctRows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceTables


def embeddings_with_events(
    spec: FeatureSpec,
    tables: Mapping[str, Tensor],
    ids: Mapping[str, Sequence[Sequence[int]]],
    numbers: Mapping[str, Sequence[Sequence[float]]],
    matrix: Tensor,
    *,
    unused: Sequence[float] = (0.0, 0.0, 0.0),
) -> PooledEmbeddings:
    """Return embeddings of samples whose `ids` look up `tables`, weights [rows, D] that are handed out.

    `numbers` are those of events; `unused` are the numbers of positions behind the last event, whose ids are of no row.
    """
    table_of = {
        of.name: table for table, features in spec.table_features.items() for of in features
    }

    def rows_of(table: str, feature: str) -> DistinctRows:
        weight, values = tables[table], ids[feature]
        lengths = torch.tensor([len(of_sample) for of_sample in values])
        flat = [number for of_sample in values for number in of_sample]
        positions = torch.tensor([*flat, *[len(weight)] * len(unused)])
        rows = torch.cat([weight, torch.zeros_like(weight[:1])])
        return DistinctRows(rows, positions, lengths.cumsum(0) - lengths, lengths)

    def samples_of(table: str, feature: str) -> Tensor:
        lengths = rows_of(table, feature).lengths
        samples = torch.arange(len(lengths)).repeat_interleave(lengths)
        return torch.cat([samples, samples.new_zeros(len(unused))])

    groups = SequenceTables(
        spec.sequences, {name: table for name, table in table_of.items() if table in tables}
    )
    flat = [
        torch.tensor(
            [*(number for of_sample in numbers[column.name] for number in of_sample), *unused]
        )
        for column in spec.event_columns
    ]
    return PooledEmbeddings.with_rows(
        matrix, rows_of, lambda name: groups.events(name, rows_of, samples_of, flat)
    )
