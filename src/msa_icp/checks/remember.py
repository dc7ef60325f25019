"""Checks that are made once for every kind of call.

The rules look at the shape, strides, dtype, device, alignment and `requires_grad` of a tensor, never at
its contents, and at the values of the numbers. A decode loop calls with the same ones again and again: what
has been accepted is remembered, and found again with one look into a dictionary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

LIMIT = 1024
"""Calls that one check remembers; then it starts anew. One takes about 2 KiB."""
NUMBERS = (int, bool, float)
"""Types of the numbers that are remembered: what one of these is, it stays."""

_TENSOR = (
    "{0} if type({0}) is not Tensor else "
    "({0}.shape, {0}.stride(), {0}.dtype, {0}.device, {0}.data_ptr() % 16, {0}.requires_grad)"
)
"""All that a rule may look at. A tensor that is not dense has no `data_ptr()`, so it is never found."""
_NUMBER = "type({0}), {0}"
"""The type as well: True and 1.0 equal 1, and are no integers."""


def remember(check: Callable[P, R]) -> Callable[P, R]:
    """`check`, but a call like one that it has accepted before gets at once what it returned then.

    The positional parameters of `check` are tensors or None, the keyword-only ones numbers, without
    defaults, and it looks at nothing of a tensor that `_TENSOR` does not name. What is refused, and what may
    answer differently the next time (a subclass of Tensor, a number of another type), is checked in every
    call.

    The look-up is written out for the parameters, as dataclasses write `__init__`: a loop over them took
    5.1 us for the decode scorer, this takes 3.6, of which 2.1 are PyTorch's answers.
    """
    parameters = inspect.signature(check).parameters.values()
    tensors = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    numbers = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    key = ", ".join([*map(_TENSOR.format, tensors), *map(_NUMBER.format, numbers)])
    signature = ", ".join([*tensors, "*", *numbers])
    call = ", ".join([*tensors, *(f"{name}={name}" for name in numbers)])
    source = f"""
def key({signature}):
    return {key}

def remembered({signature}):
    try:
        return accepted[{key}]
    except Exception:
        pass  # the call below is no part of the handler: a refusal has no other error behind it
    return anew({call})
"""

    def anew(*arguments: P.args, **numbers: P.kwargs) -> R:
        result = check(*arguments, **numbers)
        if all(t is None or type(t) is Tensor for t in arguments) and all(
            type(n) in NUMBERS for n in numbers.values()
        ):
            if len(accepted) >= LIMIT:
                accepted.clear()
            accepted[names["key"](*arguments, **numbers)] = result
        return result

    accepted: dict[Any, R] = {}
    names: dict[str, Any] = {"Tensor": Tensor, "accepted": accepted, "anew": anew}
    exec(compile(source, f"<look-up of {check.__module__}.{check.__name__}>", "exec"), names)
    return functools.wraps(check)(names["remembered"])
