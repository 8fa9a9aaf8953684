"""Declaration that models of several tasks share: a table per feature, and as many logits as the dataset has labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import one_table_per_feature
from nn.models.features import num_tasks
from nn.models.model import Model

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig


class SeveralTasks(Model):
    """A model whose constructor has the arguments `num_numerical`, `embedding_columns`, `num_tasks` and `options`."""

    @classmethod
    def tables(cls, options: Any, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return one table per feature."""
        return one_table_per_feature(options, spec)

    @classmethod
    def build(cls, options: Any, spec: FeatureSpec) -> Self:
        """Build the dense component for the features and the labels of a dataset."""
        return cls(
            num_numerical=len(spec.numerical),
            embedding_columns=len(spec.categorical) * options.embedding_dim,
            num_tasks=num_tasks(spec),
            options=options,
        )
