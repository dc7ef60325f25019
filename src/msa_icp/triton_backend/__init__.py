"""Portable GPU kernels in Triton: every GPU that Triton serves, and its interpreter on CPU tensors.

A kernel is found by its op's name. What the kernels share is in `launch` (compilation and launch), `e4m3`
(numbers), `ranking` (Top16), `waiting` (the exchange) and `pdl`.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain

import torch

__all__ = [
    "decode_index_score_sharded",
    "decode_score_publish",
    "index_score_sharded",
    "index_score_sharded_plan_device",
    "merge_candidates",
    "prefill_score_select",
    "topk_select_prefill",
    "topk_select_publish",
    "unavailable",
    "warmup",
    "write_index_keys",
]

_INSTALLED = find_spec("triton") is not None
if _INSTALLED:
    from . import launch as _launch
    from .decode_index_score_sharded import decode_index_score_sharded
    from .decode_index_score_sharded import variants as _score_variants
    from .decode_score_publish import decode_score_publish
    from .decode_score_publish import variants as _fused_variants
    from .index_score_sharded import index_score_sharded
    from .index_score_sharded import variants as _window_variants
    from .index_score_sharded_plan_device import index_score_sharded_plan_device
    from .index_score_sharded_plan_device import variants as _plan_variants
    from .merge_candidates import merge_candidates
    from .merge_candidates import variants as _merge_variants
    from .prefill_score_select import prefill_score_select
    from .prefill_score_select import variants as _window_fused_variants
    from .topk_select_prefill import topk_select_prefill
    from .topk_select_prefill import variants as _select_variants
    from .topk_select_publish import topk_select_publish
    from .topk_select_publish import variants as _publish_variants
    from .write_index_keys import variants as _write_variants
    from .write_index_keys import write_index_keys

    VARIANTS = (
        _score_variants,
        _publish_variants,
        _merge_variants,
        _fused_variants,
        _write_variants,
        _plan_variants,
        _window_variants,
        _select_variants,
        _window_fused_variants,
    )
    """For each op, a function from a `Target` to every (kernel, constants) that a device may need."""

_OLDEST = (8, 0)


def unavailable(device: torch.device) -> str | None:
    """None where this backend serves `device`, else the reason."""
    if not _INSTALLED:
        return "Triton is not installed"
    if device.type == "cpu":
        return None if _launch.INTERPRETED else "on a CPU it runs only under TRITON_INTERPRET=1"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "this PyTorch finds no GPU of that kind"
    if _launch.INTERPRETED:
        return "under TRITON_INTERPRET=1 it serves CPU tensors only"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < _OLDEST:
        return f"it needs compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    return None


def warmup(device: torch.device) -> None:
    """Compile and load every variant of every kernel: afterwards no call does either."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    target = _launch.target_of(device)
    for kernel, constants in chain.from_iterable(variants(target) for variants in VARIANTS):
        kernel.load(constants, device)
