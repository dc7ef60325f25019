"""What the ranks of a group must agree on before one of them goes on.

A rank that fails alone would leave the others in a collective that it never enters. Here every
exchange carries a report, so what goes wrong on one rank ends the attempt on all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import checks

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
        with _reaching_all():
            dist.all_gather_object(everybody, mine, group=self.group)
        return everybody

    def wait_for_all(self, timeout: float) -> None:
        """Until every rank is here, at most `timeout` seconds (gloo).

        Raises NoAgreementError, which names the ranks that did not come.
        """
        group: Any = self.group  # not through `dist`, which refuses a group of gloo and another backend
        with _reaching_all():
            group.monitored_barrier(timedelta(seconds=timeout), True)


@contextmanager
def _reaching_all() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise NoAgreementError(f"receive storage: a rank of the group cannot be reached: {error}") from error


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
