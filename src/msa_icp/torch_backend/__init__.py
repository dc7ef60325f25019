"""Tensor code: the fast path of a CPU, and right on any device.

The scorer accumulates in FP64, in which the sum of 128 products of e4m3 values is exact: its scores
are the canonical ones, bit for bit, whatever order the matrix library adds in.

Every op runs in inference mode, whatever mode its caller is in: only there PyTorch writes into tensors that
were made in it, as an engine's may be. Kernels write into any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from ..geometry import HEAD_DIM, NUM_HEADS, Layouts, ShardLayout
from .decode_index_score_sharded import decode_index_score_sharded
from .decode_score_publish import decode_score_publish
from .index_score_sharded import index_score_sharded
from .index_score_sharded_plan_device import index_score_sharded_plan_device
from .merge_candidates import merge_candidates
from .prefill_score_select import prefill_score_select
from .topk_select_prefill import topk_select_prefill
from .topk_select_publish import topk_select_publish
from .write_index_keys import write_index_keys

__all__ = [
    "decode_index_score_sharded",
    "decode_score_publish",
    "index_score_sharded",
    "index_score_sharded_plan_device",
    "merge_candidates",
    "prefill_score_select",
    "to_load",
    "topk_select_prefill",
    "topk_select_publish",
    "unavailable",
    "write_index_keys",
]

SERVED = ("cpu", "cuda")


def unavailable(device: torch.device) -> str | None:
    """None where this backend serves `device`, else the reason."""
    if device.type not in SERVED:
        return f"it is tested on {' and '.join(SERVED)} tensors only"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "this PyTorch finds no CUDA device"
    return None


def to_load(device: torch.device, ops: Collection[str], layouts: Layouts) -> list[Callable[[], Any]]:
    """Nothing of ours, but the matrix library and the thread pool of whatever scores."""
    return [partial(_one_small_score, device)] if any("score" in op for op in ops) else []


def _one_small_score(device: torch.device) -> None:
    layout = ShardLayout(world_size=4, rank=0, page_size=128)
    keys = torch.zeros((1, layout.rows, HEAD_DIM), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    one = torch.ones(1, dtype=torch.int32, device=device)
    decode_index_score_sharded(
        torch.zeros((1, NUM_HEADS, HEAD_DIM), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        keys,
        torch.zeros((1, 1), dtype=torch.int32, device=device),
        one,
        torch.empty((1, NUM_HEADS, 4), dtype=torch.float32, device=device),
        layout=layout,
        decode_query_len=1,
        enable_pdl=False,
    )
