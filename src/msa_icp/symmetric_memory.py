"""Receive storage on CUDA: words on every rank's card that all ranks' processes can write.

Everything that touches PyTorch's symmetric memory is in this file, because that interface is young.
It is written for PyTorch 2.11 to 2.13, from which it takes: an allocation that other processes can map,
the passing of its handle (through a socket in the folder for temporary files), and the mapping. The words
that the ranks exchange around it go over the group's own exchange.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import shared_memory
from .agreement import Exchange, NoAgreementError, agreement, gather

try:
    from torch._C._distributed_c10d import (
        ProcessGroup,
        Store,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    _MISSING = ""
except ImportError as error:  # a PyTorch without torch.distributed, or one that has moved on
    _MISSING = str(error)
    Store = object  # type: ignore[assignment,misc]

ONE_CARD = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Set to 1, it makes PyTorch accept several ranks on a card of one index."""
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""Set to 1, it keeps PyTorch from setting up NVLink multicast. Rows are stored to one peer at a time."""
SOCKET_FOLDERS = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Where PyTorch puts the socket for the handles: the first of these variables, else /tmp."""

_numbers = itertools.count()


class PeerWords(NamedTuple):
    """The words of all ranks, as this process sees them."""

    words: list[Tensor]
    """int32 `[count]` of every rank on this rank's device. This rank's own tensor owns its allocation."""
    mapping: object
    """Keeps the peers' words mapped into this process."""


def unavailable(device: torch.device) -> str | None:
    """None where processes can share memory of this CUDA device, else the reason."""
    if _MISSING:
        return f"this PyTorch lacks what is needed of its symmetric memory: {_MISSING}"
    if not torch.cuda.is_available():
        return "this PyTorch finds no GPU"
    if device.index is not None and device.index >= torch.cuda.device_count():
        return f"this process sees {torch.cuda.device_count()} of them"
    backend = _SymmetricMemory.get_backend(device)
    if backend != "CUDA":
        return f"PyTorch's symmetric memory is set to {backend} (TORCH_SYMMMEM, set_backend) and must be CUDA"
    return None


def share(count: int, device: torch.device, exchange: Exchange, *, rank: int, what: str) -> PeerWords:
    """Collective: `count` int32 words of zeros on every rank's `device`, mapped into every rank's process.

    The ranks must be processes of one machine and one user whose cards reach one another's memory. What goes
    wrong on one rank ends the attempt on all. A rank that is killed makes `exchange` fail on the others;
    only in the microseconds in which PyTorch passes the handles nothing bounds their wait.

    Args:
        count: words, the same on every rank.
        device: a CUDA device for which `unavailable` is None.
        exchange: gathers one object of every rank.
        rank: this rank's place in it.
        what: the sizes, for the message where there is no room.

    Raises:
        RuntimeError: says what is missing, and on which rank.
    """
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    _on_one_machine(exchange)
    with agreement(exchange):
        cards = gather(exchange, Card.of(device))
        _refuse_unreachable(cards, rank)
        mine = _allocate(count, device, what)
        mine[0] = rank + 1  # a mark, see _check_marks
        torch.cuda.synchronize(device)
        try:
            with _without_multicast(), _torch_group(exchange, rank, len(cards)) as name:
                mapping = _SymmetricMemory.rendezvous(mine, name)
            words = [
                mine if peer == rank else mapping.get_buffer(peer, (count,), torch.int32)
                for peer in range(len(cards))
            ]
            _check_marks(words)
        except NoAgreementError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"receive storage: PyTorch cannot map the memory of {_names(cards)} into the process of rank "
                f"{rank}: {error}"
            ) from error
        gather(exchange, None)  # all marks have been read
        mine[0] = 0
        torch.cuda.synchronize(device)
    return PeerWords(words, mapping)


# ---------------------------------------------------------------- what can go wrong


@dataclass(frozen=True)
class Card:
    """What the other ranks must know of a rank's card before PyTorch is asked."""

    index: int
    uuid: str
    one_card_allowed: bool
    sockets: tuple[str, int, int]
    """The folder of PyTorch's socket: its path, and what tells it from a folder of the same name."""

    @staticmethod
    def of(device: torch.device) -> Card:
        folder = next((os.environ[name] for name in SOCKET_FOLDERS if name in os.environ), "/tmp")
        try:
            there = os.stat(folder)
        except OSError as error:
            raise RuntimeError(
                f"receive storage: PyTorch passes memory on through sockets in {folder}, which it cannot use "
                f"({error.strerror}); set TMPDIR to a folder that all ranks see"
            ) from error
        return Card(
            device.index,
            str(torch.cuda.get_device_properties(device).uuid),
            os.environ.get(ONE_CARD) == "1",
            (folder, there.st_dev, there.st_ino),
        )


