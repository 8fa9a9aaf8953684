"""Rows to score, as features: numbers and ids that are valid."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.inference.tables import Ids

# B: rows, N: numerical features


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to score.

    Attributes:
        numerical: float32 [B, N].
        ids: by categorical feature; valid row numbers of its tables.
        keep_rates: float32 [B]; None if no row has one.
    """

    numerical: Tensor
    ids: Mapping[str, Ids]
    keep_rates: Tensor | None = None

    def __len__(self) -> int:
        return len(self.numerical)

    def part(self, first: int, last: int) -> "Rows":
        """Return the rows `first` to `last` - 1."""
        return Rows(
            self.numerical[first:last],
            {name: _part(ids, len(self), first, last) for name, ids in self.ids.items()},
            None if self.keep_rates is None else self.keep_rates[first:last],
        )

    @classmethod
    def joined(cls, parts: "list[Rows]") -> "Rows":
        """Return the rows of several requests, one after another; a row without a keep rate has 1."""
        if len(parts) == 1:
            return parts[0]
        ids = {
            name: Ids(
                torch.cat([part.ids[name].values for part in parts]),
                None
                if first.lengths is None
                else torch.cat([_lengths(part.ids[name]) for part in parts]),
            )
            for name, first in parts[0].ids.items()
        }
        rates = None
        if any(part.keep_rates is not None for part in parts):
            rates = torch.cat(
                [
                    torch.ones(len(part)) if part.keep_rates is None else part.keep_rates
                    for part in parts
                ]
            )
        return cls(torch.cat([part.numerical for part in parts]), ids, rates)


def _lengths(ids: Ids) -> Tensor:
    assert ids.lengths is not None
    return ids.lengths


def _part(ids: Ids, num_rows: int, first: int, last: int) -> Ids:
    if ids.lengths is None:
        hotness = len(ids.values) // num_rows
        return Ids(ids.values[first * hotness : last * hotness])
    begin, end = int(ids.lengths[:first].sum()), int(ids.lengths[:last].sum())
    return Ids(ids.values[begin:end], ids.lengths[first:last])
