"""Merge the pieces of a plan's items into the carrier: the second launch of `prefill_score_select`.

One warp a row. Where an item was cut into many pieces (a short segment over a long prefix:
one for every multiprocessor), only the 16 lists with the best first keys of a row are read.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from ..geometry import ITEM_TOKENS, NUM_HEADS, TOP_K, Layouts
from .launch import I32, I64, INTERPRETED, INTS, LONGS, Kernel, Target, kernel
from .pdl import release_dependents, wait_for_predecessor
from .prefill_share import BLOCKS_OF_UNIT, HEADS, ROWS_OF_ITEM, piece_of
from .ranking import BLOCKS, TOP, ranking_keys, score_bits_of
from .sorting import best16_with, sorted_rows
from .topk_select_prefill import store_carrier_rows

SLOT_KEYS = tl.constexpr(TOP_K * ITEM_TOKENS * NUM_HEADS)
"""int64 keys of a piece's slot in the pool: `[16][rows of an item]`."""
LIST_NUMBERS = tl.constexpr(8192)
"""More lists than an item may have, and more than it has on any device: a multiprocessor has four at most."""
LISTS = tl.constexpr(2)
"""Lists of 16 keys that are merged at once."""
FIRST_KEYS = tl.constexpr(32)
"""Lists whose first keys are compared at once."""
WORKERS = tl.constexpr(128)


