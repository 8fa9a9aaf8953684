"""Wide & Deep: a linear model of features and crosses beside an MLP (arXiv:1606.07792)."""

from torch import Tensor, nn

from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import Tables, one_table_per_feature
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import chosen_features, rates
from nn.models.model import Activations, Model
from nn.models.options import WideDeepOptions

# B: samples, N: numerical features, D: columns of a deep table, W and F: wide and deep features


class WideDeep(Model):
    """Dense component of Wide & Deep (section 3.3, equation 3).

    logit = sum of the wide weights of all ids + w^T x + MLP([x, e_1, ..., e_F])

    x are the numerical features, e_i the embeddings of the deep features. The wide weights are tables of one column. The bias of
    the MLP's last layer is the model's. The paper gives no initial weights; HugeCTR's are those of `MLP`. The term w^T x is
    optional. Raises ValueError: an option names a feature that the dataset lacks, or has no effect without numerical ones.
    """

    Options = WideDeepOptions

    def __init__(self, options: WideDeepOptions, spec: FeatureSpec) -> None:
        super().__init__()
        wide, deep = _wide_and_deep(options, spec)
        if options.wide_numerical and not spec.numerical:
            raise ValueError(
                "model.wide_numerical=true has no effect: the dataset has no numerical features; leave it out"
            )
        self.prefix_columns = len(spec.numerical)
        self._num_wide = len(wide)
        self._deep_columns = self.prefix_columns + len(deep) * options.embedding_dim
        self.deep = MLP(self._deep_columns, [*options.hidden, 1], **rates(options))
        self.wide = (
            nn.Linear(self.prefix_columns, 1, bias=False) if options.wide_numerical else None
        )

    @classmethod
    def tables(cls, options: WideDeepOptions, spec: FeatureSpec) -> Tables:
        wide, deep = _wide_and_deep(options, spec)
        return [
            *one_table_per_feature(options, spec, features=deep),
            *one_table_per_feature(options, spec, columns=1, features=wide, prefix="wide_"),
        ]

    def activations(self) -> Activations:
        """Return the columns of the joined matrix that are in memory already: those of the embeddings."""
        return Activations(reread_columns=self._deep_columns - self.prefix_columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        """Map numerical [B, N] and embeddings [B, F*D + W] or `PooledEmbeddings` to logits [B] in float32."""
        x = self.join_inputs(numerical, embeddings)
        logits = self.deep(x[:, : self._deep_columns]).squeeze(1).float()
        if self._num_wide:
            logits = logits + x[:, self._deep_columns :].float().sum(1)
        if self.wide is not None:
            logits = logits + self.wide(numerical).squeeze(1)
        return logits.float()


def _wide_and_deep(options: WideDeepOptions, spec: FeatureSpec) -> tuple[list[str], list[str]]:
    """Return the names of the wide and of the deep features, in the order of the options or of the dataset."""
    every = [feature.name for feature in spec.categorical]
    wide = chosen_features("model.wide_features", options.wide_features, every)
    others = [name for name in every if name not in wide] or every
    return wide, chosen_features("model.deep_features", options.deep_features, every, others)
