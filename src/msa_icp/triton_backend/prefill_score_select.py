"""Score and select a window in one call (contract, section 7): two launches, no score rows.

The first scores every piece of the plan and keeps, for each of its rows, the best 16 keys so far, sorted, in
the piece's slot of the pool: item + worker, `[16][rows of an item]`. After each step the columns of the
step are sorted and merged into them, unless none is good enough. The second merges the pieces of an item into
the carrier.

A block that no piece scores, behind the units of an item or of a row that belongs to no segment, is still a
candidate of score -inf. Among such blocks the ranking is a matter of ids alone (`unscored_columns`).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="assignment"

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import ITEM_TOKENS, NUM_HEADS, Layouts, ShardLayout, prefill_items, shard_columns
from ..prefill_plan import MSAIcpScorePlan
from .index_score_sharded import plan_arguments
from .launch import BYTES, I32, I64, INTS, LONGS, Kernel, Target, kernel, target_of
from .pdl import wait_for_predecessor
from .prefill_merge import LIST_NUMBERS, SLOT_KEYS, heads_at_once, merge_pieces_kernel, unscored_columns
from .prefill_merge import variants as merge_variants
from .prefill_share import (
    HEADS,
    KEYS_OF_BLOCK,
    ROWS_OF_ITEM,
    SCHEDULE,
    TOKENS_OF_ITEM,
    parts,
    query_rows,
    score_share,
    share_constants,
)
from .ranking import PADDING_BITS, PADDING_ID, TOP, ranking_keys
from .sorting import eight, merged16, sorted8
from .topk_select_publish import IS_READY, READY_AT

STEP_COLUMNS = 8
"""Columns of a step, which are sorted together."""
MERGE_PROGRAMS = 1 << 15
"""Programs of the second launch, about, where items are many and segments long."""


@triton.jit
def _list(sink, place, n):
    """Addresses of the best keys of a part's rows, and whether they are within the pool."""
    pool, slots = sink[0], sink[1]
    item, part = place
    slot = item + tl.program_id(0)
    address = pool + slot.to(tl.int64) * SLOT_KEYS + part * n.shape[0] + n
    # Compared as vectors: Triton's interpreter makes integers of one truth value for all, and 3.9 takes no
    # mask of integers.
    return address, tl.broadcast_to(slot, n.shape) < slots


@triton.jit
def _start(sink, place, n, row, live, last_key):
    """No key yet; the state is how many blocks each row's token has."""
    address, mask = _list(sink, place, n)
    for i in tl.static_range(TOP):
        tl.store(address + i * ROWS_OF_ITEM, tl.full(n.shape, -1, tl.int64), mask=mask)
    tl.debug_barrier()
    return tl.load(sink[2] + row, mask=live, other=0)


@triton.jit
def _keep(sink, num_valid, place, n, row, live, last_key, column, end, maxima):
    """Merge a step's columns into the keys kept."""
    _, _, _, force_begin, force_end, scale, offset = sink
    block = column * scale + offset
    keys = ranking_keys(tl.trans(maxima), block[None, :], num_valid[:, None], force_begin, force_end)
    keys = tl.where((column < end)[None, :], keys, -1)
    # Where there are more threads than rows, several read a row and one of them writes it. What they are
    # asked next, all together, holds each of them until all have read.
    address, mask = _list(sink, place, n)
    kept = ()
    for i in tl.static_range(TOP):
        kept = kept + (tl.load(address + i * ROWS_OF_ITEM, mask=mask, other=-1),)
    if tl.max((tl.max(keys, axis=1) > kept[TOP - 1]).to(tl.int32)) != 0:
        kept = merged16(kept, sorted8(eight(keys)))
        for i in tl.static_range(TOP):
            tl.store(address + i * ROWS_OF_ITEM, kept[i], mask=mask)
    return num_valid


