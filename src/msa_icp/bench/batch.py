"""A decode batch over random keys: every layer's K, a block table, lengths, and who holds the newest keys.

Three ways to share the keys of a tensor-parallel group out make three batches of the same requests:

- `sharded`: this library. A rank holds and reads 1/W of every page.
- `replicated`: a rank holds and reads everything, and needs no exchange.
- `page_strided`: a rank holds everything and reads the pages `c % W == rank`, whole.

The last two are not served by the entry points, but the same kernels read them: a page of 128 rows on "one
rank of one" is one B128 block. A page of 256 keys is two such blocks side by side, and striding is then by
block (`block % W`), so that one scale and one offset name what a column is. Bytes and pieces of memory are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msa_icp import num_valid_pages
from msa_icp.geometry import BLOCK, HEAD_DIM, NUM_HEADS, ShardLayout, ceil_div

FP8 = torch.float8_e4m3fn
PAGE_ORDERS = ("permuted", "disjoint", "shared prefix")
"""Pages at random; one request behind the other; at random behind a prefix that all requests share."""
SHARED_KEYS = 8192
"""Keys of a shared prefix, in a request that is longer."""
_WHOLE = ShardLayout(world_size=1, rank=0, page_size=BLOCK)
"""One rank with every row of a page that is one block."""


def random_keys(nbytes: int, device: torch.device) -> Tensor:
    """uint8 `[nbytes]`: random e4m3 bytes without NaN."""
    keys = torch.empty(nbytes, dtype=torch.uint8, device=device)
    for part in keys.split(1 << 30):  # what is made in between is as large
        part.random_(0, 0xFE)
        part += part >= 0x7F
    return keys


def layers_of(pool: Tensor, k_bytes: int, layers: int) -> list[Tensor]:
    """Contiguous parts of `pool`, one a layer, as many bytes as a launch reads or all there are.

    One behind the other, and again from the front where the pool ends: what is read again by then has left
    every cache, if the pool is many times as large as one.
    """
    size = min(k_bytes, pool.numel())
    parts = pool[: pool.numel() // size * size].split(size)
    return [parts[layer % len(parts)] for layer in range(layers)]


def block_table(columns: Sequence[int], pages: int, order: str = "permuted", prefix: int = 0) -> Tensor:
    """int32 `[B, max(columns)]` on the CPU: physical pages below `pages`, 0 behind a request's last one.

    `order` is one of PAGE_ORDERS, `prefix` the columns that are shared. With fewer pages than columns, all
    pages are used before one is used again.
    """
    total = sum(columns)
    generator = torch.Generator().manual_seed(0)
    rounds = [
        torch.arange(pages) if order == "disjoint" else torch.randperm(pages, generator=generator)
        for _ in range(ceil_div(total, pages))
    ]
    own = torch.cat(rounds)[:total].to(torch.int32).split(list(columns))
    table = torch.zeros((len(columns), max(columns)), dtype=torch.int32)
    for row, (count, its) in enumerate(zip(columns, own, strict=True)):
        table[row, :count] = its
        if order == "shared prefix":
            shared = max(0, min(prefix, count - 1, columns[0] - 1))  # the newest page is nobody else's
            table[row, :shared] = own[0][:shared]
    return table


@dataclass
class Batch:
    """What one rank is given at every layer of a decode step."""

    layout: ShardLayout
    """What the scorer is told of a page's rows."""
    world_size: int
    rank: int
    """Of the group that exchanges candidates; not of `layout` where every rank holds all rows."""
    layers: list[Tensor]
    """e4m3 `[pages, R, 128]`, dense, one a layer."""
    block_table: Tensor
    """int32 `[B, columns]`."""
    seq_lens: Tensor
    """int32 `[B]`: the keys of the columns in `block_table`."""
    num_valid: Tensor
    """int32 `[T]`: blocks of the whole sequence that a token sees."""
    key_rows: Tensor
    """int64 `[T]`: where in `layers[i]`, as rows of 128 bytes, a token's own key goes; -1: another rank's."""
    query_len: int
    scale: int
    offset: int
    """Block of a column `c`: `c * scale + offset`."""
    k_bytes: int
    """What one launch reads of K."""
    exchanges: bool = True
    """Whether the selection needs the other ranks."""
    new_q: Tensor = field(init=False)
    new_keys: Tensor = field(init=False)
    """What the step brings, e4m3: `[T, 4, 128]` and `[T, 128]`."""
    index_q: Tensor = field(init=False)
    score_out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.block_table.device
        self.new_q = random_keys(self.tokens * NUM_HEADS * HEAD_DIM, device).view(FP8)
        self.new_q = self.new_q.view(self.tokens, NUM_HEADS, HEAD_DIM)
        self.new_keys = random_keys(self.tokens * HEAD_DIM, device).view(FP8).view(self.tokens, HEAD_DIM)
        self.index_q = self.new_q.clone()
        columns = ceil_div(self.block_table.shape[1], 4) * 4
        self.score_out = torch.empty((self.tokens, NUM_HEADS, columns), device=device)

    @property
    def tokens(self) -> int:
        """T."""
        return self.seq_lens.shape[0] * self.query_len


