"""TorchRec's tables in front of the recipe's dense component for a row with events.

TorchRec has no model of events. Behind its `EmbeddingCollection` stands the dense component of the recipe with its kernels, so
that tables, pipeline and the captured step are what differs.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec import JaggedTensor as Jagged
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedTensor

from configs.schema import Config
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import table_of_feature
from nn.layers.distinct_rows import DistinctRows
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceTables
from nn.models.registry import build_dense, declared_tables


class TrainedEvents(nn.Module):
    """Tables, dense component and loss. `dense_features` of a batch are the numbers of its events, float32 [numbers, E]."""

    def __init__(
        self, config: Config, spec: FeatureSpec, device: torch.device, *, in_bf16: bool
    ) -> None:
        super().__init__()
        tables, meta = declared_tables(config.model, spec), torch.device("meta")
        handing = [table for table in tables if table.pooling.name == "NONE"]
        columns = ("name", "embedding_dim", "num_embeddings", "feature_names")
        of_rows = [
            EmbeddingConfig(**{name: getattr(table, name) for name in columns}) for table in handing
        ]
        bags = [table for table in tables if table not in handing]
        self.rows = EmbeddingCollection(tables=of_rows, device=meta)
        self.bags = EmbeddingBagCollection(tables=bags, device=meta)
        self.rest = Rest(config, spec, table_of_feature(handing), in_bf16).to(device)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the mean loss of a batch, and it again, detached, as TorchRec's pipeline wants it."""
        rows, bags = self.rows(batch.sparse_features), self.bags(batch.sparse_features)
        return self.rest(rows, bags, batch.dense_features, batch.labels)


class Rest(nn.Module):
    """Everything behind the tables, which the pipeline takes as one module."""

    def __init__(
        self, config: Config, spec: FeatureSpec, handing: dict[str, str], in_bf16: bool
    ) -> None:
        super().__init__()
        self.dense, self.in_bf16 = build_dense(config.model, spec), in_bf16
        self.tables = SequenceTables(spec.sequences, handing)

    def forward(
        self,
        rows: dict[str, Jagged],
        bags: KeyedTensor,
        numbers: torch.Tensor,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        of_events = partial(
            self.tables.events_with_spare,
            rows_of=lambda _, feature: found_rows(rows[feature], 1),
            numbers=[*numbers],
        )
        embeddings = PooledEmbeddings.with_rows(
            bags.values(), lambda _, feature: found_rows(rows[feature], 0), of_events
        )
        with torch.autocast(labels.device.type, torch.bfloat16, enabled=self.in_bf16):
            logits = self.dense(labels.new_empty(len(labels), 0), embeddings)
        loss = binary_cross_entropy_with_logits(logits.float(), labels)
        return loss, (loss.detach(),)


def found_rows(found: Jagged, spare: int) -> DistinctRows:
    """Return vectors of ids, [C, D], as rows of their own, with zeros in `spare` positions behind them."""
    rows = pad(found.values(), (0, 0, 0, 1))
    ids = torch.arange(len(rows) - 1 + spare, device=rows.device)
    starts, lengths = found.offsets()[:-1], found.lengths()
    return DistinctRows(rows, ids, starts, lengths, vectors=lambda: rows[: len(ids)])
