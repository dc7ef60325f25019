"""Hand-written kernels for compute capability 9.0 (Hopper), compiled at run time through NVRTC.

One `.cu` file an op, which the Python file of the same name launches; `device/` holds what kernels share,
`loader` compiles and loads, `launcher` launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain

import torch

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
    "topk_select_prefill",
    "topk_select_publish",
    "unavailable",
    "warmup",
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


def kernels() -> Iterator[Kernel]:
    """Every kernel of the backend."""
    return chain(
        _score_kernels(),
        _publish_kernels(),
        _merge_kernels(),
        _write_kernels(),
        _prefill_score_kernels(),
        _prefill_select_kernels(),
    )


def unavailable(device: torch.device) -> str | None:
    """None where this backend serves `device`, else the reason."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU of compute capability 9.0"
    capability = torch.cuda.get_device_capability(device)
    if capability != _CAPABILITY:
        return f"it is written for compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    return not_installed()


def warmup(device: torch.device) -> None:
    """Compile and load every kernel: afterwards no call does either."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for kernel in kernels():
        kernel.load(device)
