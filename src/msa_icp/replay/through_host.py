"""Prefill's all-to-all of ranks on GPUs over a group of gloo: through the memory of the host.

NCCL moves the rows from card to card, but needs a card for every rank and ends a process whose peer is gone.
A replay goes over gloo on any number of cards: a rank that dies is heard of, and the others say who it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .prefill import Prefill

Exchange = Callable[[Tensor, Tensor], None]
"""Moves a carrier `[4, T, 33]` to the owners and fills the received rows `[W, hpr, T, 33]`, on the CPU."""


class ThroughHost:
    """Pinned memory for the largest window of a rank, taken once; a window takes the first words of it."""

    def __init__(self, prefill: Prefill, *, pinned: bool) -> None:
        self._prefill = prefill
        self._carrier, self._received = (
            torch.empty(words, dtype=torch.int32, pin_memory=pinned) for words in prefill.rooms
        )

    def exchange(self, over_host: Exchange) -> None:
        """Copy the window's carrier to the host, exchange it there, copy what came to the card.

        Both copies are waited for: gloo reads the memory at once, and the next window writes it.
        """
        sent, got = self._prefill.carrier, self._prefill.received
        carrier = self._carrier[: sent.numel()].view(sent.shape)
        received = self._received[: got.numel()].view(got.shape)
        carrier.copy_(sent)
        over_host(carrier, received)
        got.copy_(received)
