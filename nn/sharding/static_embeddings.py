"""The sparse half of a step whose shapes are all known: ids to owners, lookup, embeddings home, gradients back, update.

It works on the memory that TorchRec's sharded modules hold, so plan, checkpoints and the dynamic path see the same
tables. Every buffer is made once for one size of batch; nothing is read back by the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import OptimizerConfig, OptimizerName
from nn.distributed.process_group import Ranks
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_expansion import IdExpansion
from nn.embedding.local_tables import LocalTable, SortedIds, UpdateScalars
from nn.ops.embedding_layout import EmbeddingLayout, LayoutSegment
from nn.sharding.id_all_to_all import IdAllToAll, LocalIds

# B: rows of this rank, W: ranks, F: features, D: columns of an embedding, T: columns of a rank's own parts


@dataclass(frozen=True, slots=True)
class ColumnShard:
    """Columns of a table, on some rank."""

    feature: str
    first_column: int
    columns: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank looks up what.

    Attributes:
        owned_by_rank: of each rank, in its order.
        owned: this rank's parts, as in `owned_by_rank`.
        replicated: this rank's copies of the replicated tables.
        replicated_tables: their names.
    """

    owned_by_rank: list[list[ColumnShard]]
    owned: list[LocalTable]
    replicated: list[LocalTable]
    replicated_tables: list[str]


@dataclass(frozen=True, slots=True)
class Channels:
    """Communicators of the exchanges, so that ids of the next batch wait for no embeddings of this one."""

    ids: dist.ProcessGroup | None
    embeddings: dist.ProcessGroup | None


