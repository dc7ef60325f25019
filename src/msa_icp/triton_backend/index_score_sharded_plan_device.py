"""Plan a prefill window on its device (contract, section 7; the words: ../prefill_plan.py).

One program: first every segment writes the words of its items, then every worker's bound finds the item that
holds it. A window of few segments takes a few microseconds, one of 65536 segments a thousand rounds.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import block_columns, prefill_items
from .launch import I32, INTS, LONGS, Kernel, Target, kernel
from .prefill_share import BLOCKS_OF_UNIT, KEYS_OF_BLOCK, TOKENS_OF_ITEM

SEGMENTS = tl.constexpr(64)
INDICES = tl.constexpr(64)
"""Segments, and items of each, that one round writes."""
BOUNDS = tl.constexpr(256)
ITEMS = tl.constexpr(32)
"""Bounds of shares, and items, that one round compares."""


@triton.jit
def _write_items(qo_lens, kv_lens, qo_offset, work_info, batch, capacity, columns):
    """Write the words of all items; returns their number."""
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
        index = 0
        while index < tl.max(count):
            own = (index + tl.arange(0, INDICES))[None, :]
            item = begin[:, None] + own
            tokens = tl.minimum((own + 1) * TOKENS_OF_ITEM, length[:, None])
            seen = tl.minimum(keys[:, None].to(tl.int64), position[:, None] + tokens)
            blocks = tl.maximum(seen + (KEYS_OF_BLOCK - 1), 0) // KEYS_OF_BLOCK
            blocks = tl.minimum(tl.maximum(blocks, 1), columns)
            units = (blocks + (BLOCKS_OF_UNIT - 1)) // BLOCKS_OF_UNIT
            word = segment[:, None].to(tl.int64) | (own.to(tl.int64) << 16) | (units << 32)
            tl.store(work_info + item, word, mask=(own < count[:, None]) & (item < capacity))
            index += INDICES
        items = tl.minimum(items + tl.sum(count), capacity)
        first += SEGMENTS
    return items


@triton.jit
def _units_of(work_info, item, items):
    return (tl.load(work_info + item, mask=item < items, other=0) >> 32).to(tl.int32)


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
):
    items = _write_items(qo_lens, kv_lens, qo_offset, work_info, batch, capacity, columns)
    tl.debug_barrier()  # what other threads wrote is read from here on

    total = tl.full((), 0, tl.int32)
    first = 0
    while first < items:
        total += tl.sum(_units_of(work_info, first + tl.arange(0, BOUNDS), items))
        first += BOUNDS

    # Share s begins, and share s - 1 ends, at unit s * total // workers: behind all items that end there
    # or before.
    first_bound = 0
    while first_bound <= workers:
        share = first_bound + tl.arange(0, BOUNDS)
        bound = (share.to(tl.int64) * total // workers).to(tl.int32)
        passed = tl.zeros((BOUNDS,), tl.int32)
        before = tl.zeros((BOUNDS,), tl.int32)
        units_up_to = tl.full((), 0, tl.int32)
        first = 0
        while first < items:
            item = first + tl.arange(0, ITEMS)
            units = _units_of(work_info, item, items)
            up_to = units_up_to + tl.cumsum(units, axis=0)
            behind = (up_to[None, :] <= bound[:, None]) & (item < items)[None, :]
            passed += tl.sum(behind.to(tl.int32), axis=1)
            before = tl.maximum(before, tl.max(tl.where(behind, up_to[None, :], 0), axis=1))
            units_up_to += tl.sum(units)
            first += ITEMS
        # A word's low half is where its share begins, its high half where it ends.
        place = passed | ((bound - before) << 16)
        tl.store(work_range + 2 * share, place, mask=share < workers)
        tl.store(work_range + 2 * share - 1, place, mask=(share > 0) & (share <= workers))
        first_bound += BOUNDS


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
        (),
        qo_segment_lens.device,
    )


def variants(target: Target) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """The one variant."""
    yield plan_kernel, ()
