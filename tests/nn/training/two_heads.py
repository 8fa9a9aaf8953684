"""A model of two tasks, and a dataset with a click, a rating, weights and keep rates."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import ModelConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from nn.embedding.declared_tables import one_table_per_feature
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.model import Model

TWO_HEADS = "model.name=tests.nn.training.two_heads:TwoHeads"
LABELS = (RowColumn("click"), RowColumn("rating", dtype=np.dtype(np.float32)))
CARDINALITIES = {"user": 20, "item": 50}


class TwoHeads(Model):
    """One linear layer with an output per label, on numericals and embeddings."""

    Options = ModelConfig

    def __init__(self, columns: int, labels: int) -> None:
        super().__init__()
        self.heads = nn.Linear(columns, labels)

    @classmethod
    def tables(cls, options: ModelConfig, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return a table per feature."""
        return one_table_per_feature(options, spec)

    @classmethod
    def build(cls, options: ModelConfig, spec: FeatureSpec) -> "TwoHeads":
        """Build the layer."""
        columns = len(spec.numerical) + options.embedding_dim * len(spec.categorical)
        return cls(columns, len(spec.labels))

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Return logits [B, labels]; [B] of one label."""
        logits = self.heads(join(numerical, embeddings)).float()
        return logits.squeeze(1) if logits.shape[1] == 1 else logits


def write_two_labels(
    root: Path,
    rows: dict[str, int],
    *,
    has_weights: bool = True,
    has_rates: bool = True,
    labels: tuple[RowColumn, ...] = LABELS,
) -> Path:
    """Write a dataset in which both labels depend on user and item; return `root`."""
    features = [CategoricalFeature.of(name, size) for name, size in CARDINALITIES.items()]
    generator = np.random.default_rng(5)
    effects = {name: generator.normal(size=size) for name, size in CARDINALITIES.items()}
    with write_dataset(
        root,
        categorical=features,
        numerical=("n",),
        numerical_dtype="float32",
        label=labels,
        weight="importance" if has_weights else None,
        keep_rate="kept" if has_rates else None,
    ) as dataset:
        for split, count in rows.items():
            ids = {name: generator.integers(0, size, count) for name, size in CARDINALITIES.items()}
            score = sum(effects[name][values] for name, values in ids.items())
            click = generator.random(count) < 1 / (1 + np.exp(-score))
            of_label = {"click": click, "rating": score + generator.normal(size=count) / 4}
            columns = np.stack([of_label[label.name] for label in labels], axis=1)
            weights = generator.choice([0, 0.5, 1, 4], count)
            rates = generator.choice([0.25, 1], count)
            dataset[split].append(
                numerical=generator.normal(size=(count, 1)),
                labels=columns if len(labels) > 1 else columns[:, 0],
                weights=weights if has_weights else None,
                keep_rates=rates if has_rates else None,
                ids=ids,
            )
    return root


def plain_losses(
    model: TwoHeads, tables: dict[str, Tensor], batches: list, lr: float, loss: object
) -> list[float]:
    """Train the same model in plain PyTorch with SGD, on complete batches; return the losses."""
    tables = {name: nn.Parameter(weight.clone()) for name, weight in tables.items()}
    optimizer = torch.optim.SGD([*model.parameters(), *tables.values()], lr=lr)
    losses = []
    for batch in batches:
        ids = batch.ids.to_dict()
        embedded = [tables[name][ids[name].values().long()] for name in tables]
        rows = slice(0, batch.num_valid)
        logits = model(batch.numerical[rows], torch.cat(embedded, dim=1))
        value = loss(logits, batch.labels[rows], batch.weights[rows])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses
