"""Widths of single tables in models whose vectors have one width (`model.embedding_dims`), and tables of files.

A vector of another width is projected to the model's, as in mixed dimension embeddings (arXiv:1909.11810, section 3).
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from configs.messages import shown
from configs.schema import SUGGESTED, ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables, hands_out_rows, lookups_of, table_name
from nn.embedding.pretrained import FileRows
from nn.layers.initialization import normal_
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import table_widths
from nn.models.model import Activations, Model, Wrapper
from nn.ops.fused_linear import as_autocast


def tables_of_widths(tables: Tables, options: ModelConfig, spec: FeatureSpec) -> Tables:
    """Return the tables with the columns that `model.embedding_dims` gives to those of features' vectors.

    Its `suggested` leaves tables whose rows the model takes as they are.

    Raises ValueError: it names a feature that the dataset lacks, or one whose rows the model takes; or two widths of a table.
    """
    if not options.embedding_dims:
        return list(tables)
    widths = {table_name(name): columns for name, columns in table_widths(options, spec).items()}
    files = {
        table_name(of.table or of.name): FileRows(of.name, options.pretrained[of.name])
        for of in spec.categorical
        if of.name in options.pretrained
    }
    is_suggested = options.embedding_dims == SUGGESTED
    found = [
        table
        if is_suggested and hands_out_rows(table, spec)
        else replace(
            table,
            embedding_dim=widths.get(table.name, table.embedding_dim),
            init_fn=files.get(table.name, table.init_fn),
        )
        for table in tables
    ]
    for before, table in zip(tables, found, strict=True):
        if table != before and hands_out_rows(table, spec):
            raise ValueError(
                f"model.embedding_dims gives table {shown(table.name)} {table.embedding_dim} columns, and the model takes its "
                f"rows of {before.embedding_dim}; leave its features out"
            )
    for of in spec.categorical:
        if of.is_dynamic and of.name in options.pretrained:
            raise ValueError(
                f"model.pretrained names {shown(of.name)}, whose rows belong to raw keys (vocabulary: dynamic); leave it out"
            )
    return found


class Projection(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def initialise(self, generator: torch.Generator) -> None:
        normal_(self.weight, generator)


class WithProjections(Wrapper):
    """A model whose vectors of tables of other widths are projected to its own width, and those of files get no gradient.

    `declared`: its tables with its own widths. `tables`: those of `tables_of_widths`.
    """

    def __init__(self, model: Model, declared: Tables, tables: Tables, spec: FeatureSpec) -> None:
        super().__init__(model)
        self.projections = nn.ModuleDict()
        lookups = lookups_of(tables, spec)
        # tables, their columns, those of all their lookups, and whether they are trained
        self._pieces: list[tuple[str, int, int, bool]] = []
        for before, table in zip(declared, tables, strict=True):
            columns = round(table.embedding_dim * sum(x.num_vectors for x in lookups[table.name]))
            is_trained = not isinstance(table.init_fn, FileRows)
            self._pieces.append((table.name, table.embedding_dim, columns, is_trained))
            if table.embedding_dim != before.embedding_dim:
                projection = Projection(table.embedding_dim, before.embedding_dim)
                self.projections[table.name] = projection

    def activations(self) -> Activations:
        """Return those of the model, with a copy of its input; projections read the embeddings where they are."""
        of_model = self.model.activations()
        read = sum(columns for name, _, columns, _ in self._pieces if name in self.projections)
        return replace(of_model, reread_columns=read)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = as_autocast(join(None, embeddings))
        vectors = x.split([columns for _, _, columns, _ in self._pieces], dim=1)
        found = []
        for (name, width, _, is_trained), piece in zip(self._pieces, vectors, strict=True):
            piece = piece if is_trained else piece.detach()
            if name in self.projections:
                piece = self.projections[name](piece.unflatten(1, (-1, width))).flatten(1)
            found.append(piece)
        joined = torch.cat(found, dim=1)
        if isinstance(embeddings, PooledEmbeddings):
            return self.model(numerical, embeddings.with_matrix(joined))
        return self.model(numerical, joined)
