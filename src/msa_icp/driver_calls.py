"""What the CUDA driver answers, through `cuda.bindings`."""

from __future__ import annotations

from typing import Any


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returned; RuntimeError with the driver's words where it failed."""
    from cuda.bindings import driver

    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"CUDA: {status.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if values else None
