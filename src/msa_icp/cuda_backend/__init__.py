"""Hand-written kernels for compute capability 9.0 (Hopper), compiled at run time through NVRTC.

One `.cu` file an op, which the Python file of the same name launches; `device/` holds what kernels share,
`loader` compiles and loads, `launcher` launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch

from ..driver_calls import checked
from ..geometry import LAYOUTS, Layouts
from .decode_index_score_sharded import decode_index_score_sharded
from .decode_index_score_sharded import kernels as _score_kernels
from .decode_score_publish import decode_score_publish
from .index_score_sharded import index_score_sharded
from .index_score_sharded import kernels as _prefill_score_kernels
from .loader import ARCHITECTURE, Kernel
from .merge_candidates import kernels as _merge_kernels
from .merge_candidates import merge_candidates
from .topk_select_prefill import kernels as _prefill_select_kernels
from .topk_select_prefill import topk_select_prefill
from .topk_select_publish import kernels as _publish_kernels
from .topk_select_publish import topk_select_publish
from .write_index_keys import kernels as _write_kernels
from .write_index_keys import write_index_keys

__all__ = [
    "ARCHITECTURE",
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


_REMEDY = "install msa-icp[cuda13] or msa-icp[cuda12]"


def not_installed() -> str | None:
    """None where kernels can be compiled, with a GPU or without one, else the reason."""
    return _without_nvrtc() if _INSTALLED else f"cuda-core is not installed; {_REMEDY}"


@cache
def _without_nvrtc() -> str | None:
    from cuda.bindings import nvrtc

    try:
        nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:  # the package is there, and the library that it loads is not
        return f"NVRTC cannot be loaded ({str(error).splitlines()[0]}); {_REMEDY}"
    return None


@cache
def _behind_nvrtc() -> str | None:
    """None where the driver takes what NVRTC compiles, else the reason."""
    from cuda.bindings import driver, nvrtc

    _, compiler, _ = nvrtc.nvrtcVersion()
    served = checked(driver.cuDriverGetVersion()) // 1000
    if compiler <= served:
        return None
    return f"NVRTC is of CUDA {compiler}, and this driver serves CUDA {served}; install msa-icp[cuda{served}]"


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
    return not_installed() or _behind_nvrtc()


def to_load(device: torch.device, ops: Collection[str], layouts: Layouts) -> list[Callable[[], Any]]:
    """What there is to call before no call of `ops` in `layouts` compiles or loads: one for each kernel."""
    return [partial(kernel.load, device) for kernel in kernels(ops, layouts)]
