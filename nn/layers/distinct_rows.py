"""The distinct rows of a table that a batch needs, for a dense component that takes them itself, without pooling."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import embedding

# B: samples, C: capacity for the ids of a feature, R: capacity for distinct rows, D: columns


@dataclass(frozen=True, slots=True)
class DistinctRows:
    """The distinct rows of a table that this rank's batch needs, and where the ids of one of its features find theirs.

    Rows are in no particular order, and which of them are used changes from batch to batch: work on rows must not depend on
    their position or number. Those that no id points to are zeros, and their gradient is ignored.

    Attributes:
        rows: [R + 1, D], differentiable; the last one is zeros. Features of one table have the same.
        positions: row of each id, [C]; R behind the last id.
        starts: position of each sample's first id in `positions`, [B].
        lengths: ids of each sample, [B].
        hotness: ids of every sample; 0 if they differ.
    """

    rows: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    hotness: int = 0

    def by_id(self) -> Tensor:
        """Return the row of each id, [C, D]; the backward pass adds up the gradients of a row in one order."""
        return embedding(self.positions, self.rows)

    def by_sample(self) -> Tensor:
        """Return the row of each sample's first id, [B, D]."""
        return embedding(self.positions.index_select(0, self.starts), self.rows)

    def of_samples(self, first: int, end: int) -> "DistinctRows":
        """Return the same of some samples; all positions are kept where samples differ in their number of ids."""
        lengths, hotness = self.lengths[first:end], self.hotness
        if not hotness:
            return replace(self, starts=self.starts[first:end], lengths=lengths)
        positions = self.positions[hotness * first : hotness * end]
        return replace(
            self, positions=positions, starts=self.starts[: end - first], lengths=lengths
        )
