"""Widths of single tables in models whose vectors have one width (`model.embedding_dims`).

A vector of another width is projected to the model's, as in mixed dimension embeddings (arXiv:1909.11810, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.messages import shown
from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import hands_out_rows, lookups_of, table_name
from nn.layers.initialization import normal_
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import table_widths
from nn.models.model import Activations, Fp8Layer, Model
from nn.ops.fused_linear import as_autocast

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig


def tables_of_widths(
    tables: Sequence[EmbeddingBagConfig], options: ModelConfig, spec: FeatureSpec
) -> list[EmbeddingBagConfig]:
    """Return the tables with the columns that `model.embedding_dims` gives to those of features' vectors.

    Raises ValueError: it names a feature that the dataset lacks, or one whose rows the model takes; or two widths of a table.
    """
    if not options.embedding_dims:
        return list(tables)
    widths = {table_name(name): columns for name, columns in table_widths(options, spec).items()}
    found = [
        replace(table, embedding_dim=widths.get(table.name, table.embedding_dim))
        for table in tables
    ]
    for before, table in zip(tables, found, strict=True):
        if table != before and hands_out_rows(table, spec):
            raise ValueError(
                f"model.embedding_dims gives table {shown(table.name)} {table.embedding_dim} columns, and the model takes its "
                f"rows of {before.embedding_dim}; leave its features out"
            )
    return found


class Projection(nn.Linear):
    """Projection of the vectors of a table, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weight from a CPU generator."""
        normal_(self.weight, generator)


class WithProjections(Model):
    """A model whose vectors of tables of other widths are projected to its own width.

    `declared`: its tables with its own widths. `tables`: those of `tables_of_widths`.
    """

    def __init__(
        self,
        model: Model,
        declared: Sequence[EmbeddingBagConfig],
        tables: Sequence[EmbeddingBagConfig],
        spec: FeatureSpec,
    ) -> None:
        super().__init__()
        self.model, self.projections = model, nn.ModuleDict()
        lookups = lookups_of(tables, spec)
        self._pieces: list[
            tuple[str, int, int]
        ] = []  # tables, their columns and those of all their lookups
        for before, table in zip(declared, tables, strict=True):
            columns = round(table.embedding_dim * sum(x.num_vectors for x in lookups[table.name]))
            self._pieces.append((table.name, table.embedding_dim, columns))
            if table.embedding_dim != before.embedding_dim:
                projection = Projection(table.embedding_dim, before.embedding_dim)
                self.projections[table.name] = projection

    def activations(self) -> Activations:
        """Return those of the model, with a copy of its input; projections read the embeddings where they are."""
        of_model = self.model.activations()
        read = sum(width for name, width, _ in self._pieces if name in self.projections)
        return replace(of_model, reread_columns=read)

    def add_losses(self, share: Tensor, share_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the loss of the model."""
        return self.model.add_losses(share, share_of)

    def fp8_layers(self) -> Sequence[Fp8Layer]:
        """Return the layers of the model."""
        return self.model.fp8_layers()

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, or `PooledEmbeddings`, to the logits of the model."""
        x = as_autocast(join(None, embeddings))
        vectors = x.split([columns for *_, columns in self._pieces], dim=1)
        found = []
        for (name, width, _), piece in zip(self._pieces, vectors, strict=True):
            if name in self.projections:
                piece = self.projections[name](piece.unflatten(1, (-1, width))).flatten(1)
            found.append(piece)
        joined = torch.cat(found, dim=1)
        if isinstance(embeddings, PooledEmbeddings) and embeddings.rows_of is not None:
            assert embeddings.sequence_of is not None, "both are given"
            return self.model(
                numerical,
                PooledEmbeddings.with_rows(joined, embeddings.rows_of, embeddings.sequence_of),
            )
        return self.model(numerical, joined)
