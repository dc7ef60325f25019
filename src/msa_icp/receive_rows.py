"""Receive rows by their address, for callers that must not pass them as a tensor.

`torch.compile` makes a graph functional: what an op writes may be cloned, written there and copied back,
and a graph's inputs may be copied to where a CUDA graph wants them. Peers would go on writing into the rows
left behind. So a compiled merge has their address, an integer, and finds the tensor here.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from . import checks

_announced: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""The rows of every slot set, by the address of the first. They are not kept alive from here."""


def announce(rows: Tensor) -> int:
    """Let `rows` be found as long as the tensor lives, or until `withdraw`; returns their address.

    A view of rows that can be found already changes nothing: the rows may outlive the view.
    """
    address = rows.data_ptr()
    known = _announced.get(address)
    if known is None or (known.shape, known.dtype) != (rows.shape, rows.dtype):
        _announced[address] = rows
    return address


def withdraw(address: int) -> None:
    """What lies at `address` is found no longer."""
    _announced.pop(address, None)


def at(address: int) -> Tensor:
    """The rows of an address, as they were announced; raises ValueError where there are none (any more)."""
    rows = _announced.get(address)
    if rows is None:
        checks.refuse(
            "comm",
            "an open ReceiveStorage, or known by register_comm(comm), called outside the compiled function",
            f"one without live receive rows at {address:#x}",
        )
    return rows
