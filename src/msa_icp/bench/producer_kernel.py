"""The small kernels before and behind a scorer, in Triton: every GPU that it serves, and its interpreter."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="no-any-return"

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton.language as tl
from torch import Tensor

from msa_icp.geometry import HEAD_DIM, LEGACY_WORDS, NUM_HEADS, TAGGED_WORDS, WORLD_SIZES
from msa_icp.rows import READY, READY_WORD
from msa_icp.triton_backend.launch import (
    BYTES,
    FLOATS,
    I32,
    I64,
    INTS,
    LONGS,
    Kernel,
    Target,
    kernel,
    target_of,
)
from msa_icp.triton_backend.pdl import release_dependents, wait_for_predecessor

NO_ROWS, LEGACY_ROWS, TAGGED_ROWS = range(3)
"""What the peers' rows are."""
NONE = tl.constexpr(NO_ROWS)
LEGACY_FORM = tl.constexpr(LEGACY_ROWS)
TAGGED_FORM = tl.constexpr(TAGGED_ROWS)
HEADS = tl.constexpr(NUM_HEADS)
DIM = tl.constexpr(HEAD_DIM)
QUERY = tl.constexpr(NUM_HEADS * HEAD_DIM)
TAGGED = tl.constexpr(TAGGED_WORDS)
LEGACY = tl.constexpr(LEGACY_WORDS)
READY_AT = tl.constexpr(READY_WORD)
IS_READY = tl.constexpr(READY)


@kernel(aligned=("new_q", "new_keys", "index_q", "index_k"), threads=128)
def produce_kernel(
    new_q: BYTES,
    new_keys: BYTES,
    index_q: BYTES,
    index_k: BYTES,
    key_rows: LONGS,
    bases: LONGS,
    expected: INTS,
    slot: I32,
    rank: I32,
    capacity: I32,
    RANKS: tl.constexpr,
    FORM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, QUERY)
    tl.store(index_q + token * QUERY + byte, tl.load(new_q + token * QUERY + byte))
    row = tl.load(key_rows + token)
    dim = tl.arange(0, DIM)
    tl.store(
        index_k + row * DIM + dim,
        tl.load(new_keys + token * DIM + dim),
        mask=tl.broadcast_to(row, dim.shape) >= 0,
    )

    # What the other ranks do meanwhile. A row of theirs is there already but for its tag, or its ready word.
    HEADS_PER_RANK: tl.constexpr = HEADS // RANKS
    own_base = tl.load(bases + rank)
    ranks = tl.arange(0, RANKS)
    for head in tl.static_range(HEADS_PER_RANK):
        index = ((slot * RANKS + ranks) * HEADS_PER_RANK + head).to(tl.int64) * capacity + token
        if FORM == TAGGED_FORM:
            tag = (tl.load(expected + head * capacity + token) + 1).to(tl.int64) << 32
            address = (own_base + index * (TAGGED * 8)).to(tl.pointer_type(tl.int64))
            words = address[:, None] + tl.arange(0, TAGGED)[None, :]
            tl.store(words, tag | (tl.load(words) & 0xFFFFFFFF), mask=(ranks != rank)[:, None])
        if FORM == LEGACY_FORM:
            theirs = (own_base + index * (LEGACY * 4)).to(tl.pointer_type(tl.int32))
            tl.store(theirs + READY_AT, tl.full((RANKS,), IS_READY, tl.int32), mask=ranks != rank)
            # Every owner has taken what this rank sent the last time.
            sent = ((slot * RANKS + rank) * HEADS_PER_RANK + head).to(tl.int64) * capacity + token
            taken = (tl.load(bases + ranks) + sent * (LEGACY * 4)).to(tl.pointer_type(tl.int32))
            tl.store(taken + READY_AT, tl.zeros((RANKS,), tl.int32))


@kernel(threads=64)
def consume_kernel(
    scores: FLOATS, output: FLOATS, token_stride: I64, head_stride: I64, DEPENDENT: tl.constexpr
):
    wait_for_predecessor(DEPENDENT)
    release_dependents(True, DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    first = tl.load(scores + token * token_stride + head * head_stride)
    tl.store(output + token * HEADS + head, first)


def produce(
    new_q: Tensor,
    new_keys: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    key_rows: Tensor,
    bases: Tensor,
    expected: Tensor,
    *,
    slot: int,
    rank: int,
    form: int,
    enable_pdl: bool,
) -> None:
    """One program a token: its query, its key where this rank holds it, and the peers' part of its rows."""
    capacity, ranks = expected.shape[1], bases.shape[0]
    produce_kernel(
        (new_q.shape[0],),
        (new_q, new_keys, index_q, index_k, key_rows, bases, expected, slot, rank, capacity),
        (ranks, form, enable_pdl and target_of(new_q.device).dependent_launch),
        new_q.device,
    )


def consume(scores: Tensor, output: Tensor, *, enable_pdl: bool) -> None:
    """One program a token: the first score of every head, `[T, 4, K]` -> `[T, 4]`."""
    consume_kernel(
        (scores.shape[0],),
        (scores, output, *scores.stride()[:2]),
        (enable_pdl and target_of(scores.device).dependent_launch,),
        scores.device,
    )


def variants(target: Target) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a chain may need."""
    for dependent in sorted({False, target.dependent_launch}):
        for world_size, form in product(WORLD_SIZES, (NO_ROWS, LEGACY_ROWS, TAGGED_ROWS)):
            yield produce_kernel, (world_size, form, dependent)
        yield consume_kernel, (dependent,)
