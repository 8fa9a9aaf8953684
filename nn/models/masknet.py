"""MaskNet: hidden layers multiplied by masks of the input (arXiv:2102.07619)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.dropout import Dropout
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, VectorModel
from nn.models.options import MaskNetOptions, MaskStructure

# B: samples, F: features, numerical ones included, D: columns of a vector, C: F * D, I: columns of a block's input


class MaskBlock(nn.Module):
    """MaskBlock (section 3.3) with its instance-guided mask (section 3.2).

    mask = W_2 (W_1 v + b_1) + b_2, v the vectors of the sample; output = dropout(ReLU(LN(W (mask * x))))

    C is `vector_columns`. I is `inputs`.
    """

    def __init__(
        self, vector_columns: int, inputs: int, width: int, aggregation: int, dropout: float
    ) -> None:
        super().__init__()
        self.aggregation = MLP(vector_columns, [aggregation])
        self.projection = MLP(aggregation, [inputs])
        self.hidden = MLP(inputs, [width])
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout) if dropout else None

    def forward(self, vectors: Tensor, x: Tensor) -> Tensor:
        """Map vectors [B, C] and x [B, I] to [B, width]."""
        mask = self.projection(self.aggregation(vectors))
        out = torch.relu(self.norm(self.hidden(mask * x)))
        return out if self.dropout is None else self.dropout(out)


class FeatureNorm(nn.Module):
    """Layer normalisation of every vector by itself, with a gain and a bias per element (section 3.3, LN_EMB).

    F is `num_features`. D is `embedding_dim`.
    """

    def __init__(self, num_features: int, embedding_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features, embedding_dim))
        self.bias = nn.Parameter(torch.zeros(num_features, embedding_dim))

    def forward(self, vectors: Tensor) -> Tensor:
        """Map [B, C] to [B, C]."""
        x = vectors.unflatten(1, self.weight.shape)
        x = nn.functional.layer_norm(x, self.weight.shape[1:])
        return torch.addcmul(self.bias, x, self.weight).flatten(1)


class MaskNet(VectorModel):
    """Dense component of MaskNet (section 3.4).

    Serial: the first block transforms the normalised vectors, and every further one the output of the block before; dropout
    follows every block, as in FuxiCTR's. Parallel: every block transforms the normalised vectors, and an MLP joins their outputs.
    A linear layer gives the logit (section 3.5). The vectors are the embeddings, and numbers times vectors for numerical features
    (section 3.1). The paper gives no initial weights; linear layers begin as those of `MLP`.
    """

    Options = MaskNetOptions

    def __init__(self, options: MaskNetOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        self.norm = FeatureNorm(self.vectors.num_features, options.embedding_dim)
        self.is_serial = options.structure is MaskStructure.serial
        first, blocks = self.vectors.columns, options.blocks
        inputs = [first, *blocks[:-1]] if self.is_serial else [first] * len(blocks)
        rate = options.dropout if self.is_serial else 0.0
        made = nn.ModuleList(
            MaskBlock(first, before, width, round(before * options.reduction_ratio), rate)
            for before, width in zip(inputs, blocks, strict=True)
        )
        self.blocks = cast(Sequence[MaskBlock], made)
        hidden: Sequence[int] = () if self.is_serial else options.hidden
        self.top = MLP(
            blocks[-1] if self.is_serial else sum(blocks), [*hidden, 1], **rates(options)
        )

    def activations(self) -> Activations:
        """Return what a block keeps beside the inputs of its linear layers: mask, block input, and input of its norm."""
        columns = sum(
            2 * block.hidden.layers[0].in_features + 2 * block.hidden.layers[0].out_features
            for block in self.blocks
        )
        return Activations(backward_columns=columns + 2 * self.vectors.columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        vectors = self.vectors(numerical, embeddings)
        x = self.norm(vectors).to(vectors.dtype)
        if self.is_serial:
            for block in self.blocks:
                x = block(vectors, x)
        else:
            x = torch.cat([block(vectors, x) for block in self.blocks], dim=1)
        return self.top(x).squeeze(1).float()
