"""The all-to-all of prefill: the carrier rows of every rank to the owners of their heads.

Contract, sections 7 and 9. Rank `s` has the rows of all four heads in its carrier; rank `d` merges the
heads from `d * hpr` to before `(d + 1) * hpr`, with `hpr = 4 / W`. A head's rows `[T, 33]` lie in one piece
in the carrier and in the receive buffer alike, so every piece is sent from where the selection wrote it
and received where the merge reads it: nothing is packed, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks
from .geometry import NUM_HEADS
from .interruptible import wait_for

_TAG = 0x1C9
"""Tag of head 0's rows, the other heads count on: it tells messages between two ranks of gloo apart."""


def exchange_prefill(
    carrier: Tensor | Sequence[Tensor],
    received: Tensor | Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Move head `h` of every rank's carrier to the head's owner, rank `h // hpr` (sections 7 and 9).

    Collective: every rank of the group calls it once a layer, after `msa_icp_topk_select_prefill` or
    `msa_icp_prefill_score_select` and before `msa_icp_merge_candidates(..., prefill=True)`. `W` is the
    ranks of the group, 2 or 4, and `hpr = 4 / W`. `T` is the same on every rank of one exchange, as
    `torch.distributed` does not survive messages of the wrong size; the next exchange may have another.

    Args:
        carrier: `int32 [4, T, 33]`, strides `(s, 33, 1)` with `s >= T * 33`: a buffer of its own, or a token
            slice of a larger head-major one. Or a sequence of such tensors: the carriers of all ranks in
            order of rank, which then live in this process, on one device.
        received: `int32 [W, hpr, T, 33]` on the carrier's device, a head's rows without gaps, in the same
            buffers or others, and none on another or on the carrier's; written. `received[s, i]` becomes rank
            `s`'s rows of this rank's `i`-th head. Where `carrier` is a sequence, so is this.
        group: a group of `torch.distributed` that has a backend for the carrier's device: gloo on a CPU, NCCL
            where every rank has a GPU of its own. None: the default group. Ranks of one process need none.

    Written: every element of `received`, nothing else. With `T == 0` nothing is done, on all ranks alike.

    On a CPU the call returns when the rows are there, or a signal handler raises, as that of Ctrl-C does: the
    group is of no use then, as if a rank were gone. On CUDA it queues the exchange on the current stream
    and synchronizes nothing; with NCCL, and for ranks of one process, it can be captured in a CUDA graph
    once the group has made an exchange.

    Raises:
        ValueError: an argument breaks a rule, or the group has no backend for the device; nothing was sent.
        RuntimeError: `torch.distributed` is not initialised; or, on a CPU, a rank is gone, or did not come
            within the group's timeout, and the message says which. `received` means nothing then; it may be
            written, and `carrier` read, until the group is destroyed. With NCCL the call has returned by
            then: the group's own watchdog finds out, in the way that it is set up for.
    """
    with torch.inference_mode():  # the only one in which PyTorch writes into tensors that were made in it
        if isinstance(carrier, Tensor):
            _over_group(carrier, received, group)
        else:
            _in_process(carrier, received, group)


def _in_process(carrier: Sequence[Tensor], received: Tensor | Sequence[Tensor], group: object) -> None:
    """All ranks at once: a copy for every pair of them."""
    if group is not None:
        checks.refuse("group", "None where carrier is a sequence", type(group).__name__)
    sources, targets = checks.local_exchange(carrier, received)
    for rank, rows in enumerate(targets):
        for source, sent in enumerate(sources):
            rows[source].copy_(sent[_owned(rank, len(sources))])


def _over_group(
    carrier: Tensor, received: Tensor | Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """This rank's part in the exchange of a group."""
    members = _membership(group)
    world_size, rank = dist.get_world_size(members), dist.get_rank(members)
    rows = checks.exchange(carrier, received, world_size=world_size)
    _check_backend(members, carrier.device.type)
    if carrier.shape[1] == 0:
        return
    works = _start(list(_operations(carrier, rows, members, world_size, rank)), world_size)
    rows[rank].copy_(carrier[_owned(rank, world_size)])

    def wait() -> None:
        for peer, work in works:
            with _a_rank_may_be_gone(peer, world_size):
                work.wait()

    if carrier.device.type == "cpu":
        wait_for(wait)
    else:  # the current stream waits, which is this thread's
        wait()


def _owned(rank: int, world_size: int) -> slice:
    """The heads that a rank merges."""
    heads = NUM_HEADS // world_size
    return slice(rank * heads, (rank + 1) * heads)


def _membership(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: torch.distributed is not initialised; call init_process_group first")
    members = dist.group.WORLD if group is None else group
    if not isinstance(members, dist.ProcessGroup) or dist.get_rank(members) < 0:
        checks.refuse("group", "one that this process belongs to, or None", "one that it does not belong to")
    return members


def _check_backend(group: dist.ProcessGroup, kind: str) -> None:
    """The group's backend for tensors of that kind of device moves them."""
    backends = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    chosen = dict(entry.split(":") for entry in backends.split(",")).get(kind)
    # gloo takes CUDA tensors for collectives alone: a message would be read from their address on the host.
    if chosen is None or (chosen == "gloo" and kind != "cpu"):
        checks.refuse("group", f"one with a backend that sends {kind} tensors", f"one of {backends}")


def _operations(
    carrier: Tensor, received: Tensor, group: dist.ProcessGroup, world_size: int, rank: int
) -> Iterator[dist.P2POp]:
    """What this rank receives and sends; between two ranks in order of head, as NCCL knows no tags."""
    heads = range(NUM_HEADS)
    peers = [(rank + step) % world_size for step in range(1, world_size)]
    for peer in peers:
        for place, head in enumerate(heads[_owned(rank, world_size)]):
            yield _operation(dist.irecv, received[peer, place], group, head, peer)
    for peer in peers:
        for head in heads[_owned(peer, world_size)]:
            yield _operation(dist.isend, carrier[head], group, head, peer)


def _operation(
    what: Callable[..., object], rows: Tensor, group: dist.ProcessGroup, head: int, peer: int
) -> dist.P2POp:
    return dist.P2POp(what, rows, group=group, tag=_TAG + head, group_peer=peer)


def _start(operations: list[dist.P2POp], world_size: int) -> list[tuple[int | None, dist.Work]]:
    """Begin the operations: what has to be waited for, and the peer that it depends on, if on one alone."""
    if operations[0].tensor.device.type != "cpu":
        with _a_rank_may_be_gone(None, world_size):
            return [(None, work) for work in dist.batch_isend_irecv(operations)]
    works: list[tuple[int | None, dist.Work]] = []
    failure = None
    for one in operations:  # one by one: if it fails here, it is known whose it was
        side = {"group_src" if one.op is dist.irecv else "group_dst": one.group_peer}
        try:
            with _a_rank_may_be_gone(one.group_peer, world_size):
                works.append((one.group_peer, one.op(one.tensor, group=one.group, tag=one.tag, **side)))
        except RuntimeError as error:  # the living get their rows all the same, or they would blame this rank
            failure = failure or error
    if failure is not None:
        raise failure
    return works


@contextmanager
def _a_rank_may_be_gone(peer: int | None, world_size: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        who = "a rank" if peer is None else f"rank {peer}"
        raise RuntimeError(
            f"exchange_prefill: {who} of {world_size} is gone, or did not come within the group's timeout; "
            "destroy the group and make one of the ranks that are left"
        ) from error
