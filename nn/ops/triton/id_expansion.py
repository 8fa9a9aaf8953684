"""Id expansion of all features as one Triton kernel; the PyTorch version is in `nn.embedding.id_expansion`."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_BLOCK_H = 16
IDS_PER_PROGRAM = 4096


class IdExpansionKernel:
    """Kernel launcher for some features and a fixed number of samples.

    `tables`: per feature the additional ids of every id, int32 [rows, hotness - 1]; None copies input ids. G is `num_samples`.
    """

    def __init__(
        self, tables: Sequence[Tensor | None], stored: Sequence[int], num_samples: int
    ) -> None:
        base = next(table for table in tables if table is not None)
        additional = [0 if table is None else table.shape[1] for table in tables]
        expanded = [count + more for count, more in zip(stored, additional, strict=True)]
        self._base = base
        # The kernel takes one pointer, so every table is addressed by its distance from the first one, in elements.
        offsets = [
            0 if table is None else (table.data_ptr() - base.data_ptr()) // 4 for table in tables
        ]
        rows = [
            offsets,
            list(accumulate((num_samples * count for count in stored), initial=0))[:-1],
            list(accumulate((num_samples * count for count in expanded), initial=0))[:-1],
            list(stored),
            additional,
        ]
        self._num_ids = num_samples * sum(expanded)
        self._num_samples = num_samples
        sizes = [
            max(triton.next_power_of_2(max(pair)), MIN_BLOCK_H)
            for pair in zip(stored, additional, strict=True)
        ]
        columns = torch.tensor(rows, dtype=torch.int64)
        # Features of few ids have a launch of their own: as wide as the widest one, most threads would have no id.
        self._classes = [
            (block_h, columns[:, torch.tensor(sizes) == block_h].contiguous().to(base.device))
            for block_h in sorted(set(sizes), reverse=True)
        ]

    def __call__(self, ids: Tensor) -> Tensor:
        out = ids.new_empty(self._num_ids)
        for block_h, features in self._classes:
            num_features = features.shape[1]
            block = max(IDS_PER_PROGRAM // block_h, 1)
            _expand_ids[(triton.cdiv(self._num_samples, block), num_features)](
                ids,
                self._base,
                out,
                features,
                num_features,
                self._num_samples,
                BLOCK=block,
                BLOCK_H=block_h,
            )
        return out


@triton.jit
def _expand_ids(
    ids,
    tables,
    out,
    features,
    num_features,
    num_samples,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    feature = features + tl.program_id(1)
    offset = tl.load(feature)
    first_in = tl.load(feature + num_features)
    first_out = tl.load(feature + 2 * num_features)
    stored = tl.load(feature + 3 * num_features)
    additional = tl.load(feature + 4 * num_features)
    sample = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    index = tl.arange(0, BLOCK_H)[None, :]
    inside = (sample < num_samples)[:, None]
    row_out = out + first_out + (sample * (stored + additional))[:, None]
    is_stored = inside & (index < stored)
    stored_ids = tl.load(
        ids + first_in + (sample * stored)[:, None] + index, mask=is_stored, other=0
    )
    tl.store(row_out + index, stored_ids, mask=is_stored)
    # Only one-hot features are expanded, so the first id of a sample is its only one.
    one_hot_id = tl.load(ids + first_in + sample * stored, mask=sample < num_samples, other=0)
    row = one_hot_id.to(tl.int64)
    is_additional = inside & (index < additional)
    additional_ids = tl.load(
        tables + offset + (row * additional)[:, None] + index, mask=is_additional, other=0
    )
    tl.store(row_out + 1 + index, additional_ids.to(out.dtype.element_ty), mask=is_additional)
