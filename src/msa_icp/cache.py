"""Getting data in: sharding a whole cache, and counting the blocks that a token sees.

Tensor expressions on any device; the op that writes new keys is a backend's (`write_index_keys`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .geometry import BLOCK, ceil_div


def shard_index_keys(cache: Tensor, *, rank: int, world_size: int) -> Tensor:
    """One rank's shard of a whole index-key cache.

    Args:
        cache: `float8_e4m3fn [pages, P, 128]`, any strides, any device; P, 128 or 256, is the page
            size. Row `p` of a page is the key at position `P * column + p` of whoever owns the page.
        rank, world_size: whose shard; `world_size` 2 or 4.

    Returns:
        `float8_e4m3fn [pages, P / world_size, 128]`, contiguous, on the cache's device: the rows that
        section 2 of the contract gives this rank, in their local order.

    Raises:
        ValueError: an argument breaks a rule; the message names it.
    """
    layout = checks.shard_cache(cache, rank, world_size)
    rows = layout.key_position(0, torch.arange(layout.rows, device=cache.device))
    return cache.view(torch.uint8).index_select(1, rows).view(cache.dtype)


def num_valid_pages(seq_lens: Tensor, decode_query_len: int, out: Tensor | None = None) -> Tensor:
    """How many B128 blocks each decode token sees: what publish and merge take of that name.

    Token `j` of a request is at position `seq_len - decode_query_len + j` and sees
    `ceil((position + 1) / 128)` blocks over all ranks; 0 for a padding row (`seq_len <= 0`) and for a
    position below 0 (contract, section 5).

    Args:
        seq_lens: `int32 [B]`, contiguous: keys of each request, the new tokens included.
        decode_query_len: query tokens of each request, 1 to 8.
        out: optional contiguous `int32 [B * decode_query_len]` on the same device, to be written
            instead of a new tensor (under a CUDA graph, for example).

    Returns:
        `int32 [B * decode_query_len]`, contiguous.

    Raises:
        ValueError: an argument breaks a rule; the message names it.
    """
    checks.valid_pages(seq_lens, decode_query_len, out)
    steps = torch.arange(1, decode_query_len + 1, device=seq_lens.device)
    seen = seq_lens.to(torch.int64)[:, None] - decode_query_len + steps
    blocks: Tensor = ceil_div(seen.clamp(min=0), BLOCK).to(torch.int32).flatten()
    if out is None:
        return blocks
    with torch.inference_mode():  # the only one in which PyTorch writes into a tensor that was made in it
        out.copy_(blocks)
    return out
