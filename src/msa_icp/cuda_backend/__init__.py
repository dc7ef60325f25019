"""Hand-written kernels for compute capability 9.0 (Hopper), compiled at run time through NVRTC.

One `.cu` file an op, which the Python file of the same name launches; `device/` holds what kernels share,
`loader` compiles and loads, `launcher` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from ..geometry import LAYOUTS, Layouts
from .decode_index_score_sharded import decode_index_score_sharded
from .decode_index_score_sharded import kernels as _score_kernels
from .decode_score_publish import decode_score_publish
from .index_score_sharded import index_score_sharded
from .index_score_sharded import kernels as _prefill_score_kernels
from .loader import Kernel
from .merge_candidates import kernels as _merge_kernels
from .merge_candidates import merge_candidates
from .topk_select_prefill import kernels as _prefill_select_kernels
from .topk_select_prefill import topk_select_prefill
from .topk_select_publish import kernels as _publish_kernels
from .topk_select_publish import topk_select_publish
from .write_index_keys import kernels as _write_kernels
from .write_index_keys import write_index_keys

__all__ = [
    "decode_index_score_sharded",
    "decode_score_publish",
    "index_score_sharded",
    "kernels",
    "merge_candidates",
    "not_installed",
    "to_load",
    "topk_select_prefill",
    "topk_select_publish",
    "unavailable",
    "write_index_keys",
]

_CAPABILITY = (9, 0)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_INSTALLED = _installed("cuda.core") and _installed("cuda.bindings.nvrtc")


def not_installed() -> str | None:
    """None where kernels can be compiled, with a GPU or without one, else the reason."""
    return None if _INSTALLED else "cuda-core is not installed; install msa-icp[cuda13] or msa-icp[cuda12]"


_KERNELS = {
    "decode_index_score_sharded": (_score_kernels,),
    "topk_select_publish": (_publish_kernels,),
    "merge_candidates": (_merge_kernels,),
    "decode_score_publish": (_score_kernels, _publish_kernels),
    "write_index_keys": (_write_kernels,),
    "index_score_sharded": (_prefill_score_kernels,),
    "topk_select_prefill": (_prefill_select_kernels,),
}
"""For each op, functions from layouts to every kernel that it may need."""


def kernels(ops: Collection[str] = tuple(_KERNELS), layouts: Layouts = LAYOUTS) -> Iterator[Kernel]:
    """Every kernel that the ops need in the layouts, once."""
    groups = dict.fromkeys(chain.from_iterable(_KERNELS[op] for op in ops))
    return chain.from_iterable(group(layouts) for group in groups)


def unavailable(device: torch.device) -> str | None:
    """None where this backend serves `device`, else the reason."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"it is written for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    return not_installed()


def to_load(device: torch.device, ops: Collection[str], layouts: Layouts) -> list[Callable[[], Any]]:
    """What there is to call before no call of `ops` in `layouts` compiles or loads: one for each kernel."""
    return [partial(kernel.load, device) for kernel in kernels(ops, layouts)]