@triton.jit
def unscored_columns(first, columns, num_valid, force_end, scale, offset):
    """int32 [..., 16]: of the columns from `first` on, all of score -inf, the 16 best, ascending; else -1.

    Of equal scores the lower id is better, so these are the forced ones at the end and the lowest others.
    """
    lane = tl.arange(0, TOP)
    below = tl.minimum(tl.maximum(num_valid, 0), BLOCKS)
    columns = tl.minimum(columns, (tl.maximum(below - offset, 0) + scale - 1) // scale)
    forced = (tl.maximum(num_valid - force_end - offset, 0) + scale - 1) // scale
    at_end = tl.minimum(tl.maximum(columns - tl.maximum(forced, first), 0), TOP)
    column = tl.where((lane < TOP - at_end) | (columns - first <= TOP), first + lane, columns - TOP + lane)
    return tl.where(column < columns, column, -1)


@triton.jit
def _has_piece(work_range, worker, workers, item):
    """Whether workers have a piece of an item."""
    work = tl.load(work_range + worker, mask=worker < workers, other=0)
    begin_item, begin_unit = work & 0xFFFF, (work >> 16) & 0xFFFF
    end_item, end_unit = (work >> 32) & 0xFFFF, (work >> 48) & 0xFFFF
    some = (begin_item != end_item) | (begin_unit != end_unit)
    return some & (begin_item <= item) & ((end_item > item) | ((end_item == item) & (end_unit > 0)))


@triton.jit
def _workers_of(work_range, workers, item):
    """First worker with a piece of an item and one past the last; between are only those without work."""
    begin = workers
    end = tl.zeros_like(workers)
    first = 0
    while first < workers:
        worker = first + tl.arange(0, WORKERS)
        own = _has_piece(work_range, worker, workers, item)
        begin = tl.minimum(begin, tl.min(tl.where(own, worker, workers)))
        end = tl.maximum(end, tl.max(tl.where(own, worker + 1, 0)))
        first += WORKERS
    return begin, end


@triton.jit
def _lists(lists, number, live):
    """Addresses of an item's lists by number, and which of them are there."""
    pool, slots, work_range, workers, item, begin, count, slices, rows = lists
    worker = begin + number // slices
    slot = item + worker
    there = live & (number < count) & (slot < slots)
    there &= _has_piece(work_range, worker, workers, item)
    return pool + slot.to(tl.int64) * SLOT_KEYS + number % slices * rows, there


@triton.jit
def _best_lists(lists, row):
    """[rows, 16]: the lists with the best first keys, or -1; no other list has a key among the 16 best."""
    count = lists[6]
    best = tl.full((row.shape[0], TOP), -1, tl.int64)
    first = 0
    while first < count:
        number = first + tl.arange(0, FIRST_KEYS)
        address, there = _lists(lists, number, number >= 0)
        key = tl.load(address[None, :] + row[:, None], mask=there[None, :], other=-1)
        key = tl.where(key < 0, -1, key * LIST_NUMBERS + number[None, :])
        best = best16_with(best, key)
        first += FIRST_KEYS
    return tl.where(best < 0, -1, best % LIST_NUMBERS).to(tl.int32)


@triton.jit
def _merge_lists(lists, row, best):
    """The 16 best of `best` [rows, 16] and the keys of the rows `row` [rows] in all lists of their item."""
    count = lists[6]
    lane = tl.arange(0, TOP)
    chosen = tl.broadcast_to(lane[None, :], (row.shape[0], TOP))
    if count > TOP:
        chosen = _best_lists(lists, row)
    first = 0
    while (first < count) & (first < TOP):
        wanted = (first + tl.arange(0, LISTS))[None, :, None]
        number = tl.max(tl.where(lane[None, None, :] == wanted, chosen[:, None, :], -1), axis=2)
        address, there = _lists(lists, number, number >= 0)
        address = address[:, :, None] + lane[None, None, :] * ROWS_OF_ITEM + row[:, None, None]
        keys = tl.load(address, mask=there[:, :, None], other=-1)
        best = best16_with(best, tl.reshape(keys, (row.shape[0], LISTS * TOP)))
        first += LISTS
    return best


@kernel(aligned=("pool",), threads=32)
def merge_pieces_kernel(
    qo_lens: INTS,
    qo_starts: INTS,
    work_range: LONGS,
    work_info: LONGS,
    num_valid_pages: INTS,
    pool: LONGS,
    carrier: INTS,
    carrier_head_stride: I64,
    carrier_row_stride: I64,
    batch: I32,
    total_q: I32,
    columns: I32,
    capacity: I32,
    workers: I32,
    slots: I32,
    rows: I32,
    force_begin: I32,
    force_end: I32,
    index_scale: I32,
    index_offset: I32,
    HEADS_AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    item = tl.program_id(0)
    token = tl.program_id(1)
    items = (tl.load(work_range + workers - 1) >> 32) & 0xFFFF
    if item < items:
        word = tl.load(work_info + item, mask=item < capacity, other=0)
        there, segment, first, tokens, units = piece_of(word, item, capacity, (qo_lens, batch))
        start = tl.load(qo_starts + segment, mask=there, other=0).to(tl.int64) + first
        begin, end = _workers_of(work_range, workers, item)
        # As the pieces were cut: a list for each slice of a worker's units where one part has all the rows.
        slices = tl.where(tokens * HEADS <= rows, ROWS_OF_ITEM // rows, 1)
        lists = pool, slots, work_range, workers, item, begin, (end - begin) * slices, slices, rows
        scored = units * BLOCKS_OF_UNIT // index_scale
        head = tl.program_id(2) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
        while token < tokens:
            row = start + token
            if (row >= 0) & (row < total_q):
                num_valid = tl.load(num_valid_pages + row)
                column = unscored_columns(scored, columns, num_valid, force_end, index_scale, index_offset)
                nothing = tl.full((TOP,), float("-inf"), tl.float32)
                block = column * index_scale + index_offset
                key = ranking_keys(nothing, block, num_valid, force_begin, force_end)
                key = tl.where(column < 0, -1, key)[None, :]
                best = sorted_rows(tl.broadcast_to(key, (HEADS_AT_ONCE, TOP)), head >= 0)
                best = _merge_lists(lists, token * HEADS + head, best)
                # A score of this backend is neither NaN nor -0.0, so its key holds its raw bits.
                address = carrier + head * carrier_head_stride + row * carrier_row_stride
                store_carrier_rows(address, best, score_bits_of(best))
            token += tl.num_programs(1)


def heads_at_once() -> int:
    """Rows of a program: one for its one warp, all of a token where the interpreter counts programs."""
    return NUM_HEADS if INTERPRETED else 1


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    for dependent in sorted({False, target.dependent_launch}):
        yield merge_pieces_kernel, (heads_at_once(), dependent)