def _on_one_machine(exchange: Exchange) -> None:
    """Refuse ranks that see different processes: PyTorch would wait for a handle that nobody sends."""
    with shared_memory.rendezvous(8, exchange, ranks=1, what="a test") as blocks:
        for block in blocks:
            block.map(torch.int32)


def _refuse_unreachable(cards: Sequence[Card], rank: int) -> None:
    """RuntimeError where PyTorch would fail obscurely, or not come back."""
    folders = {card.sockets for card in cards}
    if len(folders) > 1:
        paths = ", ".join(f"{card.sockets[0]} on rank {peer}" for peer, card in enumerate(cards))
        raise RuntimeError(
            "receive storage: PyTorch passes the memory through a socket in the folder for temporary files "
            f"(TMPDIR), which must be one and the same for all ranks; it is {paths}"
        )
    _refuse_one_card(cards)
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    for peer, card in enumerate(cards):
        other = here.get(card.uuid)
        if other is None or card.uuid == cards[rank].uuid:
            continue  # a card that this process does not see: PyTorch will find out
        if not torch.cuda.can_device_access_peer(cards[rank].index, other):
            raise RuntimeError(
                f"receive storage: cuda:{cards[rank].index} of rank {rank} has no peer access to "
                f"cuda:{other} of rank {peer}; cards must reach one another's memory (NVLink, PCIe with P2P)"
            )


def _refuse_one_card(cards: Sequence[Card]) -> None:
    """PyTorch takes one index for one card, and goes by the variable of each rank."""
    same = [peer for peer, card in enumerate(cards) if [c.index for c in cards].count(card.index) > 1]
    if not same or all(card.one_card_allowed for card in cards):
        return
    ranks = ", ".join(map(str, same))
    if len({card.uuid for card in cards}) == len(cards):
        raise RuntimeError(
            f"receive storage: ranks {ranks} have cards of their own of one name (CUDA_VISIBLE_DEVICES?), "
            "which PyTorch takes for one card. Let every rank see all cards, or set "
            f"{ONE_CARD}=1 for every rank"
        )
    raise RuntimeError(
        f"receive storage: ranks {ranks} share one card. For tests that is possible: set {ONE_CARD}=1 in the "
        "environment of every rank, with a gloo group"
    )


def _allocate(count: int, device: torch.device, what: str) -> Tensor:
    """Zeros that other processes can map. Not from PyTorch's pool: that never gives memory back."""
    try:
        words = _SymmetricMemory.empty_strided_p2p((count,), (1,), torch.int32, device)
    except RuntimeError as error:
        raise RuntimeError(f"cannot allocate {count * 4} bytes on {device} ({what}): {error}") from error
    return words.zero_()


def _check_marks(words: Sequence[Tensor]) -> None:
    """Read what every rank wrote into its first word: an exchange over a wrong mapping would never meet."""
    marks = torch.cat([peer[:1] for peer in words]).tolist()  # a kernel reads them, as the exchange does
    if marks != list(range(1, len(words) + 1)):
        raise RuntimeError(f"the marks of the ranks are {marks}")


def _names(cards: Sequence[Card]) -> str:
    return ", ".join(f"cuda:{card.index} (rank {peer})" for peer, card in enumerate(cards))


# ---------------------------------------------------------------- PyTorch's rendezvous


class _ExchangeStore(Store):
    """The store of PyTorch's rendezvous, in which the n-th words of all ranks meet.

    PyTorch numbers the keys ("name/number/rank") by a counter of the process. In a common store a process
    that takes the place of a dead one would wait for keys that nobody writes; here the number is ignored.
    And a rank that fails is heard of in the exchange that the others are in.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._words: list[bytes] = []

    def set(self, key: str, value: Any) -> None:
        self._words = gather(self._exchange, bytes(value))

    def wait(self, keys: list[str], timeout: object = None) -> None:
        """They are there: `set` has waited for them."""

    def get(self, key: str) -> bytes:
        return self._words[int(key.rpartition("/")[2])]


@contextmanager
def _torch_group(exchange: Exchange, rank: int, world_size: int) -> Iterator[Any]:
    """The name of a group that PyTorch knows for as long as the rendezvous lasts.

    Not the caller's: PyTorch keeps what it learns of a group by its name, and a group that is made anew has
    the name of the old one.
    """
    name: Any = f"msa-icp-{next(_numbers)}"
    store = _ExchangeStore(exchange)  # PyTorch does not keep the Python half of it
    group = ProcessGroup(store, rank, world_size)
    _register_process_group(name, group)
    try:
        yield name
    finally:
        _unregister_process_group(name)


@contextmanager
def _without_multicast() -> Iterator[None]:
    before = os.environ.get(NO_MULTICAST)
    os.environ[NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_MULTICAST]
        else:
            os.environ[NO_MULTICAST] = before
