"""Lookup of a model that is served, and fetch of rows of host memory: ids as a request has them, rows in both memories.

They read only. Beside `nn.ops.triton.embedding_bag` they take int8 rows with a scale each, and rows whose place is behind a
table's first ones from pinned host memory, over the bus and without a copy of them. A row that its table does not have is
read nowhere and counts as zeros: rows are checked before (`serving.inference.requests`, and when a model is loaded), and a
read elsewhere would end the GPU's context, or give the memory of something else.
"""

import triton
import triton.language as tl

# B: samples, D: columns of a table, T: columns of all lookups
# `vectors`: `serving.gpu.vectors.Vector` with a tensor for each of its fields, which has a number per vector


@triton.jit
def _served_lookup(
    weights,
    scales,
    places,
    ids,
    out,
    vectors,
    is_fetched,
    num_samples,
    out_stride,
    HAS_COLD: tl.constexpr,
    HAS_RAGGED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program computes one vector of some samples. A lookup without pooling has several vectors, of one id each.
    vector = tl.program_id(1)
    width = tl.multiple_of(tl.load(vectors.columns + vector), ALIGN)
    hot = tl.multiple_of(tl.load(vectors.hot_offset + vector), ALIGN)
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = sample < num_samples
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = in_batch[:, None] & (column < width)
    first = tl.load(vectors.first_id + vector) + sample.to(tl.int64) * tl.load(
        vectors.id_stride + vector
    )
    length = tl.where(in_batch, tl.load(vectors.num_ids + vector), 0)
    if HAS_RAGGED:
        starts = tl.load(vectors.first_start + vector)
        is_ragged = in_batch & (starts >= 0)
        begin = tl.load(ids + starts + sample, mask=is_ragged, other=0)
        end = tl.load(ids + starts + sample + 1, mask=is_ragged, other=0)
        first = tl.where(is_ragged, tl.load(vectors.first_id + vector) + begin, first)
        length = tl.where(is_ragged, end - begin, length)
    if HAS_COLD:
        cold = tl.multiple_of(tl.load(vectors.cold_offset + vector), ALIGN)
        rows_here = tl.load(vectors.hot_rows + vector)
        is_complete = tl.load(is_fetched + vector) == 0
        first_place = tl.load(vectors.place_offset + vector)
    rows_in_all = tl.load(vectors.table_rows + vector)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for k in range(tl.max(length, 0)):
        is_id = k < length
        row = tl.load(ids + first + k, mask=is_id, other=0).to(tl.int64)
        is_id = is_id & (row >= 0) & (row < rows_in_all)
        if HAS_COLD:
            has_places = is_id & (rows_here < rows_in_all)
            place = tl.load(places + first_place + row, mask=has_places, other=0)
            row = tl.where(has_places, place.to(tl.int64), row)
        offset = row * width
        if HAS_COLD:
            offset += tl.multiple_of(tl.where(row < rows_here, hot, cold), ALIGN)
            # Other cold rows are written over these zeros.
            is_id = is_id & (is_complete | (row < rows_here))
        else:
            offset += hot
        pointer = weights + offset[:, None] + column
        values = tl.load(pointer, mask=is_id[:, None] & inside, other=0.0).to(tl.float32)
        if HAS_SCALES:
            scale = tl.load(
                scales + tl.load(vectors.scale_offset + vector) + row, mask=is_id, other=0.0
            )
            values *= scale[:, None]
        total += values
    divisor = tl.where(tl.load(vectors.is_mean + vector) > 0, tl.maximum(length, 1), 1)
    total /= divisor[:, None].to(tl.float32)
    first_column = tl.multiple_of(tl.load(vectors.out_column + vector), ALIGN)
    pointer = out + (sample.to(tl.int64) * out_stride)[:, None] + first_column + column
    tl.store(pointer, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _cold_rows(
    weights,
    scales,
    keys,
    order,
    counts,
    out,
    vectors,
    first_key,
    num_samples,
    out_stride,
    HAS_SCALES: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.arange(0, BLOCK_D)[None, :]
    count = tl.load(counts)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        exists = index < count
        position = tl.load(order + index, mask=exists, other=0)
        vector = position // num_samples
        sample = position - vector * num_samples
        row = tl.load(keys + index, mask=exists, other=0) - tl.load(first_key + vector)
        row = row.to(tl.int64)
        width = tl.multiple_of(tl.load(vectors.columns + vector), ALIGN)
        offset = row * width + tl.multiple_of(tl.load(vectors.cold_offset + vector), ALIGN)
        inside = exists[:, None] & (column < width[:, None])
        values = tl.load(weights + offset[:, None] + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALES:
            scale_index = tl.load(vectors.scale_offset + vector) + row
            scale = tl.load(scales + scale_index, mask=exists, other=0.0)
            values *= scale[:, None]
        first_column = tl.multiple_of(tl.load(vectors.out_column + vector), ALIGN)
        target = sample * out_stride + first_column
        tl.store(out + target[:, None] + column, values.to(out.dtype.element_ty), mask=inside)
