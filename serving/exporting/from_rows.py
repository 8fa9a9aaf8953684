"""A dense component that takes rows of tables itself, as a module of plain tensors that torch can export."""

from itertools import islice

import torch
from torch import Tensor, nn

from nn.layers.distinct_rows import DistinctRows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents, SequenceTables
from serving.manifest import Manifest

PREFIX = "component."
"""Of the names of the component's weights."""

# B: rows of a request, C: ids of a ragged feature, H: of a row, D: columns of a table


class FromRows(nn.Module):
    """A dense component of numericals [B, N], embeddings [B, T] and what `MappedTables` gives of tables that hand out rows.

    The latter are the rows of the ids of each feature of such a table, [B * H, D] or [C, D]; the ids of each row of those
    that are ragged, int64 [B]; and the numbers of events, float32 [C] each.
    """

    def __init__(self, component: nn.Module, manifest: Manifest) -> None:
        super().__init__()
        self.component = component
        self._looked_up = [(table.name, name) for table, name in manifest.handed_out]
        self._hotness = {feature.name: feature.hotness for feature in manifest.categorical}
        self._ragged = manifest.handed_out_ragged
        tables = {name: table.name for table, name in reversed(manifest.handed_out)}
        self._sequences = SequenceTables([of.group for of in manifest.sequences], tables)
        self._columns = [table.columns for table, _ in manifest.handed_out]

    def example(self, rows: int) -> list[Tensor]:
        """Return further inputs of some rows of zeros; each sequence has as many events as rows, and two more."""
        of_rows = [
            torch.zeros((self._hotness[name] or 1) * rows + 2 * (name in self._ragged), columns)
            for (_, name), columns in zip(self._looked_up, self._columns, strict=True)
        ]
        lengths = [torch.ones(rows, dtype=torch.int64) for _ in self._ragged]
        numbers = [torch.zeros(rows + 2) for of in self._sequences.groups for _ in of.numbers]
        return [*of_rows, *lengths, *numbers]

    def forward(self, numerical: Tensor, embeddings: Tensor, *more: Tensor) -> Tensor:
        rest = iter(more)
        parts = dict(zip(self._looked_up, islice(rest, len(self._looked_up)), strict=True))
        lengths_of = dict(zip(self._ragged, islice(rest, len(self._ragged)), strict=True))
        numbers = list(rest)
        of_table: dict[str, list[Tensor]] = {}
        first: dict[tuple[str, str], int] = {}
        for key, part in parts.items():
            first[key] = sum(before.shape[0] for before in of_table.get(key[0], []))
            of_table.setdefault(key[0], []).append(part)
        rows = {
            name: torch.cat([*found, found[0].new_zeros(1, found[0].shape[1])])
            for name, found in of_table.items()
        }
        count = numerical.shape[0]

        def rows_of(table: str, feature: str) -> DistinctRows:
            positions = first[table, feature] + torch.arange(parts[table, feature].shape[0])
            lengths = lengths_of.get(feature)
            if lengths is None:
                lengths = torch.full((count,), self._hotness[feature] or 0)
            found = DistinctRows(rows[table], positions, lengths.cumsum(0) - lengths, lengths)
            return self._sequences.with_spare(feature, found)

        def sequence_of(group: str) -> SequenceEvents:
            return self._sequences.events_with_spare(group, rows_of, numbers)

        return self.component(
            numerical, PooledEmbeddings.with_rows(embeddings, rows_of, sequence_of)
        )
