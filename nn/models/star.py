"""STAR: a network per domain, each the product of shared weights and its own (arXiv:2101.11427)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.batch_norm import PartitionedNorm
from nn.layers.dropout import Dropout
from nn.layers.initialization import truncated_glorot_
from nn.layers.interactions.experts import Towers
from nn.layers.mlp import round_up
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import chosen_features, rates
from nn.models.model import Activations, Model
from nn.models.options import STAROptions
from nn.ops.fused_linear import as_autocast

# B: samples, C: columns of numerical features and embeddings, P: domains, T: tasks


class StarLayer(nn.Module):
    """Star Topology FCN: layers (W_p * W) x + (b_p + b) of all domains, as one batched product.

    The paper gives no initial weights: W begins as that of an MLP, W_p at 1 and the biases at 0, so all domains as one.
    """

    def __init__(self, domains: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.domain_weight = nn.Parameter(torch.ones(domains, inputs, outputs))
        self.domain_bias = nn.Parameter(torch.zeros(domains, 1, outputs))
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        truncated_glorot_(self.weight, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map [P, B, inputs] to [P, B, outputs]."""
        bias, weight = self.bias + self.domain_bias, self.weight * self.domain_weight
        return torch.baddbmm(bias.to(x.dtype), x, weight.to(x.dtype))


class STAR(Model):
    """Dense component of STAR: logit = FCN_p(PN_p(x)) + auxiliary([x, v_p]), a logit per task.

    x are the other numerical features and the embeddings; v_p is the vector of the row's domain p, the number in
    `model.domain`. Another number than 0 to `model.domains` - 1 gives NaN, which ends training or evaluation. Every row
    passes through the networks of all P domains, of which it takes its own. `model.batch_norm` is PN of every hidden layer, and
    batch normalization of the auxiliary network. Raises ValueError: `model.domain` is no numerical feature of the dataset.
    """

    Options = STAROptions

    def __init__(self, options: STAROptions, spec: FeatureSpec) -> None:
        super().__init__()
        if options.domain is None:
            raise ValueError(
                "model.name=star needs model.domain, the numerical feature with the number of a row's domain; name one of "
                f"{', '.join(spec.numerical) or 'them: the dataset has none'}"
            )
        chosen_features("model.domain", [options.domain], spec.numerical)
        self._domain, domains = spec.numerical.index(options.domain), options.domains
        self.prefix_columns, num_tasks = len(spec.numerical) - 1, len(spec.labels)
        columns = self.prefix_columns + len(spec.categorical) * options.embedding_dim
        self.norm = PartitionedNorm(domains, columns)
        self._padding = round_up(columns) - columns
        self._widths = [columns + self._padding, *options.hidden, num_tasks]
        layers = nn.ModuleList(StarLayer(domains, *sizes) for sizes in pairwise(self._widths))
        self.layers = cast(Sequence[StarLayer], layers)
        widths = options.hidden if options.batch_norm else []
        self.norms = nn.ModuleList(PartitionedNorm(domains, width) for width in widths)
        rate, count = options.dropout, len(options.hidden)
        self.dropouts = nn.ModuleList(Dropout(rate) for _ in range(count if rate else 0))
        self.domain_vectors = nn.Parameter(torch.empty(domains, options.embedding_dim))
        self.auxiliary = Towers(
            columns + options.embedding_dim, num_tasks, options.auxiliary_hidden, **rates(options)
        )
        self.initialise(torch.default_generator)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the vectors of the domains as those of numerical features."""
        truncated_glorot_(self.domain_vectors, generator)

    def activations(self) -> Activations:
        """Return what norm and networks keep, and the operations of the networks' products."""
        domains, columns = len(self.domain_vectors), self.norm.scale.numel()
        products = sum(before * after for before, after in pairwise(self._widths))
        norms = 6 * sum(self._widths[1:-1]) if self.norms else 0
        return Activations(
            backward_columns=6 * columns + 2 * domains * sum(self._widths) + norms,
            reread_columns=columns - self.prefix_columns,
            products={"domain networks": 2 * domains * products},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D] or `PooledEmbeddings` to float32 logits [B, T], or [B] of one task."""
        numbers = [numerical[:, : self._domain], numerical[:, self._domain + 1 :]]
        x = join(as_autocast(torch.cat(numbers, 1)) if self.prefix_columns else None, embeddings)
        domains = torch.arange(len(self.domain_vectors), device=x.device)
        chosen = (numerical[:, self._domain, None] == domains).to(self.domain_vectors.dtype)
        hidden = nn.functional.pad(self.norm(x, chosen), (0, self._padding))
        hidden = hidden.expand(len(domains), -1, -1)
        for number, layer in enumerate(self.layers[:-1]):
            hidden = layer(hidden)
            if self.norms or self.dropouts:  # Each row counts once, in its own domain.
                hidden = _own(hidden, chosen)
            hidden = torch.relu(self.norms[number](hidden, chosen) if self.norms else hidden)
            hidden = self.dropouts[number](hidden) if self.dropouts else hidden
            hidden = hidden.expand(len(domains), -1, -1)
        logits = _own(self.layers[-1](hidden), chosen).float()
        vectors = (chosen @ self.domain_vectors).to(x.dtype)
        auxiliary = self.auxiliary([torch.cat([x, vectors], 1)] * logits.shape[1])
        is_known = chosen.sum(1).float()
        logits = logits + 0 / is_known.unsqueeze(1)
        return auxiliary + (logits.squeeze(1) if auxiliary.dim() == 1 else logits)


def _own(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the values of each row's domain, [B, W], of those of all domains [P, B, W]."""
    return (x * chosen.T.unsqueeze(2)).sum(0)
