"""Shared bottom: one MLP for all tasks, and a tower per task (Caruana 1997; MMoE's paper, 10.1145/3219819.3220007)."""

from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.experts import Towers
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, TaskModel
from nn.models.options import SharedBottomOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a table, T: tasks


class SharedBottom(TaskModel):
    """Dense component of the shared-bottom model: y_k = tower_k(f(x)) (section "Shared-bottom Multi-task Model").

    x are the numerical features and the embeddings, f is an MLP with ReLU after every layer.
    """

    Options = SharedBottomOptions

    def __init__(self, options: SharedBottomOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        self.bottom = MLP(self._inputs, options.hidden, final_activation=True, **rates(options))
        self.towers = Towers(
            options.hidden[-1], self._num_tasks, options.tower_hidden, **rates(options)
        )

    def activations(self) -> Activations:
        """Return the columns of layers' inputs that are in memory already: embeddings, and the inputs of further towers."""
        shared = (self._num_tasks - 1) * self.bottom.layers[-1].out_features
        return Activations(reread_columns=self._embedding_columns + shared)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        return self.towers([self.bottom(self.join_inputs(numerical, embeddings))] * self._num_tasks)
