"""Score and select a window in one call (contract, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launches
from ..geometry import NUM_HEADS, ShardLayout
from ..prefill_plan import MSAIcpScorePlan
from .exact import NEG_INF
from .index_score_sharded import CHUNK_TOKENS, Columns, parts_of, score_part
from .topk_select_prefill import topk_select_prefill

CHUNK_SCORES = 1 << 23
"""Scores kept at a time, 32 MiB: those of 256 tokens over a million keys."""


@launches.tensor_code(takes_query=True)
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
    """Write every row of `carrier`, some tokens after others; `pool` is not needed here."""
    columns = Columns(layout, True, plan.columns)
    most = max(1, min(CHUNK_SCORES // (NUM_HEADS * columns.count), plan.total_q))
    memory = torch.empty((most, NUM_HEADS, columns.count), dtype=torch.float32, device=q.device)
    for first in range(0, plan.total_q, most):
        last = min(first + most, plan.total_q)
        scores = memory[: last - first].fill_(NEG_INF)
        for part in parts_of(plan, first, last, CHUNK_TOKENS):
            rows = slice(part.row, part.row + part.tokens)
            own = scores[part.row - first : part.row - first + part.tokens]
            score_part(q[rows], k, block_table[part.segment], part, columns, own)
        topk_select_prefill(
            scores,
            num_valid_pages[first:last],
            carrier[:, first:last],
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            index_scale=layout.index_scale,
            index_offset=layout.index_offset,
        )
