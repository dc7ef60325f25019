"""Score and publish in one call (contract, section 6).

The pool holds 4096 FP32 words for each (token, head): its score row, in rounds where the block table is
wider. Between rounds the last words of a row carry the keys of the best 16 columns so far.
"""

from __future__ import annotations

from torch import Tensor

from ..geometry import MAX_BLOCKS, NUM_HEADS, POOL_ROW_WORDS, ShardLayout, pool_rounds
from .decode_index_score_sharded import launch_scores
from .topk_select_publish import kernel_for


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
    select = kernel_for(tagged=generations is not None, fused=True)
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
        select(
            (tokens, NUM_HEADS, 1),
            (
                pool.data_ptr(),
                num_valid_pages.data_ptr(),
                recv_bases.data_ptr(),
                errors.data_ptr(),
                0 if generations is None else generations.data_ptr(),
                count,
                NUM_HEADS * POOL_ROW_WORDS,
                POOL_ROW_WORDS,
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
                seq_lens.data_ptr(),
                decode_query_len,
                layout.page_size,
                first,
                int(first + count == columns),
                POOL_ROW_WORDS,
            ),
            index_q.device,
            dependent=enable_pdl,
        )
