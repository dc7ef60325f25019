"""Select a rank's Top16 and store it into the owners' receive storage (contract, sections 5 and 6).

One program a (token, head) row.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import LEGACY_WORDS, NUM_HEADS, TAGGED_WORDS, Layouts
from ..rows import READY, READY_WORD
from .launch import FLOATS, I32, I64, INTS, LONGS, Kernel, Target, kernel, target_of
from .pdl import release_dependents, wait_for_predecessor
from .ranking import PADDING_BITS, TOP, ascending, block_of, top16
from .waiting import poll, polls_allowed, record_failure, signal

HEADS = tl.constexpr(NUM_HEADS)
LEGACY = tl.constexpr(LEGACY_WORDS)
TAGGED = tl.constexpr(TAGGED_WORDS)
READY_AT = tl.constexpr(READY_WORD)
IS_READY = tl.constexpr(READY)


@triton.jit
def counter_of(generations, slot, head, token, capacity):
    """Where this rank counts its tagged publications of a row."""
    return generations + (slot * HEADS + head).to(tl.int64) * capacity + token


@triton.jit
def publish_row(
    best, bits, token, head, base, errors, error_words, counter, generation, slot, rank, world_size,
    heads_per_rank, capacity, spin_limit, TAGS: tl.constexpr,
):  # fmt: skip
    """Store a row of the keys `best` and their raw score bits, in any order, into its owner's rows at `base`.

    `generation` is what `counter` held; both are for tagged rows.
    """
    ids, place = ascending(best)
    bits = tl.where(best < 0, PADDING_BITS, bits)
    first = (slot * world_size + rank) * heads_per_rank + head % heads_per_rank
    index = first.to(tl.int64) * capacity + token
    if TAGS:
        generation += 1
        tl.debug_barrier()  # every thread has read the counter
        tl.store(counter, generation)
        tag = generation.to(tl.int64) << 32
        row = (base + index * (TAGGED * 8)).to(tl.pointer_type(tl.int64))
        tl.store(row + place, tag | (bits.to(tl.int64) & 0xFFFFFFFF))
        tl.store(row + TOP + place, tag | (ids.to(tl.int64) & 0xFFFFFFFF))
    else:
        row = (base + index * (LEGACY * 4)).to(tl.pointer_type(tl.int32))
        limit = polls_allowed(errors, spin_limit)
        ready = tl.full((), IS_READY, tl.int32)
        polls = 0
        while (ready != 0) & (polls < limit):
            ready = poll(row + READY_AT)
            polls += 1
        if ready != 0:
            record_failure(errors, error_words, slot, 1 << (head // heads_per_rank), token)
        else:
            tl.store(row + place, bits)
            tl.store(row + TOP + place, ids)
            signal(row + READY_AT, IS_READY)


@kernel(threads=128)
def publish_kernel(
    scores: FLOATS,
    num_valid_pages: INTS,
    recv_bases: LONGS,
    errors: INTS,
    generations: INTS,
    columns: I32,
    token_stride: I64,
    head_stride: I64,
    error_words: I32,
    slot: I32,
    rank: I32,
    world_size: I32,
    heads_per_rank: I32,
    capacity: I32,
    force_begin: I32,
    force_end: I32,
    spin_limit: I32,
    index_scale: I32,
    index_offset: I32,
    TAGS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    token = tl.program_id(0)
    head = tl.program_id(1)
    # Read before the selection, which hides them.
    base = tl.load(recv_bases + head // heads_per_rank)
    counter = counter_of(generations, slot, head, token, capacity)
    generation = tl.load(counter) if TAGS else 0
    row = scores + token * token_stride + head * head_stride
    num_valid = tl.load(num_valid_pages + token)
    best = top16(row, columns, columns, num_valid, force_begin, force_end, index_scale, index_offset)
    column = (block_of(best) - index_offset) // index_scale
    bits = tl.load(row + column, mask=best >= 0, other=0.0).to(tl.int32, bitcast=True)
    publish_row(
        best, bits, token, head, base, errors, error_words, counter, generation, slot, rank, world_size,
        heads_per_rank, capacity, spin_limit, TAGS,
    )  # fmt: skip


def topk_select_publish(
    scores: Tensor,
    num_valid_pages: Tensor,
    recv_bases: Tensor,
    errors: Tensor,
    *,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    generations: Tensor | None,
    index_scale: int,
    index_offset: int,
) -> None:
    """Publish every row `t < T`."""
    tokens, heads, columns = scores.shape
    if tokens == 0:
        return
    target = target_of(scores.device)
    tagged = generations is not None
    publish_kernel(
        (tokens, heads),
        (
            scores,
            num_valid_pages,
            recv_bases,
            errors,
            generations if tagged else errors,
            columns,
            *scores.stride()[:2],
            errors.shape[0],
            slot,
            rank,
            world_size,
            heads_per_rank,
            capacity,
            force_begin_blocks,
            force_end_blocks,
            spin_limit,
            index_scale,
            index_offset,
        ),
        (tagged, enable_pdl and target.dependent_launch),
        scores.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    for tagged, dependent in product((False, True), sorted({False, target.dependent_launch})):
        yield publish_kernel, (tagged, dependent)
