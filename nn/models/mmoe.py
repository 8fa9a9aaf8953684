"""MMoE: multi-gate mixture of experts for several tasks (Ma et al., KDD 2018, 10.1145/3219819.3220007)."""

from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.experts import Experts, Gate, Towers
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, TaskModel
from nn.models.options import MMoEOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a table, E: experts, T: tasks


class MMoE(TaskModel):
    """Dense component of MMoE (section "Multi-gate Mixture-of-Experts").

    y_k = tower_k(f_k(x)), f_k(x) = sum_i g_k(x)_i expert_i(x), g_k(x) = softmax(W_k x)

    x are the numerical features and the embeddings. The paper gives no initial weights; experts and towers begin as `MLP`,
    gates as PyTorch's linear layers.
    """

    Options = MMoEOptions

    def __init__(self, options: MMoEOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        num_tasks = self._num_tasks
        self.experts = Experts(
            self._inputs, options.experts, options.expert_hidden, **rates(options)
        )
        self.gates = nn.ModuleList(Gate(self._inputs, options.experts) for _ in range(num_tasks))
        self.towers = Towers(
            options.expert_hidden[-1], num_tasks, options.tower_hidden, **rates(options)
        )
        self._expert_columns = options.experts * options.expert_hidden[-1]

    def activations(self) -> Activations:
        """Return the stacked experts, and the inputs of experts and gates, which are one matrix."""
        readers = len(self.experts.experts) + len(self.gates)
        return Activations(
            backward_columns=self._expert_columns,
            reread_columns=self._embedding_columns + (readers - 1) * self._inputs,
            products={"gates": 2 * len(self.gates) * self._expert_columns},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = self.join_inputs(numerical, embeddings)
        experts = self.experts(x)
        return self.towers([gate(x, experts) for gate in self.gates])
