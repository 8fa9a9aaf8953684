"""Declaration of a model: options, tables, dense component, and its memory and work.

A model is one file: a subclass of `Model` and the dataclass of its options. Planner, training step, memory estimate,
checkpoints and export read the declaration, and know no model by name. docs/add_a_model.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import one_table_per_feature
from nn.layers.feature_vectors import FeatureVectors
from nn.layers.numerical_embedding import NumericalEmbedding
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.ops.fused_linear import as_autocast

if TYPE_CHECKING:
    # TorchRec takes seven seconds to import, and `--help` needs the options only.
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

# B: samples, N: numerical features, T: columns of all looked-up embeddings


@dataclass(frozen=True, slots=True)
class Activations:
    """Memory and work of a dense component per sample, in addition to the inputs and outputs of its linear layers."""

    backward_columns: int = 0  # additional columns kept for the backward pass
    # columns kept for the backward pass per event, by sequence group
    event_columns: dict[str, int] = field(default_factory=dict)
    # bytes beside them, such as numbers of positions
    event_bytes: dict[str, int] = field(default_factory=dict)
    # of `event_columns`, those of gradients, which are made when the layers behind the events keep nothing any more
    event_gradient_columns: dict[str, int] = field(default_factory=dict)
    event_gradient_bytes: int = 0  # of gradients made with those, whatever the number of events
    # event fields under 16-bit autocast, of groups of which a GPU's kernels keep something else
    in_16_bits: Activations | None = None
    # the same per distinct row, by table that hands out its rows
    row_columns: dict[str, int] = field(default_factory=dict)
    # additional columns that exist beside the widest layer in a forward pass alone
    forward_columns: int = 0
    # columns of linear layers' inputs that are in memory already: embeddings, or another layer's input
    reread_columns: int = 0
    # floating-point operations of the forward pass in products of vectors, by name; the backward pass is estimated
    # at twice as many
    products: dict[str, int] = field(default_factory=dict)


class Fp8Layer(Protocol):
    """Layer that can compute its matrix products in 8 bits in training (`train.fp8`)."""

    def use_fp8(self, *, weight_gradients: bool) -> None:
        """Compute the products in 8 bits, gradients of weights too or in 16 bits."""

    def fp8_products(self) -> list[tuple[str, int, int]]:
        """Return name, inputs and outputs of every product's weight.

        Products that are none of linear layers are in the term of `Activations.products` that an attribute `fp8_term` names.
        """


class Model(nn.Module):
    """Dense component of a model, a plain single-device module, and the declaration of its tables.

    It knows neither ids nor ranks. Checkpoints hold its parameters and the persistent buffers of `PassLayer`s. Layers that
    have a method `initialise(generator)` are initialised by it, in the order of registration; others keep PyTorch's own
    initial weights. Both depend on the seed alone.
    """

    Options: ClassVar[type[ModelConfig]]  # dataclass of the options, a subclass of `ModelConfig`
    # columns that `forward` puts before the embeddings (`join_inputs`); the lookup leaves room for them, which saves copies
    prefix_columns: int = 0
    # whether `forward` gives all embeddings to one layer that looks up rows itself where it can, and to nothing
    # else; in training on one GPU nothing is then looked up before
    fuses_lookup: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.logged_losses: dict[str, Tensor] = {}  # this rank's latest `extra_losses`

    @classmethod
    def tables(cls, options: Any, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return the tables with their features: one per feature unless overridden.

        The order of the features in this list is that of the embeddings that `forward` receives. A table without pooling that has
        a ragged feature has no vectors: `forward` takes its rows by `embeddings.distinct_rows(table, feature)` or, of events,
        `embeddings.sequence(group)`.
        """
        return one_table_per_feature(options, spec)

    @classmethod
    def build(cls, options: Any, spec: FeatureSpec) -> Self:
        """Build the dense component for the features of a dataset: the constructor unless overridden.

        Raises ValueError: the options do not fit the features.
        """
        kind: Any = cls
        made: Self = kind(options, spec)
        return made

    def activations(self) -> Activations:
        """Return the memory and work that the estimates count in addition to linear layers."""
        return Activations()

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, T] or `PooledEmbeddings` to logits, [B] or [B, T] of T tasks, in float32."""
        raise NotImplementedError

    def join_inputs(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Return one matrix of the embeddings, behind the numericals if these are the prefix."""
        return join(as_autocast(numerical) if self.prefix_columns else None, embeddings)

    def extra_losses(self) -> dict[str, Tensor]:
        """Return this rank's shares [] of further terms of the loss by name, after `forward` in training; none unless overridden.

        Records have the latest step's sums over ranks as `extra_loss.NAME`.
        """
        return {}

    def add_losses(self, share: Tensor, share_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's share of the loss that is trained, after `forward`: with `extra_losses` unless overridden.

        `share`: this rank's share of the tasks' loss; the sum over ranks is the loss. `share_of`: returns that of other logits.
        """
        for name, term in self.extra_losses().items():
            share = share + term
            # One piece of memory, which all captured passes write.
            if name not in self.logged_losses:
                self.logged_losses[name] = torch.empty_like(term, requires_grad=False)
            self.logged_losses[name].copy_(term.detach())
        return share

    @classmethod
    def adds_to_loss(cls) -> bool:
        """Return whether the loss that is trained is not that of the tasks alone."""
        return (cls.add_losses, cls.extra_losses) != (Model.add_losses, Model.extra_losses)

    def fp8_layers(self) -> Sequence[Fp8Layer]:
        """Return the layers with products that are wide enough to gain from 8 bits (`train.fp8`)."""
        return []

    def linear_layers(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of every linear layer, in the order of registration."""
        return [
            (layer.in_features, layer.out_features)
            for layer in self.modules()
            if isinstance(layer, nn.Linear)
        ]

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers by name, which checkpoints hold."""
        parameters = {name for name, _ in self.named_parameters()}
        return {name: value for name, value in self.state_dict().items() if name not in parameters}

    def num_parameters(self) -> int:
        """Return the number of trained parameters; every linear layer is counted with a bias."""
        linear = {
            id(parameter)
            for layer in self.modules()
            if isinstance(layer, nn.Linear)
            for parameter in layer.parameters()
        }
        others = sum(
            parameter.numel() for parameter in self.parameters() if id(parameter) not in linear
        )
        return others + sum(before * after + after for before, after in self.linear_layers())


class VectorModel(Model):
    """A model that reads the vectors of all features, those of numerical ones first."""

    def __init__(self, options: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        self.vectors = FeatureVectors(spec, options)
        self.prefix_columns = self.vectors.prefix_columns


class LinearVectorModel(VectorModel):
    """A model of vectors with a linear term: all features have a weight too, those of numerical ones times their values."""

    def __init__(self, options: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        num_numerical = len(spec.numerical)
        self.weights = NumericalEmbedding(num_numerical, 1) if num_numerical else None

    @classmethod
    def tables(cls, options: Any, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        return [
            *one_table_per_feature(options, spec),
            *one_table_per_feature(options, spec, columns=1, prefix="weight_"),
        ]


class TaskModel(Model):
    """A model of several tasks that reads numerical features and embeddings as one matrix (`join_inputs`)."""

    def __init__(self, options: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__()
        self.prefix_columns, self._num_tasks = len(spec.numerical), len(spec.labels)
        self._embedding_columns = len(spec.categorical) * options.embedding_dim
        self._inputs = self.prefix_columns + self._embedding_columns


class Wrapper(Model):
    """A model that changes what another one reads, and has its losses and layers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.logged_losses = model.logged_losses

    def activations(self) -> Activations:
        return self.model.activations()

    def add_losses(self, share: Tensor, share_of: Callable[[Tensor], Tensor]) -> Tensor:
        return self.model.add_losses(share, share_of)

    def fp8_layers(self) -> Sequence[Fp8Layer]:
        return self.model.fp8_layers()
