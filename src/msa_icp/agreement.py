"""What the ranks of a group must agree on before one of them goes on.

A rank that fails alone would leave the others in a collective that it never enters. Here every
exchange carries a report, so what goes wrong on one rank ends the attempt on all of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import checks
from .interruptible import wait_for

Exchange = Callable[[Any], list[Any]]
"""Everybody's objects, in order of rank, for one's own."""

NO_OBJECTS = ("fake",)
"""Backends that take CPU tensors and do not bring them to anybody."""


class NoAgreementError(RuntimeError):
    """A rank has ended the attempt and said so, or cannot be reached: there is nobody left to tell."""


class GroupExchange:
    """The exchange of a `torch.distributed` group, on the CPU.

    Over the GPU (NCCL alone) a dead rank would end the processes of the others, so such a group is refused.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Raises RuntimeError without `torch.distributed`, ValueError for a group that cannot be used."""
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: torch.distributed is not initialised; call init_process_group first")
        if dist.get_rank(group) < 0:
            checks.refuse("group", "one that this process belongs to", "one that it does not")
        backends = dist.get_backend_config(group)
        on_cpu = dict(pair.partition(":")[::2] for pair in backends.split(",")).get("cpu")
        if on_cpu is None or on_cpu in NO_OBJECTS:
            checks.refuse(
                "group",
                "one whose backend moves Python objects on the CPU (new_group(backend='gloo') makes one)",
                f"one of {backends}",
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def __call__(self, mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * self.world_size
        try:
            wait_for(lambda: dist.all_gather_object(everybody, mine, group=self.group))
        except RuntimeError as error:
            raise _given_up("a rank of the group cannot be reached") from error
        return everybody

    def wait_for_all(self, timeout: float) -> None:
        """Until every rank is here: rank 0 waits at most `timeout` seconds, the others for what it says.

        For gloo. Raises NoAgreementError, which names the ranks that did not come: on all that live, as soon
        as rank 0 knows; without rank 0 after twice `timeout`, as it may come late and then wait as long.
        """
        wait_for(lambda: self._ask_all(timeout) if self.rank == 0 else self._ask_first(timeout))

    def _ask_all(self, timeout: float) -> None:
        failed: dict[int, RuntimeError] = {}

        def attempt(rank: int, call: Callable[..., object], *arguments: Any) -> None:
            try:
                call(rank, *arguments)
            except RuntimeError as error:  # its connection is closed, or the time is over
                failed[rank] = error

        # All at once: gloo closes every connection of the group with the first wait that is too long.
        listening = [
            threading.Thread(target=attempt, args=(rank, self._recv, timeout), daemon=True)
            for rank in range(1, self.world_size)
        ]
        for one in listening:
            one.start()
        for one in listening:
            one.join()
        missing = sorted(failed)
        mask = sum(1 << rank for rank in missing)
        for rank in range(1, self.world_size):
            if rank not in missing:
                attempt(rank, self._send, mask, timeout)
        if failed:  # or has died since
            raise _missing(missing or sorted(failed)) from failed[min(failed)]

    def _ask_first(self, timeout: float) -> None:
        try:
            self._send(0, 0, timeout)  # that it is here
            mask = self._recv(0, 2 * timeout)
        except RuntimeError as error:
            why = "rank 0 cannot be reached, or has given up as somebody did not come"
            raise _given_up(why) from error
        if mask:
            raise _missing([rank for rank in range(self.world_size) if mask >> rank & 1])

    # Not through `dist`: its functions take no limit of their own.

    def _send(self, rank: int, word: int, timeout: float) -> None:
        group: Any = self.group
        group.send([torch.tensor([word])], rank, _TAG).wait(timedelta(seconds=timeout))

    def _recv(self, rank: int, timeout: float) -> int:
        group: Any = self.group
        word = torch.zeros(1, dtype=torch.int64)
        group.recv([word], rank, _TAG).wait(timedelta(seconds=timeout))
        return int(word)


_TAG = 0x6D736169
"""Of the messages of a roll call, which no other of the group's has."""


def _given_up(why: str) -> NoAgreementError:
    remedy = "make a group without the ranks that are gone and create the storage anew"
    return NoAgreementError(f"receive storage: {why}; {remedy}")


def _missing(ranks: Sequence[int]) -> NoAgreementError:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return _given_up(f"{who} of the group cannot be reached")


def gather(exchange: Exchange, mine: Any, trouble: str | None = None) -> list[Any]:
    """What every rank sends; NoAgreementError, on all of them, where one has `trouble` instead."""
    reports = exchange((trouble, mine))
    wrong = [f"rank {rank} {trouble}" for rank, (trouble, _) in enumerate(reports) if trouble]
    if wrong:
        raise NoAgreementError("receive storage: " + "; ".join(wrong))
    return [sent for _, sent in reports]


@contextmanager
def agreement(exchange: Exchange) -> Iterator[None]:
    """Whatever goes wrong in the body on one rank ends the attempt on all of them.

    That rank raises what went wrong there, the others NoAgreementError, from a `gather` of the body or at
    its end. The body may `gather`, on every rank equally often; agreements are not nested.
    """
    try:
        yield
    except NoAgreementError:
        raise
    except Exception as error:
        exchange((f"gives up: {str(error) or type(error).__name__}", None))
        raise
    gather(exchange, None)
