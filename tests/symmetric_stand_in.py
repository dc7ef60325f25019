"""A stand-in for PyTorch's symmetric memory on a machine without a GPU, and what ranks do with it.

It does what PyTorch does around the cards, in the same order and through the same objects: the group is
looked up by its name, requests go through the group's store under keys numbered by a counter of the process,
handles go to the peers, mappings last as long as the handle. The memory is shared memory of the CPU.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from rank_processes import TOKENS, mapped, open_files, run_layers
from torch._C._distributed_c10d import PrefixStore, _resolve_process_group

import msa_icp
from msa_icp import symmetric_memory
from msa_icp.shared_memory import SharedBlock


class StandIn:
    """In the place of `_SymmetricMemory` and of a process's cards."""

    def __init__(self, rank: int, cards: list[str] | None = None, index: int | None = None) -> None:
        """`cards`: the uuids of the cards that this process sees; `index`: which of them is its own."""
        self.cards = cards or [f"card-{number}" for number in range(4)]
        self.index = rank if index is None else index
        self.no_access: set[tuple[int, int]] = set()
        self.fails: str | None = None
        """Where this rank's rendezvous goes wrong: "allocation", "early", "late", "mapping", "killed"."""
        self.synchronized: list[int] = []
        """The first word of this rank's allocation at every wait for the device."""
        self.multicast: list[str | None] = []
        self._blocks: dict[int, SharedBlock] = {}
        self._words: weakref.ref[torch.Tensor] | None = None
        self._keys = itertools.count()

    def install(self) -> StandIn:
        symmetric_memory._SymmetricMemory = self
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: len(self.cards)
        torch.cuda.current_device = lambda: self.index
        torch.cuda.synchronize = self._synchronize
        torch.cuda.get_device_properties = self._properties
        torch.cuda.can_device_access_peer = lambda a, b: (a, b) not in self.no_access
        return self

    def _synchronize(self, device: torch.device) -> None:
        if self._words is not None and (words := self._words()) is not None:
            self.synchronized.append(int(words[0]))

    def _properties(self, device: torch.device | int) -> Any:
        index = device if isinstance(device, int) else device.index
        return type("Properties", (), {"uuid": self.cards[index]})

    # ---- what PyTorch has

    def get_backend(self, device: torch.device) -> str:
        return "CUDA"

    def empty_strided_p2p(
        self, size: tuple[int], stride: tuple[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert device.index == self.index
        if self.fails == "allocation":
            raise RuntimeError("out of memory")
        block = SharedBlock.allocate(size[0] * dtype.itemsize)
        words = block.map(dtype).fill_(77)
        self._blocks[words.data_ptr()] = block
        self._words = weakref.ref(words)  # its owner frees it
        return words

    def rendezvous(self, words: torch.Tensor, name: str) -> Handle:
        group = _resolve_process_group(name)
        store = PrefixStore("symmetric_memory", group.get_group_store())
        block = self._blocks.pop(words.data_ptr())
        self.multicast.append(os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST"))
        self._fail("early")
        if self.fails == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        one_card = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        requests = self._all_gather(store, group, (self.index, block.path, block.nbytes, block.mark))
        assert one_card or len({index for index, *_ in requests}) == len(requests)
        self._fail("late")
        known = [SharedBlock(*request[1:]) for request in requests]
        if self.fails == "mapping":
            known[group.rank() - 1] = SharedBlock.allocate(block.nbytes)
        mapped_words = [peer.map(words.dtype) for peer in known]
        self._all_gather(store, group, None)
        block.forget()
        return Handle(mapped_words)

    def _fail(self, where: str) -> None:
        if self.fails == where:
            raise RuntimeError("CUDA driver error: invalid argument")

    def _all_gather(self, store: Any, group: Any, mine: Any) -> list[Any]:
        number = next(self._keys)
        store.set(f"CUDASymmetricMemory/{number}/{group.rank()}", pickle.dumps(mine))
        found = []
        for rank in range(group.size()):
            store.wait([f"CUDASymmetricMemory/{number}/{rank}"])
            found.append(pickle.loads(store.get(f"CUDASymmetricMemory/{number}/{rank}")))
        return found


class Handle:
    """Gives views that do not keep the mapping alive by themselves, as PyTorch's do not."""

    def __init__(self, words: list[torch.Tensor]) -> None:
        self._words = words

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        import ctypes

        raw = (ctypes.c_int32 * sizes[0]).from_address(self._words[rank].data_ptr())
        return torch.frombuffer(raw, dtype=dtype)


# ---------------------------------------------------------------- what the ranks do


def create(index: int, capacity: int = TOKENS) -> msa_icp.ReceiveStorage:
    return msa_icp.ReceiveStorage.create(capacity=capacity, device=torch.device("cuda", index))


def attempt(stand_in: StandIn, capacity: int = TOKENS, device: str | None = None) -> str:
    """The error of a storage that cannot be made, and how soon it came; empty where it could be made."""
    began = time.monotonic()
    try:
        msa_icp.ReceiveStorage.create(capacity=capacity, device=device or f"cuda:{stand_in.index}").close()
    except (ValueError, RuntimeError) as error:
        late = time.monotonic() - began > rank_processes.GROUP_TIMEOUT_S / 2
        return f"{'late ' * late}{'ValueError' if isinstance(error, ValueError) else 'RuntimeError'}: {error}"
    return ""


def works(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    stand_in = StandIn(rank).install()
    found: dict[str, Any] = {}
    with create(rank) as storage:
        found["synchronized"] = list(stand_in.synchronized)
        found["cleared"] = not storage.recv.any() and not storage.tagged_recv.any()
        dist.barrier()
        found["distinct"] = len(set(storage.recv_bases.tolist()))
        found["mine"] = storage.recv_bases[rank].item() == storage.recv.data_ptr()
        found["legacy"] = run_layers(storage, range(6), tagged=False)
        found["tagged"] = run_layers(storage, range(6, 12), tagged=True)
        storage.reset()
        found["again"] = run_layers(storage, range(20, 23), tagged=False)
        found["multicast"] = [*stand_in.multicast, os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")]
    found["left"] = mapped() + open_files()
    return found


def refusals(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """One attempt after the other that cannot succeed, then one that does."""
    found = {}
    variable = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    stand_in = StandIn(rank, index=0).install()
    found["one card"] = attempt(stand_in)
    if rank == 0:
        os.environ[variable] = "1"
    found["allowed on one rank"] = attempt(stand_in)
    os.environ[variable] = "1"
    found["allowed"] = attempt(stand_in)
    del os.environ[variable]
    found["hidden cards"] = attempt(StandIn(rank, cards=[f"card-{rank}"], index=0).install())

    for fault in ("allocation", "early", "late", "mapping"):
        stand_in = StandIn(rank).install()
        stand_in.fails = fault if rank == 1 else None
        found[fault] = attempt(stand_in)
    stand_in = StandIn(rank).install()
    stand_in.no_access = {(1, 0)}
    found["no access"] = attempt(stand_in)
    found["unseen card"] = attempt(StandIn(rank, cards=[f"mine-{rank}"] * 2).install())

    stand_in = StandIn(rank).install()
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(folder / "tmp") if rank == 1 else "/tmp"
    found["folders"] = attempt(stand_in)
    del os.environ["TMPDIR"]

    found["capacities"] = attempt(stand_in, capacity=2 + rank)
    found["devices"] = attempt(stand_in, device="cpu" if rank == 1 else None)
    found["no such card"] = attempt(stand_in, device=f"cuda:{9 if rank == 1 else 0}")
    found["left"] = mapped()
    with create(rank) as storage:
        found["wrong"] = run_layers(storage, range(3), tagged=True)
    return found


def replaced(rank: int, world_size: int, folder: Path) -> int | None:
    """Rank 1 is killed in a rendezvous; a process that never saw one before takes its place."""
    stand_in = StandIn(min(rank, 1)).install()
    if rank < world_size:
        create(rank).close()
        create(rank).close()
        dist.barrier()
        stand_in.fails = "killed" if rank == 1 else None
        error = attempt(stand_in)
        assert error.startswith("RuntimeError: receive storage: a rank of the group cannot be reached"), error
        dist.destroy_process_group()
    rank = 1 if rank == world_size else rank
    rank_processes.join(folder / "store-again", rank, world_size)
    with create(rank) as storage:
        return run_layers(storage, range(4), tagged=True)


def a_group_without_objects(rank: int, world_size: int, folder: Path) -> list[str]:
    """The default group is one of gloo; the others are not, and are refused by name on every rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found = []
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    found.append(attempt(StandIn(rank).install()))
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    found.append(attempt(StandIn(rank)))
    return found
