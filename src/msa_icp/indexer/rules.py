"""Which form of a chain serves: fused or not, by layout and batch alone, never by a value on the device."""

from __future__ import annotations

import torch


def fused_decode_min_batch(device: torch.device, page_size: int, world_size: int) -> int | None:
    """Requests of a decode batch from which on score and publish are one call; None: never.

    To be set from measurements (benchmarks/decode_chain.py); until there is one that shows the fused form
    ahead, it serves only where the caller gives it a pool.
    """
    return None


def fused_prefill(device: torch.device, page_size: int, world_size: int) -> bool:
    """Whether the fused form is the better one for prefill windows; likewise."""
    return False
