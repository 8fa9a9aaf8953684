"""RankMixer: tokens of features, mixed without parameters, each with a network of its own (arXiv:2507.15551)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.fp8 import padded, unpadded
from nn.layers.interactions.experts import Towers
from nn.layers.mlp import round_up
from nn.layers.per_token import PerTokenExperts, PerTokenLinear, ReluRouter
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence import LayerNorm
from nn.models.features import chosen_features, in_table_order, rates
from nn.models.model import Activations, Fp8Layer, VectorModel
from nn.models.options import RankMixerOptions
from nn.ops.fused_linear import as_autocast, can_fuse

# B: samples, F: features, T: tokens and heads, D: columns of a token


class RankMixerBlock(nn.Module):
    """S = LN(TokenMixing(X) + X), X' = LN(PFFN(S) + S) (section 3.1, equation 1).

    Token mixing (section 3.3.1) cuts every token into T heads; its token h is the heads h of all tokens side by side.
    """

    def __init__(self, options: RankMixerOptions) -> None:
        super().__init__()
        sizes = options.tokens, options.token_dim
        self.mixing_norm = LayerNorm(options.token_dim)
        self.network = PerTokenExperts(
            *sizes, options.expansion * options.token_dim, options.experts
        )
        self.network_norm = LayerNorm(options.token_dim)
        self.router = (
            ReluRouter(*sizes, options.experts, options.active_experts)
            if options.experts > 1
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, B, D] to [T, B, D]."""
        if self.network.fp8 is None or not self.training:
            return self._forward(x)
        return unpadded(self._forward(padded(x)), x.shape[1])

    def _forward(self, x: Tensor) -> Tensor:
        if self.router is None and can_fuse(x, self.network.up):
            norms = self.mixing_norm, self.network_norm
            return self.network.between_norms(as_autocast(x), *norms)
        mixed = x.unflatten(2, (len(x), -1)).permute(2, 1, 0, 3).flatten(2)
        s = self.mixing_norm(mixed + x)
        gates = None if self.router is None else self.router(s)
        return self.network_norm(self.network(s, gates) + s)


class RankMixer(VectorModel):
    """Dense component of RankMixer: tokens, `RankMixerBlock`s, the mean of the tokens, and a tower per task.

    Tokens (section 3.2, equation 2): the vectors of all features side by side, those of a semantic group next to each other,
    are cut into T pieces of equal columns, and token i is W_i piece_i + b_i. Numerical features have vectors that their
    values multiply. With an expansion of k a block has 2 k T D^2 weights; of the published sizes T=16, D=768, L=2 (100 M)
    and T=32, D=1536, L=2 (1 B) the paper gives no k, and 3 comes near. It gives no initial weights either: they are those
    of `MLP`, and zero for the biases of tokens.
    """

    Options = RankMixerOptions

    def __init__(self, options: RankMixerOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        every = [*spec.numerical, *in_table_order(spec)]
        first = chosen_features("model.feature_order", options.feature_order, every)
        order = [*first, *(name for name in every if name not in first)] if first else []
        self._order = [every.index(name) for name in order]
        self._tasks, self._options = len(spec.labels), options
        tokens, columns = options.tokens, self.vectors.columns
        piece = -(-columns // tokens)
        # Products of 16 bits are faster at multiples of 8, unless the last token would be empty.
        self._piece = round_up(piece) if (tokens - 1) * round_up(piece) < columns else piece
        self.tokens = PerTokenLinear(tokens, self._piece, options.token_dim)
        blocks = nn.ModuleList(RankMixerBlock(options) for _ in range(options.layers))
        self.blocks = cast(Sequence[RankMixerBlock], blocks)
        self.towers = Towers(options.token_dim, self._tasks, options.tower_hidden, **rates(options))

    def activations(self) -> Activations:
        """Return what pieces, norms and networks keep, a gradient of the widest layer, and the batched products."""
        o = self._options
        width, hidden = o.tokens * o.token_dim, o.experts * o.expansion * o.tokens * o.token_dim
        per_block = 3 * width + 2 * hidden
        products = 4 * o.token_dim * hidden
        if o.experts > 1:
            per_block += hidden + 4 * o.tokens * o.experts
            products += 6 * width * o.experts
        pieces = o.tokens * self._piece
        return Activations(
            backward_columns=pieces * (2 if self._order else 1) + o.layers * per_block + 2 * hidden,
            products={
                "tokens": 2 * pieces * o.token_dim,
                PerTokenExperts.fp8_term: o.layers * products,
            },
        )

    def fp8_layers(self) -> list[Fp8Layer]:
        """Return the per-token networks, unless a token has several: their gates are between the products."""
        return [block.network for block in self.blocks if block.router is None]

    def extra_losses(self) -> dict[str, Tensor]:
        routers = [block.router for block in self.blocks if block.router is not None]
        penalties = [router.penalty() for router in routers]
        return {"router": torch.stack(penalties).sum()} if routers else {}

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = self.vectors(numerical, embeddings)
        if self._order:
            vectors = x.split(self._options.embedding_dim, dim=1)
            x = torch.cat([vectors[position] for position in self._order], dim=1)
        x = nn.functional.pad(x, (0, self._options.tokens * self._piece - x.shape[1]))
        pieces = x.unflatten(1, (self._options.tokens, -1)).transpose(0, 1)
        tokens = self.tokens(pieces).to(x.dtype)
        for block in self.blocks:
            tokens = block(tokens)
        # Autocast would make it float32, and the gradient of every token too.
        mean = tokens.sum(0, dtype=tokens.dtype) / len(tokens)
        return self.towers([mean] * self._tasks)
