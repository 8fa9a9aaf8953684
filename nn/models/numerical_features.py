"""Encoded numerical features for models that read them as plain numbers (`model.numerical_encoding`)."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.numerical_embedding import NumericalVectors
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.model import Model, Wrapper
from nn.models.options import without_effect


def encoded_spec(options: ModelConfig, spec: FeatureSpec) -> FeatureSpec:
    """Return the features as a model reads them: the numbers that its options name, then D columns for each other one."""
    named = named_numbers(options, spec)
    columns = tuple(
        f"{name}.{column}"
        for name in spec.numerical
        if name not in named
        for column in range(options.embedding_dim)
    )
    return replace(spec, numerical=(*named, *columns))


def named_numbers(options: ModelConfig, spec: FeatureSpec) -> tuple[str, ...]:
    """Return the numbers with a meaning of their own, such as a length: a `numerical` option that has an effect names them."""
    naming = {declared.name for declared in fields(options) if declared.metadata.get("numerical")}
    values = [getattr(options, name) for name in naming.difference(without_effect(options))]
    return tuple(name for name in spec.numerical if name in values)


class WithEncodedNumbers(Wrapper):
    """A model that reads the vectors of `NumericalVectors` as numbers; it is built for `encoded_spec`."""

    def __init__(self, model: Model, options: ModelConfig, spec: FeatureSpec) -> None:
        super().__init__(model)
        self.prefix_columns, self.fuses_lookup = model.prefix_columns, model.fuses_lookup
        named = named_numbers(options, spec)
        self._named = [spec.numerical.index(name) for name in named]
        self._others = [n for n, name in enumerate(spec.numerical) if name not in named]
        self.numbers = NumericalVectors(len(self._others), options)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        columns = numerical.unbind(1)
        named = [columns[number].unsqueeze(1) for number in self._named]
        others = torch.stack([columns[number] for number in self._others], dim=1)
        return self.model(torch.cat([*named, self.numbers(others)], dim=1), embeddings)
