"""ESMM: conversions learned over all rows, as click times conversion after a click (arXiv:1804.07931)."""

import torch
from torch import Tensor

from dataloading.dataset.feature_spec import FeatureSpec
from nn.layers.interactions.experts import Towers
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.features import rates
from nn.models.model import Activations, TaskModel
from nn.models.options import ESMMOptions

# B: samples, N: numerical features, F: categorical features, D: columns of a table


class ESMM(TaskModel):
    """Dense component of ESMM (section 2.3, equations 1 to 3), for the labels click, and click and conversion.

    The towers give logits a and b of pCTR and pCVR over shared embeddings. The second label is predicted by
    pCTCVR = pCTR pCVR, whose logit is -log(e^-a + e^-b + e^-(a + b)). pCVR itself is pCTCVR / pCTR. The paper gives no
    initial weights; the towers begin as `MLP`. Raises ValueError: the dataset has not two binary labels.
    """

    Options = ESMMOptions

    def __init__(self, options: ESMMOptions, spec: FeatureSpec) -> None:
        super().__init__(options, spec)
        if len(spec.labels) != 2 or not all(label.is_binary for label in spec.labels):
            names = ", ".join(label.name for label in spec.labels)
            raise ValueError(
                "model.name=esmm needs two binary labels, click, and click and conversion, and the dataset has "
                f"{names}; list them in the spec's channel_spec.label"
            )
        self.towers = Towers(self._inputs, self._num_tasks, options.tower_hidden, **rates(options))

    def activations(self) -> Activations:
        """Return the input of the second tower, which is the first one's, and the embeddings."""
        return Activations(reread_columns=2 * self._embedding_columns + self.prefix_columns)

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = self.join_inputs(numerical, embeddings)
        a, b = self.towers([x, x]).unbind(1)
        return torch.stack([a, -torch.logsumexp(-torch.stack([a, b, a + b]), dim=0)], dim=1)
