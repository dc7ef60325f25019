"""Score and publish in one call (contract, section 6).

The pool holds 4096 FP32 words for each (token, head): its score row, in rounds where the block table is
wider. Between rounds the last words of a row carry the keys of the best 16 columns so far.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from itertools import product
from typing import Any

import triton.language as tl
from torch import Tensor

from ..geometry import MAX_BLOCKS, NUM_HEADS, POOL_ROW_WORDS, Layouts, ShardLayout, pool_rounds
from .decode_index_score_sharded import launch_scores
from .launch import FLOATS, I32, INTS, LONGS, Kernel, Target, kernel, target_of
from .pdl import release_dependents, wait_for_predecessor
from .ranking import TOP, best16, score_bits_of, top16
from .topk_select_publish import HEADS, counter_of, publish_row

POOL_ROW = tl.constexpr(POOL_ROW_WORDS)


@kernel(threads=128)
def select_round_kernel(
    pool: FLOATS,
    seq_lens: INTS,
    num_valid_pages: INTS,
    recv_bases: LONGS,
    errors: INTS,
    generations: INTS,
    first_column: I32,
    columns: I32,
    last_round: I32,
    page_size: I32,
    query_len: I32,
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
    base = tl.load(recv_bases + head // heads_per_rank)
    counter = counter_of(generations, slot, head, token, capacity)
    generation = tl.load(counter) if TAGS else 0
    row = pool + (token * HEADS + head).to(tl.int64) * POOL_ROW
    carry = (row + POOL_ROW).to(tl.pointer_type(tl.int64)) - TOP + tl.arange(0, TOP)

    # Columns that the scorer left alone hold what an earlier call put there: they count as -inf.
    pages = (tl.maximum(tl.load(seq_lens + token // query_len), 1) - 1) // page_size + 1
    first_block = first_column * index_scale + index_offset
    num_valid = tl.load(num_valid_pages + token)
    scored = pages - first_column
    best = top16(row, columns, scored, num_valid, force_begin, force_end, index_scale, first_block)
    if first_column > 0:
        best = best16(tl.join(best, tl.load(carry)).reshape(2 * TOP))
    if last_round == 0:
        tl.store(carry, best)
    else:
        # A score of this backend is neither NaN nor -0.0, so its key holds its raw bits.
        publish_row(
            best, score_bits_of(best), token, head, base, errors, error_words, counter, generation, slot,
            rank, world_size, heads_per_rank, capacity, spin_limit, TAGS,
        )  # fmt: skip


def decode_score_publish(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_valid_pages: Tensor,
    pool: Tensor,
    recv_bases: Tensor,
    errors: Tensor,
    *,
    layout: ShardLayout,
    decode_query_len: int,
    slot: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int,
    generations: Tensor | None,
    enable_pdl: bool,
) -> None:
    """Publish the Top16 of scores that stay in `pool`: two launches a round, almost always one round."""
    tokens = index_q.shape[0]
    if tokens == 0:
        return
    tagged = generations is not None
    target = target_of(index_q.device)
    columns = min(block_table.shape[1], MAX_BLOCKS)
    for first, count in pool_rounds(columns):
        launch_scores(
            index_q,
            index_k,
            block_table,
            seq_lens,
            pool,
            columns=count,
            token_stride=NUM_HEADS * POOL_ROW_WORDS,
            head_stride=POOL_ROW_WORDS,
            layout=layout,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
            first_column=first,
        )
        select_round_kernel(
            (tokens, NUM_HEADS),
            (
                pool,
                seq_lens,
                num_valid_pages,
                recv_bases,
                errors,
                generations if tagged else errors,
                first,
                count,
                int(first + count == columns),
                layout.page_size,
                decode_query_len,
                errors.shape[0],
                slot,
                layout.rank,
                layout.world_size,
                NUM_HEADS // layout.world_size,
                capacity,
                force_begin_blocks,
                force_end_blocks,
                spin_limit,
                layout.index_scale,
                layout.index_offset,
            ),
            (tagged, enable_pdl and target.dependent_launch),
            index_q.device,
        )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need, the scorer's aside."""
    for tagged, dependent in product((False, True), sorted({False, target.dependent_launch})):
        yield select_round_kernel, (tagged, dependent)
