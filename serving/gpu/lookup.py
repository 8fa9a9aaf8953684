"""Lookup of the tables of a served model for one size of batch: launches of `nn.ops.triton.served_lookup`."""

from collections.abc import Sequence
from math import gcd

import torch
import triton
from torch import Tensor

from nn.ops.triton.served_lookup import _served_lookup
from serving.gpu.cold_rows import ColdRows
from serving.gpu.inputs import InputLayout
from serving.gpu.tables import DeviceTable, all_places
from serving.gpu.vectors import Vector, on_device, vectors_of
from serving.manifest import Manifest

ELEMENTS_PER_PROGRAM = 4096
SAMPLES_PER_PROGRAM = (32, 256)
"""Fewest and most."""
FETCHED_FROM = 4096
"""Samples from which cold rows are fetched in the order of their addresses, behind the others' lookup."""


class ServedLookup:
    def __init__(
        self, manifest: Manifest, tables: Sequence[DeviceTable], layout: InputLayout
    ) -> None:
        self._num_rows = layout.num_rows
        vectors = vectors_of(manifest, tables, layout)
        are_fetched = layout.num_rows >= FETCHED_FROM
        fetched = [v for v in vectors if are_fetched and v.has_one_cold_row]
        self._cold = ColdRows(fetched, tables, layout.num_rows) if fetched else None
        widths = sorted({triton.next_power_of_2(vector.columns) for vector in vectors})
        self._classes = [_WidthClass(tables, vectors, fetched, width) for width in widths]

    def __call__(self, block: Tensor, out: Tensor) -> None:
        """Write the embeddings of a block's ids to `out`, [P, T]."""
        for width_class in self._classes:
            width_class.look_up(block, out, self._num_rows)
        if self._cold is not None:
            self._cold.fetch(block, out)


class _WidthClass:
    """Those of `vectors` whose columns have the next power of two `width`: one launch."""

    def __init__(
        self,
        tables: Sequence[DeviceTable],
        vectors: Sequence[Vector],
        fetched: Sequence[Vector],
        width: int,
    ) -> None:
        vectors = [v for v in vectors if triton.next_power_of_2(v.columns) == width]
        self._base, self._width = tables[0].hot, width
        self._scales = self._base if tables[0].scale is None else tables[0].scale
        self._has_scales = tables[0].scale is not None
        self._has_cold = any(table.cold is not None for table in tables)
        self._places = all_places(tables)
        self._has_ragged = any(vector.first_start >= 0 for vector in vectors)
        self._vectors = on_device(vectors, self._base.device)
        are_fetched = [int(vector in fetched) for vector in vectors]
        self._are_fetched = torch.tensor(are_fetched, device=self._base.device)
        numbers = [(v.hot_offset, v.cold_offset, v.columns, v.out_column) for v in vectors]
        self._align = gcd(16, *(number for row in numbers for number in row))

    def look_up(self, block: Tensor, out: Tensor, num_rows: int) -> None:
        fewest, most = SAMPLES_PER_PROGRAM
        samples = min(max(ELEMENTS_PER_PROGRAM // self._width, fewest), most)
        grid = (triton.cdiv(num_rows, samples), len(self._are_fetched))
        _served_lookup[grid](
            self._base,
            self._scales,
            self._places,
            block,
            out,
            self._vectors,
            self._are_fetched,
            num_rows,
            out.stride(0),
            HAS_COLD=self._has_cold,
            HAS_RAGGED=self._has_ragged,
            HAS_SCALES=self._has_scales,
            ALIGN=gcd(self._align, out.stride(0)),
            BLOCK=samples,
            BLOCK_D=self._width,
        )
