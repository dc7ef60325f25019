"""Which form of a chain serves: fused or not, by layout and batch alone, never by a value on the device."""

from __future__ import annotations

import torch


def fused_decode_min_batch(device: torch.device, page_size: int, world_size: int) -> int | None:
    """Requests of a decode batch from which on score and publish are one call; None: never.

    On an H200, at W = 2 and 4, both page sizes, 1 to 256 requests and 8K to 1M keys, it is ahead in one cell
    by 4 % and elsewhere by no more than two runs differ by, and takes up to 1.5 times as long where rows are
    widest (docs/performance.md). So it serves only where the caller gives it a pool.
    """
    return None


def fused_prefill(device: torch.device, page_size: int, world_size: int) -> bool:
    """Whether the fused form is the better one for prefill windows.

    Triton's, the only one on a GPU, takes longer than the CUDA scorer and selection at every size
    (docs/performance-prefill.md), but no score matrix.
    """
    return False
