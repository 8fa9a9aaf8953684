"""Lookup and updates of tables by a Triton kernel each, for GPUs; `nn.embedding.embedding_bags` has both in plain torch.

FBGEMM has both as well, but its update takes the learning rate and Adam's step count from the host, so every replay of a
CUDA graph would repeat the captured values. It also sums the gradients of a frequent row with atomic additions. Here every
scalar comes from device memory and every sum has one order, so a step can be replayed and is deterministic.

The update sums the gradients of equal keys. The keys are sorted. A program of one warp walks over a block of `LENGTH`
neighbours, with a few columns per thread, and keeps one running sum. At the end of a run of equal ids the row is updated. A
run that crosses an edge of the block leaves a partial sum, at most two per block. The partial sums, still sorted, are the
next level's input, until every table is one block.

The walk is bound by its instructions and by the latency of its loads. So what is the same for all ids of a block is computed
before it, a row is touched in a branch, and ids come in groups of `GROUP`: their gradients are loaded together, and the rows
that the next group updates are prefetched.

Rows of 16 bits are read as float32 and written with stochastic rounding (`nn.ops.stochastic_rounding`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nn.ops.triton.stochastic_rounding import random_bits, round_stochastically, step_bits


class RowStep(NamedTuple):
    """The numbers that a table optimizer's branch reads beside a row.

    `rate` is the learning rate. `scalars` points to the rate, 1 / (1 - beta ** step) for beta1 and beta2, the factor of
    gradients, L2, and from 5 on the options that the optimizer's `TableRule` names. `rest1` and `rest2` are 1 - beta, computed
    on the host, since single precision keeps four digits only.
    """

    width: Any
    rate: Any
    scalars: Any
    # From here on `settings` of the kernels.
    eps: Any
    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any


class Listed(NamedTuple):
    """Row, first column and factor of each key's gradient, which are not read unless `SOURCE` is `listed`."""

    rows: Any
    columns: Any
    factors: Any


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
    origin,
    of_table,
    listed,
    ONE_HOT: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    SOURCE: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Return the offset of the gradient of the vector that a key's row was looked up for.

    SOURCE is `sum` if every table has one lookup that sums, `one` if every table has one lookup, and `listed` otherwise.
    """
    first_key, hotness, reciprocal, width, column = of_table
    sample = (origin - first_key).to(tl.int32)
    if SOURCE == "listed":
        sample = tl.load(listed.rows + origin)
        column = tl.load(listed.columns + origin)
    elif SOURCE == "one":
        # The hotness of a lookup without pooling is stored as a negative number.
        position = sample
        sample = _quotient(position, tl.abs(hotness), reciprocal, BY_PRODUCT)
        position -= sample * tl.abs(hotness)
        column += tl.where(hotness < 0, position * width, 0)
    elif not ONE_HOT:
        sample = _quotient(sample, hotness, reciprocal, BY_PRODUCT)
    return sample.to(tl.int64) * STRIDE + column


@triton.jit
def _group_keys(keys, first, stop, GROUP: tl.constexpr):
    """Return the keys of a group; -1 behind the block's end."""
    group = ()
    for number in tl.static_range(GROUP):
        group += (tl.load(keys + first + number, mask=first + number < stop, other=-1),)
    return group


@triton.jit
def _group_origins(order, exists, first, stop, LEVEL: tl.constexpr, GROUP: tl.constexpr):
    """Return the positions of a group's keys before sorting; of partial sums, whether they exist."""
    origins = exists if LEVEL > 0 else order
    group = ()
    for number in tl.static_range(GROUP):
        group += (tl.load(origins + first + number, mask=first + number < stop, other=0),)
    return group


