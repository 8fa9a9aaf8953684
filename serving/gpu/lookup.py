"""Launches of `nn.ops.triton.served_lookup` for the tables of a model and one size of batch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import gcd

import torch
import triton
from torch import Tensor

from nn.ops.triton.served_lookup import _served_lookup
from serving.gpu.inputs import InputLayout
from serving.gpu.tables import DeviceTable
from serving.manifest import Manifest

ELEMENTS_PER_PROGRAM = 4096
SAMPLES_PER_PROGRAM = (32, 256)
"""Fewest and most."""
SORTED_FROM = 4096
"""Samples from which those of tables with cold rows are looked up in the order of their ids."""


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector of a lookup; `nn.ops.triton.served_lookup` has its fields as arguments.

    Attributes:
        hot_offset: of the first row from the base, in elements.
        cold_offset: likewise of row 0, as if the cold rows began with it.
        hot_rows: number of hot rows.
        scale_offset: of the first scale from the base.
        columns: D.
        is_mean: whether the sum is divided by the number of ids.
        first_id: position of the first sample's first id in the block.
        id_stride: from a sample to the next.
        num_ids: ids whose rows are added.
        first_start: position of the starts of a ragged feature; otherwise -1.
        out_column: first column in the embeddings.
        first_place: position of the first sample in the order of samples; -1 if they are taken as they come.
    """

    hot_offset: int
    cold_offset: int
    hot_rows: int
    scale_offset: int
    columns: int
    is_mean: int
    first_id: int
    id_stride: int
    num_ids: int
    first_start: int
    out_column: int
    first_place: int


class ServedLookup:
    """Lookup of all tables of a model for one size of batch.

    Args:
        manifest: of the model.
        tables: on the device.
        layout: of the batch.
    """

    def __init__(
        self, manifest: Manifest, tables: Sequence[DeviceTable], layout: InputLayout
    ) -> None:
        self._layout = layout
        ordered = _ordered_columns(manifest, tables, layout)
        self._ordered = torch.tensor(ordered, dtype=torch.int64, device=tables[0].hot.device)
        vectors = _vectors(manifest, tables, layout, ordered)
        widths = sorted({triton.next_power_of_2(vector.columns) for vector in vectors})
        self._classes = [
            _WidthClass(
                tables,
                [v for v in vectors if triton.next_power_of_2(v.columns) == width],
                width,
            )
            for width in widths
        ]

    def __call__(self, block: Tensor, out: Tensor) -> None:
        """Write the embeddings of a block's ids to `out`, [P, T]."""
        order = self._ordered
        if len(order):
            ids = self._layout.ids(block).index_select(1, self._ordered)
            order = ids.t().contiguous().sort(dim=1).indices
        for width_class in self._classes:
            width_class.look_up(block, order, out, self._layout.num_rows)


class _WidthClass:
    """Vectors of tables whose columns have the same next power of two: one launch."""

    def __init__(
        self, tables: Sequence[DeviceTable], vectors: Sequence[_Vector], width: int
    ) -> None:
        self._base, self._width = tables[0].hot, width
        self._scales = self._base if tables[0].scale is None else tables[0].scale
        self._has_scales = tables[0].scale is not None
        self._has_cold = any(table.cold is not None for table in tables)
        self._has_order = any(vector.first_place >= 0 for vector in vectors)
        self._has_ragged = any(vector.first_start >= 0 for vector in vectors)
        self._arguments = [
            torch.tensor(
                [getattr(vector, field.name) for vector in vectors],
                dtype=torch.int64,
                device=self._base.device,
            )
            for field in fields(_Vector)
        ]
        numbers = [(v.hot_offset, v.cold_offset, v.columns, v.out_column) for v in vectors]
        self._align = gcd(16, *(number for row in numbers for number in row))

    def look_up(self, block: Tensor, order: Tensor, out: Tensor, num_rows: int) -> None:
        """Look up these vectors."""
        fewest, most = SAMPLES_PER_PROGRAM
        samples = min(max(ELEMENTS_PER_PROGRAM // self._width, fewest), most)
        grid = (triton.cdiv(num_rows, samples), len(self._arguments[0]))
        _served_lookup[grid](
            self._base,
            self._scales,
            block,
            order,
            out,
            *self._arguments,
            num_rows,
            out.stride(0),
            HAS_COLD=self._has_cold,
            HAS_ORDER=self._has_order,
            HAS_RAGGED=self._has_ragged,
            HAS_SCALES=self._has_scales,
            ALIGN=gcd(self._align, out.stride(0)),
            BLOCK=samples,
            BLOCK_D=self._width,
        )


def _ordered_columns(
    manifest: Manifest, tables: Sequence[DeviceTable], layout: InputLayout
) -> list[int]:
    """Return the columns of ids by which samples are sorted: those of single ids in tables with cold rows."""
    if layout.num_rows < SORTED_FROM:
        return []
    places = manifest.id_places()
    return [
        column
        for table in tables
        if table.cold is not None
        for name in table.declared.features
        if name in places
        for column in range(places[name].start, places[name].stop)
        if table.declared.pooling == "none" or places[name].stop - places[name].start == 1
    ]


def _vectors(
    manifest: Manifest,
    tables: Sequence[DeviceTable],
    layout: InputLayout,
    ordered: Sequence[int],
) -> list[_Vector]:
    """Return the vectors of all lookups, in the order of their columns."""
    places, vectors, out_column = manifest.id_places(), [], 0
    base, scales = tables[0].hot, tables[0].scale
    for table in tables:
        columns, hot_rows = table.declared.columns, len(table.hot)
        hot = _elements(base, table.hot)
        cold = hot if table.cold is None else _elements(base, table.cold) - hot_rows * columns
        scale = 0
        if scales is not None and table.scale is not None:
            scale = _elements(scales, table.scale)
        for name in table.declared.features:
            place = places.get(name)
            # Position of the first id, ids from a sample to the next, ids per vector, position of the starts.
            if place is None:
                bags = [(layout.first_value, 0, 0, layout.first_start(name))]
            elif table.declared.pooling == "none":
                columns_of_ids = range(place.start, place.stop)
                bags = [(layout.first_id + i, layout.num_ids, 1, -1) for i in columns_of_ids]
            else:
                hotness = place.stop - place.start
                bags = [(layout.first_id + place.start, layout.num_ids, hotness, -1)]
            is_mean = int(table.declared.pooling == "mean")
            for bag in bags:
                column_of_ids = bag[0] - layout.first_id
                is_ordered = bag[2] == 1 and column_of_ids in ordered
                order = ordered.index(column_of_ids) * layout.num_rows if is_ordered else -1
                vectors.append(
                    _Vector(hot, cold, hot_rows, scale, columns, is_mean, *bag, out_column, order)
                )
                out_column += columns
    return vectors


def _elements(base: Tensor, tensor: Tensor) -> int:
    """Return the elements from the beginning of a tensor to that of another, in any memory that the device reads."""
    return (tensor.data_ptr() - base.data_ptr()) // base.element_size()
