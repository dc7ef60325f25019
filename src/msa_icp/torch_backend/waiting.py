"""Bounded waits, failure words and shared words of the exchange (contract, section 6), on a CPU."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

_yield = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))
_fence_lock = threading.Lock()


def memory(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over memory that somebody else owns: a row range of a receive storage."""
    count = 1
    for size in shape:
        count *= size
    raw = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def fence() -> None:
    """Earlier loads and stores of this thread are done before later ones begin.

    Python has no fence. Taking and releasing a lock twice is one: what comes before is done before
    the first release, what comes after cannot begin before the second take, and a take is not moved
    before a release. (On x86 the loads and stores in question are ordered as they are.)
    """
    for _ in range(2):
        with _fence_lock:
            pass


def wait(
    missing: Callable[[], Tensor],
    first_word: Callable[[Tensor], Callable[[], bool]],
    errors: Tensor,
    spin_limit: int,
) -> Tensor:
    """Poll until nothing is missing, `spin_limit` polls at most; returns what is missing then.

    `missing()` looks at every row and returns a bool tensor. Between two such looks only one row is
    watched, which is hundreds of times cheaper: `first_word(missing)` returns a function that tells
    whether that row is still missing. With a failure already in `errors` there is one poll.
    """
    polls_left = 1 if int(errors[0]) != 0 else spin_limit
    while True:
        absent = missing()
        polls_left -= 1
        if polls_left <= 0 or not bool(absent.any()):
            return absent
        still_missing = first_word(absent)
        while polls_left > 1 and still_missing():
            polls_left -= 1
            _yield()


def record_failures(errors: Tensor, failed: Tensor, slot: int, ranks_of: Callable[[int, int], int]) -> None:
    """Count the failed rows, bool `[T, heads]`, in `errors`; the first failure also says what it was.

    `ranks_of(t, head)`: bit mask of the ranks that were missing for that row.
    """
    count = int(failed.sum())
    if count == 0:
        return
    if int(errors[0]) == 0 and errors.shape[0] >= 4:
        t, head = (int(x) for x in failed.nonzero()[0])
        errors[1] = slot + 1
        errors[2] = ranks_of(t, head)
        errors[3] = t
    errors[0] += count
