"""Columns of one number per row that are no features: labels, the weight, the keep rate and scores of teachers."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dataloading.dataset.split_files import expect

Channel = StrEnum("Channel", "label weight keep_rate teacher")
"""Channels of a spec whose columns hold one number per row."""
# The first is that of a binary label.
LABEL_DTYPES = ("bool", "float16", "float32")
BINARY = np.dtype(bool)
LABEL_DTYPE = np.dtype(np.uint8)
"""Stored dtype of a binary label."""


@dataclass(frozen=True, slots=True)
class RowColumn:
    name: str  # of the column, unique among all features
    # what the number is. A row has one number per label, at most one weight and at most one keep
    # rate, and any scores of teachers.
    channel: Channel = Channel.label
    # `bool` for a binary label, 0 or 1; float16 or float32 for a regression label; float32 for others
    dtype: np.dtype = BINARY

    def __post_init__(self) -> None:
        allowed = LABEL_DTYPES if self.channel is Channel.label else ("float32",)
        good = self.dtype.name in allowed
        expect(good, f"feature_spec.{self.name}.dtype", self.dtype.name, " or ".join(allowed))

    @classmethod
    def of(cls, name: str, channel: Channel) -> "RowColumn":
        return cls(name, channel, np.dtype(np.float32))

    @property
    def is_binary(self) -> bool:
        return self.dtype == BINARY

    @property
    def stored(self) -> np.dtype:
        """Dtype of the numbers in a file: a byte for a binary label, else `dtype`, little-endian."""
        return LABEL_DTYPE if self.is_binary else self.dtype.newbyteorder("<")

    @property
    def default(self) -> int:
        """The number of a row whose split has no such column; a label or score of such a row must not be used."""
        return 0 if self.channel in (Channel.label, Channel.teacher) else 1

    @property
    def wanted(self) -> str:
        """The numbers that it may hold, for messages."""
        if self.channel is Channel.weight:
            return "a finite number that is not negative"
        if self.channel is Channel.keep_rate:
            return "a number above 0 and at most 1"
        if self.channel is Channel.teacher:
            return "a number from 0 to 1"
        return "0 or 1" if self.is_binary else f"a finite number of {self.dtype.name}"

    def wrong(self, values: np.ndarray) -> np.ndarray:
        if self.is_binary:
            return (values != 0) & (values != 1)
        with np.errstate(over="ignore", under="ignore"):
            stored = values.astype(self.dtype, copy=False)
        finite = np.isfinite(stored)
        if self.channel is Channel.weight:
            return ~(finite & (values >= 0))
        if self.channel is Channel.keep_rate:
            return ~(finite & (stored > 0) & (values <= 1))
        if self.channel is Channel.teacher:
            return ~(finite & (values >= 0) & (values <= 1))
        return ~finite

    def has_wrong(self, stored: np.ndarray) -> bool:
        """Return whether any number of a file, in the dtype `stored`, is one that it may not hold."""
        if self.is_binary and stored.dtype == LABEL_DTYPE:
            return int(stored.max(initial=0)) > 1  # several times as fast
        return bool(self.wrong(stored).any())
