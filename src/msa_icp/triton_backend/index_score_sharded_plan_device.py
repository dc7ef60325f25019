"""Plan a prefill window on its device (contract, section 7; the words: ../prefill_plan.py).

One program, in three steps: every segment writes the words and the costs of its items, the costs are added
up, and every worker's bound finds the item that holds it.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import COST_TOKENS, START_COST, UNIT_COST, Layouts, block_columns, prefill_items
from .launch import I32, INTS, LONGS, Kernel, Target, kernel
from .prefill_share import BLOCKS_OF_UNIT, KEYS_OF_BLOCK, TOKENS_OF_ITEM

ITEMS = tl.constexpr(2048)
"""Items whose costs are added up in one round."""
BOUNDS = tl.constexpr(512)
"""Bounds of shares that are looked for at once."""
SHAPES = ((64, 64), (512, 8))
"""Segments, and items of each, that one round writes: for few segments and for many."""
COST_OF_UNIT = tl.constexpr(UNIT_COST)
TOKENS_OF_COST = tl.constexpr(COST_TOKENS)
COST_OF_START = tl.constexpr(START_COST)


@triton.jit
def _write_items(
    qo_lens, kv_lens, qo_offset, work_info, costs, batch, capacity, columns, SEGMENTS: tl.constexpr,
    INDICES: tl.constexpr,
):  # fmt: skip
    """Write the words of all items to `work_info` and what each costs to `costs`; returns their number."""
    items = tl.full((), 0, tl.int32)
    first = 0
    while first < batch:
        segment = first + tl.arange(0, SEGMENTS)
        there = segment < batch
        length = tl.maximum(tl.load(qo_lens + segment, mask=there, other=0), 0)
        keys = tl.load(kv_lens + segment, mask=there, other=0)
        position = tl.load(qo_offset + segment, mask=there, other=0).to(tl.int64)
        count = tl.minimum(length // TOKENS_OF_ITEM + (length % TOKENS_OF_ITEM > 0), capacity)
        begin = items + tl.cumsum(count, axis=0) - count
        longest = tl.max(count)
        index = 0
        while index < longest:
            own = (index + tl.arange(0, INDICES))[None, :]
            item = begin[:, None] + own
            tokens = tl.minimum((own + 1) * TOKENS_OF_ITEM, length[:, None])
            seen = tl.minimum(keys[:, None].to(tl.int64), position[:, None] + tokens)
            blocks = tl.maximum(seen + (KEYS_OF_BLOCK - 1), 0) // KEYS_OF_BLOCK
            blocks = tl.minimum(tl.maximum(blocks, 1), columns)
            units = (blocks + (BLOCKS_OF_UNIT - 1)) // BLOCKS_OF_UNIT
            word = segment[:, None].to(tl.int64) | (own.to(tl.int64) << 16) | (units << 32)
            fits = (own < count[:, None]) & (item < capacity)
            tl.store(work_info + item, word, mask=fits)
            tokens_of_item = tokens - own * TOKENS_OF_ITEM
            unit_cost = COST_OF_UNIT + (tokens_of_item + (TOKENS_OF_COST - 1)) // TOKENS_OF_COST
            cost = units * unit_cost + tl.where(item > 0, COST_OF_START, 0)
            tl.store(costs + item, cost, mask=fits)
            index += INDICES
        items = tl.minimum(items + tl.sum(count), capacity)
        first += SEGMENTS
    return items


@triton.jit
def _add_up(costs, items):
    """Turn the cost of each item into the cost up to and with it; returns the total."""
    total = tl.full((), 0, tl.int64)
    first = 0
    while first < items:
        item = first + tl.arange(0, ITEMS)
        cost = tl.load(costs + item, mask=item < items, other=0)
        tl.store(costs + item, total + tl.cumsum(cost, axis=0), mask=item < items)
        total += tl.sum(cost)
        first += ITEMS
    return total


@triton.jit
def _write_shares(work_range, workers, work_info, cost_up_to, items, total):
    """Share s begins, and share s - 1 ends, where the cost before it is s * total // workers, or less."""
    first = 0
    while first <= workers:
        share = first + tl.arange(0, BOUNDS)
        bound = share.to(tl.int64) * total // workers
        # How many items end at or before the bound, digit by digit.
        item = tl.zeros((BOUNDS,), tl.int32)
        before = tl.zeros((BOUNDS,), tl.int64)
        step = tl.full((), 1 << 15, tl.int32)
        while step > 0:
            further = item + step
            up_to = tl.load(cost_up_to + further - 1, mask=further <= items, other=0)
            passed = (further <= items) & (up_to <= bound)
            item = tl.where(passed, further, item)
            before = tl.where(passed, up_to, before)
            step = step // 2
        inside = item < items
        units = (tl.load(work_info + item, mask=inside, other=1 << 32) >> 32).to(tl.int32)
        start = tl.where(item > 0, COST_OF_START, 0)
        cost = (tl.load(cost_up_to + item, mask=inside, other=0) - before).to(tl.int32) - start
        spent = tl.maximum((bound - before).to(tl.int32) - start, 0)
        unit = tl.where(inside, spent // tl.maximum(cost // units, 1), 0)
        # A word's low half is where its share begins, its high half where it ends.
        place = item | (unit << 16)
        tl.store(work_range + 2 * share, place, mask=share < workers)
        tl.store(work_range + 2 * share - 1, place, mask=(share > 0) & (share <= workers))
        first += BOUNDS


@kernel(threads=512)
def plan_kernel(
    qo_lens: INTS,
    kv_lens: INTS,
    qo_offset: INTS,
    work_range: INTS,
    work_info: LONGS,
    batch: I32,
    capacity: I32,
    columns: I32,
    workers: I32,
    SEGMENTS: tl.constexpr,
    INDICES: tl.constexpr,
):
    # There are two words an item or more (contract, section 7), and those past the items mean nothing.
    costs = work_info + capacity
    items = _write_items(
        qo_lens, kv_lens, qo_offset, work_info, costs, batch, capacity, columns, SEGMENTS, INDICES
    )
    tl.debug_barrier()  # what other threads wrote is read from here on
    total = _add_up(costs, items)
    tl.debug_barrier()
    _write_shares(work_range, workers, work_info, costs, items, total)


def index_score_sharded_plan_device(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    qo_offset: Tensor,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    packed_work_range: Tensor,
    packed_work_info: Tensor,
    workspace: Tensor,
) -> None:
    """Write the packed words; neither prefix sums nor workspace are needed here."""
    batch = qo_segment_lens.shape[0]
    plan_kernel(
        (1,),
        (
            qo_segment_lens,
            kv_segment_lens,
            qo_offset,
            packed_work_range.view(torch.int32),
            packed_work_info,
            batch,
            prefill_items(total_q, batch),
            block_columns(max_seq_len),
            packed_work_range.shape[0],
        ),
        SHAPES[batch > SHAPES[0][0]],
        qo_segment_lens.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    for shape in SHAPES:
        yield plan_kernel, shape
