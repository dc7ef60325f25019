"""Which backend serves a device, and why another one cannot."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from . import checks

NAMES = ("triton", "torch")
"""Backend names; `msa_icp.<name>_backend` is the package of each. The better of a GPU comes first."""

AUTOMATIC = ("cake", "auto")
"""Names that leave the choice to the device; "cake" is the upstream's only one."""


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


def resolve(backend: str, device: torch.device) -> ModuleType:
    """The package of the backend that a call with `backend=` on `device` runs in.

    Raises ValueError for an unknown name, and for a backend that does not serve the device, with the
    reason.
    """
    if backend in AUTOMATIC:
        for name in _by_preference(device):
            candidate = package(name)
            if candidate.unavailable(device) is None:
                return candidate
        reasons = "; ".join(f"{name}: {reason}" for name, reason in backends(device).items())
        raise ValueError(f"backend: no backend serves {device} ({reasons})")
    if backend not in NAMES:
        known = ", ".join(repr(name) for name in AUTOMATIC + NAMES)
        raise ValueError(f"backend: must be one of {known}, was {backend!r}")
    chosen = package(backend)
    reason = chosen.unavailable(device)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} does not serve {device}: {reason}")
    return chosen


def warmup(device: torch.device | str, backend: str = "cake") -> None:
    """Compile and load every kernel of the chosen backend, before the first exchange.

    A kernel that is first loaded while a peer waits for it stalls both, and none can be loaded while
    a CUDA graph is being captured. Raises ValueError as the entry points do for `backend`.
    """
    where = checks.device("device", device)
    resolve(backend, where).warmup(where)
