"""Select a rank's Top16 of every token of a window into the carrier (contract, sections 5 and 7)."""

from __future__ import annotations

from torch import Tensor

from .. import launches, rows
from .ranking import select_top16

CHUNK_SCORES = 1 << 18
"""Scores ranked at a time: their ranking keys, and what they are computed from, are 2 MiB each."""


@launches.tensor_code(takes_query=False)
def topk_select_prefill(
    scores: Tensor,
    num_valid_pages: Tensor,
    carrier: Tensor,
    *,
    force_begin_blocks: int,
    force_end_blocks: int,
    index_scale: int,
    index_offset: int,
) -> None:
    """Write every row of `carrier`."""
    tokens, heads, columns = scores.shape
    most = max(1, CHUNK_SCORES // (heads * columns))
    for first in range(0, tokens, most):
        part = slice(first, first + most)
        selected = select_top16(
            scores[part],
            num_valid_pages[part],
            force_begin_blocks,
            force_end_blocks,
            index_scale,
            index_offset,
        )
        carrier[:, part].copy_(rows.legacy(*selected).transpose(0, 1))
