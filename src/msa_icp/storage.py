"""Receive storage: allocate it on every rank, exchange the addresses, watch it, take it down.

The rows lie in memory that every rank of a group can write: plain memory for ranks of one process,
memory shared between processes on a CPU. Contract, sections 6 and 9.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks, geometry, shared_memory


class IcpTimeoutError(RuntimeError):
    """A publish or a merge waited in vain for a peer.

    Attributes:
        slot: slot set of the first failed wait.
        ranks: the ranks that were missing in it.
        count: (token, head) rows that failed since the last reset.
        token: token of the first failed wait.
    """

    def __init__(self, slot: int, ranks: tuple[int, ...], count: int, token: int) -> None:
        who = "rank " + ", ".join(map(str, ranks)) if ranks else "an unknown rank"
        super().__init__(
            f"slot set {slot}: {who} did not come within the spin limit, first at token {token}; "
            f"{count} (token, head) rows failed. Reset the receive storage on every rank, or create it "
            "anew without the missing ones, before the next step"
        )
        self.slot = slot
        self.ranks = ranks
        self.count = count
        self.token = token


class ReceiveStorage:
    """One rank's receive storage, and the addresses of its peers'.

    `create` makes it for the ranks of a `torch.distributed` group, `in_process` for several ranks of
    this process. Use it as a context manager, or call `close`. It has what the functions and the
    facade take as `comm`:

    Attributes:
        rank, world_size, heads_per_rank, capacity: whose storage, and for how many tokens a call.
        device: where the tensors are.
        recv: int32 `[3, W, hpr, capacity, 33]`, the legacy rows; `recv[slot]` is what a merge takes.
        tagged_recv: int64 `[3, W, hpr, capacity, 32]`, the tagged rows, in the same storage.
        recv_bases, tagged_recv_bases: int64 `[W]`, addresses of every rank's rows in this process.
        publish_generations: int32 `[3, 4, capacity]`, this rank's tagged publishes.
        expected_generations: int32 `[3, hpr, capacity]`, this rank's tagged merges.
        errors: int32 `[4]`: failed rows, then slot + 1, rank mask and token of the first.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        heads_per_rank: int,
        capacity: int,
        words: Tensor,
        peers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Made by `create` and `in_process`. `words`: this rank's storage, `peers`: every rank's."""
        layout = geometry.comm_layout(world_size, heads_per_rank, capacity)
        self.rank = rank
        self.world_size = world_size
        self.heads_per_rank = heads_per_rank
        self.capacity = capacity
        self.device = words.device
        self._group = group
        self._words = words
        self._peers = tuple(peers)  # keeps the peers' memory mapped
        self._in_flight: dict[int, tuple[object, torch.cuda.Event | None]] = {}  # user, and when it is done
        self._next_slot = 0
        self._lock = threading.Lock()
        tagged_offset = layout["tagged_offset_bytes"]
        legacy_words = tagged_offset // 4
        self.recv = words[:legacy_words].view(layout["legacy_shape"])
        self.tagged_recv = words[legacy_words:].view(torch.int64).view(layout["tagged_shape"])
        bases = [peer.data_ptr() for peer in self._peers]
        self.recv_bases = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self.tagged_recv_bases = self.recv_bases + tagged_offset
        self.publish_generations = words.new_zeros(layout["generations_shape"])
        self.expected_generations = words.new_zeros(layout["expected_shape"])
        self.errors = words.new_zeros(4)

    # ------------------------------------------------------------ creation

    @staticmethod
    @torch.inference_mode(False)  # an inference tensor could not be written outside that mode
    def create(
        group: dist.ProcessGroup | None = None,
        *,
        capacity: int,
        heads_per_rank: int | None = None,
        device: torch.device | str = "cpu",
    ) -> ReceiveStorage:
        """Collective: every rank of `group` (default: the default group) calls it with the same sizes.

        The ranks must be processes of one machine. The shared memory has no name once all ranks have
        it: the system takes it back when the last of them is gone, however that happens.

        Args:
            group: a group of 2 or 4 ranks whose backend moves Python objects on the CPU (gloo).
            capacity: the most tokens of one call.
            heads_per_rank: 4 / ranks, the default.
            device: "cpu": shared memory is what the processes of a CPU have in common.

        Raises:
            ValueError: a size is out of range or differs between ranks, or no storage exists for the device.
            RuntimeError: the rendezvous failed; the message says where.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("group: torch.distributed is not initialised; call init_process_group first")
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        if rank < 0:
            checks.refuse("group", "one that this process belongs to", "one that it does not")
        exchange = _Exchange(group)
        with shared_memory.agreement(exchange):
            world, heads, rows = _sizes(world_size, heads_per_rank, capacity)
            if checks.device("device", device).type != "cpu":
                checks.refuse(
                    "device", "cpu, the only one with a storage for several processes so far", device
                )
        need = geometry.comm_layout(world, heads, rows)["storage_words"] * 4
        with shared_memory.rendezvous(need, exchange, ranks=world, what=f"capacity={rows}") as blocks:
            words = [block.map(torch.int32) for block in blocks]
        return ReceiveStorage(
            rank=rank,
            world_size=world,
            heads_per_rank=heads,
            capacity=rows,
            words=words[rank],
            peers=words,
            group=group if group is not None else dist.group.WORLD,
        )

    @staticmethod
    @torch.inference_mode(False)
    def in_process(
        world_size: int,
        *,
        capacity: int,
        heads_per_rank: int | None = None,
        device: torch.device | str = "cpu",
    ) -> LocalGroup:
        """The storages of `world_size` ranks that live in this process (tests, simulation).

        Args and errors as for `create`, and `device` may be a CUDA one: the ranks are then virtual ranks of
        one card. In one thread or on one stream, let every rank publish before the first merges.
        """
        world, heads, rows = _sizes(world_size, heads_per_rank, capacity)
        where = checks.device("device", device)
        if where.type != "cpu" and not (where.type == "cuda" and torch.cuda.is_available()):
            checks.refuse("device", "cpu, or cuda where PyTorch finds a GPU", device)
        count = geometry.comm_layout(world, heads, rows)["storage_words"]
        words = [torch.zeros(count, dtype=torch.int32, device=where) for _ in range(world)]
        return LocalGroup(
            ReceiveStorage(
                rank=rank,
                world_size=world,
                heads_per_rank=heads,
                capacity=rows,
                words=words[rank],
                peers=words,
                group=None,
            )
            for rank in range(world)
        )

    # ------------------------------------------------------------ use

    @contextmanager
    def slot_set(self, slot: int | None = None, stream: object | None = None) -> Iterator[int]:
        """Hand out a slot set for one publish and its merge.

        The rotation 0, 1, 2 goes on across steps: a rotation that restarts with every step would
        bring two uses of one slot set too close for tagged rows. Every rank must take the same slots in
        the same order.

        Args:
            slot: a particular slot set; None: the next of the rotation.
            stream: who uses it: a CUDA stream, by default the current one; on the CPU the calling thread. On
                CUDA a slot set is in flight until its last kernel has run.

        Raises:
            RuntimeError: the slot set is in flight on another stream. Two streams on one slot set
                wait for each other's rows; nothing has been launched.
        """
        cuda_stream = stream if isinstance(stream, torch.cuda.Stream) else None
        if cuda_stream is None and self.device.type == "cuda":
            cuda_stream = torch.cuda.current_stream(self.device)
        if stream is None:
            stream = cuda_stream or threading.get_ident()
        user = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream
        with self._lock:
            chosen = (
                self._next_slot if slot is None else checks.integer("slot", slot, 0, geometry.SLOT_SETS - 1)
            )
            holder, done = self._in_flight.get(chosen, (user, None))
            idle = done is not None and (holder == user or done.query())
            if chosen in self._in_flight and not idle:
                raise RuntimeError(
                    f"slot: slot set {chosen} is in flight on stream {holder}, stream {user} cannot use it; "
                    "merge there first, or give every stream a receive storage of its own"
                )
            self._in_flight[chosen] = (user, None)
            self._next_slot = (chosen + 1) % geometry.SLOT_SETS
        try:
            yield chosen
        finally:
            with self._lock:
                self._in_flight.pop(chosen, None)
                if cuda_stream is not None and not torch.cuda.is_current_stream_capturing():
                    self._in_flight[chosen] = (user, cuda_stream.record_event())

    def check(self) -> None:
        """Raise `IcpTimeoutError` if a wait on this storage has failed since the last reset.

        Reads the error words on the host; on a device it waits for the work before it.
        """
        count, slot, mask, token = self.errors.tolist()
        if count:
            ranks = tuple(r for r in range(self.world_size) if mask >> r & 1)
            raise IcpTimeoutError(slot - 1, ranks, count, token)

    def reset(self) -> None:
        """Collective: clear all rows, counters and errors of the group, after a failure.

        Every living rank calls it, with no exchange under way. With a rank gone it raises what the
        group's barrier raises, at the latest after the group's own timeout: make a group without that
        rank and create the storage anew.
        """
        if self._group is None:
            raise RuntimeError(
                "reset: ranks in one process are reset together; call reset() of their LocalGroup"
            )
        dist.barrier(self._group)  # nobody still publishes into what is cleared
        self._clear()
        dist.barrier(self._group)  # nobody publishes before all is clear

    def _clear(self) -> None:
        with self._lock:
            self._in_flight.clear()
            self._next_slot = 0
        for words in (self._words, self.publish_generations, self.expected_generations, self.errors):
            words.zero_()

    def close(self) -> None:
        """Let go of the memory; not collective. It goes once the last tensor and the last rank let go."""
        empty = torch.empty(0, dtype=torch.int32, device=self.device)
        self._words, self._peers = empty, ()
        self.recv = self.tagged_recv = empty
        self.recv_bases = self.tagged_recv_bases = empty.to(torch.int64)

    def __enter__(self) -> ReceiveStorage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalGroup(tuple[ReceiveStorage, ...]):
    """The storages of the ranks of one process, in order of rank; a context manager."""

    def reset(self) -> None:
        """Clear all rows, counters and errors of all ranks, with no exchange under way."""
        for storage in self:
            storage._clear()

    def close(self) -> None:
        """Let go of the memory of all ranks."""
        for storage in self:
            storage.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Exchange:
    """What the rendezvous needs of a process group: everybody's objects, in order of rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, mine: Any) -> list[Any]:
        everybody: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everybody, mine, group=self._group)
        return everybody


def _sizes(world_size: int, heads_per_rank: int | None, capacity: int) -> tuple[int, int, int]:
    world = checks.one_of("world_size", world_size, geometry.WORLD_SIZES)
    heads = geometry.NUM_HEADS // world if heads_per_rank is None else heads_per_rank
    return checks.group_shape(world, heads, capacity)
