"""The expansion of all features' ids as one Triton kernel; `nn.embedding.id_expansion` has it in plain torch."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32
LEAST_FURTHER = 16


class Launch:
    """Launches the kernel for some features and a fixed number of samples.

    Args:
        tables: further ids of each id, int32 [rows, hotness - 1], for each feature; None copies what arrives.
        stored: ids a sample that arrive, for each feature.
        num_samples: G.
    """

    def __init__(
        self, tables: Sequence[Tensor | None], stored: Sequence[int], num_samples: int
    ) -> None:
        some = [table for table in tables if table is not None]
        device = some[0].device
        further = [0 if table is None else table.shape[1] for table in tables]
        final = [count + more for count, more in zip(stored, further, strict=True)]
        self._base = some[0]
        # Distance from the first table in elements; the tables have memory of their own each.
        offsets = [
            0 if table is None else (table.data_ptr() - some[0].data_ptr()) // 4 for table in tables
        ]
        rows = [
            offsets,
            list(accumulate((num_samples * each for each in stored), initial=0))[:-1],
            list(accumulate((num_samples * each for each in final), initial=0))[:-1],
            list(stored),
            further,
        ]
        self._features = torch.tensor(rows, dtype=torch.int64, device=device)
        self._num_ids = num_samples * sum(final)
        self._num_samples = num_samples
        self._block_h = max(triton.next_power_of_2(max(max(further), *stored)), LEAST_FURTHER)

    def __call__(self, ids: Tensor) -> Tensor:
        """See `nn.embedding.id_expansion.IdExpansion`."""
        out = ids.new_empty(self._num_ids)
        num_features = self._features.shape[1]
        _expand_ids[(triton.cdiv(self._num_samples, BLOCK), num_features)](
            ids,
            self._base,
            out,
            self._features,
            num_features,
            self._num_samples,
            BLOCK=BLOCK,
            BLOCK_H=self._block_h,
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
    further = tl.load(feature + 4 * num_features)
    sample = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    which = tl.arange(0, BLOCK_H)[None, :]
    inside = (sample < num_samples)[:, None]
    row_out = out + first_out + (sample * (stored + further))[:, None]
    kept = inside & (which < stored)
    arrived = tl.load(ids + first_in + (sample * stored)[:, None] + which, mask=kept, other=0)
    tl.store(row_out + which, arrived, mask=kept)
    # Only what arrives one a sample is expanded.
    one = tl.load(ids + first_in + sample * stored, mask=sample < num_samples, other=0).to(tl.int64)
    more = inside & (which < further)
    found = tl.load(tables + offset + (one * further)[:, None] + which, mask=more, other=0)
    tl.store(row_out + 1 + which, found.to(out.dtype.element_ty), mask=more)