class StaticEmbeddings:
    """The tables, for batches of one size.

    Args:
        placement: of the tables.
        features: names in the model's order.
        hotness: feature -> ids a row as they are sent, in the order of the batch.
        expansions: feature -> further ids of each id, of features looked up here that are expanded.
        embedding_dim: D.
        batch_size: B.
        config: rule of the update.
        scalars: of the update of this rank's own tables.
        replicated_gradients: gradient [rows, D] of each replicated table, zero at the beginning of a step.
        dtype: that embeddings and their gradients travel in.
        ranks: this process.
        channels: communicators.
        prefix_columns: columns that the dense half puts before each sample's embeddings; left free for them where nothing is sent.

    Attributes:
        layout: of what `look_up` returns.
    """

    def __init__(
        self,
        placement: Placement,
        features: Sequence[str],
        hotness: dict[str, int],
        expansions: dict[str, Tensor],
        *,
        embedding_dim: int,
        batch_size: int,
        config: OptimizerConfig,
        scalars: UpdateScalars,
        replicated_gradients: Sequence[Tensor],
        dtype: torch.dtype,
        ranks: Ranks,
        channels: Channels,
        prefix_columns: int,
    ) -> None:
        world_size, device = ranks.world_size, ranks.device
        self._ranks, self._channel = ranks, channels.embeddings
        self._exchange = IdAllToAll(
            [[place.feature for place in places] for places in placement.owned_by_rank],
            [part.feature for part in placement.replicated],
            hotness,
            batch_size=batch_size,
            rank=ranks.rank,
            device=device,
            channel=channels.ids,
        )
        num_samples = batch_size * world_size
        self._owned_sizes = [num_samples * hotness[part.feature] for part in placement.owned]
        self._expand_owned, self._expand_replicated = (
            IdExpansion([part.feature for part in parts], count, hotness, expansions)
            for parts, count in ((placement.owned, num_samples), (placement.replicated, batch_size))
        )
        self._owned = LocalEmbeddingBags(
            placement.owned, num_samples, config, scalars, dtype, device
        )
        self._replicated = LocalEmbeddingBags(
            placement.replicated, batch_size, config, scalars, dtype, device
        )
        # Adding to a gradient is descending it by SGD with a rate of -1.
        adding = OptimizerConfig(name=OptimizerName.sgd)
        minus_one = UpdateScalars(adding, 1.0, device)
        minus_one.set(0, -1.0)
        sums = [
            LocalTable(part.feature, part.hotness, gradient, {})
            for part, gradient in zip(placement.replicated, replicated_gradients, strict=True)
        ]
        self._replicated_sums = LocalEmbeddingBags(
            sums, batch_size, adding, minus_one, dtype, device
        )

        widths = [sum(place.columns for place in places) for places in placement.owned_by_rank]
        replicated_columns = len(placement.replicated) * embedding_dim
        self._prefix_columns = prefix_columns if world_size == 1 and not replicated_columns else 0
        self._local_sizes = [batch_size * (self._prefix_columns + width) for width in widths]
        self._owned_sizes_by_rank = [batch_size * widths[ranks.rank]] * world_size
        starts = list(accumulate(self._local_sizes, initial=0))
        self._replicated_start = starts[-1]
        self.layout = _layout(
            placement,
            features,
            embedding_dim,
            starts,
            [*widths, replicated_columns],
            self._prefix_columns,
            device,
        )
        self._local = torch.empty(
            starts[-1] + batch_size * replicated_columns, dtype=dtype, device=device
        )
        if world_size > 1:
            self._sent = torch.empty(num_samples, widths[ranks.rank], dtype=dtype, device=device)
        else:
            self._sent = self._owned_part(self._local)

    def send_ids(self, ids: Tensor, num_valid: int | None = None) -> LocalIds:
        """Send this rank's ids to their tables, and expand them there.

        Args:
            ids: feature after feature, each [B, hotness].
            num_valid: rows of the global batch that count, if not all; the others come after them, and arrive with the first one's
                ids: no row is looked up, and with a gradient of zero changed, that the batch has not.
        """
        arrived = self._exchange(ids)
        if num_valid is not None:
            for each in arrived.owned.split(self._owned_sizes):
                rows = each.view(self._owned.num_samples, -1)
                rows[num_valid:] = rows[0]
        return LocalIds(
            self._expand_owned(arrived.owned), self._expand_replicated(arrived.replicated)
        )

    @cached_property
    def _returned(self) -> Tensor:
        """Where gradients arrive; evaluation has none."""
        return torch.empty_like(self._sent)

    def look_up(self, ids: LocalIds) -> Tensor:
        """Look up and bring home; the memory [B * F * D] that `layout` describes, overwritten by the next call."""
        self._owned.look_up(ids.owned, self._sent)
        self._replicated.look_up(ids.replicated, self._replicated_part(self._local))
        if self._ranks.world_size > 1:
            dist.all_to_all_single(
                self._local[: self._replicated_start],
                self._sent.view(-1),
                self._local_sizes,
                self._owned_sizes_by_rank,
                group=self._channel,
            )
        return self._local

    def sort(self, ids: LocalIds) -> tuple[SortedIds, SortedIds]:
        """Sort the ids for the updates: of this rank's tables, and of its copies."""
        return self._owned.sort(ids.owned), self._replicated.sort(ids.replicated)

    def send_back(self, gradients: Tensor) -> Tensor:
        """Send the gradients of what `look_up` returned to the tables' owners: [B * W, T]."""
        if self._ranks.world_size == 1:
            return self._owned_part(gradients)
        dist.all_to_all_single(
            self._returned.view(-1),
            gradients[: self._replicated_start],
            self._owned_sizes_by_rank,
            self._local_sizes,
            group=self._channel,
        )
        return self._returned

    def update(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Update this rank's tables by what `send_back` returned, unless `is_good` [1] is 0."""
        self._owned.update(ids, gradients, is_good)

    def accumulate_replicated(self, ids: SortedIds, gradients: Tensor, is_good: Tensor) -> None:
        """Add the gradients of what `look_up` returned to those of the replicated tables: of this rank's samples."""
        self._replicated_sums.update(ids, self._replicated_part(gradients), is_good)

    def _owned_part(self, local: Tensor) -> Tensor:
        """On one rank: what lies home is what was looked up."""
        return local[: self._replicated_start].view(self._owned.num_samples, -1)[
            :, self._prefix_columns :
        ]

    def _replicated_part(self, local: Tensor) -> Tensor:
        return local[self._replicated_start :].view(self._replicated.num_samples, -1)


def _layout(
    placement: Placement,
    features: Sequence[str],
    embedding_dim: int,
    starts: Sequence[int],
    widths: Sequence[int],
    prefix_columns: int,
    device: torch.device,
) -> EmbeddingLayout:
    """Say where the features lie in a block a rank, followed by one of the replicated tables."""
    replicated = [ColumnShard(part.feature, 0, embedding_dim) for part in placement.replicated]
    position = {feature: index for index, feature in enumerate(features)}
    pieces = []
    for start, width, places in zip(
        starts, widths, [*placement.owned_by_rank, replicated], strict=True
    ):
        columns = accumulate((place.columns for place in places), initial=prefix_columns)
        pieces += [
            LayoutSegment(
                position[place.feature],
                place.first_column,
                place.columns,
                start + column,
                prefix_columns + width,
            )
            for place, column in zip(places, columns, strict=False)
        ]
    return EmbeddingLayout(pieces, len(features), embedding_dim, device, prefix_columns)
