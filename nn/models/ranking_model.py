"""Tables and dense component as one plain module for one device: what the sharded training step equals."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, pad

from dataloading.batch import Batch
from dataloading.dataset.sequences import SequenceGroup
from nn.embedding.declared_tables import initial_bound, table_of_feature
from nn.embedding.pretrained import FileRows
from nn.layers.distinct_rows import DistinctRows
from nn.layers.initialization import fill_uniform_
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceTables

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.sparse.jagged_tensor import JaggedTensor


class RankingModel(nn.Module):
    """Tables and dense component on one device.

    `dense`: a `Model`, or a module with the same `forward`. `seed`: seed of the tables' initial weights; None leaves them
    undefined, for weights that are loaded. `handed_out`: tables whose rows the dense component takes.
    `sequences`: groups of the dataset. `tables`: weight of each table, float32 [rows, columns].
    """

    def __init__(
        self,
        declared: "Sequence[EmbeddingBagConfig]",
        dense: nn.Module,
        seed: int | None = 0,
        handed_out: Collection[str] = (),
        sequences: Sequence[SequenceGroup] = (),
    ) -> None:
        super().__init__()
        self._declared, self._handed_out = list(declared), handed_out
        handing = [table for table in self._declared if table.name in handed_out]
        self._sequences = SequenceTables(sequences, table_of_feature(handing))
        self.tables = nn.ParameterDict()
        for table in self._declared:
            weight = torch.empty(table.num_embeddings, table.embedding_dim)
            if seed is not None and isinstance(table.init_fn, FileRows):
                table.init_fn(weight)
            elif seed is not None:
                fill_uniform_(weight, seed=seed, table=table.name, bound=initial_bound(table))
            self.tables[table.name] = nn.Parameter(weight)
        self.dense = dense

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch that lies on the model's device: [B], or [B, T] of several tasks."""
        return self.dense(batch.numerical, self.embeddings(batch))

    def embeddings(self, batch: Batch) -> Tensor | PooledEmbeddings:
        """Return the embeddings of a batch, [B, T]: table after table, feature after feature; and rows, if any are handed out."""
        vectors = [
            self._look_up(table, feature, batch)
            for table in self._declared
            if table.name not in self._handed_out
            for feature in table.feature_names
        ]
        matrix = torch.cat(vectors, dim=1) if vectors else batch.numerical[:, :0]
        if not self._handed_out:
            return matrix
        # One copy of a table, whose features share it.
        longer = {name: pad(self.tables[name], (0, 0, 0, 1)) for name in self._handed_out}
        rows_of = partial(self._rows_of, batch, longer)
        sequence_of = partial(
            self._sequences.events_with_spare, rows_of=rows_of, numbers=batch.events
        )
        return PooledEmbeddings.with_rows(matrix, rows_of, sequence_of)

    def _rows_of(
        self, batch: Batch, longer: Mapping[str, Tensor], table: str, feature: str
    ) -> DistinctRows:
        ids = self._ids_of(table, feature, batch)
        found = DistinctRows(longer[table], ids.values(), ids.offsets()[:-1], ids.lengths())
        return self._sequences.with_spare(feature, found)

    def _ids_of(self, table: str, feature: str, batch: Batch) -> "JaggedTensor":
        return batch.feature(feature)

    def _look_up(self, table: "EmbeddingBagConfig", feature: str, batch: Batch) -> Tensor:
        """Return the embeddings of one feature: [B, D], or [B, H * D] without pooling."""
        weight, ids = self.tables[table.name], self._ids_of(table.name, feature, batch)
        if table.pooling.name == "NONE":
            return weight[ids.values()].view(len(batch.labels), -1)
        mode = table.pooling.name.lower()
        return embedding_bag(ids.values().long(), weight, ids.offsets()[:-1].long(), mode=mode)
