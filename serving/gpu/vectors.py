"""Vectors of a lookup: where their rows and ids lie, and where they go."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from nn.ops.addresses import elements_between
from serving.gpu.inputs import InputLayout
from serving.gpu.tables import DeviceTable
from serving.manifest import Manifest


class Vector(NamedTuple):
    """Numbers of a vector, which kernels find by these names."""

    hot_offset: int  # of the first row from the base, in elements
    cold_offset: int  # likewise of row 0, as if the cold rows began with it
    hot_rows: int
    scale_offset: int  # of the first scale from the base
    place_offset: int  # of the first row's place among all places; 0 without places
    columns: int  # D
    is_mean: int  # whether the sum is divided by the number of ids
    first_id: int  # position of the first sample's first id in the block
    id_stride: int  # from a sample to the next
    num_ids: int  # ids whose rows are added
    first_start: int  # position of the starts of a ragged feature; otherwise -1
    out_column: int  # first column in the embeddings
    table_rows: int  # rows of the table, hot and cold

    @property
    def has_one_cold_row(self) -> bool:
        """Return whether it is one row, which may lie in host memory."""
        return self.num_ids == 1 and self.hot_rows < self.table_rows


def vectors_of(
    manifest: Manifest, tables: Sequence[DeviceTable], layout: InputLayout
) -> list[Vector]:
    """Return the vectors of all lookups, in the order of their columns.

    They count from the first table's hot rows, and scales from its scales.
    """
    id_columns, vectors, out_column = manifest.id_slices(), [], 0
    base, scales = tables[0].hot, tables[0].scale
    for table in tables:
        columns, hot_rows = table.declared.columns, len(table.hot)
        hot = elements_between(base, table.hot)
        cold = (
            hot if table.cold is None else elements_between(base, table.cold) - hot_rows * columns
        )
        scale = 0
        if scales is not None and table.scale is not None:
            scale = elements_between(scales, table.scale)
        place = 0 if table.places is None else int(table.places.storage_offset())
        for name in table.declared.features:
            of_feature = id_columns.get(name)
            # Position of the first id, ids from a sample to the next, ids per vector, position of the starts.
            if of_feature is None:
                bags = [(layout.first_value, 0, 0, layout.first_start(name))]
            elif table.declared.pooling == "none":
                columns_of_ids = range(of_feature.start, of_feature.stop)
                bags = [(layout.first_id + i, layout.num_ids, 1, -1) for i in columns_of_ids]
            else:
                hotness = of_feature.stop - of_feature.start
                bags = [(layout.first_id + of_feature.start, layout.num_ids, hotness, -1)]
            is_mean = int(table.declared.pooling == "mean")
            for bag in bags:
                row = (hot, cold, hot_rows, scale, place, columns, is_mean, *bag, out_column)
                vectors.append(Vector(*row, table.declared.rows))
                out_column += columns
    return vectors


def on_device(vectors: Sequence[Vector], device: torch.device) -> Any:
    """Return a `Vector` for kernels: each field is that of all vectors, int64 [V]."""
    columns: Any = (torch.tensor(c, device=device) for c in zip(*vectors, strict=True))
    return Vector(*columns)
