"""Rows of host memory for a large batch, fetched in the order of their addresses by few large programs.

The GPU's search for the pages of host memory bounds such reads, and finds a page sooner if its neighbour was just found. A lookup
in the order of the samples has the rows of several tables in flight at once.
"""

from collections.abc import Sequence
from math import gcd

import torch
import triton
from torch import Tensor

from nn.ops.triton.served_lookup import _cold_rows
from serving.gpu.tables import DeviceTable, all_places
from serving.gpu.vectors import Vector, on_device

PROGRAMS = 12
ELEMENTS_PER_PROGRAM = 16_384
"""Elements that a program fetches at once."""
WARPS = 32

# P: rows of a padded batch, C: vectors with one id whose table has cold rows


class ColdRows:
    """Fetch of the cold rows of one size of batch, behind the lookup of the hot ones.

    P is `num_rows`.
    """

    def __init__(
        self, vectors: Sequence[Vector], tables: Sequence[DeviceTable], num_rows: int
    ) -> None:
        base = tables[0].hot
        self._base, self._scales, self._num_rows = base, tables[0].scale, num_rows
        self._places = all_places(tables)
        # Keys number the places of all vectors, one vector after another, each vector's as far as its ids go.
        sizes = [vector.table_rows for vector in vectors]
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        dtype = torch.int32 if sum(sizes) < torch.iinfo(torch.int32).max else torch.int64
        self._last_key = torch.iinfo(dtype).max

        x = self._vectors = on_device(vectors, base.device)
        self._first_ids, self._first_places = x.first_id[:, None], x.place_offset[:, None]
        self._hot_rows, self._table_rows = x.hot_rows.int()[:, None], x.table_rows[:, None]
        self._id_stride = vectors[0].id_stride
        self._first_keys = torch.tensor(firsts, dtype=dtype, device=base.device)[:, None]
        self._width = triton.next_power_of_2(max(vector.columns for vector in vectors))
        starts = [(v.cold_offset, v.columns, v.out_column) for v in vectors]
        self._align = gcd(16, *(number for row in starts for number in row))

    def fetch(self, block: Tensor, out: Tensor) -> None:
        """Write the rows of a block's ids that are cold to `out`, [P, T]."""
        samples = torch.arange(self._num_rows, device=block.device) * self._id_stride
        ids = block[self._first_ids + samples]
        # Ids beyond a table would be read as keys of the next one, or from other memory.
        is_row = (ids >= 0) & (ids < self._table_rows)
        places = self._places[self._first_places + torch.where(is_row, ids, 0)]
        is_cold = is_row & (places >= self._hot_rows)
        keys = torch.where(is_cold, places + self._first_keys, self._last_key)
        keys, order = keys.view(-1).sort()
        _cold_rows[(PROGRAMS,)](
            self._base,
            self._base if self._scales is None else self._scales,
            keys,
            order,
            is_cold.sum(),
            out,
            self._vectors,
            self._first_keys,
            self._num_rows,
            out.stride(0),
            HAS_SCALES=self._scales is not None,
            ALIGN=gcd(self._align, out.stride(0)),
            ROWS=max(1, ELEMENTS_PER_PROGRAM // self._width),
            BLOCK_D=self._width,
            num_warps=WARPS,
        )
