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
from nn.layers.mlp import fused, round_up
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.features import chosen_features, rates
from nn.models.model import Activations, Model
from nn.models.options import STAROptions
from nn.ops.fused_linear import as_autocast, can_fuse

# B: samples, C: columns of numerical features and embeddings, P: domains, T: tasks


class StarLayer(nn.Module):
    """Star Topology FCN: layers (W_p * W) x + (b_p + b) of all domains.

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

    def of_domains(self) -> tuple[Tensor, Tensor]:
        """Return weights [P, inputs, outputs] and biases [P, 1, outputs]."""
        return self.weight * self.domain_weight, self.bias + self.domain_bias

    def forward(self, x: Tensor) -> Tensor:
        """Map [P, B, inputs] to [P, B, outputs]."""
        weight, bias = self.of_domains()
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
        dropouts = nn.ModuleList(Dropout(rate) for _ in range(count if rate else 0))
        self.dropouts = cast(Sequence[Dropout], dropouts)
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
        numbers = [numerical[:, : self._domain], numerical[:, self._domain + 1 :]]
        x = join(as_autocast(torch.cat(numbers, 1)) if self.prefix_columns else None, embeddings)
        domains = torch.arange(len(self.domain_vectors), device=x.device)
        chosen = (numerical[:, self._domain, None] == domains).to(self.domain_vectors.dtype)
        normed = nn.functional.pad(self.norm(x, chosen), (0, self._padding))
        fuses = not self.norms and can_fuse(normed, self.layers[0].weight)
        logits = self._fused(normed) if fuses else self._plain(normed, chosen)
        logits = _own(logits, chosen).float()
        vectors = (chosen @ self.domain_vectors).to(x.dtype)
        auxiliary = self.auxiliary([torch.cat([x, vectors], 1)] * logits.shape[1])
        logits = logits + 0 / chosen.sum(1, keepdim=True).float()
        return auxiliary + (logits.squeeze(1) if auxiliary.dim() == 1 else logits)

    def _plain(self, x: Tensor, chosen: Tensor) -> Tensor:
        domains = chosen.shape[1]
        for number, layer in enumerate(self.layers[:-1]):
            # Each row counts once, in its own domain.
            x = _own(layer(x.expand(domains, -1, -1)), chosen)
            x = torch.relu(self.norms[number](x, chosen) if self.norms else x)
            x = self.dropouts[number](x) if self.dropouts else x
        return self.layers[-1](x.expand(domains, -1, -1))

    def _fused(self, x: Tensor) -> Tensor:
        """Compute each domain's network by itself, by the kernels of MLPs, which is faster than batched products."""
        weights, biases = zip(*(layer.of_domains() for layer in self.layers), strict=True)
        layers = zip([of.mT for of in weights], [of.squeeze(1) for of in biases], strict=True)
        of_layers = [as_autocast(of).unbind() for layer in layers for of in layer]
        networks = zip(*of_layers, strict=True)
        x = as_autocast(x)
        return torch.stack([fused(x, of[::2], of[1::2], self.dropouts) for of in networks])


def _own(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the values of each row's domain, [B, W], of those of all domains [P, B, W]."""
    return (x * chosen.T.unsqueeze(2)).sum(0)
