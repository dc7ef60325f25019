"""Receive storage: allocate it on every rank, exchange the addresses, watch it, take it down.

The rows lie in memory that every rank of a group can write: plain memory for ranks of one process,
memory shared between processes on a CPU, PyTorch's symmetric memory on CUDA. Contract, sections 6 and 9.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from . import checks, geometry, receive_rows, shared_memory, symmetric_memory
from .agreement import GroupExchange, NoAgreementError, agreement, gather


class IcpTimeoutError(RuntimeError):
    """A publish or a merge waited in vain for a peer.

    Attributes:
        slot: slot set of the first failed wait.
        ranks: the ranks that were missing in it. Empty if each has been here and one has overwritten its row
            since: after a failure of its own, which names who was missing, or because two uses of the slot
            set were too close.
        count: (token, head) rows that failed since the last reset.
        token: token of the first failed wait.
    """

    def __init__(self, slot: int, ranks: tuple[int, ...], count: int, token: int) -> None:
        if ranks:
            what = f"rank {', '.join(map(str, ranks))} did not come within the spin limit"
        else:
            what = (
                "a row was overwritten by a newer use of the slot set: a rank whose own wait had failed went "
                "on, or two uses were too close (tagged rows: two layers apart, across steps too)"
            )
        super().__init__(
            f"slot set {slot}: {what}, first at token {token}; "
            f"{count} (token, head) rows failed. Reset the receive storage on every rank, or create it "
            "anew without the missing ones, before the next step"
        )
        self.slot = slot
        self.ranks = ranks
        self.count = count
        self.token = token

    def __reduce__(self) -> tuple[type[IcpTimeoutError], tuple[int, tuple[int, ...], int, int]]:
        """For pools of processes, which pickle what a worker raises."""
        return type(self), (self.slot, self.ranks, self.count, self.token)


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
        recv_address, tagged_recv_address: where `recv` and `tagged_recv` lie, which `merge_received` needs in
            a function that `torch.compile` traces; 0 once closed.
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
        exchange: GroupExchange | None,
        mapping: object = None,
    ) -> None:
        """Made by `create` and `in_process`. `words`: this rank's storage, `peers`: every rank's.

        `mapping` is whatever keeps the peers' memory mapped, where their tensors do not.
        """
        layout = geometry.comm_layout(world_size, heads_per_rank, capacity)
        self.rank = rank
        self.world_size = world_size
        self.heads_per_rank = heads_per_rank
        self.capacity = capacity
        self.device = words.device
        self._exchange = exchange
        self._words = words
        self._peers = tuple(peers)  # keeps the peers' memory mapped
        self._mapping = mapping
        self._in_flight: dict[int, tuple[object, torch.cuda.Event | None]] = {}  # user, and when it is done
        self._next_slot = 0
        self._lock = threading.Lock()
        tagged_offset = layout["tagged_offset_bytes"]
        legacy_words = tagged_offset // 4
        self.recv = words[:legacy_words].view(layout["legacy_shape"])
        self.tagged_recv = words[legacy_words:].view(torch.int64).view(layout["tagged_shape"])
        self.recv_address = receive_rows.announce(self.recv)
        self.tagged_recv_address = receive_rows.announce(self.tagged_recv)
        bases = [peer.data_ptr() for peer in self._peers]
        self.recv_bases = torch.tensor(bases, dtype=torch.int64, device=self.device)
        self.tagged_recv_bases = self.recv_bases + tagged_offset
        self.publish_generations = words.new_zeros(layout["generations_shape"])
        self.expected_generations = words.new_zeros(layout["expected_shape"])
        self.errors = words.new_zeros(4)
        _finish(self.device)  # whichever stream uses them first

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

        The ranks must be processes of one machine. On a CPU the shared memory has no name once all ranks have
        it: the system takes it back when the last of them is gone, however that happens. So does CUDA's
        driver with the memory of a card; what a killed rank has allocated stays as long as a peer maps it.

        Args:
            group: a group of 2 or 4 ranks whose backend moves Python objects on the CPU (gloo), with
                CUDA too: NCCL ends a process whose peer is gone.
            capacity: the most tokens of one call.
            heads_per_rank: 4 / ranks, the default.
            device: "cpu", or this rank's CUDA device (without an index: the current one). The cards must
                have peer access to one another. Several ranks on one card, for tests, need
                TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. NVLink multicast is not used.

        Raises:
            ValueError: a size is out of range or differs between ranks, the group cannot be used, or no
                storage exists for the device.
            RuntimeError: the rendezvous failed; the message says where.
        """
        exchange = GroupExchange(group)
        with agreement(exchange):
            where = _shared_device(device)
            if exchange.world_size not in geometry.WORLD_SIZES:
                checks.refuse("group", "one of 2 or 4 ranks", f"one of {exchange.world_size}")
            world, heads, rows = _sizes(exchange.world_size, heads_per_rank, capacity)
            asked = gather(exchange, (where.type, rows))
            for name, mine in (("device", where.type), ("capacity", rows)):
                theirs = [kind if name == "device" else size for kind, size in asked]
                if len(set(theirs)) > 1:
                    checks.refuse(name, f"the same on every rank, the ranks have {theirs}", mine)
        count = geometry.comm_layout(world, heads, rows)["storage_words"]
        what, mapping = f"capacity={rows}", None
        if where.type == "cuda":
            words, mapping = symmetric_memory.share(count, where, exchange, rank=exchange.rank, what=what)
        else:
            with shared_memory.rendezvous(count * 4, exchange, ranks=world, what=what) as blocks:
                words = [block.map(torch.int32) for block in blocks]
        return ReceiveStorage(
            rank=exchange.rank,
            world_size=world,
            heads_per_rank=heads,
            capacity=rows,
            words=words[exchange.rank],
            peers=words,
            exchange=exchange,
            mapping=mapping,
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

        Args and errors as for `create`, and RuntimeError where there is no memory for them; `device` may be a
        CUDA one: the ranks are then virtual ranks of one card. In one thread or on one stream, let every rank
        publish before the first merges.
        """
        world, heads, rows = _sizes(world_size, heads_per_rank, capacity)
        where = checks.device("device", device)
        if where.type != "cpu" and not (where.type == "cuda" and torch.cuda.is_available()):
            checks.refuse("device", "cpu, or cuda where PyTorch finds a GPU", device)
        count = geometry.comm_layout(world, heads, rows)["storage_words"]
        try:
            words = [torch.zeros(count, dtype=torch.int32, device=where) for _ in range(world)]
        except RuntimeError as error:  # out of memory, in as many wordings as there are devices
            what = f"capacity={rows}: {world} storages of {count * 4} bytes each on {where}"
            raise RuntimeError(f"{what}: no memory; take a smaller capacity") from error
        group = LocalGroup(
            ReceiveStorage(
                rank=rank,
                world_size=world,
                heads_per_rank=heads,
                capacity=rows,
                words=words[rank],
                peers=words,
                exchange=None,
            )
            for rank in range(world)
        )
        for storage in group:  # a compiled graph keeps exchanges over one and the same bases in order
            storage.recv_bases, storage.tagged_recv_bases = group[0].recv_bases, group[0].tagged_recv_bases
        return group

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
                wait for each other's rows; nothing has been launched. Or the storage is closed.
        """
        self._refuse_closed("slot_set")
        cuda_stream = stream if isinstance(stream, torch.cuda.Stream) else None
        if cuda_stream is None and self.device.type == "cuda":
            cuda_stream = torch.cuda.current_stream(self.device)
        if stream is None:
            stream = cuda_stream or threading.get_ident()
        user = stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream
        # What is captured does not run yet, and an event may not be looked at meanwhile.
        capturing = cuda_stream is not None and torch.cuda.is_current_stream_capturing()
        with self._lock:
            chosen = (
                self._next_slot if slot is None else checks.integer("slot", slot, 0, geometry.SLOT_SETS - 1)
            )
            before = self._in_flight.get(chosen)
            holder, done = before or (user, None)
            idle = done is not None and (capturing or holder == user or done.query())
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
                if capturing and before is not None:
                    self._in_flight[chosen] = before
                elif cuda_stream is not None and not capturing:
                    self._in_flight[chosen] = (user, cuda_stream.record_event())

    def check(self) -> None:
        """Raise `IcpTimeoutError` if a wait on this storage has failed since the last reset.

        Reads the error words on the host. On CUDA it waits for the current stream's work and for what has
        been launched within `slot_set`, on whichever stream.

        Raises:
            IcpTimeoutError: with the slot set, the ranks that were missing, how many rows failed and the
                token of the first.
            RuntimeError: the storage is closed.
        """
        self._refuse_closed("check")
        if self.device.type == "cuda":
            with self._lock:
                launched = [done for _, done in self._in_flight.values() if done is not None]
            for done in launched:
                done.synchronize()
        count, slot, mask, token = self.errors.tolist()
        if count:
            ranks = tuple(r for r in range(self.world_size) if mask >> r & 1)
            raise IcpTimeoutError(slot - 1, ranks, count, token)

    def reset(self, timeout: float | None = None) -> None:
        """Collective: clear all rows, counters and errors of the group, after a failure.

        Every living rank calls it, with no exchange under way. On CUDA it first waits for all work of this
        process on the device, which a failed step ends within one spin limit.

        Args:
            timeout: seconds that rank 0 waits for the others, 0.001 at least, the same on every rank (gloo);
                where rank 0 is missing the others end after twice that. None: the group's own timeout.

        Raises:
            ValueError: `timeout` is no such number; nothing has been done, and the others wait.
            RuntimeError: a rank is gone, or did not come in time. With `timeout` the message names it; but
                gloo closes all connections when a wait was too long, and then only rank 0's does. Or a
                rank's device has failed: that one raises what it says, the others with its message. Make a
                group without that rank and create the storage anew.
        """
        if timeout is not None:
            timeout = checks.seconds("timeout", timeout)
        exchange = self._exchange
        self._refuse_closed("reset")
        if exchange is None:
            raise RuntimeError(
                "reset: ranks in one process are reset together; call reset() of their LocalGroup"
            )
        # A rank whose device has failed comes all the same, or the others would wait for it.
        failure: Exception | None = None
        try:
            _finish(self.device)
        except Exception as error:
            failure = error
        try:
            if timeout is not None:
                exchange.wait_for_all(timeout)
            with agreement(exchange):  # nobody still publishes into what is cleared
                if failure is not None:
                    raise failure
        except NoAgreementError as error:
            if failure is not None:
                raise failure from error
            raise
        with agreement(exchange):  # nobody publishes before all is clear
            self._clear()
            _finish(self.device)

    @property
    def closed(self) -> bool:
        """Whether `close` has let go of the memory."""
        return self.recv_address == 0

    def _refuse_closed(self, what: str) -> None:
        if self.closed:
            raise RuntimeError(f"{what}: the receive storage is closed")

    def _clear(self) -> None:
        with self._lock:
            self._in_flight.clear()
            self._next_slot = 0
        for words in (self._words, self.publish_generations, self.expected_generations, self.errors):
            words.zero_()

    def close(self) -> None:
        """Let go of the memory; not collective. It goes once the last tensor and the last rank let go."""
        try:
            _finish(self.device)  # kernels in flight still write into what may go now
        finally:
            receive_rows.withdraw(self.recv_address)
            receive_rows.withdraw(self.tagged_recv_address)
            self.recv_address = self.tagged_recv_address = 0
            empty = torch.empty(0, dtype=torch.int32, device=self.device)
            self._words, self._peers, self._mapping = empty, (), None
            self._exchange = None  # or a group that is destroyed would keep its connections
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
        """Clear all rows, counters and errors of all ranks, with no exchange under way.

        Raises:
            RuntimeError: a storage is closed; nothing has been cleared.
        """
        for storage in self:
            storage._refuse_closed("reset")
        for storage in self:
            _finish(storage.device)
            storage._clear()
            _finish(storage.device)

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


def _shared_device(device: torch.device | str) -> torch.device:
    """The device, where processes can share its memory."""
    where = checks.device("device", device)
    must_be = "cpu, or a CUDA device whose memory processes can share"
    if where.type == "cuda":
        reason = symmetric_memory.unavailable(where)
        if reason is not None:
            checks.refuse("device", must_be, f"{where} ({reason})")
    elif where.type != "cpu":
        checks.refuse("device", must_be, where)
    return where


def _finish(device: torch.device) -> None:
    """Wait for all work of this process on a CUDA device, whatever the stream."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sizes(world_size: int, heads_per_rank: int | None, capacity: int) -> tuple[int, int, int]:
    world = checks.one_of("world_size", world_size, geometry.WORLD_SIZES)
    heads = geometry.NUM_HEADS // world if heads_per_rank is None else heads_per_rank
    return checks.group_shape(world, heads, capacity)
