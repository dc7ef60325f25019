"""Our functions under FlashInfer's names, for the devices that FlashInfer does not serve.

An engine that imports from `flashinfer.msa_ops` runs unchanged once `install()` has been called. What is
replaced are the public functions of this package that `flashinfer.msa_ops` has under the same names: each
becomes one that looks at the device of the call, and nothing else of FlashInfer is touched.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

MODULES = ("flashinfer.msa_ops", "flashinfer.msa_ops.cake_icp_indexer")
"""Where callers find the names: the package that exports them and the module that defines them."""

CAPABILITIES = ((10, 0), (10, 3), (10, 7))
"""What FlashInfer's kernels are built for, by its documentation."""

Function = Callable[..., Any]

_lock = threading.Lock()
_originals: dict[Function, Function] = {}
"""FlashInfer's function by the one that stands in its place."""
_served: dict[torch.device, bool] = {}
"""Whether FlashInfer serves a device that was in a call. A dictionary, for torch.compile can look it up."""


def install() -> None:
    """Let the ICP functions of `flashinfer.msa_ops` serve the devices that FlashInfer does not.

    Call it once, before the engine's `from flashinfer.msa_ops import ...`: a name that was imported
    before stays what it was. Afterwards a call about a CUDA device that FlashInfer serves (its own
    `is_supported` decides) goes to FlashInfer's function, with the arguments as they are, and every
    other one to ours, a CPU's too. What a call is about is the argument `device` where the function has
    one (None: the current CUDA device, the CPU where there is none), otherwise its first tensor.
    Functions of sizes alone are ours on every device; they give the same numbers.

    Called again it changes nothing, or replaces what somebody has put back. Threads may call it at
    once. CUDA is not initialized.

    Raises:
        ImportError: FlashInfer is not installed, or cannot be imported here.
        RuntimeError: this FlashInfer has not all of the functions. Nothing has been replaced.
    """
    with _lock:
        ours = _our_functions()
        modules = _flashinfer(tuple(ours))
        made: dict[Function, Function] = {}  # both modules hold the same function, before and after
        for module in modules:
            for name, mine in ours.items():
                theirs = getattr(module, name)
                if theirs in _originals:
                    continue
                if theirs not in made:
                    made[theirs] = _either(theirs, mine)
                    _originals[made[theirs]] = theirs
                setattr(module, name, made[theirs])


def uninstall() -> None:
    """Put FlashInfer's own functions back where `install` has replaced them; without `install`, nothing.

    A name that somebody else has replaced since is theirs and stays. Whoever imported a function between
    `install` and `uninstall` keeps the one that looks at the device.
    """
    with _lock:
        if not _originals:
            return
        for module in map(importlib.import_module, MODULES):
            for name in _our_functions():
                present = getattr(module, name, None)
                if present in _originals:
                    setattr(module, name, _originals[present])
        _originals.clear()
        _served.clear()


def _our_functions() -> dict[str, Function]:
    """The functions of this package that FlashInfer has too, by name: a prefix tells them."""
    package = importlib.import_module(__package__)
    prefixes = ("msa_icp_", "prepare_msa_icp_")
    return {name: getattr(package, name) for name in package.__all__ if name.startswith(prefixes)}


def _flashinfer(names: tuple[str, ...]) -> list[ModuleType]:
    """FlashInfer's modules that hold `names`; raises as `install` does."""
    try:
        modules = [importlib.import_module(module) for module in MODULES]
    except (ImportError, OSError) as error:  # it loads libraries of CUDA while it is imported
        raise ImportError(
            f"install() puts functions into flashinfer.msa_ops, which cannot be imported here ({error}): "
            "`pip install 'flashinfer-python>=0.7.4'`, or import the functions from msa_icp itself",
            name="flashinfer",
        ) from error
    missing = [
        f"{module.__name__}.{name}" for module in modules for name in names if not hasattr(module, name)
    ]
    if missing:
        version = getattr(importlib.import_module("flashinfer"), "__version__", "of an unknown version")
        raise RuntimeError(
            f"install() cannot replace {', '.join(missing)}: FlashInfer {version} has no such function; "
            "`pip install 'flashinfer-python>=0.7.4'`, or import the functions from msa_icp itself"
        )
    return modules


def _either(theirs: Function, ours: Function) -> Function:
    """The function that calls `theirs` for a device that FlashInfer serves, and `ours` for any other."""
    parameters = inspect.signature(ours).parameters
    if "device" in parameters:

        @functools.wraps(theirs)
        def by_device(*args: Any, **kwargs: Any) -> Any:
            device = _named(kwargs.get("device"))
            return (theirs if device is not None and _serves(device) else ours)(*args, **kwargs)

        return by_device

    first = next(iter(parameters))

    @functools.wraps(theirs)
    def by_tensor(*args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else kwargs.get(first)
        if isinstance(subject, Tensor) and _serves(subject.device):
            return theirs(*args, **kwargs)
        return ours(*args, **kwargs)

    return by_tensor


def _named(value: Any) -> torch.device | None:
    """The CUDA device that an argument `device` means; None for any other, and for what is no device."""
    try:
        device = torch.device("cuda" if value is None else value)
    except (RuntimeError, TypeError):
        return None  # our function words the error
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _serves(device: torch.device) -> bool:
    """Whether FlashInfer's kernels serve `device`."""
    known = _served.get(device)  # first of all, because this is most of what a call pays
    if known is None:
        known = _served[device] = _ask(device)
    return known


def _ask(device: torch.device) -> bool:
    if device.type != "cuda":
        return False  # not for FlashInfer to say: it would answer for the current CUDA device
    try:
        theirs = importlib.import_module("flashinfer.experimental.cake_msa_icp_indexer").is_supported
    except (ImportError, OSError, AttributeError):  # moved, or something is missing: its function says so
        return torch.cuda.is_available() and torch.cuda.get_device_capability(device) in CAPABILITIES
    return bool(theirs(device))
