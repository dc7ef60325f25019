"""Ways in which an argument can be wrong, and what the message must then say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# ---------------------------------------------------------------- how a tensor can be wrong


def no_tensor(_: Tensor) -> Any:
    return None


def listed(t: Tensor) -> Any:
    return t.shape


def as_type(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.zeros(t.shape, dtype=dtype, device=t.device)


def elsewhere(t: Tensor) -> Tensor:
    """The same tensor on another device (on a CPU: one that holds nothing)."""
    return t.to("cpu" if t.device.type != "cpu" else "meta")


def longer(dim: int, by: int = 1) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        shape = list(t.shape)
        shape[dim] += by
        return torch.zeros(shape, dtype=t.dtype, device=t.device)

    return change


def extra_dimension(t: Tensor) -> Tensor:
    return t[None]


def with_strides(*stride: int) -> Callable[[Tensor], Tensor]:
    """The same shape at other strides, over zeros."""

    def change(t: Tensor) -> Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, stride, strict=True))
        return torch.zeros(extent, dtype=t.dtype, device=t.device).as_strided(t.shape, stride)

    return change


def every_other(t: Tensor) -> Tensor:
    """The same shape, each last dimension with gaps."""
    return torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)[..., ::2]


def shifted(by: int) -> Callable[[Tensor], Tensor]:
    """The same shape and strides, `by` bytes past a 16-byte boundary."""

    def change(t: Tensor) -> Tensor:
        size = t.untyped_storage().nbytes() + 64
        memory = torch.zeros(size, dtype=torch.uint8, device=t.device)[by:]
        return memory[: (size - by) // t.itemsize * t.itemsize].view(t.dtype).as_strided(t.shape, t.stride())

    return change


# ---------------------------------------------------------------- the rules

Rule = tuple[str, str, Any, str, str]
"""Call, argument, what it becomes (a function of the right value, or a value), and what the message says:
the name, and what it was."""


def tensor_rules(
    call: str,
    argument: str,
    *wrong: tuple[Callable[[Tensor], Any], str],
    first: bool = False,
    optional: bool = False,
) -> list[Rule]:
    """Rules that every tensor has, and those given. The first one of a call says what the device is."""
    common = [(listed, "Size")]
    if not optional:
        common.append((no_tensor, "NoneType"))
    if not first:
        common.append((elsewhere, "on meta|on cpu"))
    return [(call, argument, change, argument, was) for change, was in [*common, *wrong]]


def integer_rules(call: str, argument: str, *values: Any, optional: bool = False) -> list[Rule]:
    common = (True, 1.0, "1", *(() if optional else (None,)))
    return [(call, argument, value, argument, re.escape(str(value))) for value in [*common, *values]]


def forced_rules(call: str, begin: str, end: str) -> list[Rule]:
    both = re.escape(f"{begin} + {end}")
    return [
        *integer_rules(call, begin, -1),
        *integer_rules(call, end, -1),
        (call, begin, 15, both, "17"),
        (call, end, 16, both, "17"),
    ]


def flag_rules(call: str, argument: str) -> list[Rule]:
    return [(call, argument, value, argument, re.escape(repr(value))) for value in (1, 0, None, "yes")]


def valid_pages_rules(call: str, argument: str = "num_valid_pages") -> list[Rule]:
    return tensor_rules(
        call,
        argument,
        (as_type(torch.int64), "torch.int64"),
        (longer(0), r"\[7\]"),
        (longer(0, -1), r"\[5\]"),
        (extra_dimension, r"\[1, 6\]"),
        (every_other, "strides"),
    )


def backend_rules(call: str) -> list[Rule]:
    return [
        (call, "backend", value, "backend", re.escape(repr(value)))
        for value in ("numpy", "", "Torch", "cake ", None, 3)
    ]
