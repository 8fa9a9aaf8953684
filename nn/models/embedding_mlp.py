"""An MLP over pooled or unpooled embeddings, as HugeCTR's MovieLens example and SOK's dense demo have it."""

from torch import Tensor

from configs.messages import shown
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables, one_table_per_feature
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates, table_widths
from nn.models.model import Activations, Model
from nn.models.options import EmbeddingMLPOptions, Pooling

# B: samples, N: numerical features, T: columns of all embeddings of a sample


class EmbeddingMLP(Model):
    """Dense component: logit = MLP([x, e_1, ..., e_F]).

    x are the numerical features. e_i is the sum or the mean of the embeddings of a feature's ids, or, without pooling, the
    embeddings of all its ids side by side. Raises ValueError: without pooling a feature has a varying number of ids.
    """

    Options = EmbeddingMLPOptions

    def __init__(self, options: EmbeddingMLPOptions, spec: FeatureSpec) -> None:
        super().__init__()
        self._embedding_columns = 0
        widths = table_widths(options, spec)
        for table, features in spec.table_features.items():
            for feature in features:
                positions = feature.hotness if options.pooling is Pooling.none else 1
                if positions is None:
                    raise ValueError(
                        f"model.pooling=none requires fixed hotness, but feature {shown(feature.name)} is ragged; use sum "
                        "or mean"
                    )
                self._embedding_columns += widths[table] * positions
        self.prefix_columns = len(spec.numerical)
        self.mlp = MLP(
            self.prefix_columns + self._embedding_columns, [*options.hidden, 1], **rates(options)
        )

    @classmethod
    def tables(cls, options: EmbeddingMLPOptions, spec: FeatureSpec) -> Tables:
        """Return a table per feature, with the pooling and the widths of the options.

        Raises ValueError: the options name a feature that the dataset lacks, or two widths of one table.
        """
        from torchrec.modules.embedding_configs import PoolingType

        tables = one_table_per_feature(options, spec)
        for table, columns in zip(tables, table_widths(options, spec).values(), strict=True):
            table.embedding_dim = columns
            table.pooling = PoolingType[options.pooling.name.upper()]
        return tables

    def activations(self) -> Activations:
        """Return the columns of the MLP's input that are in memory already: those of the embeddings."""
        return Activations(reread_columns=self._embedding_columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        return self.mlp(self.join_inputs(numerical, embeddings)).squeeze(1).float()
