"""The decode scorer in tensor code (contract, sections 3 and 4).

The work is a flat list of (request, column) items, cut into tiles of a few thousand key rows that
stay in the caches: gather the pages' bytes, convert them, multiply by the request's queries, take the
maximum over the rows of each page. The keys of the cache are never converted as a whole.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import HEAD_DIM, NUM_HEADS, ShardLayout

TILE_ROWS = 4096
"""Key rows converted at a time: 0.5 MiB of bytes become 4 MiB of FP64. On two Zen 4 cores tiles of
1024, 2048 and 4096 rows reached 1.1, 1.4 and 1.7 GB/s at P = 128, W = 4."""

KEY_SCALE = 256.0
"""The converted keys are their values divided by this; the queries are multiplied by it."""

NEG_INF = float("-inf")


@dataclass
class _Items:
    """One entry for each (request, column) whose scores are written."""

    request: Tensor  # int64
    column: Tensor  # int64
    page: Tensor  # int64, clamped to the cache
    readable: Tensor  # bool: the page exists, in the sequence, the table and the cache


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
    queries = index_q.to(torch.float64).view(lens.shape[0], decode_query_len * NUM_HEADS, HEAD_DIM)
    # A NaN query row makes every dot product NaN, and a NaN is ignored by the maximum.
    dead = queries.isnan().any(-1)
    queries = queries.nan_to_num(nan=0.0) * KEY_SCALE

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
    scratch = _scratch(pages.device)
    raw = scratch.take("raw", (count, rows * HEAD_DIM), torch.uint8)
    torch.index_select(_page_bytes(index_k), 0, pages, out=raw)
    keys, number = _exact_values(raw, scratch)

    dots = _products(queries, request, keys.view(count, rows, HEAD_DIM), scratch)
    if visible is not None:
        dots.view(count, -1, NUM_HEADS, rows).masked_fill_(~visible[:, :, None, :], NEG_INF)
    if number is not None:
        dots.masked_fill_(~number.view(count, 1, rows), NEG_INF)
    # The one rounding of the exact sum; adding zero makes -0.0 a +0.0.
    return dots.amax(-1).to(torch.float32) + 0.0


def _products(queries: Tensor, request: Tensor, keys: Tensor, scratch: _Scratch) -> Tensor:
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


def _page_bytes(index_k: Tensor) -> Tensor:
    """The shard as bytes, a page a row, at the shard's own pitch."""
    pages, rows, _ = index_k.shape
    return index_k.view(torch.uint8).as_strided((pages, rows * HEAD_DIM), (index_k.stride(0), 1))


def _exact_values(raw: Tensor, scratch: _Scratch) -> tuple[Tensor, Tensor | None]:
    """e4m3 bytes `[g, n]` -> their values divided by `KEY_SCALE` in FP64, and which rows hold no NaN.

    The bits are moved in integer lanes: the sign to bit 15 and the other seven to bits 13 ... 7 make
    the fp16 number of the same digits with an exponent bias of 15 instead of 7, which is the value
    divided by 2**8. A NaN byte (0x7F, 0xFF) becomes a finite number there, so NaN rows are found in the
    bytes and reported apart: bool over all rows of 128 bytes, None where no row of the tile has one.
    """
    count, width = raw.shape
    magnitude = scratch.take("magnitude", (count, width), torch.uint8)
    torch.bitwise_and(raw, 0x7F, out=magnitude)
    number = None
    if int(magnitude.max()) == 0x7F:
        number = magnitude.view(-1, HEAD_DIM).amax(-1) != 0x7F
    half = scratch.take("half", (count, width), torch.int16)
    half.copy_(raw.view(torch.int8))  # sign-extended: the sign stands in bits 15 ... 7
    half.mul_(128).bitwise_and_(-16385)  # bit 14 cleared
    single = scratch.take("single", (count, width), torch.float32)
    single.copy_(half.view(torch.float16))
    double = scratch.take("double", (count, width), torch.float64)
    double.copy_(single)
    return double, number


class _Scratch:
    """Buffers that the tiles of one thread reuse: fresh ones cost more in page faults than the work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The buffer `name` as an uninitialised contiguous tensor."""
        need = dtype.itemsize
        for size in shape:
            need *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < need:
            buffer = self._buffers[name] = torch.empty(need, dtype=torch.uint8, device=self._device)
        return buffer[:need].view(dtype).view(shape)


_local = threading.local()


def _scratch(device: torch.device) -> _Scratch:
    """This thread's buffers. On CUDA the caching allocator serves as well, and knows the streams."""
    if device.type != "cpu":
        return _Scratch(device)
    if not hasattr(_local, "scratch"):
        _local.scratch = _Scratch(device)
    return _local.scratch  # type: ignore[no-any-return]
