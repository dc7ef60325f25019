"""Which backend serves a device, and why another one cannot."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from types import ModuleType

import torch

from . import checks

NAMES = ("cuda", "triton", "torch")
"""Backend names; `msa_icp.<name>_backend` is the package of each. The better of a GPU comes first."""

AUTOMATIC = ("cake", "auto")
"""Names that leave the choice to the device; "cake" is the upstream's only one."""


OPS = (
    "decode_index_score_sharded",
    "topk_select_publish",
    "merge_candidates",
    "decode_score_publish",
    "write_index_keys",
    "index_score_sharded_plan_device",
    "index_score_sharded",
    "topk_select_prefill",
    "prefill_score_select",
)
"""The functions of a backend. Not every backend has every one."""


def package(name: str) -> ModuleType:
    """The package of a backend's name, whatever it serves."""
    return importlib.import_module(f"msa_icp.{name}_backend")


def _by_preference(device: torch.device) -> tuple[str, ...]:
    """The names, best first. On a CPU kernels run interpreted, if at all."""
    return tuple(reversed(NAMES)) if device.type == "cpu" else NAMES


def backends(device: torch.device | str) -> dict[str, str | None]:
    """Every backend by name: None where it serves `device`, else the reason why it does not."""
    where = checks.device("device", device)
    return {name: package(name).unavailable(where) for name in _by_preference(where)}


def is_supported(device: torch.device | str) -> bool:
    """Whether any backend serves `device`."""
    return any(reason is None for reason in backends(device).values())


def resolve(backend: str, device: torch.device, op: str | None = None) -> ModuleType:
    """The package of the backend that a call with `backend=` on `device` runs in.

    With `op`, the name of a backend function, it is one that has that op. Raises ValueError for an unknown
    name, and for a backend that does not serve the device or has not the op, with the reason.
    """
    if backend in AUTOMATIC:
        reasons = {}
        for name in _by_preference(device):
            reasons[name] = _why_not(name, device, op)
            if reasons[name] is None:
                return package(name)
        raise ValueError(
            f"backend: no backend serves {device} ({'; '.join(f'{n}: {r}' for n, r in reasons.items())})"
        )
    if backend not in NAMES:
        known = ", ".join(repr(name) for name in AUTOMATIC + NAMES)
        raise ValueError(f"backend: must be one of {known}, was {backend!r}")
    reason = _why_not(backend, device, op)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} does not serve {device}: {reason}")
    return package(backend)


def _why_not(name: str, device: torch.device, op: str | None) -> str | None:
    chosen = package(name)
    reason = chosen.unavailable(device)
    if reason is None and op is not None and op not in chosen.__all__:
        return f"it has no {op}; backend='auto' chooses one that has"
    return str(reason) if reason is not None else None


_found: dict[tuple[str, str, torch.device], ModuleType] = {}
"""What `implementation` has found. A backend that serves a device does so until the process ends."""


def implementation(op: str, backend: str, device: torch.device) -> Callable[..., None]:
    """The function that does `op` in a call with `backend=` on `device`; raises as `resolve` does."""
    try:
        chosen = _found[op, backend, device]
    except (KeyError, TypeError):  # TypeError: what is no name need not be hashable either
        chosen = _found[op, backend, device] = resolve(backend, device, op)
    return getattr(chosen, op)  # type: ignore[no-any-return]


def warmup(
    device: torch.device | str,
    backend: str = "cake",
    *,
    page_size: int | None = None,
    world_size: int | None = None,
) -> None:
    """Compile and load every kernel that a call with `backend=` may need, before the first exchange.

    A kernel that is first loaded while a peer waits for it stalls both, and none can be loaded while
    a CUDA graph is being captured. What has been compiled is kept on disk. Several processes may call it
    at once, from a cold cache too: each goes its own way through the kernels and finds there what the others
    have compiled.

    Args:
        device: the device of the tensors.
        backend: the backend of the calls.
        page_size: 128 or 256. None: kernels for both are loaded.
        world_size: 2 or 4. None: kernels for both are loaded.

    Raises:
        ValueError: as the entry points raise for these arguments.
    """
    where = checks.device("device", device)
    layouts = checks.layouts(page_size, world_size)
    resolve(backend, where)  # whatever op it is, this is what is wrong with it
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    loads = [
        load
        for name, ops in _ops_by_backend(backend, where).items()
        for load in package(name).to_load(where, ops, layouts)
    ]
    random.Random(os.getpid()).shuffle(loads)
    for load in loads:
        load()


def _ops_by_backend(backend: str, device: torch.device) -> dict[str, list[str]]:
    """The ops that calls with `backend=` on `device` find in each backend."""
    found: dict[str, list[str]] = {}
    for op in OPS:
        names = _by_preference(device) if backend in AUTOMATIC else (backend,)
        for name in names:
            if _why_not(name, device, op) is None:
                found.setdefault(name, []).append(op)
                break
    return found
