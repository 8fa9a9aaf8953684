"""The tables as an unsharded EmbeddingBagCollection: names, initial weights, and where looked-up embeddings lie."""

import math
from collections.abc import Collection, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from configs.schema import ModelConfig, TableDtype
from dataloading.feature_spec import FeatureSpec
from nn.layers.initialization import fill_uniform_
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.ops.pooled_embeddings import PooledEmbeddings

DATA_TYPES = {
    TableDtype.fp32: DataType.FP32,
    TableDtype.bf16: DataType.BF16,
    TableDtype.fp16: DataType.FP16,
}


def build_embeddings(
    config: ModelConfig, spec: FeatureSpec, device: torch.device
) -> EmbeddingBagCollection:
    """Build one table a categorical feature, named after it, summing the ids of a bag.

    On a real device the weights are TorchRec's default draw; `initialise_tables` gives them their final values.

    Args:
        config: gives the tables' columns and dtype.
        spec: gives names and rows, in model order.
        device: may be meta, where tables of any size cost nothing.

    Raises:
        ValueError: two features whose tables would bear the same name.
    """
    features: dict[str, str] = {}
    for feature in spec.categorical:
        other = features.setdefault(table_name(feature.name), feature.name)
        if other != feature.name:
            raise ValueError(
                f"features {other!r} and {feature.name!r} would share the table name "
                f"{table_name(feature.name)!r}; rename one of them in the feature spec"
            )
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table_name(feature.name),
                embedding_dim=config.embedding_dim,
                num_embeddings=feature.cardinality,
                feature_names=[feature.name],
                pooling=PoolingType.SUM,
                data_type=DATA_TYPES[config.embedding_dtype],
            )
            for feature in spec.categorical
        ],
        device=device,
    )


def keep_float32(embeddings: EmbeddingBagCollection, tables: Collection[str]) -> None:
    """Let some of the tables, which have no memory yet, be float32 whatever the others are."""
    for table in embeddings.embedding_bag_configs():
        if table.name in tables:
            table.data_type = DataType.FP32
            embeddings.embedding_bags[table.name].float()


def table_name(feature: str) -> str:
    """Name a feature's table: as the feature, unless no module may be called so (`cat_0.bin`, `type`)."""
    name = feature.replace(".", "_")
    return f"{name}_" if hasattr(nn.ModuleDict(), name) else name


def initialise_tables(embeddings: EmbeddingBagCollection, seed: int) -> None:
    """Give unsharded tables the initial weights that `fill_uniform_` gives their shards: uniform in +-1/sqrt(rows)."""
    for table in embeddings.embedding_bag_configs():
        fill_uniform_(
            embeddings.embedding_bags[table.name].weight,
            seed=seed,
            table=table.name,
            bound=1 / math.sqrt(table.num_embeddings),
        )


def embeddings_of(pooled: KeyedTensor, names: Sequence[str]) -> PooledEmbeddings:
    """Show where the named features lie in what TorchRec looked up, which it orders by sharding; copies nothing.

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
    dim, stride = widths[0], sum(widths)
    pieces = [
        LayoutSegment(index, 0, dim, offsets[name], stride) for index, name in enumerate(names)
    ]
    return EmbeddingLayout(pieces, len(names), dim, device)
