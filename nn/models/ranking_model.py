"""Tables and dense component as one module for one device; with several ranks the training step combines them."""

from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dataloading.batch import Batch
from nn.embedding.collection import embeddings_of


class RankingModel(nn.Module):
    """Tables and dense component on one device.

    Args:
        embeddings: tables in the order of the dense component's features, one feature per table.
        dense: a `Model`, or a module with the same `forward`.
    """

    def __init__(self, embeddings: EmbeddingBagCollection, dense: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = dense
        self.names = [table.feature_names[0] for table in embeddings.embedding_bag_configs()]

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [B] of a batch that lies on the model's device."""
        return self.dense(batch.numerical, embeddings_of(self.embeddings(batch.ids), self.names))
