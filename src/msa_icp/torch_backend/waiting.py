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
_WATCHED = 100
"""Polls of one row between two looks at all of them."""
_POLLS_A_YIELD = 32
"""Polls before the core is yielded: on a busy one every yield may cost a time slice."""


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
    rows: tuple[int, ...],
    look: Callable[[], Tensor],
    take: Callable[[Tensor], None],
    watch: Callable[[tuple[int, ...]], Callable[[], bool]],
    ended: Callable[[Tensor], None],
    errors: Tensor,
    spin_limit: int,
) -> Tensor:
    """Poll until every row is there, `spin_limit` polls at most; returns which rows are late, a bool tensor.

    Each row is taken as soon as it is there: one that is late must not hold up the others, whose
    peers would wait for us in their turn.

    Args:
        rows: shape of the rows that are waited for.
        look: one poll of all rows; bool, true where a row is still missing.
        take: called with the rows, bool, that a look found for the first time.
        watch: of a missing row's index, makes a poll of that row alone, true while it is missing. It
            is hundreds of times cheaper than a look.
        ended: called with the rows that are late, however the wait ends: those that Ctrl-C leaves behind have
            failed like others, or nobody would know that the storage must be reset.
        errors: with a failure in it already, there is one poll.
    """
    polls_left = 1 if int(errors[0]) != 0 else spin_limit
    late = torch.ones(rows, dtype=torch.bool, device=errors.device)
    try:
        while True:
            missing = look()
            polls_left -= 1
            there = late & ~missing
            if bool(there.any()):
                take(there)
                late &= missing
            if polls_left <= 0 or not bool(late.any()):
                return late
            is_missing = watch(tuple(late.nonzero()[0].tolist()))
            for _ in range(min(_WATCHED, polls_left - 1)):
                if not is_missing():
                    break
                polls_left -= 1
                if polls_left % _POLLS_A_YIELD == 0:
                    _yield()
    finally:
        ended(late)


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
