"""Rows to score, as features: numbers and ids that are valid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# B: rows, N: numerical features, H: ids of a row in all features of fixed hotness


@dataclass(frozen=True, slots=True)
class RaggedIds:
    """Ids of a feature whose rows differ in their number, or numbers of their events."""

    values: Tensor  # int64, or float32 numbers, row after row
    lengths: Tensor  # ids per row, int64 [B]

    def part(self, first: int, last: int) -> "RaggedIds":
        """Return the ids of the rows `first` to `last` - 1."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:last].sum())
        return RaggedIds(self.values[begin:end], self.lengths[first:last])


@dataclass(frozen=True, slots=True)
class Rows:
    numerical: Tensor  # float32 [B, N]
    ids: Tensor  # of the features of fixed hotness, in the order of `Manifest.fixed`, int32 or int64 [B, H]; valid row numbers
    ragged: Mapping[str, RaggedIds] = field(default_factory=dict)  # ids of the other features
    keep_rates: Tensor | None = None  # float32 [B]; None if no row has one
    numbers: Mapping[str, RaggedIds] = field(default_factory=dict)  # of events, by name

    def __len__(self) -> int:
        return len(self.numerical)

    def ids_of(self, feature: str, columns: slice) -> Tensor:
        """Return the ids of a feature, row after row; `columns`: its own ones of `ids`, unless it is ragged."""
        ragged = self.ragged.get(feature)
        return self.ids[:, columns].reshape(-1) if ragged is None else ragged.values

    def part(self, first: int, last: int) -> "Rows":
        """Return the rows `first` to `last` - 1."""
        return Rows(
            self.numerical[first:last],
            self.ids[first:last],
            {name: ids.part(first, last) for name, ids in self.ragged.items()},
            None if self.keep_rates is None else self.keep_rates[first:last],
            {name: numbers.part(first, last) for name, numbers in self.numbers.items()},
        )

    @classmethod
    def joined(cls, parts: "Sequence[Rows]") -> "Rows":
        """Return the rows of several requests, one after another; a row without a keep rate has 1."""
        if len(parts) == 1:
            return parts[0]

        def joined(of_parts: Sequence[Mapping[str, RaggedIds]]) -> dict[str, RaggedIds]:
            return {
                name: RaggedIds(
                    torch.cat([part[name].values for part in of_parts]),
                    torch.cat([part[name].lengths for part in of_parts]),
                )
                for name in of_parts[0]
            }

        rates = None
        if any(part.keep_rates is not None for part in parts):
            rates = torch.cat(
                [
                    torch.ones(len(part)) if part.keep_rates is None else part.keep_rates
                    for part in parts
                ]
            )
        return cls(
            torch.cat([part.numerical for part in parts]),
            torch.cat([part.ids for part in parts]),
            joined([part.ragged for part in parts]),
            rates,
            joined([part.numbers for part in parts]),
        )
