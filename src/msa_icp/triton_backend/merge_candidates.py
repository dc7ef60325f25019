"""Merge the ranks' candidates into the final Top16 (contract, section 6).

One program a (token, owned head).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import TAGGED_WORDS, WORLD_SIZES, Layouts
from .launch import I32, I64, INTS, LONGS, Kernel, Target, kernel, target_of
from .pdl import release_dependents, wait_for_predecessor
from .ranking import TOP, ascending, best16, ranking_keys
from .topk_select_publish import IS_READY, READY_AT
from .waiting import poll, polls_allowed, record_failure, signal


@triton.jit
def _merge_row(
    bits, ids, complete, num_valid, output, init_blocks, local_blocks, PREFILL: tl.constexpr
):  # fmt: skip
    """Candidates `[n]` -> 16 ids, ascending with a tail of -1; all -1 where not `complete`."""
    order = tl.arange(0, ids.shape[0])
    score = bits.to(tl.float32, bitcast=True)
    keys = ranking_keys(score, ids, num_valid, init_blocks, local_blocks)
    before = (keys[:, None] > keys[None, :]) | (
        (keys[:, None] == keys[None, :]) & (order[:, None] < order[None, :])
    )
    # A block that several ranks sent keeps its first key, which has its largest score.
    repeated = tl.max((before & (ids[:, None] == ids[None, :])).to(tl.int32), axis=0)
    best = best16(tl.where((repeated != 0) | (complete == 0), -1, keys))
    merged, place = ascending(best)
    if PREFILL:
        # A padding token of a prefill window attends to block 0, which always exists.
        merged = tl.where((num_valid <= 0) & (place == 0), 0, merged)
    tl.store(output + place, merged)


@triton.jit
def _missing_ranks(present, RANKS: tl.constexpr):
    """Bit mask of the ranks whose word in `present` [RANKS] is 0."""
    return tl.sum(tl.where(present == 0, 1 << tl.arange(0, RANKS), 0))


@kernel(threads=256)
def merge_kernel(
    rows: INTS,
    num_valid_pages: INTS,
    output: INTS,
    errors: INTS,
    expected_generations: INTS,
    rank_stride: I64,
    head_stride: I64,
    row_stride: I64,
    token_stride: I64,
    out_head_stride: I64,
    capacity: I32,
    error_words: I32,
    slot: I32,
    init_blocks: I32,
    local_blocks: I32,
    spin_limit: I32,
    RANKS: tl.constexpr,
    PREFILL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    token = tl.program_id(0)
    head = tl.program_id(1)
    ranks = tl.arange(0, RANKS)
    row = rows + head * head_stride + token * row_stride + ranks * rank_stride
    complete = tl.full((), 1, tl.int32)
    if not PREFILL:
        ready = tl.zeros((RANKS,), tl.int32)
        complete = tl.full((), 0, tl.int32)
        limit = polls_allowed(errors, spin_limit)
        polls = 0
        while (complete == 0) & (polls < limit):
            ready = (poll(row + READY_AT) == IS_READY).to(tl.int32)
            complete = tl.min(ready)
            polls += 1
        tl.debug_barrier()  # what each thread acquired is for all of them
    lane = tl.arange(0, TOP)
    bits = tl.load(row[:, None] + lane[None, :], volatile=True)
    ids = tl.load(row[:, None] + TOP + lane[None, :], volatile=True)
    if not PREFILL:
        if complete != 0:
            signal(row + READY_AT, tl.zeros((RANKS,), tl.int32))
        else:
            record_failure(errors, error_words, slot, _missing_ranks(ready, RANKS), token)
    _merge_row(
        bits.reshape(RANKS * TOP), ids.reshape(RANKS * TOP), complete, tl.load(num_valid_pages + token),
        output + token * token_stride + head * out_head_stride, init_blocks, local_blocks, PREFILL,
    )  # fmt: skip


def _merge_tagged(
    rows: LONGS,
    num_valid_pages: INTS,
    output: INTS,
    errors: INTS,
    expected_generations: INTS,
    rank_stride: I64,
    head_stride: I64,
    row_stride: I64,
    token_stride: I64,
    out_head_stride: I64,
    capacity: I32,
    error_words: I32,
    slot: I32,
    init_blocks: I32,
    local_blocks: I32,
    spin_limit: I32,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    token = tl.program_id(0)
    head = tl.program_id(1)
    counter = expected_generations + head.to(tl.int64) * capacity + token
    wanted = tl.load(counter) + 1
    word = tl.arange(0, 2 * TOP)
    row = rows + head * head_stride + token * row_stride + tl.arange(0, RANKS) * rank_stride
    # What is merged is the very copy whose tags matched: no later write of a fast rank mixes into it. So
    # each word must be read by one thread alone, which is why there are as many threads as words.
    words = tl.zeros((RANKS, 2 * TOP), tl.int64)
    ahead = tl.full((RANKS, 2 * TOP), -1, tl.int32)
    complete = tl.full((), 0, tl.int32)
    limit = polls_allowed(errors, spin_limit)
    polls = 0
    while (complete == 0) & (polls < limit):
        words = tl.load(row[:, None] + word[None, :], volatile=True)
        ahead = (words >> 32).to(tl.int32) - wanted
        complete = tl.min(tl.min((ahead == 0).to(tl.int32), axis=1))
        polls += 1
    if complete == 0:
        # A rank whose whole row is ahead has been here and went on: it is not the one that was missing.
        least = tl.min(ahead, axis=1)
        present = (least > 0) | ((least == 0) & (tl.max(ahead, axis=1) == 0))
        record_failure(errors, error_words, slot, _missing_ranks(present, RANKS), token)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counter, wanted)
    halves = tl.permute(words.to(tl.int32).reshape(RANKS, 2, TOP), (0, 2, 1))
    bits, ids = tl.split(halves)
    _merge_row(
        bits.reshape(RANKS * TOP), ids.reshape(RANKS * TOP), complete, tl.load(num_valid_pages + token),
        output + token * token_stride + head * out_head_stride, init_blocks, local_blocks, False,
    )  # fmt: skip


merge_tagged_kernels = {
    world_size: kernel(threads=world_size * TAGGED_WORDS)(_merge_tagged) for world_size in WORLD_SIZES
}


def merge_candidates(
    recv_slot: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    expected_generations: Tensor | None,
    prefill: bool,
    slot: int,
) -> None:
    """Write `output` for every token."""
    world_size, heads, capacity, _ = recv_slot.shape
    tokens = output.shape[0]
    if tokens == 0:
        return
    dependent = enable_pdl and target_of(recv_slot.device).dependent_launch
    arguments = (
        recv_slot,
        num_valid_pages,
        output,
        errors,
        errors if expected_generations is None else expected_generations,
        *recv_slot.stride()[:3],
        *output.stride()[:2],
        capacity,
        errors.shape[0],
        slot,
        init_blocks,
        local_blocks,
        spin_limit,
    )
    if expected_generations is None:
        merge_kernel((tokens, heads), arguments, (world_size, prefill, dependent), recv_slot.device)
    else:
        tagged_kernel = merge_tagged_kernels[world_size]
        tagged_kernel((tokens, heads), arguments, (world_size, dependent), recv_slot.device)


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    world_sizes = sorted({world_size for _, world_size in layouts})
    for world_size, dependent in product(world_sizes, sorted({False, target.dependent_launch})):
        yield merge_kernel, (world_size, False, dependent)
        yield merge_tagged_kernels[world_size], (world_size, dependent)
    for world_size in world_sizes:
        yield merge_kernel, (world_size, True, False)