@triton.jit
def _prefetch(pointers):
    """Bring what lies at pointers to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_row(table, key, width, STATE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Prefetch a row's weights, or its state; `table` is the pointer of key 0."""
    if STATE == "row":
        _prefetch(table + key)
    elif STATE == "element":
        # An address per 32 bytes of float32, the least that the cache loads; none is behind the row.
        columns = tl.minimum(tl.arange(0, (BLOCK_D + 7) // 8) * 8, width - 1)
        _prefetch(table + key.to(tl.int64) * width + columns)


@triton.jit
def _states_of_table(
    state, state_offset, table_index, base, width, ALIGN: tl.constexpr, STATE: tl.constexpr
):
    """Return the pointer to the state that a row with key 0 would have in a table whose first row has the key `base`."""
    if STATE == "row":
        state += tl.load(state_offset + table_index) - base
    elif STATE == "element":
        state += tl.multiple_of(tl.load(state_offset + table_index) - base * width, ALIGN)
    else:
        tl.static_assert(
            STATE == "none", "a state of a table optimizer has one number per row or per element"
        )
    return state


@triton.jit
def _state_of_row(states, key, offset, column, in_row, STATE: tl.constexpr):
    """Return a row's state, and where it is: a number, or one per column; without a state 0."""
    pointer = states
    state = 0.0
    if STATE == "row":
        pointer += key
        state = tl.load(pointer)
    elif STATE == "element":
        pointer = states + column + offset
        state = tl.load(pointer, mask=in_row, other=0.0)
    return state, pointer


@triton.jit
def _store_state(pointer, state, in_row, STATE: tl.constexpr):
    if STATE == "row":
        tl.store(pointer, state)
    elif STATE == "element":
        tl.store(pointer, state, mask=in_row)


@triton.jit
def _updated_row(
    pointer, states, at, gradient, l2, step, UPDATE: tl.constexpr, STATES: tl.constexpr
):
    """Store a row's states after the optimizer's branch, and return its weights.

    `states`: pointers to both of key 0. `at`: the row's key, its offset, and columns with which of them it has.
    """
    weight = tl.load(pointer, mask=at[3], other=0.0).to(tl.float32)
    state1, pointer1 = _state_of_row(states[0], *at, STATES[0])
    state2, pointer2 = _state_of_row(states[1], *at, STATES[1])
    if l2 is not None:
        gradient += l2 * weight
    weight, state1, state2 = UPDATE(weight, gradient, state1, state2, step)
    _store_state(pointer1, state1, at[3], STATES[0])
    _store_state(pointer2, state2, at[3], STATES[1])
    return weight


@triton.jit
def _segment_update(
    weights,
    state1,
    state2,
    keys,
    order,
    gradients,
    exists,
    sums,
    sums_keys,
    sums_exist,
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
    listed,
    scalars,
    updates_before,
    is_good,
    settings,
    UPDATE: tl.constexpr,
    STATES: tl.constexpr,
    L2: tl.constexpr,
    LEVEL: tl.constexpr,
    ONE_HOT: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
    SOURCE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SLOTS: tl.constexpr,
    PREFETCHES: tl.constexpr,
    ALIGN: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tl.static_assert(UPDATE is not None, "a table optimizer without a branch of this kernel")
    if tl.load(is_good) == 0:
        return
    # A block: its table, its first id and end, and the first id and end of its table.
    block = tl.program_id(0)
    table_index = tl.load(blocks + block)
    start = tl.load(blocks + num_blocks + block)
    stop = tl.load(blocks + 2 * num_blocks + block)
    table_start = tl.load(blocks + 3 * num_blocks + block)
    table_stop = tl.load(blocks + 4 * num_blocks + block)
    # WIDTH is that of all tables, or 0.
    width = WIDTH if WIDTH else tl.multiple_of(tl.load(columns + table_index), ALIGN)
    hot = tl.load(hotness + table_index)
    reciprocal = tl.load(reciprocals + table_index).to(tl.uint32)
    base = tl.load(key_base + table_index)
    first_key_of_table = tl.load(first_keys + table_index)
    first_column = tl.multiple_of(tl.load(out_column + table_index), ALIGN)
    of_table = (first_key_of_table, hot, reciprocal, width, first_column)
    end_key = base + tl.load(num_rows + table_index)
    column = tl.arange(0, BLOCK_D)
    in_row = column < width
    factor = tl.load(factors + table_index)
    if SLOTS:
        # The rows in the slots of a table's arena; negative: its rows are all here.
        start_of_slots = tl.load(slot_start + table_index)
    if touched is not None:
        # The byte of each row, with a thread per key: the walk over them would take a warp each.
        first_touched = touched + tl.load(touched_start + table_index)
        position = start + tl.arange(0, LENGTH)
        is_inside = position < stop
        marked = tl.load(keys + position, mask=is_inside, other=-1)
        # Once per run of equal keys in the block.
        following = tl.load(keys + position + 1, mask=position + 1 < stop, other=-1)
        ends_run = is_inside & (following != marked)
        if BOUNDED:
            ends_run = ends_run & (marked < end_key)
        touched_row = (marked - base).to(tl.int64)
        if SLOTS:
            in_arena = start_of_slots >= 0
            slots = slot_rows + start_of_slots + touched_row
            of_slots = tl.load(slots, mask=ends_run & in_arena, other=0).to(tl.int64)
            touched_row = tl.where(in_arena, of_slots, touched_row)
        tl.store(first_touched + touched_row, 1, mask=ends_run)
    # Pointers of key 0, so that a key needs no more than a product.
    rows = weights + tl.multiple_of(tl.load(weight_offset + table_index) - base * width, ALIGN)
    states1 = _states_of_table(state1, state1_offset, table_index, base, width, ALIGN, STATES[0])
    states2 = _states_of_table(state2, state2_offset, table_index, base, width, ALIGN, STATES[1])

    key_at_start = tl.load(keys + start)
    key_at_end = tl.load(keys + stop - 1)
    is_inner = start > table_start
    from_before = is_inner & (tl.load(keys + start - 1, mask=is_inner, other=-1) == key_at_start)
    is_inner = stop < table_stop
    continues = is_inner & (tl.load(keys + stop, mask=is_inner, other=-1) == key_at_end)
    # Runs that cross an edge leave a partial sum: the block's first run, and its last one if that is another.
    one_run = key_at_start == key_at_end
    leaves_first = from_before | (one_run & continues)
    leaves_last = continues & (one_run == 0)
    tl.store(sums_keys + 2 * block, key_at_start)
    tl.store(sums_keys + 2 * block + 1, key_at_end)
    tl.store(sums_exist + 2 * block, leaves_first.to(tl.int8))
    tl.store(sums_exist + 2 * block + 1, leaves_last.to(tl.int8))
    # Their keys; -2 is none.
    left_first = tl.where(leaves_first, key_at_start, -2)
    left_last = tl.where(leaves_last, key_at_end, -2)

    row_dtype: tl.constexpr = weights.dtype.element_ty
    if row_dtype != tl.float32:
        bits_of_step = step_bits(tl.load(rounding_key + table_index), tl.load(updates_before))
        pair = tl.load(first_pair + table_index)
        rows_before = tl.load(first_row + table_index)
        if SLOTS:
            offset_of_rows = tl.load(slot_offset + table_index)
    rate = tl.load(scalars)
    scale = tl.load(scalars + 3)
    l2 = tl.load(scalars + 4) if L2 else None
    row_step = RowStep(width, rate, scalars, *settings)

    # Keys and origins are loaded one group ahead.
    next_keys = _group_keys(keys, start, stop, GROUP)
    next_origins = _group_origins(order, exists, start, stop, LEVEL, GROUP)
    total = tl.zeros((BLOCK_D,), tl.float32)
    has_gradient = False
    for group in range(LENGTH // GROUP):
        first = start + group * GROUP
        group_keys, origins = next_keys, next_origins
        next_keys = _group_keys(keys, first + GROUP, stop, GROUP)
        all_keys = group_keys + next_keys
        gradients_of_ids = ()
        factors_of_ids = ()
        has_gradients = ()
        for number in tl.static_range(GROUP):
            of_column = gradients + column
            origin, index = origins[number], first + number
            has = index < stop
            if BOUNDED:
                # The last key of a table is that of ids without a row here.
                has = has & (group_keys[number] < end_key)
            factor_of_id = factor
            if LEVEL > 0:
                # A partial sum has its factors already.
                has = has & (origin != 0)
                source = index.to(tl.int64) * STRIDE
            else:
                source = _source(origin, of_table, listed, ONE_HOT, BY_PRODUCT, SOURCE, STRIDE)
                if SOURCE == "listed":
                    factor_of_id = tl.load(listed.factors + origin)
            of_key = of_column + tl.multiple_of(source, ALIGN)
            gradient = tl.load(of_key, mask=has & in_row, other=0.0)
            gradients_of_ids += (gradient,)
            factors_of_ids += (factor_of_id,)
            has_gradients += (has,)
        next_origins = _group_origins(order, exists, first + GROUP, stop, LEVEL, GROUP)
        if PREFETCHES:
            # The last key of this group, and those of the next one but its last, whose run may continue.
            for number in tl.static_range(GROUP - 1, 2 * GROUP - 1):
                key = all_keys[number]
                ends = key != all_keys[number + 1]
                if BOUNDED:
                    ends = ends & (key < end_key)
                if ends:
                    _prefetch_row(rows, key, width, "element", BLOCK_D)
                    _prefetch_row(states1, key, width, STATES[0], BLOCK_D)
                    _prefetch_row(states2, key, width, STATES[1], BLOCK_D)

        for number in tl.static_range(GROUP):
            key = group_keys[number]
            gradient = gradients_of_ids[number].to(tl.float32)
            if LEVEL == 0 and SOURCE != "sum":
                gradient *= factors_of_ids[number]
            total += gradient
            if LEVEL > 0:
                has_gradient = has_gradient | has_gradients[number]
            if key != all_keys[number + 1]:
                leaves = (key == left_first) | (key == left_last)
                updates = leaves == 0
                if BOUNDED:
                    updates = updates & (key < end_key)
                if LEVEL > 0:
                    # Of a run that a level below has updated, only the key is left here.
                    updates = updates & has_gradient
                if leaves:
                    entry = (2 * block + (key == left_last).to(tl.int32)).to(tl.int64)
                    tl.store(sums + entry * BLOCK_D + column, total, mask=in_row)
                if updates:
                    offset = tl.multiple_of(key.to(tl.int64) * width, ALIGN)
                    pointer = rows + column + offset
                    at, states = (key, offset, column, in_row), (states1, states2)
                    weight = _updated_row(
                        pointer, states, at, total * scale, l2, row_step, UPDATE, STATES
                    )
                    if row_dtype != tl.float32:
                        row = (key - base).to(tl.int64)
                        row_of_table = row + rows_before
                        if SLOTS:
                            has_slots = start_of_slots >= 0
                            slot = slot_rows + start_of_slots + row
                            in_slot = tl.load(slot, mask=has_slots, other=0).to(tl.int64)
                            row_of_table = tl.where(
                                has_slots, in_slot - offset_of_rows, row_of_table
                            )
                        bits = random_bits(bits_of_step, row_of_table, pair, column)
                        weight = round_stochastically(weight, bits, row_dtype)
                    tl.store(pointer, weight, mask=in_row)
                total = tl.zeros((BLOCK_D,), tl.float32)
                has_gradient = False


@triton.jit
def _table_update(
    weights,
    state1,
    state2,
    gradients,
    num_rows,
    scalars,
    is_good,
    settings,
    UPDATE: tl.constexpr,
    STATES: tl.constexpr,
    L2: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # A program updates neighbouring rows of a table by a gradient of the same shape.
    if tl.load(is_good) == 0:
        return
    column = tl.arange(0, BLOCK_D)
    in_row = column < WIDTH
    first = tl.program_id(0).to(tl.int64) * ROWS
    rate = tl.load(scalars)
    row_step = RowStep(WIDTH, rate, scalars, *settings)
    l2 = tl.load(scalars + 4) if L2 else None
    gradients_of_rows = ()
    for number in tl.static_range(ROWS):
        has = in_row & (first + number < num_rows)
        pointer = gradients + (first + number) * WIDTH + column
        gradients_of_rows += (tl.load(pointer, mask=has, other=0.0),)
    for number in tl.static_range(ROWS):
        gradient = gradients_of_rows[number]
        # A NaN is no zero either.
        if tl.max((gradient != 0).to(tl.int32), 0) != 0:
            row = first + number
            offset = row * WIDTH
            pointer = weights + offset + column
            at, states = (row, offset, column, in_row), (state1, state2)
            weight = _updated_row(pointer, states, at, gradient, l2, row_step, UPDATE, STATES)
            tl.store(pointer, weight, mask=in_row)
