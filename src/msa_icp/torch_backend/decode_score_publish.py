"""Score and publish in one call (contract, section 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launches
from ..geometry import MAX_BLOCKS, NUM_HEADS, ShardLayout
from .decode_index_score_sharded import decode_index_score_sharded
from .topk_select_publish import topk_select_publish


@launches.tensor_code(takes_query=True)
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
    """Publish the Top16 of scores that only this call sees; `pool` is not needed here."""
    if index_q.device.type != "cpu":  # before the scorer is launched
        raise ValueError(f"backend: 'torch' publishes CPU tensors only, index_q was on {index_q.device}")
    columns = min(block_table.shape[1], MAX_BLOCKS)
    scores = torch.full(
        (index_q.shape[0], NUM_HEADS, columns), float("-inf"), dtype=torch.float32, device=index_q.device
    )
    decode_index_score_sharded(
        index_q,
        index_k,
        block_table,
        seq_lens,
        scores,
        layout=layout,
        decode_query_len=decode_query_len,
        enable_pdl=enable_pdl,
    )
    topk_select_publish(
        scores,
        num_valid_pages,
        recv_bases,
        errors,
        slot=slot,
        rank=layout.rank,
        world_size=layout.world_size,
        heads_per_rank=NUM_HEADS // layout.world_size,
        capacity=capacity,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        generations=generations,
        index_scale=layout.index_scale,
        index_offset=layout.index_offset,
    )
