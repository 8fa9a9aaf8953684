"""Mapping of ids to slots on a GPU: six launches per group of tables, and the host waits for none of them.

The results are those of `SlotMap.map`, slot by slot. Two searches replace sorting: a bit per row says which rows are missing, and
counting bits gives them distinct and in ascending order; counting free slots from the hand on gives the slots. What is counted
stays on the device, so buffers have room for as many rows as the batch has ids. Each launch needs all of the one before.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nn.tiers.slot_map import DeviceMoves, SlotMap, TierIds

BLOCK = 1024
"""Ids, slots or positions per step of a program."""
BLOCK_WORDS = 64
"""Words of 32 rows per step of a program that lists them."""
MOST_WORD_PROGRAMS = 2048
MOST_RING_PROGRAMS = 1024

# Positions in the counts of `DeviceMoves`.
_FETCHED = tl.constexpr(0)
_RETURNED = tl.constexpr(1)
_MISSING = tl.constexpr(2)
_LACKING = tl.constexpr(3)
_IDS = tl.constexpr(4)
NUM_COUNTS = 8


class _Ids(NamedTuple):
    """Ids of a batch, and `TierIds` by its names."""

    ids: Tensor
    positions: Tensor
    first: Tensor
    end: Tensor
    offset: Tensor


class _Map(NamedTuple):
    """Parts of `SlotMap`, by its names."""

    slot_of_row: Tensor
    pins: Tensor
    num_fixed: int


class _Search(NamedTuple):
    """Inputs of both searches: bits of missing rows in words, and the ring; `found` is counted per program."""

    is_missing: Tensor
    num_words: int
    words_per_program: int
    pins: Tensor
    num_ring: int
    positions_per_program: int
    hand: Tensor
    found: Tensor
    word_programs: int


class SlotKernels:
    """Launcher of the mapping for one arena, instead of the map's own `map`; `counts`, int32 [2, NUM_COUNTS], are per turn."""

    def __init__(self, slot_map: SlotMap, counts: Tensor) -> None:
        self._map, self._counts = slot_map, counts
        device = counts.device
        self._num_words = triton.cdiv(slot_map.num_rows, 32)
        self._is_missing = torch.zeros(self._num_words, dtype=torch.int32, device=device)
        # The next position, and the one after the rows of the batch that is mapped.
        self._hand = torch.zeros(2, dtype=torch.int32, device=device)
        self._words_per_program, self._word_programs = _parts(
            self._num_words, BLOCK_WORDS, MOST_WORD_PROGRAMS
        )
        self._positions_per_program, ring_programs = _parts(
            slot_map.num_ring, BLOCK, MOST_RING_PROGRAMS
        )
        self._programs = self._word_programs + ring_programs
        self._found = torch.zeros(self._programs, dtype=torch.int32, device=device)
        self._buffers = [torch.empty(3, 0, dtype=torch.int32, device=device) for _ in counts]

    def release(self, released: int, trained: int, turn: int) -> None:
        """Let the rows of some batches leave, as `SlotMap.release`, and set counts to 0; call it before every `map`."""
        slot_map = self._map
        slot_map.are_fixed_changed |= trained > 0
        _release[(triton.cdiv(slot_map.num_ring, BLOCK),)](
            slot_map.pins,
            slot_map.is_changed,
            self._counts[turn],
            slot_map.num_ring,
            released,
            trained,
            NUM_COUNTS=NUM_COUNTS,
            BLOCK=BLOCK,
        )

    def map(self, ids: Tensor, of_group: TierIds, pin: int, turn: int) -> DeviceMoves:
        """Turn ids into slots in place, as `SlotMap.map`, -1 without a free one; the turn's next call overwrites the moves."""
        slot_map, count, counts = self._map, len(of_group.positions), self._counts[turn]
        if self._buffers[turn].shape[1] < count:
            self._buffers[turn] = self._buffers[turn].new_empty(3, count)
        rows, slots, returned = self._buffers[turn]
        moves = DeviceMoves(rows, slots, returned, counts)
        x = _Ids(ids, of_group.positions, of_group.first, of_group.end, of_group.offset)
        of_map = _Map(slot_map.slot_of_row, slot_map.pins, slot_map.num_fixed)
        grid = (triton.cdiv(count, BLOCK),)
        _find_missing[grid](x, count, of_map, self._is_missing, counts, pin, BLOCK=BLOCK)
        search = _Search(
            self._is_missing,
            self._num_words,
            self._words_per_program,
            slot_map.pins,
            slot_map.num_ring,
            self._positions_per_program,
            self._hand,
            self._found,
            self._word_programs,
        )
        _count_found[(self._programs,)](search, BLOCK=BLOCK)
        _list_found[(self._programs,)](
            search,
            moves,
            PROGRAMS=self._programs,
            ALL=triton.next_power_of_2(self._programs),
            BLOCK=BLOCK,
            BLOCK_WORDS=BLOCK_WORDS,
        )
        _take_slots[grid](
            moves, self._hand, of_map, slot_map.row_of_slot, slot_map.is_changed, BLOCK=BLOCK
        )
        _to_slots[grid](x, count, of_map, pin, BLOCK=BLOCK)
        return moves


