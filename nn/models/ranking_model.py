"""Tables and dense component as one plain module for one device: what the sharded training step equals."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from dataloading.batch import Batch
from nn.embedding.declared_tables import initial_bound
from nn.layers.initialization import fill_uniform_

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig


class RankingModel(nn.Module):
    """Tables and dense component on one device.

    `dense`: a `Model`, or a module with the same `forward`. `seed`: seed of the tables' initial weights; None leaves them
    undefined, for weights that are loaded. `tables`: weight of each table, float32 [rows, columns].
    """

    def __init__(
        self, declared: "Sequence[EmbeddingBagConfig]", dense: nn.Module, seed: int | None = 0
    ) -> None:
        super().__init__()
        self._declared = list(declared)
        self.tables = nn.ParameterDict()
        for table in self._declared:
            weight = torch.empty(table.num_embeddings, table.embedding_dim)
            if seed is not None:
                fill_uniform_(weight, seed=seed, table=table.name, bound=initial_bound(table))
            self.tables[table.name] = nn.Parameter(weight)
        self.dense = dense

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch that lies on the model's device: [B], or [B, T] of several tasks."""
        return self.dense(batch.numerical, self.embeddings(batch))

    def embeddings(self, batch: Batch) -> Tensor:
        """Return the embeddings of a batch, [B, T]: table after table, feature after feature."""
        vectors = [
            self._look_up(table, feature, batch)
            for table in self._declared
            for feature in table.feature_names
        ]
        return torch.cat(vectors, dim=1)

    def _look_up(self, table: "EmbeddingBagConfig", feature: str, batch: Batch) -> Tensor:
        """Return the embeddings of one feature: [B, D], or [B, H * D] without pooling."""
        weight, ids = self.tables[table.name], batch.ids[feature]
        if table.pooling.name == "NONE":
            return weight[ids.values()].view(len(batch.labels), -1)
        mode = table.pooling.name.lower()
        return embedding_bag(ids.values().long(), weight, ids.offsets()[:-1].long(), mode=mode)
