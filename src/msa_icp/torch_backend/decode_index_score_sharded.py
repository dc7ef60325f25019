"""The decode scorer in tensor code (contract, sections 3 and 4).

The work is a flat list of (request, column) items, cut into tiles of a few thousand key rows that
stay in the caches: gather the pages' bytes, convert them, multiply by the request's queries, take the
maximum over the rows of each page. The keys of the cache are never converted as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import launches
from ..geometry import HEAD_DIM, NUM_HEADS, ShardLayout
from .exact import NEG_INF, TILE_ROWS, Scratch, exact_keys, exact_queries, scratch_of


@dataclass
class _Items:
    """One entry for each (request, column) whose scores are written."""

    request: Tensor  # int64
    column: Tensor  # int64
    page: Tensor  # int64, clamped to the cache
    readable: Tensor  # bool: the page exists, in the sequence, the table and the cache


@launches.tensor_code(takes_query=True)
def decode_index_score_sharded(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
) -> None:
    """Write `score_out`; `enable_pdl` changes nothing here."""
    if seq_lens.shape[0] == 0:
        return
    lens = seq_lens.to(torch.int64)
    items = _work_items(lens, block_table, index_k.shape[0], score_out.shape[2], layout)
    positions = lens[:, None] - decode_query_len + torch.arange(decode_query_len, device=lens.device)
    queries, dead = exact_queries(index_q.view(lens.shape[0], decode_query_len * NUM_HEADS, HEAD_DIM))

    # A page whose last local key every token of the request may see needs no mask.
    last_key = layout.key_position(items.column, layout.rows - 1)
    whole = items.readable & (last_key <= positions[items.request, 0])
    values = torch.full(
        (items.request.shape[0], decode_query_len * NUM_HEADS),
        NEG_INF,
        dtype=torch.float32,
        device=lens.device,
    )
    for chosen, masked in ((whole, False), (items.readable & ~whole, True)):
        index = chosen.nonzero().squeeze(1)
        if index.shape[0] == 0:
            continue
        for tile in index.split(TILE_ROWS // layout.rows):
            request = items.request[tile]
            visible = None
            if masked:
                rows = torch.arange(layout.rows, device=lens.device)
                keys = layout.key_position(items.column[tile][:, None], rows)
                visible = keys[:, None, :] <= positions[request][:, :, None]
            values[tile] = _tile_scores(index_k, items.page[tile], queries, request, visible)
    values.masked_fill_(dead[items.request], NEG_INF)

    tokens = items.request[:, None] * decode_query_len + torch.arange(decode_query_len, device=lens.device)
    heads = torch.arange(NUM_HEADS, device=lens.device)
    score_out[tokens[:, :, None], heads, items.column[:, None, None]] = values.view(
        -1, decode_query_len, NUM_HEADS
    )


def _work_items(lens: Tensor, block_table: Tensor, pages: int, cols: int, layout: ShardLayout) -> _Items:
    exist = layout.columns(lens.clamp(min=0))
    counts = ((exist + 3) // 4 * 4).clamp(max=cols)
    request = torch.repeat_interleave(torch.arange(lens.shape[0], device=lens.device), counts)
    column = torch.arange(request.shape[0], device=lens.device) - (counts.cumsum(0) - counts)[request]
    width = block_table.shape[1]
    in_table = column < torch.clamp(exist[request], max=width)
    page = block_table[request, column.clamp(max=width - 1)].to(torch.int64)
    readable = in_table & (page >= 0) & (page < pages)
    return _Items(request, column, torch.where(readable, page, 0), readable)


def _tile_scores(
    index_k: Tensor, pages: Tensor, queries: Tensor, request: Tensor, visible: Tensor | None
) -> Tensor:
    """Scores of the pages `[g]` for the queries of their requests: float32 `[g, N]`.

    `visible`: bool `[g, tokens, R]`, None where every token sees every row.
    """
    count, rows = pages.shape[0], index_k.shape[1]
    scratch = scratch_of(pages.device)
    keys, number = exact_keys(index_k, pages, scratch)

    dots = _products(queries, request, keys, scratch)
    if visible is not None:
        dots.view(count, -1, NUM_HEADS, rows).masked_fill_(~visible[:, :, None, :], NEG_INF)
    if number is not None:
        dots.masked_fill_(~number.view(count, 1, rows), NEG_INF)
    # The one rounding of the exact sum; adding zero makes -0.0 a +0.0.
    return dots.amax(-1).to(torch.float32) + 0.0


def _products(queries: Tensor, request: Tensor, keys: Tensor, scratch: Scratch) -> Tensor:
    """Dot products of the keys `[g, R, 128]` with the queries of their requests: float64 `[g, N, R]`.

    The requests are in order. Pages of one request are one matrix product, which takes about half the
    time of one product a page.
    """
    count, rows, _ = keys.shape
    width = queries.shape[1]
    dots = scratch.take("dots", (width * count * rows,), torch.float64)
    if int(request[0]) == int(request[-1]):
        torch.mm(queries[request[0]], keys.view(-1, HEAD_DIM).t(), out=dots.view(width, -1))
        return dots.view(width, count, rows).transpose(0, 1)
    used = scratch.take("queries", (count, *queries.shape[1:]), torch.float64)
    torch.index_select(queries, 0, request, out=used)
    dots = dots.view(count, width, rows)
    return torch.bmm(used, keys.transpose(1, 2), out=dots)