def _parts(size: int, block: int, most: int) -> tuple[int, int]:
    """Return elements per program, a multiple of `block`, and programs, at most `most`."""
    blocks = max(triton.cdiv(size, block), 1)
    per_program = triton.cdiv(blocks, most) * block
    return per_program, max(triton.cdiv(size, per_program), 1)


@triton.jit(do_not_specialize=["released", "trained"])
def _release(
    pins,
    is_changed,
    counts,
    num_ring,
    released,
    trained,
    NUM_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.program_id(0) == 0:
        tl.store(counts + tl.arange(0, NUM_COUNTS), tl.zeros([NUM_COUNTS], tl.int32))
    if released != 0:
        position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        exists = position < num_ring
        bits = tl.load(pins + position, mask=exists, other=0).to(tl.int32)
        tl.store(is_changed + position, 1, mask=exists & ((bits & trained) != 0))
        is_released = exists & ((bits & released) != 0)
        tl.store(pins + position, (bits & ~released).to(tl.uint8), mask=is_released)


@triton.jit
def _slots_of(x, count, of_map, BLOCK: tl.constexpr):
    """Return positions, whether they have a row here, rows, and their slots, -1 without one."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < count
    position = tl.load(x.positions + index, mask=exists, other=0)
    number = tl.load(x.ids + position, mask=exists, other=-1)
    is_here = exists & (number >= tl.load(x.first + index, mask=exists, other=0))
    is_here = is_here & (number < tl.load(x.end + index, mask=exists, other=0))
    row = (number + tl.load(x.offset + index, mask=exists, other=0)).to(tl.int32)
    slot = tl.load(of_map.slot_of_row + row, mask=is_here, other=-1)
    return position, exists, is_here, row, slot


@triton.jit
def _pin(of_map, slot, pin):
    """Keep rows from leaving. Those that do so at once write the same value."""
    is_in_ring = slot >= of_map.num_fixed
    pin_of_slot = of_map.pins + (slot - of_map.num_fixed)
    bits = tl.load(pin_of_slot, mask=is_in_ring, other=0).to(tl.int32)
    tl.store(pin_of_slot, (bits | pin).to(tl.uint8), mask=is_in_ring)


@triton.jit(do_not_specialize=["count", "pin"])
def _find_missing(x, count, of_map, is_missing, counts, pin, BLOCK: tl.constexpr):
    _, _, is_here, row, slot = _slots_of(x, count, of_map, BLOCK)
    _pin(of_map, slot, pin)
    lacks_slot = is_here & (slot < 0)
    bit = tl.full([BLOCK], 1, tl.int32) << (row % 32)
    tl.atomic_or(is_missing + row // 32, bit, mask=lacks_slot, sem="relaxed")
    tl.atomic_add(counts + _MISSING, tl.sum(lacks_slot.to(tl.int32)), sem="relaxed")
    tl.atomic_add(counts + _IDS, tl.sum(is_here.to(tl.int32)), sem="relaxed")


@triton.jit
def _num_bits(word):
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _words(x, index, stop):
    return tl.load(x.is_missing + index, mask=index < stop, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _free_positions(x, hand, index, stop):
    """Return positions of the ring, counted from the hand on, and whether they are free."""
    position = hand.to(tl.int64) + index
    position = tl.where(position >= x.num_ring, position - x.num_ring, position)
    is_free = tl.load(x.pins + position, mask=index < stop, other=1) == 0
    return position.to(tl.int32), is_free.to(tl.int32)


@triton.jit
def _count_found(x, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    if program < x.word_programs:
        start = program * x.words_per_program
        stop = tl.minimum(start + x.words_per_program, x.num_words)
        bits = tl.zeros([BLOCK], tl.int32)
        for begin in range(start, stop, BLOCK):
            bits += _num_bits(_words(x, begin + tl.arange(0, BLOCK), stop))
        tl.store(x.found + program, tl.sum(bits))
    else:
        start = (program - x.word_programs) * x.positions_per_program
        stop = tl.minimum(start + x.positions_per_program, x.num_ring)
        first = tl.load(x.hand)
        positions = tl.zeros([BLOCK], tl.int32)
        for begin in range(start, stop, BLOCK):
            _, is_free = _free_positions(x, first, begin + tl.arange(0, BLOCK), stop)
            positions += is_free
        tl.store(x.found + program, tl.sum(positions))


@triton.jit
def _list_found(
    x,
    moves,
    PROGRAMS: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    others = tl.arange(0, ALL)
    of_others = tl.load(x.found + others, mask=others < PROGRAMS, other=0)
    is_of_words = others < x.word_programs
    needed = tl.sum(tl.where(is_of_words, of_others, 0))
    if program == 0:
        free = tl.sum(tl.where(is_of_words, 0, of_others))
        tl.store(moves.counts + _FETCHED, tl.minimum(needed, free))
        tl.store(moves.counts + _LACKING, tl.maximum(needed - free, 0))
    before = tl.sum(tl.where(others < program, of_others, 0))
    if program < x.word_programs:
        start = program * x.words_per_program
        stop = tl.minimum(start + x.words_per_program, x.num_words)
        position, end = before, before + tl.load(x.found + program)
        # Behind its last row, a program has nothing more to list.
        while (start < stop) & (position < end):
            index = start + tl.arange(0, BLOCK_WORDS)
            word = _words(x, index, stop)
            in_word = _num_bits(word)
            in_words = tl.sum(in_word)
            if in_words > 0:
                bit = tl.arange(0, 32).to(tl.uint32)[None, :]
                is_set = ((word[:, None] >> bit) & 1) != 0
                one = tl.full([1, 32], 1, tl.uint32)
                lower = word[:, None] & ((one << bit) - 1)
                earlier = position + tl.cumsum(in_word, 0) - in_word
                row = index[:, None] * 32 + bit.to(tl.int32)
                tl.store(moves.rows + earlier[:, None] + _num_bits(lower), row, mask=is_set)
                tl.store(x.is_missing + index, tl.zeros([BLOCK_WORDS], tl.int32), mask=index < stop)
                position += in_words
            start += BLOCK_WORDS
    else:
        start = (program - x.word_programs) * x.positions_per_program
        stop = tl.minimum(start + x.positions_per_program, x.num_ring)
        position = before - needed
        first = tl.load(x.hand)
        while (start < stop) & (position < needed):
            index = start + tl.arange(0, BLOCK)
            of_ring, is_free = _free_positions(x, first, index, stop)
            number = position + tl.cumsum(is_free, 0) - is_free
            is_taken = (is_free > 0) & (number < needed)
            tl.store(moves.slots + number, of_ring, mask=is_taken)
            # The hand follows the last one taken; all others still read it.
            after = tl.where(of_ring + 1 == x.num_ring, 0, of_ring + 1)
            next_hand = x.hand + 1 + tl.zeros([BLOCK], tl.int32)
            tl.store(next_hand, after, mask=is_taken & (number == needed - 1))
            position += tl.sum(is_free)
            start += BLOCK


@triton.jit
def _take_slots(moves, hand, of_map, row_of_slot, is_changed, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(hand, tl.load(hand + 1))
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < tl.load(moves.counts + _FETCHED)
    row = tl.load(moves.rows + index, mask=exists, other=0)
    position = tl.load(moves.slots + index, mask=exists, other=0)
    slot = position + of_map.num_fixed
    # No row that leaves is one that enters: those are not on the device.
    leaving = tl.load(row_of_slot + slot, mask=exists, other=0)
    returns = exists & (tl.load(is_changed + position, mask=exists, other=0) != 0)
    tl.store(of_map.slot_of_row + leaving, -1, mask=exists)
    tl.store(of_map.slot_of_row + row, slot, mask=exists)
    tl.store(row_of_slot + slot, row, mask=exists)
    tl.store(is_changed + position, 0, mask=exists)
    tl.store(moves.slots + index, slot, mask=exists)
    tl.store(moves.returned + index, tl.where(returns, leaving, -1), mask=exists)
    tl.atomic_add(moves.counts + _RETURNED, tl.sum(returns.to(tl.int32)), sem="relaxed")


@triton.jit(do_not_specialize=["count", "pin"])
def _to_slots(x, count, of_map, pin, BLOCK: tl.constexpr):
    position, exists, _, _, slot = _slots_of(x, count, of_map, BLOCK)
    _pin(of_map, slot, pin)
    tl.store(x.ids + position, slot.to(x.ids.dtype.element_ty), mask=exists)
