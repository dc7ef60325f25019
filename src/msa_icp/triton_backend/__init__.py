"""Portable GPU kernels in Triton: every GPU that Triton serves, and its interpreter on CPU tensors.

A kernel is found by its op's name. What the kernels share is in `launch` (compilation and launch), `e4m3`
(numbers), `ranking` (Top16), `waiting` (the exchange) and `pdl`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from ..geometry import LAYOUTS, Layouts

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
    "variants",
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

    _VARIANTS = {
        "decode_index_score_sharded": (_score_variants,),
        "topk_select_publish": (_publish_variants,),
        "merge_candidates": (_merge_variants,),
        "decode_score_publish": (_score_variants, _fused_variants),
        "write_index_keys": (_write_variants,),
        "index_score_sharded_plan_device": (_plan_variants,),
        "index_score_sharded": (_window_variants,),
        "topk_select_prefill": (_select_variants,),
        "prefill_score_select": (_window_fused_variants,),
    }
    """For each op, functions from a `Target` and layouts to every (kernel, constants) that it may need."""

    def variants(
        target: _launch.Target, ops: Collection[str] = tuple(_VARIANTS), layouts: Layouts = LAYOUTS
    ) -> Iterator[tuple[_launch.Kernel, tuple[Any, ...]]]:
        """Every (kernel, constants) that the ops need in the layouts, once."""
        groups = dict.fromkeys(chain.from_iterable(_VARIANTS[op] for op in ops))
        return chain.from_iterable(group(target, layouts) for group in groups)


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


def to_load(device: torch.device, ops: Collection[str], layouts: Layouts) -> list[Callable[[], Any]]:
    """What there is to call before no call of `ops` in `layouts` compiles or loads: one for each variant."""
    needed = variants(_launch.target_of(device), ops, layouts)
    return [partial(kernel.load, constants, device) for kernel, constants in needed]
