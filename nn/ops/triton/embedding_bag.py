"""Lookup and update of many tables as one Triton kernel each, for GPUs; `nn.embedding.embedding_bags` has both in plain torch.

FBGEMM has both as well, but its update takes the learning rate and Adam's step count from the host, so every replay of a
CUDA graph would repeat the captured values. It also sums the gradients of a frequent row with atomic additions. Here every
scalar comes from device memory and every sum has one order, so a step can be replayed and is deterministic.

The update sums the gradients of equal keys. The keys are sorted. A warp reads a block of `LENGTH` neighbours, with a few
columns per thread, and keeps one running sum. At the end of a run of equal ids the row is updated. A run that crosses an
edge of the block leaves a partial sum, at most two per block. The partial sums, still sorted, are the next level's input,
until one block is left.

Rows of 16 bits are read as float32 and written with stochastic rounding (`nn.ops.stochastic_rounding`).
"""

import triton
import triton.language as tl

from nn.ops.triton.stochastic_rounding import random_bits, round_stochastically, step_bits

# G: samples, H: hotness of a lookup, N: total number of ids, K: number of keys (an id and a table that it is looked up in),
# D: columns of a local table, T: columns of all lookups


@triton.jit
def _pooled_lookup(
    weights,
    ids,
    out,
    weight_offset,
    first_id,
    id_stride,
    num_ids,
    factor,
    out_column,
    columns,
    first_start,
    first_row,
    num_rows,
    num_samples,
    out_stride,
    BOUNDED: tl.constexpr,
    IS_MEAN: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program computes one vector of some samples. A lookup without pooling has several vectors, of one id each.
    vector = tl.program_id(1)
    width = tl.multiple_of(tl.load(columns + vector), ALIGN)
    count = tl.load(num_ids + vector)
    table = weights + tl.multiple_of(tl.load(weight_offset + vector), ALIGN)
    sample = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (sample < num_samples)[:, None] & (column < width)
    first = tl.load(first_id + vector) + sample.to(tl.int64) * tl.load(id_stride + vector)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if BOUNDED:
        # Ids may have no row here. A ragged lookup has no `num_ids`, but a position of starts, which lengths follow.
        starts = tl.load(first_start + vector)
        in_batch = sample < num_samples
        is_ragged = in_batch & (starts >= 0)
        begin = tl.load(ids + starts + sample, mask=is_ragged, other=0).to(tl.int64)
        length = tl.load(ids + starts + num_samples + sample, mask=is_ragged, other=0)
        first = tl.where(is_ragged, tl.load(first_id + vector) + begin, first)
        length = tl.where(is_ragged, length, tl.where(in_batch, count, 0))
        rows_before = tl.load(first_row + vector)
        rows_here = tl.load(num_rows + vector)
        for k in range(tl.max(length, 0)):
            row = tl.load(ids + first + k, mask=k < length, other=-1).to(tl.int64) - rows_before
            is_here = (row >= 0) & (row < rows_here)
            pointer = table + (row * width)[:, None] + column
            total += tl.load(pointer, mask=is_here[:, None] & inside, other=0.0).to(tl.float32)
        if IS_MEAN:
            # Of a ragged mean; the factor of another lookup stands below.
            is_ragged_mean = is_ragged & (tl.load(num_ids + vector) < 0)
            divisor = tl.where(is_ragged_mean, tl.maximum(length, 1), 1)
            total /= divisor[:, None].to(tl.float32)
    else:
        for k in range(count):
            row = tl.load(ids + first + k, mask=sample < num_samples, other=0).to(tl.int64)
            pointer = table + (row * width)[:, None] + column
            total += tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    total *= tl.load(factor + vector)
    first_column = tl.multiple_of(tl.load(out_column + vector), ALIGN)
    pointer = out + (sample.to(tl.int64) * out_stride)[:, None] + first_column + column
    tl.store(pointer, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quotient(number, divisor, reciprocal, BY_PRODUCT: tl.constexpr):
    """Return number // divisor, BY_PRODUCT with 2 ** 32 / divisor, rounded up: one instruction instead of twenty."""
    if BY_PRODUCT:
        product = tl.umulhi(number.to(tl.uint32), reciprocal).to(tl.int32)
        return tl.where(divisor == 1, number, product)
    return number // divisor


@triton.jit
def _source(
    order,
    index,
    inside,
    first_key,
    hotness,
    reciprocal,
    width,
    stride,
    out_column,
    listed_rows,
    listed_columns,
    LEVEL: tl.constexpr,
    ONE_HOT: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    SOURCE: tl.constexpr,
):
    """Return the offset of the gradient of the `index`-th sorted key: that of its vector, or a partial sum.

    SOURCE is `sum` if every table has one lookup that sums, `one` if every table has one lookup, and `listed` otherwise.
    """
    if LEVEL > 0:
        return index.to(tl.int64) * stride
    key = tl.load(order + index, mask=inside, other=0)
    if SOURCE == "listed":
        row = tl.load(listed_rows + key, mask=inside, other=0).to(tl.int64)
        first_column = tl.load(listed_columns + key, mask=inside, other=0)
        return row * stride + first_column
    sample = (key - first_key).to(tl.int32)
    if SOURCE == "one":
        # The hotness of a lookup without pooling is stored as a negative number.
        position = sample
        sample = _quotient(position, tl.abs(hotness), reciprocal, BY_PRODUCT)
        position -= sample * tl.abs(hotness)
        first_column = out_column + tl.where(hotness < 0, position * width, 0)
        return sample.to(tl.int64) * stride + first_column
    if not ONE_HOT:
        sample = _quotient(sample, hotness, reciprocal, BY_PRODUCT)
    return sample.to(tl.int64) * stride + out_column


@triton.jit
def _listed_factor(order, index, inside, listed_factors):
    """Return the factor of the gradient of the `index`-th sorted key."""
    key = tl.load(order + index, mask=inside, other=0)
    return tl.load(listed_factors + key, mask=inside, other=0.0)


@triton.jit
def _state_of_table(state, state_offset, table_index, ALIGN: tl.constexpr, STATE: tl.constexpr):
    """Return the pointer to the state of a table's first row."""
    if STATE == "row":
        state += tl.load(state_offset + table_index)
    elif STATE == "element":
        state += tl.multiple_of(tl.load(state_offset + table_index), ALIGN)
    else:
        tl.static_assert(
            STATE == "none", "a state of a table optimizer has one number per row or per element"
        )
    return state


@triton.jit
def _state_pointer(state, row, offset, updates, inside, STATE: tl.constexpr):
    """Return the pointer to a row's state, and the mask for loads and stores."""
    mask = updates
    if STATE == "row":
        state += row
    elif STATE == "element":
        state = state[:, None] + offset
        mask = inside
    return state, mask


@triton.jit
def _mark_rows(
    touched,
    touched_start,
    keys,
    start,
    stop,
    base,
    end_key,
    slot_rows,
    start_of_slots,
    BOUNDED: tl.constexpr,
    SLOTS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Set the byte of each row of a block's keys, with a thread per key: the walk over them would take a warp each."""
    position = start[:, None] + tl.arange(0, LENGTH)[None, :]
    is_inside = position < stop[:, None]
    key = tl.load(keys + position, mask=is_inside, other=-1)
    # Once per run of equal keys in the block.
    following = tl.load(keys + position + 1, mask=position + 1 < stop[:, None], other=-1)
    ends = is_inside & (following != key)
    if BOUNDED:
        ends = ends & (key < end_key[:, None])
    row = (key - base[:, None]).to(tl.int64)
    if SLOTS:
        has_slots = start_of_slots[:, None] >= 0
        slot = slot_rows + start_of_slots[:, None] + row
        row = tl.where(has_slots, tl.load(slot, mask=ends & has_slots, other=0).to(tl.int64), row)
    tl.store(touched + touched_start[:, None] + row, 1, mask=ends)


@triton.jit
def _any_row(mask, WARPS: tl.constexpr):
    """Return whether to compute what is masked: a program of one warp skips it where its only row is masked off."""
    if WARPS > 1:
        return True
    return tl.max(mask.to(tl.int32), 0) != 0


@triton.jit
def _segment_update(
    weights,
    state1,
    state2,
    keys,
    order,
    gradients,
    counts,
    sums,
    sums_keys,
    sums_counts,
    blocks,
    num_blocks,
    weight_offset,
    state1_offset,
    state2_offset,
    key_base,
    first_keys,
    out_column,
    columns,
    hotness,
    reciprocals,
    factors,
    rounding_key,
    first_pair,
    first_row,
    num_rows,
    slot_rows,
    slot_start,
    slot_offset,
    touched,
    touched_start,
    listed_rows,
    listed_columns,
    listed_factors,
    gradient_stride,
    scalars,
    updates_before,
    is_good,
    eps,
    beta1,
    rest1,
    beta2,
    rest2,
    UPDATE: tl.constexpr,
    STATE1: tl.constexpr,
    STATE2: tl.constexpr,
    L2: tl.constexpr,
    LEVEL: tl.constexpr,
    ONE_HOT: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    SOURCE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SLOTS: tl.constexpr,
    ALIGN: tl.constexpr,
    WARPS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tl.static_assert(UPDATE is not None, "a table optimizer without a branch of this kernel")
    if tl.load(is_good) == 0:
        return
    # One block per warp: its table, its first id and end, and the first id and end of its table.
    block = tl.program_id(0) * WARPS + tl.arange(0, WARPS)
    exists = block < num_blocks
    table_index = tl.load(blocks + block, mask=exists, other=0)
    start = tl.load(blocks + num_blocks + block, mask=exists, other=0)
    stop = tl.load(blocks + 2 * num_blocks + block, mask=exists, other=0)
    table_start = tl.load(blocks + 3 * num_blocks + block, mask=exists, other=0)
    table_stop = tl.load(blocks + 4 * num_blocks + block, mask=exists, other=0)
    width = tl.load(columns + table_index)
    hot = tl.load(hotness + table_index)
    reciprocal = tl.load(reciprocals + table_index).to(tl.uint32)
    base = tl.load(key_base + table_index)
    table_first_key = tl.load(first_keys + table_index)
    if SOURCE == "one":
        factor = tl.load(factors + table_index)[:, None]
    if BOUNDED:
        # The last key of a table is that of ids without a row here.
        end_key = base + tl.load(num_rows + table_index)
        rows_before = tl.load(first_row + table_index)
    first_column = tl.multiple_of(tl.load(out_column + table_index), ALIGN)
    table = tl.multiple_of(tl.load(weight_offset + table_index), ALIGN)
    column = tl.arange(0, BLOCK_D)[None, :]
    in_row = column < tl.multiple_of(width[:, None], [1, ALIGN])

    if touched is not None:
        _mark_rows(
            touched,
            tl.load(touched_start + table_index),
            keys,
            start,
            stop,
            base,
            end_key if BOUNDED else base,
            slot_rows,
            tl.load(slot_start + table_index) if SLOTS else base,
            BOUNDED,
            SLOTS,
            LENGTH,
        )

    state1 = _state_of_table(state1, state1_offset, table_index, ALIGN, STATE1)
    state2 = _state_of_table(state2, state2_offset, table_index, ALIGN, STATE2)

    first_key = tl.load(keys + start, mask=exists, other=-1)
    last_key = tl.load(keys + stop - 1, mask=exists, other=-1)
    is_inner = exists & (start > table_start)
    from_before = is_inner & (tl.load(keys + start - 1, mask=is_inner, other=-1) == first_key)
    is_inner = exists & (stop < table_stop)
    continues = is_inner & (tl.load(keys + stop, mask=is_inner, other=-1) == last_key)
    # Runs that cross an edge leave a partial sum: the block's first run, and its last one if that is another.
    one_run = first_key == last_key
    leaves_first = from_before | (one_run & continues)
    leaves_last = continues & (one_run == 0)
    tl.store(sums_keys + 2 * block, first_key, mask=exists)
    tl.store(sums_keys + 2 * block + 1, last_key, mask=exists)
    tl.store(sums_counts + 2 * block, leaves_first.to(tl.int8), mask=exists)
    tl.store(sums_counts + 2 * block + 1, leaves_last.to(tl.int8), mask=exists)

    row_dtype: tl.constexpr = weights.dtype.element_ty
    if row_dtype != tl.float32:
        bits_of_step = step_bits(tl.load(rounding_key + table_index), tl.load(updates_before))
        pair = tl.load(first_pair + table_index)[:, None]
        if SLOTS:
            # The rows in the slots of a table's arena; negative: its rows are all here.
            start_of_slots = tl.load(slot_start + table_index)
            offset_of_rows = tl.load(slot_offset + table_index)
    rate = tl.load(scalars)
    scale = tl.load(scalars + 3)
    if L2:
        l2 = tl.load(scalars + 4)
    total = tl.zeros((WARPS, BLOCK_D), tl.float32)
    has_gradient = exists
    # Loads run one id ahead of the sum, so that the next gradient does not wait for an update's memory accesses.
    ahead = exists
    next_key = first_key
    next_counts = ahead
    if LEVEL > 0:
        has_gradient = exists & (start < 0)
        next_counts = tl.load(counts + start, mask=ahead, other=0) != 0
    source = _source(
        order,
        start,
        ahead,
        table_first_key,
        hot,
        reciprocal,
        width,
        gradient_stride,
        first_column,
        listed_rows,
        listed_columns,
        LEVEL,
        ONE_HOT,
        BY_PRODUCT,
        SOURCE,
    )
    if LEVEL == 0 and SOURCE == "listed":
        next_factor = _listed_factor(order, start, ahead, listed_factors)
    gradient_pointer = gradients + tl.multiple_of(source[:, None], [1, ALIGN]) + column
    if BOUNDED:
        next_counts = next_counts & (next_key < end_key)
    next_gradient = tl.load(gradient_pointer, mask=next_counts[:, None] & in_row, other=0.0)
    for step in range(LENGTH):
        here, key, gradient = ahead, next_key, next_gradient
        # A partial sum has its factors already.
        if LEVEL == 0 and SOURCE == "one":
            gradient = gradient.to(tl.float32) * factor
        if LEVEL == 0 and SOURCE == "listed":
            gradient = gradient.to(tl.float32) * next_factor[:, None]
        if LEVEL > 0:
            has_gradient = has_gradient | next_counts
        following = start + step + 1
        ahead = following < stop
        next_key = tl.load(keys + following, mask=ahead, other=-1)
        next_counts = ahead
        if LEVEL > 0:
            next_counts = tl.load(counts + following, mask=ahead, other=0) != 0
        source = _source(
            order,
            following,
            ahead,
            table_first_key,
            hot,
            reciprocal,
            width,
            gradient_stride,
            first_column,
            listed_rows,
            listed_columns,
            LEVEL,
            ONE_HOT,
            BY_PRODUCT,
            SOURCE,
        )
        if LEVEL == 0 and SOURCE == "listed":
            next_factor = _listed_factor(order, following, ahead, listed_factors)
        gradient_pointer = gradients + tl.multiple_of(source[:, None], [1, ALIGN]) + column
        if BOUNDED:
            next_counts = next_counts & (next_key < end_key)
        next_gradient = tl.load(gradient_pointer, mask=next_counts[:, None] & in_row, other=0.0)

        total += gradient.to(tl.float32)
        ends = here & (next_key != key)
        is_first = key == first_key
        is_last = key == last_key
        at_first = ends & is_first & leaves_first
        at_last = ends & is_last & leaves_last
        entry = (2 * block + at_last.to(tl.int32)).to(tl.int64)
        leaves = at_first | at_last
        if _any_row(leaves, WARPS):
            tl.store(
                sums + entry[:, None] * BLOCK_D + column,
                total,
                mask=leaves[:, None] & in_row,
            )

        # A run that did not cross an edge was updated a level below; only its key is left here.
        updates = ends & ~(is_first & from_before) & ~(is_last & continues) & has_gradient
        if BOUNDED:
            updates = updates & (key < end_key)
        if _any_row(updates, WARPS):
            inside = updates[:, None] & in_row
            row = (key - base).to(tl.int64)
            offset = tl.multiple_of((row * width)[:, None], [1, ALIGN]) + column
            pointer = weights + table[:, None] + offset
            weight = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
            sum_of_row = total * scale
            if L2:
                sum_of_row += l2 * weight
            pointer1, mask1 = _state_pointer(state1, row, offset, updates, inside, STATE1)
            pointer2, mask2 = _state_pointer(state2, row, offset, updates, inside, STATE2)
            weight = UPDATE(
                weight,
                sum_of_row,
                pointer1,
                mask1,
                pointer2,
                mask2,
                width,
                rate,
                scalars,
                eps,
                beta1,
                rest1,
                beta2,
                rest2,
            )
            if row_dtype != tl.float32:
                row_of_table = row
                if BOUNDED:
                    row_of_table += rows_before
                if SLOTS:
                    has_slots = start_of_slots >= 0
                    in_slot = tl.load(
                        slot_rows + start_of_slots + row, mask=updates & has_slots, other=0
                    )
                    row_of_table = tl.where(
                        has_slots, in_slot.to(tl.int64) - offset_of_rows, row_of_table
                    )
                weight = round_stochastically(
                    weight, random_bits(bits_of_step, row_of_table, pair, column), row_dtype
                )
            tl.store(pointer, weight, mask=inside)
        total = tl.where(ends[:, None], 0.0, total)
        if LEVEL > 0:
            has_gradient = has_gradient & ~ends
