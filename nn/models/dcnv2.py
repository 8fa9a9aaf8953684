"""DCNv2: bottom MLP, cross network and deep network (arXiv:2008.13535)."""

import torch
from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.cross_net import CrossNet
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import rates
from nn.models.model import Activations, Fp8Layer, Model
from nn.models.options import CrossStructure, DCNv2Options

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DCNv2(Model):
    """Dense component of DCNv2.

    Stacked: the output of the cross network is the input of the top MLP. Parallel: the cross network and the hidden layers
    of the top MLP have the same input, and one linear layer combines their outputs.

    Without numerical features there is no bottom MLP and the input is the embeddings alone. Raises ValueError: parallel with
    a top MLP that has no hidden layer.
    """

    Options = DCNv2Options

    def __init__(self, options: DCNv2Options, spec: FeatureSpec) -> None:
        super().__init__()
        num_numerical, top_mlp, cross = len(spec.numerical), options.top_mlp, options.cross
        self.bottom = (
            MLP(num_numerical, options.bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.prefix_columns = options.bottom_mlp[-1] if num_numerical else 0
        self._embedding_columns = len(spec.categorical) * options.embedding_dim
        width = self.prefix_columns + self._embedding_columns
        self.cross = CrossNet(width, cross.num_layers, cross.projection_dim)
        self.deep = None
        if cross.structure is CrossStructure.parallel:
            *hidden, last = top_mlp
            if not hidden:
                raise ValueError(
                    f"model.cross.structure=parallel needs a deep network beside the cross network, got "
                    f"model.top_mlp={top_mlp}; give it a width before the last, or use stacked"
                )
            self.deep = MLP(width, hidden, final_activation=True, **rates(options))
            self.top = MLP(width + hidden[-1], [last])
        else:
            self.top = MLP(width, top_mlp, **rates(options))

    def activations(self) -> Activations:
        """Return the columns that the cross layers keep: the gradient of x0 * (W x + b) needs W x + b, as wide as x."""
        layers = self.linear_layers()
        widest = max(max(layer) for layer in layers)
        # x0 is the bottom vector and the embeddings; the deep network of the parallel structure reads it again.
        reread = self._embedding_columns
        if self.deep is not None:
            reread += self._embedding_columns + self.prefix_columns
        return Activations(
            backward_columns=len(self.cross.layers) * widest,
            forward_columns=max(before for before, _ in layers),  # the product, before it is added
            reread_columns=reread,
        )

    def fp8_layers(self) -> list[Fp8Layer]:
        """Return the cross network and the MLP that reads it, or that stands beside it."""
        return [self.cross, self.top if self.deep is None else self.deep]

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x0 = join(None if self.bottom is None else self.bottom(numerical), embeddings)
        if self.deep is None:
            return self.cross(x0, self.top).squeeze(1).float()
        return self.top(torch.cat([self.cross(x0), self.deep(x0)], dim=1)).squeeze(1).float()
