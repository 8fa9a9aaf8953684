"""Rows of tables from which a kernel takes the vectors of a batch itself, instead of reading what a lookup has copied."""

from dataclasses import dataclass

from torch import Tensor

# B: samples, F: features, D: columns of all tables


@dataclass(frozen=True, slots=True)
class TableRows:
    """Tables of one width and dtype, looked up by one id per sample and feature."""

    weights: Tensor  # of the first feature's table, [rows, D]
    ids: Tensor  # row of every sample, feature after feature
    # per feature the distance of its table from `weights`, in elements, and the position of the first sample's id; int64 [2, F]
    offsets: Tensor
    alignment: int  # largest divisor of all distances and of D, at most 16
