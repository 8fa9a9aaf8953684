"""Tables and dense half together, on one device; on several ranks the sharded step joins them."""

from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dataloading.batch import Batch
from nn.embedding.collection import embeddings_of


class RankingModel(nn.Module):
    """Tables and dense half on one device.

    Args:
        embeddings: tables in the order of the features of the dense half, one feature per table.
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
