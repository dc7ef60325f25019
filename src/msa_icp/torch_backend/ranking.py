"""The ranking as integer keys, so that a top-k needs no tie rule (contract, section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import MAX_BLOCKS, TOP_K
from ..rows import PAD_ID, PAD_SCORE_BITS

_ID_BITS = 13
_FORCED = 1 << (32 + _ID_BITS)
NOT_A_CANDIDATE = -1


def ranking_keys(scores: Tensor, ids: Tensor, num_valid: Tensor, force_begin: int, force_end: int) -> Tensor:
    """int64 keys: the better candidate has the larger key, and no two blocks have the same.

    `scores` float32 and `ids` int64 broadcast with `num_valid` (int64, negative counts as 0). From the
    top: forced or not, the score (NaN as -inf, -0.0 as +0.0), the lower id. What is no candidate gets
    `NOT_A_CANDIDATE`.
    """
    number = torch.where(scores.isnan(), float("-inf"), scores) + 0.0
    bits = number.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)
    keys = (ordered << _ID_BITS) | (MAX_BLOCKS - 1 - ids.clamp(0, MAX_BLOCKS - 1))
    forced = (ids < force_begin) | (ids >= num_valid - force_end)
    candidate = (ids >= 0) & (ids < num_valid.clamp(max=MAX_BLOCKS))
    return torch.where(candidate, keys + forced * _FORCED, NOT_A_CANDIDATE)


def best16(keys: Tensor) -> Tensor:
    """The ids of the 16 largest keys `[..., n]`, int64 `[..., 16]`, ascending; `MAX_BLOCKS` is padding."""
    best = keys.topk(min(TOP_K, keys.shape[-1]), dim=-1).values
    ids = MAX_BLOCKS - 1 - (best & (MAX_BLOCKS - 1))
    ids = torch.where(best == NOT_A_CANDIDATE, MAX_BLOCKS, ids).sort(-1).values
    return torch.nn.functional.pad(ids, (0, TOP_K - ids.shape[-1]), value=MAX_BLOCKS)


def select_top16(
    scores: Tensor,
    num_valid_pages: Tensor,
    force_begin: int,
    force_end: int,
    index_scale: int,
    index_offset: int,
) -> tuple[Tensor, Tensor]:
    """Score rows `[T, H, K]` -> raw score bits and ids of their Top16, int32 `[T, H, 16]` each."""
    columns = min(scores.shape[-1], (MAX_BLOCKS - 1 - index_offset) // index_scale + 1)
    scores = scores[..., :columns]
    blocks = torch.arange(columns, device=scores.device) * index_scale + index_offset
    num_valid = num_valid_pages.to(torch.int64)[:, None, None]
    ids = best16(ranking_keys(scores, blocks, num_valid, force_begin, force_end))
    padding = ids == MAX_BLOCKS
    column = torch.where(padding, 0, (ids - index_offset) // index_scale)
    bits = scores.gather(-1, column).contiguous().view(torch.int32)
    bits = torch.where(padding, PAD_SCORE_BITS, bits)
    return bits, torch.where(padding, PAD_ID, ids).to(torch.int32)
