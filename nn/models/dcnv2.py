"""DCNv2 as a plain single-device module (arXiv:2008.13535)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from configs.schema import CrossStructure, ModelConfig
from dataloading.feature_spec import FeatureSpec
from nn.layers.cross_net import CrossNet
from nn.layers.mlp import MLP
from nn.ops.pooled_embeddings import PooledEmbeddings, join

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DCNv2(nn.Module):
    """Dense half of DCNv2: bottom MLP, cross network and deep network (arXiv:2008.13535, figure 1).

    Stacked: the cross network's output goes through the top MLP. Parallel: the cross network and the hidden layers of
    the top MLP both see the input, and one linear layer joins them.

    Args:
        num_numerical: N; with 0 there is no bottom MLP and the input is the embeddings alone.
        num_categorical: F.
        embedding_dim: D.
        bottom_mlp: widths of the bottom MLP, ReLU after each.
        top_mlp: widths of the top MLP, ending in 1, ReLU after all but the last.
        num_cross_layers: cross layers.
        projection_dim: rank of a cross layer's weight; None for full rank.
        structure: stacked or parallel.

    Attributes:
        prefix_columns: columns that it puts before the embeddings; whoever looks them up may leave room for these.

    Raises:
        ValueError: parallel with a top MLP that has no hidden layer.
    """

    def __init__(
        self,
        *,
        num_numerical: int,
        num_categorical: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        num_cross_layers: int,
        projection_dim: int | None,
        structure: CrossStructure = CrossStructure.stacked,
    ) -> None:
        super().__init__()
        self.bottom = (
            MLP(num_numerical, bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.prefix_columns = bottom_mlp[-1] if num_numerical else 0
        width = self.prefix_columns + num_categorical * embedding_dim
        self.cross = CrossNet(width, num_cross_layers, projection_dim)
        self.deep = None
        if structure is CrossStructure.parallel:
            *hidden, last = top_mlp
            if not hidden:
                raise ValueError(
                    f"model.cross.structure=parallel needs a deep network beside the cross network, got "
                    f"model.top_mlp={list(top_mlp)}; give it a width before the last, or use stacked"
                )
            self.deep = MLP(width, hidden, final_activation=True)
            self.top = MLP(width + hidden[-1], [last], final_activation=False)
        else:
            self.top = MLP(width, top_mlp, final_activation=False)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, [B, F*D] or where they lie, to logits [B] in float32."""
        x0 = join(None if self.bottom is None else self.bottom(numerical), embeddings)
        crossed = self.cross(x0)
        if self.deep is not None:
            crossed = torch.cat([crossed, self.deep(x0)], dim=1)
        return self.top(crossed).squeeze(1).float()


def build_dcnv2(config: ModelConfig, spec: FeatureSpec) -> DCNv2:
    """Build the dense half for the features of a dataset."""
    return DCNv2(
        num_numerical=len(spec.numerical),
        num_categorical=len(spec.categorical),
        embedding_dim=config.embedding_dim,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
        num_cross_layers=config.cross.num_layers,
        projection_dim=config.cross.projection_dim,
        structure=config.cross.structure,
    )