def sharded(
    pool: Tensor,
    lens: Sequence[int],
    layout: ShardLayout,
    layers: int,
    *,
    query_len: int = 1,
    order: str = "permuted",
) -> Batch:
    """A rank's shard of every page; `lens` are the requests' keys, all ranks' together."""
    columns = [layout.columns(keys) for keys in lens]
    k_bytes = sum(columns) * layout.page_bytes
    parts = layers_of(pool[: pool.numel() // layout.page_bytes * layout.page_bytes], k_bytes, layers)
    keys = [part.view(FP8).view(-1, layout.rows, HEAD_DIM) for part in parts]
    table = block_table(columns, keys[0].shape[0], order, SHARED_KEYS // layout.page_size)
    position = torch.tensor(lens)[:, None] - query_len + torch.arange(query_len)
    owner, row = layout.owner_and_row(position)
    page = table.gather(1, position // layout.page_size)
    return Batch(
        **_on(pool.device, lens, table, lens, query_len),
        layout=layout,
        world_size=layout.world_size,
        rank=layout.rank,
        layers=keys,
        key_rows=torch.where(owner == layout.rank, page * layout.rows + row, -1).flatten().to(pool.device),
        scale=layout.index_scale,
        offset=layout.index_offset,
        k_bytes=k_bytes,
    )


def replicated(pool: Tensor, lens: Sequence[int], layout: ShardLayout, layers: int) -> Batch:
    """All keys on every rank, one query token a request; `layout` says whose rank this is of what pages."""
    blocks, keys = _whole_blocks(pool, lens, layout, layers)
    return _of_whole_blocks(blocks, keys, lens, lens, layout, scale=1, offset=0, exchanges=False)


def page_strided(pool: Tensor, lens: Sequence[int], layout: ShardLayout, layers: int) -> Batch:
    """All keys on every rank, which reads every W-th block; one query token a request."""
    world_size, rank = layout.world_size, layout.rank
    blocks, keys = _whole_blocks(pool, lens, layout, layers)
    own = []
    for length in lens:
        last = ceil_div(length, BLOCK) - 1
        count = max(0, (last - rank) // world_size + 1)
        missing = (last + 1) * BLOCK - length if last % world_size == rank else 0
        own.append(count * BLOCK - missing)
    return _of_whole_blocks(
        blocks[:, rank::world_size], keys, own, lens, layout, scale=world_size, offset=rank, exchanges=True
    )


def _whole_blocks(
    pool: Tensor, lens: Sequence[int], layout: ShardLayout, layers: int
) -> tuple[Tensor, list[Tensor]]:
    """The table of every block, and every layer's K as blocks; those of a page lie side by side."""
    columns = [layout.columns(keys) for keys in lens]
    page_bytes = layout.page_size * HEAD_DIM
    keys = layers_of(pool[: pool.numel() // page_bytes * page_bytes], sum(columns) * page_bytes, layers)
    pages = block_table(columns, keys[0].numel() // page_bytes)
    each = layout.page_size // BLOCK
    blocks = (pages[:, :, None] * each + torch.arange(each, dtype=torch.int32)).flatten(1)
    return blocks, [part.view(FP8).view(-1, BLOCK, HEAD_DIM) for part in keys]


def _of_whole_blocks(
    table: Tensor,
    keys: list[Tensor],
    own: Sequence[int],
    lens: Sequence[int],
    layout: ShardLayout,
    *,
    scale: int,
    offset: int,
    exchanges: bool,
) -> Batch:
    """A batch of which a rank reads `own` of the requests' `lens` keys, in whole blocks."""
    newest = torch.tensor(lens) - 1
    mine = newest // BLOCK % scale == offset
    column = newest // BLOCK // scale
    page = table.gather(1, column.clamp(max=table.shape[1] - 1)[:, None]).squeeze(1)
    device = keys[0].device
    return Batch(
        **_on(device, own, table.contiguous(), lens, 1),
        layout=_WHOLE,
        world_size=layout.world_size,
        rank=layout.rank,
        layers=keys,
        key_rows=torch.where(mine, page * BLOCK + newest % BLOCK, -1).to(device),
        scale=scale,
        offset=offset,
        k_bytes=sum(_WHOLE.columns(keys) for keys in own) * _WHOLE.page_bytes,
        exchanges=exchanges,
    )


def _on(
    device: torch.device, own: Sequence[int], table: Tensor, lens: Sequence[int], query_len: int
) -> dict[str, Any]:
    """The metadata of a batch on its device."""
    whole = torch.tensor(lens, dtype=torch.int32, device=device)
    return {
        "seq_lens": torch.tensor(own, dtype=torch.int32, device=device),
        "block_table": table.to(device),
        "num_valid": num_valid_pages(whole, query_len),
        "query_len": query_len,
    }
