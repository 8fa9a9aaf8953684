"""Shared bottom: one MLP for all tasks, and a tower per task (Caruana 1997; MMoE's paper, 10.1145/3219819.3220007)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nn.layers.interactions.experts import Towers
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.model import Activations
from nn.models.options import SharedBottomOptions
from nn.models.several_tasks import SeveralTasks
from nn.ops.fused_linear import as_autocast

# B: samples, N: numerical features, F: categorical features, D: columns of a table, T: tasks


class SharedBottom(SeveralTasks):
    """Dense component of the shared-bottom model: y_k = tower_k(f(x)) (section "Shared-bottom Multi-task Model").

    x are the numerical features and the embeddings, f is an MLP with ReLU after every layer.

    N is `num_numerical`. T is `num_tasks`.
    """

    Options = SharedBottomOptions

    def __init__(
        self,
        *,
        num_numerical: int,
        embedding_columns: int,
        num_tasks: int,
        options: SharedBottomOptions,
    ) -> None:
        super().__init__()
        self.prefix_columns = num_numerical
        self._embedding_columns = embedding_columns
        rates: dict[str, Any] = {"dropout": options.dropout, "batch_norm": options.batch_norm}
        self.bottom = MLP(
            num_numerical + embedding_columns, options.hidden, final_activation=True, **rates
        )
        self.towers = Towers(options.hidden[-1], num_tasks, options.tower_hidden, **rates)
        self._num_tasks = num_tasks

    def activations(self) -> Activations:
        """Return the columns of layers' inputs that are in memory already: embeddings, and the inputs of further towers."""
        shared = (self._num_tasks - 1) * self.bottom.layers[-1].out_features
        return Activations(reread_columns=self._embedding_columns + shared)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D] or `PooledEmbeddings` to float32 logits [B, T], or [B] of one task."""
        x = join(as_autocast(numerical) if self.prefix_columns else None, embeddings)
        return self.towers([self.bottom(x)] * self._num_tasks)
