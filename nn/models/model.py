"""What a model declares: its options, its tables, its dense half, and what that takes.

A model is one file: a subclass of `Model` and the dataclass of its options. Planner, training step, memory estimate,
checkpoints and export read the declaration, and know no model by name. docs/contributing.md has an example.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn

from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.ops.pooled_embeddings import PooledEmbeddings

if TYPE_CHECKING:
    # TorchRec takes seven seconds to import, and `--help` needs the options only.
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

# B: samples, N: numerical features, T: columns of all looked-up embeddings


@dataclass(frozen=True, slots=True)
class Activations:
    """What a dense half takes per sample beyond the inputs and outputs of its linear layers, which are counted anyway.

    Attributes:
        backward_columns: further columns kept for the backward pass.
        forward_columns: further columns that live beside the widest layer in a forward pass alone.
        reread_columns: columns of linear layers' inputs that lie in memory already: embeddings, or another layer's input.
        products: name -> floating-point operations of the forward pass in products of vectors; the backward pass is
            taken to need twice as many.
    """

    backward_columns: int = 0
    forward_columns: int = 0
    reread_columns: int = 0
    products: dict[str, int] = field(default_factory=dict)


class Model(nn.Module):
    """The dense half of a model, a plain module for one device, and the declaration of its tables.

    It knows neither ids nor ranks. All its weights are parameters: checkpoints hold no buffers. Layers that have a method
    `initialise(generator)` are initialised by it, in the order of registration; others keep PyTorch's own initial weights.
    Both depend on the seed alone.

    Attributes:
        Options: dataclass of the options, a subclass of `ModelConfig`.
        prefix_columns: columns that `forward` puts before the embeddings (`nn.ops.pooled_embeddings.join`); the lookup
            leaves room for them, which saves a copy.
    """

    Options: ClassVar[type[ModelConfig]]
    prefix_columns: int = 0

    @classmethod
    def tables(cls, options: Any, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return the tables, each with the features that it is looked up for.

        `nn.embedding.declared_tables.one_table_per_feature` makes the usual ones. The embeddings that `forward` sees have
        the order of the features in this list.
        """
        raise NotImplementedError

    @classmethod
    def build(cls, options: Any, spec: FeatureSpec) -> Self:
        """Build the dense half for the features of a dataset.

        Raises:
            ValueError: the model cannot have these options with these features.
        """
        raise NotImplementedError

    def activations(self) -> Activations:
        """Return what the memory estimate and the floors count beyond linear layers."""
        return Activations()

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings, [B, T] or where they lie, to logits [B] in float32."""
        raise NotImplementedError

    def linear_layers(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of every linear layer, in the order of registration."""
        return [
            (layer.in_features, layer.out_features)
            for layer in self.modules()
            if isinstance(layer, nn.Linear)
        ]

    def num_parameters(self) -> int:
        """Return how many numbers are trained; a linear layer is counted with a bias."""
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
