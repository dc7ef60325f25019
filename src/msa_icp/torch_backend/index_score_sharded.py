"""The prefill scorer in tensor code (contract, sections 3 and 7).

Tokens of one segment share its keys: a tile of keys is converted once and multiplied by the queries of
up to a thousand tokens, 64 at a time. Tiles that lie behind a token's causal prefix are left out. The work
follows the segments themselves; the packed words of the plan, which deal it to multiprocessors, are not
needed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import launches
from ..geometry import BLOCK, HEAD_DIM, ITEM_TOKENS, NUM_HEADS, ShardLayout, ceil_div
from ..prefill_plan import MSAIcpScorePlan
from .exact import NEG_INF, TILE_ROWS, exact_keys, exact_queries, scratch_of

CHUNK_TOKENS = 1024
"""Most tokens of a segment that share a converted tile of keys: their queries are 4 MiB of FP64."""


@dataclass(frozen=True)
class Part:
    """Consecutive query tokens of one segment."""

    segment: int
    row: int  # of the first token in the query
    tokens: int
    position: int  # of the first token in its sequence
    keys: int  # of the segment, as far as the plan has columns

    def last_key(self, device: torch.device) -> Tensor:
        """Position of the last key that each token sees, int64 `[tokens]`, below 0 where it sees none."""
        own = self.position + torch.arange(self.tokens, device=device)
        return own.clamp(max=self.keys - 1)


@dataclass(frozen=True)
class Columns:
    """Which columns a score row has."""

    layout: ShardLayout
    compact: bool
    blocks: int  # of the window's longest context

    @property
    def blocks_per_column(self) -> int:
        return self.layout.index_scale if self.compact else 1

    @property
    def per_page(self) -> int:
        """Columns of one page."""
        return self.layout.index_scale // self.blocks_per_column

    @property
    def count(self) -> int:
        return int(ceil_div(self.blocks, self.blocks_per_column))

    def prefix(self, last_key: Tensor) -> Tensor:
        """How many columns hold the keys up to `last_key`."""
        columns: Tensor = ceil_div((last_key + 1).clamp(min=0), BLOCK * self.blocks_per_column)
        return columns


@launches.tensor_code(takes_query=True)
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
    """Write `max_score`; `enable_pdl` changes nothing here."""
    if initialize:
        max_score.fill_(NEG_INF)
    columns = Columns(layout, compact, plan.columns)
    for part in parts_of(plan, 0, plan.total_q, CHUNK_TOKENS):
        rows = slice(part.row, part.row + part.tokens)
        score_part(q[rows], k, block_table[part.segment], part, columns, max_score[rows])


def parts_of(plan: MSAIcpScorePlan, first: int, last: int, most: int) -> Iterator[Part]:
    """The query tokens of rows `first <= row < last`, segment by segment, up to `most` of them at once."""
    metadata = (plan.qo_segment_offsets[:-1], plan.qo_segment_lens, plan.qo_offset, plan.kv_segment_lens)
    for segment, (begin, count, position, keys) in enumerate(
        zip(*(t.tolist() for t in metadata), strict=True)
    ):
        end = min(begin + count, last)
        for row in range(max(begin, first), end, most):
            tokens, first_position = min(most, end - row), position + row - begin
            yield Part(segment, row, tokens, first_position, min(keys, BLOCK * plan.columns))


def score_part(q: Tensor, k: Tensor, table_row: Tensor, part: Part, columns: Columns, out: Tensor) -> None:
    """Write the causal prefixes of the part's tokens into `out`, score rows `[tokens, 4, K]`."""
    layout = columns.layout
    last_key = part.last_key(q.device)
    prefix = columns.prefix(last_key)
    # Token by token the prefix grows, so the first and the last token of a tile bound it.
    prefixes, last_keys = prefix.tolist(), last_key.tolist()
    queries, dead = exact_queries(q.view(-1, HEAD_DIM))
    pages = table_row[: ceil_div(prefixes[-1], columns.per_page)].to(torch.int64)
    readable = (pages >= 0) & (pages < k.shape[0])
    tile_pages = TILE_ROWS // layout.rows
    for page in range(0, pages.shape[0], tile_pages):
        ids, there = pages[page : page + tile_pages], readable[page : page + tile_pages]
        count = ids.shape[0]
        keys = _Keys(k, torch.where(there, ids, 0), page, layout) if bool(there.any()) else None
        first_column = page * columns.per_page
        for t in range(0, part.tokens, ITEM_TOKENS):
            end = min(t + ITEM_TOKENS, part.tokens)
            if prefixes[end - 1] <= first_column:
                continue
            heads = slice(NUM_HEADS * t, NUM_HEADS * end)
            values = torch.full((end - t, NUM_HEADS, count), NEG_INF, dtype=torch.float32, device=q.device)
            if keys is not None:
                masked = last_keys[t] < layout.key_position(page + count - 1, layout.rows - 1)
                values = keys.scores(queries[heads], last_key[t:end] if masked else None)
                values.masked_fill_(dead[heads].view(-1, NUM_HEADS, 1), NEG_INF)
                values.masked_fill_(~there, NEG_INF)
            _store(values, columns, first_column, prefix[t:end], prefixes[t], out[t:end])


class _Keys:
    """A tile of the shard's pages as exact values."""

    def __init__(self, k: Tensor, pages: Tensor, first_column: int, layout: ShardLayout) -> None:
        self._scratch = scratch_of(k.device)
        self._values, self._number = exact_keys(k, pages, self._scratch)
        self._first_column, self._layout = first_column, layout

    def scores(self, queries: Tensor, last_key: Tensor | None) -> Tensor:
        """Largest dot products of the queries `[4 * tokens, 128]` a page: float32 `[tokens, 4, pages]`.

        `last_key` `[tokens]`: the last key that each token sees; None: every token sees all of the tile.
        """
        pages, rows, _ = self._values.shape
        dots = self._scratch.take("dots", (queries.shape[0], pages * rows), torch.float64)
        torch.mm(queries, self._values.view(-1, HEAD_DIM).t(), out=dots)
        if self._number is not None:
            dots.masked_fill_(~self._number, NEG_INF)
        by_page = dots.view(-1, NUM_HEADS, pages, rows)
        if last_key is not None:
            column = self._first_column + torch.arange(pages, device=dots.device)
            row = torch.arange(rows, device=dots.device)
            hidden = self._layout.key_position(column[:, None], row) > last_key[:, None, None]
            by_page.masked_fill_(hidden[:, None], NEG_INF)
        # The one rounding of the exact sum; adding zero makes -0.0 a +0.0.
        return by_page.amax(-1).to(torch.float32) + 0.0


def _store(values: Tensor, columns: Columns, first: int, prefix: Tensor, shortest: int, out: Tensor) -> None:
    """Store a tile of page scores `[tokens, 4, pages]` at column `first`, each token's prefix alone."""
    if columns.per_page > 1:  # a column for every block: this rank holds rows of one of a page's blocks
        blocks = torch.full(
            (*values.shape, columns.per_page), NEG_INF, dtype=values.dtype, device=values.device
        )
        blocks[..., columns.layout.index_offset] = values
        values = blocks.flatten(2)
    last = min(first + values.shape[2], columns.count)
    values, target = values[..., : last - first], out[..., first:last]
    if shortest < last:
        inside = torch.arange(first, last, device=out.device) < prefix[:, None]
        values = torch.where(inside[:, None], values, target)
    target.copy_(values)
