"""TorchRec's tables before the recipe's dense component, for rows with events: TorchRec has no model of them.

The kernels are the same, so tables, pipeline and the captured step are what differs.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, JaggedTensor
from torchrec import KeyedJaggedTensor as Ids
from torchrec.sparse.jagged_tensor import KeyedTensor

from configs.schema import Config
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import table_of_feature
from nn.layers.distinct_rows import DistinctRows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceTables
from nn.models.registry import build_dense, declared_tables


class EventModel(nn.Module):
    """Logits [B, 1] of the numbers of events, float32 [numbers, E], and ids."""

    def __init__(self, config: Config, spec: FeatureSpec) -> None:
        super().__init__()
        tables, meta = declared_tables(config.model, spec), torch.device("meta")
        handing = [table for table in tables if table.pooling.name == "NONE"]
        names = ("name", "embedding_dim", "num_embeddings", "feature_names")
        of_rows = [EmbeddingConfig(**{n: getattr(table, n) for n in names}) for table in handing]
        self.rows = EmbeddingCollection(of_rows, meta)
        self.bags = EmbeddingBagCollection([t for t in tables if t not in handing], device=meta)
        self.rest = Rest(build_dense(config.model, spec), spec, table_of_feature(handing))

    def forward(self, numbers: Tensor, ids: Ids) -> Tensor:
        return self.rest(self.rows(ids), self.bags(ids), numbers)


class Rest(nn.Module):
    """Everything behind the tables, which the pipeline takes as one module."""

    def __init__(self, dense: nn.Module, spec: FeatureSpec, tables: dict[str, str]) -> None:
        super().__init__()
        self.dense, self.tables = dense, SequenceTables(spec.sequences, tables)

    def forward(self, rows: dict[str, JaggedTensor], bags: KeyedTensor, numbers: Tensor) -> Tensor:
        def rows_of(_: str, feature: str, spare: int = 0) -> DistinctRows:
            found = rows[feature]
            vectors = pad(found.values(), (0, 0, 0, 1))  # a row of zeros behind them
            at = torch.arange(len(vectors) - 1 + spare, device=numbers.device)
            starts, lengths = found.offsets()[:-1], found.lengths()
            return DistinctRows(vectors, at, starts, lengths, vectors=lambda: vectors[: len(at)])

        with_spare = partial(rows_of, spare=1)
        of = partial(self.tables.events_with_spare, rows_of=with_spare, numbers=[*numbers])
        pooled = bags.values()
        embeddings = PooledEmbeddings.with_rows(pooled, rows_of, of)
        return self.dense(pooled.new_empty(len(pooled), 0), embeddings).unsqueeze(1)
