"""Tables as an unsharded EmbeddingBagCollection: initial weights, and the layout of the pooled embeddings."""

import math
from collections.abc import Collection, Sequence
from functools import cache
from itertools import accumulate

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from nn.layers.initialization import fill_uniform_
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment


def build_embeddings(
    tables: Sequence[EmbeddingBagConfig], device: torch.device
) -> EmbeddingBagCollection:
    """Build the unsharded tables.

    On a real device the weights are TorchRec's default ones; `initialise_tables` gives them their final values.

    Args:
        tables: as a model declares them.
        device: may be meta, where tables of any size cost nothing.
    """
    return EmbeddingBagCollection(tables=list(tables), device=device)


def keep_float32(embeddings: EmbeddingBagCollection, tables: Collection[str]) -> None:
    """Make some tables float32, whatever the dtype of the others; the tables must be on the meta device."""
    for table in embeddings.embedding_bag_configs():
        if table.name in tables:
            table.data_type = DataType.FP32
            embeddings.embedding_bags[table.name].float()


def initialise_tables(embeddings: EmbeddingBagCollection, seed: int) -> None:
    """Initialise unsharded tables as `fill_uniform_` initialises their shards: uniform in +-1/sqrt(rows)."""
    for table in embeddings.embedding_bag_configs():
        fill_uniform_(
            embeddings.embedding_bags[table.name].weight,
            seed=seed,
            table=table.name,
            bound=1 / math.sqrt(table.num_embeddings),
        )


def embeddings_of(pooled: KeyedTensor, names: Sequence[str]) -> PooledEmbeddings:
    """Return TorchRec's pooled embeddings, which are ordered by sharding, as features in the order of `names`; no copy.

    Returns:
        [B, F, D], features in the order of `names`.
    """
    widths = tuple(pooled.length_per_key())
    layout = _layout(tuple(pooled.keys()), widths, tuple(names), pooled.values().device)
    return PooledEmbeddings(layout, pooled.values)


@cache
def _layout(
    keys: tuple[str, ...], widths: tuple[int, ...], names: tuple[str, ...], device: torch.device
) -> EmbeddingLayout:
    offsets = dict(zip(keys, accumulate(widths, initial=0), strict=False))
    width_of = dict(zip(keys, widths, strict=True))
    segments = [
        LayoutSegment(index, 0, width_of[name], offsets[name], sum(widths))
        for index, name in enumerate(names)
    ]
    return EmbeddingLayout(segments, [width_of[name] for name in names], device)
