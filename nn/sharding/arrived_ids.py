"""Ids of some features as they arrive, made ready for lookups."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dataloading.dataset.batch_layout import IdCount
from nn.embedding.id_blocks import id_blocks, with_positions
from nn.embedding.id_expansion import IdExpansion
from nn.embedding.local_tables import LocalTable
from nn.sharding.placement import ColumnShard, RankTables

# B: rows of a rank


class ArrivedIds:
    """Ids of some features as they arrive, made ready for lookups: expanded, or with the positions of ragged ones.

    Features are in the order of their ids, ragged ones last; `counts` are before expansion. The ids of `num_sources` ranks lie
    one after the other. `blocks` has the position of each feature's ids in the result.
    """

    def __init__(
        self,
        tables: RankTables,
        features: Sequence[str],
        counts: Mapping[str, IdCount],
        num_sources: int,
        batch_size: int,
    ) -> None:
        num_samples = num_sources * batch_size
        self._num_sources, self._batch_size = num_sources, batch_size
        fixed = [feature for feature in features if counts[feature].hotness]
        stored = {feature: counts[feature].hotness for feature in fixed}
        self._sizes = [num_samples * hotness for hotness in stored.values()]
        self._capacities = [counts[name].capacity for name in features[len(fixed) :]]
        self._expand = IdExpansion(fixed, num_samples, stored, tables.expansions)
        expanded = {}
        for feature, hotness in stored.items():
            if feature in tables.expansions:
                hotness *= 1 + tables.expansions[feature].shape[1]
            expanded[feature] = IdCount(hotness, batch_size * hotness)
        ragged = {feature: counts[feature] for feature in features[len(fixed) :]}
        self.blocks = id_blocks(expanded | ragged, num_sources, batch_size)

    def repeat_first_row(self, arrived: Tensor, num_valid: int) -> None:
        """Give padding rows, which come last, the ids of the first row; those of ragged features have none."""
        for ids in arrived[: sum(self._sizes)].split(self._sizes):
            rows = ids.view(self._num_sources * self._batch_size, -1)
            rows[num_valid:] = rows[0]

    def __call__(self, arrived: Tensor) -> Tensor:
        """Return the ids in the order of `blocks`."""
        if not self._capacities:
            return self._expand(arrived)
        num_fixed = sum(self._sizes)
        ragged = with_positions(
            arrived[num_fixed:], self._capacities, self._num_sources, self._batch_size
        )
        return torch.cat([self._expand(arrived[:num_fixed]), ragged])


def features_of(
    tables: Iterable[LocalTable | ColumnShard], counts: Mapping[str, IdCount]
) -> list[str]:
    """Return the features of tables, each once, in the order in which their ids are sent: ragged ones last."""
    features = dict.fromkeys(lookup.feature for table in tables for lookup in table.lookups)
    return sorted(features, key=lambda feature: not counts[feature].hotness)