@triton.jit
def _fill_loose_rows(
    qo_lens, qo_starts, num_valid_pages, carrier, head_stride, row_stride, batch, total_q, columns,
    search_step, force_end, scale, offset,
):  # fmt: skip
    """Write the rows that belong to no segment: 64 at a time, a program every so many."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    first = program.to(tl.int64) * TOKENS_OF_ITEM
    while first < total_q:
        row = first + tl.arange(0, TOKENS_OF_ITEM)
        # The last segment that begins at or before a row is the only one that can have it.
        segment = tl.zeros((TOKENS_OF_ITEM,), tl.int32)
        step = search_step
        while step > 0:
            further = segment + step
            start = tl.load(qo_starts + further, mask=further < batch, other=0)
            segment = tl.where((further < batch) & (start <= row), further, segment)
            step = step // 2
        within = row - tl.load(qo_starts + segment)
        loose = ((within < 0) | (within >= tl.load(qo_lens + segment))) & (row < total_q)
        if tl.max(loose.to(tl.int32)) != 0:
            num_valid = tl.load(num_valid_pages + row, mask=loose, other=0)
            column = unscored_columns(0, columns, num_valid[:, None], force_end, scale, offset)
            ids = tl.where(column < 0, PADDING_ID, column * scale + offset)
            word = row[:, None] * row_stride + tl.arange(0, TOP)[None, :]
            for head in tl.static_range(HEADS):
                address = carrier + head * head_stride + word
                tl.store(address, tl.full(ids.shape, PADDING_BITS, tl.int32), mask=loose[:, None])
                tl.store(address + TOP, ids, mask=loose[:, None])
                tl.store(carrier + head * head_stride + row * row_stride + READY_AT, IS_READY, mask=loose)
        first += tl.num_programs(0) * tl.num_programs(1) * TOKENS_OF_ITEM


@kernel(aligned=("q", "k", "pool"), threads=SCHEDULE.threads)
def select_pieces_kernel(
    q: BYTES,
    k: BYTES,
    block_table: INTS,
    qo_lens: INTS,
    kv_lens: INTS,
    qo_starts: INTS,
    qo_offset: INTS,
    work_range: LONGS,
    work_info: LONGS,
    num_valid_pages: INTS,
    pool: LONGS,
    carrier: INTS,
    pages: I32,
    page_pitch: I64,
    table_columns: I32,
    table_stride: I64,
    batch: I32,
    total_q: I32,
    columns: I32,
    capacity: I32,
    first_key: I32,
    slots: I32,
    carrier_head_stride: I64,
    carrier_row_stride: I64,
    search_step: I32,
    force_begin: I32,
    force_end: I32,
    index_offset: I32,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_STEP: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    STEP_PAGES: tl.constexpr,
    STAGES: tl.constexpr,
    REGROUP: tl.constexpr,
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    SCALE: tl.constexpr = PAGE // KEYS_OF_BLOCK
    # The programs' ends release dependents: while some work, those of the merge would all be placed on the
    # multiprocessors that have no share or are done with it.
    wait_for_predecessor(DEPENDENT)
    _fill_loose_rows(
        qo_lens, qo_starts, num_valid_pages, carrier, carrier_head_stride, carrier_row_stride, batch, total_q,
        (columns + SCALE - 1) // SCALE, search_step, force_end, SCALE, index_offset,
    )  # fmt: skip
    tensors = q, k, block_table, qo_lens, kv_lens, qo_starts, qo_offset, work_range, work_info
    sizes = pages, page_pitch, table_columns, table_stride, batch, total_q, columns, capacity, first_key
    sink = pool, slots, num_valid_pages, force_begin, force_end, SCALE, index_offset
    score_share(
        tensors,
        sizes,
        sink,
        _start,
        _keep,
        PAGE,
        ROWS,
        KEY_STEP,
        QUERY_ROWS,
        STEP_PAGES,
        STAGES,
        REGROUP,
        E4M3,
    )


def prefill_score_select(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan: MSAIcpScorePlan,
    num_valid_pages: Tensor,
    pool: Tensor,
    carrier: Tensor,
    *,
    layout: ShardLayout,
    force_begin_blocks: int,
    force_end_blocks: int,
    enable_pdl: bool,
) -> None:
    """Write every row of `carrier`: two launches.

    Raises:
        ValueError: the plan has more workers than the merge can tell lists of.
    """
    target = target_of(q.device)
    rows = query_rows(plan.max_query_len)
    workers = plan.packed_work_range.shape[0]
    if workers * parts(rows) > LIST_NUMBERS.value:
        most = LIST_NUMBERS.value // parts(rows)
        name = "plan.packed_work_range.shape[0]"
        raise ValueError(f"{name}: must be at most {most} workers for backend='triton', was {workers}")
    tensors, sizes = plan_arguments(q, k, block_table, plan)
    dependent = enable_pdl and target.dependent_launch
    items = prefill_items(plan.total_q, plan.batch)
    slots = pool.shape[0] // (8 * SLOT_KEYS.value)
    keys = pool.view(torch.int64)
    select_pieces_kernel(
        (workers, parts(rows)),
        (
            *tensors,
            num_valid_pages,
            keys,
            carrier,
            *sizes,
            layout.key_position(0, 0),
            slots,
            carrier.stride(0),
            carrier.stride(1),
            (1 << (plan.batch - 1).bit_length()) // 2,
            force_begin_blocks,
            force_end_blocks,
            layout.index_offset,
        ),
        (*share_constants(layout, rows, STEP_COLUMNS, target), dependent),
        q.device,
    )
    tokens = min(ITEM_TOKENS, plan.max_query_len, max(1, MERGE_PROGRAMS // items))
    merge_pieces_kernel(
        (items, tokens, NUM_HEADS // heads_at_once()),
        (
            plan.qo_segment_lens,
            plan.qo_segment_offsets,
            plan.packed_work_range,
            plan.packed_work_info,
            num_valid_pages,
            keys,
            carrier,
            carrier.stride(0),
            carrier.stride(1),
            plan.batch,
            plan.total_q,
            shard_columns(plan.columns, layout.page_size),
            items,
            workers,
            slots,
            rows,
            force_begin_blocks,
            force_end_blocks,
            layout.index_scale,
            layout.index_offset,
        ),
        (heads_at_once(), dependent),
        q.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    launches = sorted({False, target.dependent_launch})
    for page_size, world_size in layouts:
        layout = ShardLayout(world_size, 0, page_size)
        for rows in (SCHEDULE.few_query_rows, SCHEDULE.query_rows):
            constants = share_constants(layout, rows, STEP_COLUMNS, target)
            for dependent in launches:
                yield select_pieces_kernel, (*constants, dependent)
    yield from merge_variants(target, layouts)
