"""The two models as plain single-device modules: dense halves, tables, and both together.

A dense half takes the numerical features and the looked-up embeddings, features in the spec's order, and gives a logit;
it knows neither ids nor ranks. The tables are a TorchRec EmbeddingBagCollection. `RankingModel` joins them on one
device; on many, the sharded step does.
"""

import math
from collections.abc import Callable, Collection, Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from configs.schema import CrossStructure, ModelConfig, ModelName, TableDtype
from dataloading.batch import Batch
from dataloading.feature_spec import FeatureSpec
from nn.layers.cross_net import CrossNet
from nn.layers.dot_interaction import DotInteraction
from nn.layers.initialization import fill_uniform_
from nn.layers.mlp import MLP
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.ops.pooled_embeddings import PooledEmbeddings, join

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class DLRM(nn.Module):
    """Dense half of DLRM: bottom MLP, dot interaction, top MLP (arXiv:1906.00091).

    Args:
        num_numerical: N; with 0 there is no bottom MLP and only the embeddings interact.
        num_categorical: F.
        embedding_dim: D; the bottom MLP must end in it.
        bottom_mlp: widths of the bottom MLP, ReLU after each.
        top_mlp: widths of the top MLP, ending in 1, ReLU after all but the last.
    """

    def __init__(
        self,
        *,
        num_numerical: int,
        num_categorical: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
    ) -> None:
        super().__init__()
        self.bottom = (
            MLP(num_numerical, bottom_mlp, final_activation=True) if num_numerical else None
        )
        self.interaction = DotInteraction(
            num_categorical, embedding_dim, has_bottom=self.bottom is not None
        )
        self.top = MLP(self.interaction.num_outputs, top_mlp, final_activation=False)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, [B, F*D] or where they lie, to logits [B] in float32."""
        bottom = None if self.bottom is None else self.bottom(numerical)
        return self.top(self.interaction(bottom, embeddings)).squeeze(1).float()


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


def _build_dlrm(config: ModelConfig, spec: FeatureSpec) -> DLRM:
    num_vectors = len(spec.categorical) + bool(spec.numerical)
    if num_vectors < 2:
        raise ValueError(
            f"model.name=dlrm needs two vectors to interact, got {num_vectors} (one a categorical "
            "feature, and one for the numerical features if there are any); use model.name=dcnv2"
        )
    return DLRM(
        num_numerical=len(spec.numerical),
        num_categorical=len(spec.categorical),
        embedding_dim=config.embedding_dim,
        bottom_mlp=config.bottom_mlp,
        top_mlp=config.top_mlp,
    )


def _build_dcnv2(config: ModelConfig, spec: FeatureSpec) -> DCNv2:
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


BUILDERS: dict[ModelName, Callable[[ModelConfig, FeatureSpec], nn.Module]] = {
    ModelName.dlrm: _build_dlrm,
    ModelName.dcnv2: _build_dcnv2,
}


def build_dense(config: ModelConfig, spec: FeatureSpec) -> nn.Module:
    """Build the dense half: forward(numerical [B, N], embeddings) -> logits [B]."""
    return BUILDERS[config.name](config, spec)


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


class RankingModel(nn.Module):
    """Tables and dense half on one device.

    Args:
        embeddings: tables in the dense half's feature order, one feature each.
        dense: `DLRM`, `DCNv2` or any module with their forward.
    """

    def __init__(self, embeddings: EmbeddingBagCollection, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense
        self.names = [table.feature_names[0] for table in embeddings.embedding_bag_configs()]

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [B] of a batch that lies on the model's device."""
        return self.dense(batch.numerical, embeddings_of(self.embeddings(batch.ids), self.names))
