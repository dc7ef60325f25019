"""The prefill scorer (contract, section 7): a plan's shares, scored and stored."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import Layouts, ShardLayout, prefill_items
from ..prefill_plan import MSAIcpScorePlan
from .launch import BYTES, FLOATS, I32, I64, INTS, LONGS, Kernel, Target, kernel, target_of
from .pdl import release_dependents, wait_for_predecessor
from .prefill_share import (
    HEADS,
    KEYS_OF_BLOCK,
    SCHEDULE,
    parts,
    query_rows,
    score_share,
    share_constants,
)


@triton.jit
def _start(sink, place, n, row, live, last_key):
    """Nothing is kept from step to step."""
    return 0


@triton.jit
def _store(sink, state, place, n, row, live, last_key, column, end, maxima):
    """Store the columns that lie in each token's causal prefix."""
    max_score, token_stride, head_stride, scale, column_scale, column_offset = sink
    prefix = (last_key + KEYS_OF_BLOCK) // KEYS_OF_BLOCK
    address = max_score + row * token_stride + (n % HEADS) * head_stride
    written = (column < end)[:, None] & live[None, :]
    first_block = column * scale + column_offset
    stored = address[None, :] + (column * column_scale + column_offset)[:, None]
    tl.store(stored, maxima, mask=written & (first_block[:, None] < prefix[None, :]))
    if column_scale > 1:
        # A column for every block: the page's other block, of which this rank holds no row.
        other = column * column_scale + (1 - column_offset)
        nothing = tl.full(maxima.shape, float("-inf"), tl.float32)
        tl.store(
            address[None, :] + other[:, None], nothing, mask=written & (other[:, None] < prefix[None, :])
        )
    return state


@kernel(aligned=("q", "k"), threads=SCHEDULE.threads)
def score_window_kernel(
    q: BYTES,
    k: BYTES,
    block_table: INTS,
    qo_lens: INTS,
    kv_lens: INTS,
    qo_starts: INTS,
    qo_offset: INTS,
    work_range: LONGS,
    work_info: LONGS,
    max_score: FLOATS,
    pages: I32,
    page_pitch: I64,
    table_columns: I32,
    table_stride: I64,
    batch: I32,
    total_q: I32,
    columns: I32,
    capacity: I32,
    first_key: I32,
    token_stride: I64,
    head_stride: I64,
    column_scale: I32,
    column_offset: I32,
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
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    tensors = q, k, block_table, qo_lens, kv_lens, qo_starts, qo_offset, work_range, work_info
    sizes = pages, page_pitch, table_columns, table_stride, batch, total_q, columns, capacity, first_key
    sink = max_score, token_stride, head_stride, PAGE // KEYS_OF_BLOCK, column_scale, column_offset
    score_share(
        tensors,
        sizes,
        sink,
        _start,
        _store,
        PAGE,
        ROWS,
        KEY_STEP,
        QUERY_ROWS,
        STEP_PAGES,
        STAGES,
        REGROUP,
        E4M3,
    )


def step_pages(layout: ShardLayout) -> int:
    """Pages of a step: two units."""
    return SCHEDULE.step_pages // layout.index_scale


def plan_arguments(
    q: Tensor, k: Tensor, block_table: Tensor, plan: MSAIcpScorePlan
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The tensors and sizes of `score_share`, the first key's position aside."""
    tensors = (
        q,
        k,
        block_table,
        plan.qo_segment_lens,
        plan.kv_segment_lens,
        plan.qo_segment_offsets,
        plan.qo_offset,
        plan.packed_work_range,
        plan.packed_work_info,
    )
    sizes = (
        k.shape[0],
        k.stride(0),
        block_table.shape[1],
        block_table.stride(0),
        plan.batch,
        plan.total_q,
        plan.columns,
        prefill_items(plan.total_q, plan.batch),
    )
    return tensors, sizes


def index_score_sharded(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan: MSAIcpScorePlan,
    *,
    layout: ShardLayout,
    max_score: Tensor,
    initialize: bool,
    compact: bool,
    enable_pdl: bool,
) -> None:
    """Write `max_score`: every causal prefix, and before it -inf everywhere if `initialize`."""
    if initialize:
        with torch.inference_mode():  # the only one in which PyTorch writes into a tensor that was made in it
            max_score.fill_(float("-inf"))
    target = target_of(q.device)
    rows = query_rows(plan.max_query_len)
    tensors, sizes = plan_arguments(q, k, block_table, plan)
    score_window_kernel(
        (plan.packed_work_range.shape[0], parts(rows)),
        (
            *tensors,
            max_score,
            *sizes,
            layout.key_position(0, 0),
            max_score.stride(0),
            max_score.stride(1),
            1 if compact else layout.index_scale,
            0 if compact else layout.index_offset,
        ),
        (*share_constants(layout, rows, step_pages(layout), target), enable_pdl and target.dependent_launch),
        q.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    for page_size, world_size in layouts:
        layout = ShardLayout(world_size, 0, page_size)
        for rows in (SCHEDULE.few_query_rows, SCHEDULE.query_rows):
            constants = share_constants(layout, rows, step_pages(layout), target)
            for dependent in sorted({False, target.dependent_launch}):
                yield score_window_kernel, (*constants, dependent)
