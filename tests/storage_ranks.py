"""What ranks in processes of their own do with receive storage; `rank_processes.run_ranks` starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import publish
from rank_processes import (
    NUM_VALID,
    TOKENS,
    attempt,
    create,
    here,
    join,
    mapped,
    open_files,
    put,
    run_layers,
    step_scores,
    take,
    truth,
    wait_for_file,
)

import msa_icp
from msa_icp import shared_memory


def everything_works(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Both forms, a reset, a second storage beside the first, and nothing left when they are closed."""
    found = {}
    with create() as storage:
        found["fields"] = [storage.rank, storage.world_size, storage.heads_per_rank, storage.capacity]
        found["mapped"] = mapped()
        found["descriptors"] = open_files()
        found["legacy"] = run_layers(storage, range(12), tagged=False)
        found["tagged"] = run_layers(storage, range(12, 24), tagged=True)
        found["distinct"] = len(set(storage.recv_bases.tolist()))
        storage.reset()
        found["after reset"] = sum(
            int(t.any()) for t in (storage.recv, storage.tagged_recv, storage.expected_generations)
        )
        dist.barrier()
        found["legacy again"] = run_layers(storage, range(30, 35), tagged=False)
        with create(capacity=TOKENS + 3) as second:
            found["second"] = run_layers(second, range(40, 44), tagged=True)
            found["first"] = run_layers(storage, range(50, 53), tagged=True)
    found["left"] = mapped() + open_files()
    return found


def groups_of_two(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Two groups of two ranks each in one job of four."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = groups[rank % 2]
    with create(mine) as storage:
        ranks = [storage.rank, dist.get_rank(mine), storage.world_size]
        wrong = run_layers(storage, range(6), tagged=False)
        storage.reset()
        dist.barrier(mine)
        wrong += run_layers(storage, range(6), tagged=True)
    return {"ranks": ranks, "wrong": wrong}


def a_rank_dies(
    rank: int, world_size: int, folder: Path, dead: int, tagged: bool, when: str, go_on: str
) -> dict[str, Any]:
    """One rank is killed in layer 4; the others end the step and see the error, and the group goes on.

    `when`: "before" its publish, "after" it, or in the "middle", with the first token stored alone.
    `go_on`: with a "spare" process in its place, or as a group of "two" of the living.
    """
    if rank == world_size:
        return {"again": in_its_place(folder, dead, world_size, tagged)}
    storage = create()
    wrong = run_layers(storage, range(4), tagged)
    dist.barrier()  # the limit is short: all of them begin layer 4 together
    if rank == dead:
        _die(storage, tagged, when)
    seconds, rights = [], []
    for layer in range(4, 12):
        began = time.monotonic()
        with storage.slot_set() as slot:
            put(storage, layer, slot, tagged, here.short)
            got = take(storage, slot, tagged, here.short)
        seconds.append(time.monotonic() - began)
        rights.append([a == b for a, b in zip(got, truth(world_size, layer, rank), strict=True)])
    found: dict[str, Any] = {"wrong": wrong, "seconds": seconds, "rights": rights}
    try:
        storage.check()
    except msa_icp.IcpTimeoutError as error:
        found["error"] = [error.slot, list(error.ranks), error.count, error.token, str(error)]
    began = time.monotonic()
    try:
        storage.reset()
    except RuntimeError as caught:  # gloo says that the connection is closed
        found["reset"] = [str(caught), time.monotonic() - began]
    storage.close()
    found["left"] = mapped() + open_files()
    dist.destroy_process_group()
    if go_on == "spare":
        found["again"] = again(folder, rank, world_size, tagged)
    else:
        survivors = [r for r in range(world_size) if r != dead][:2]
        if rank in survivors:
            found["again"] = again(folder, survivors.index(rank), 2, tagged)
    return found


def _die(storage, tagged: bool, when: str) -> None:
    if when != "before":
        tokens = TOKENS if when == "after" else 1
        with storage.slot_set() as slot:
            publish(
                storage,
                step_scores(storage.world_size, 4)[storage.rank][:tokens].to(storage.device),
                NUM_VALID[:tokens],
                backend=here.backend,
                slot=slot,
                tagged=tagged,
                force=(1, 1),
                spin_limit=here.long,
            )
        if storage.device.type == "cuda":
            torch.cuda.synchronize()
    os.kill(os.getpid(), signal.SIGKILL)


def again(folder: Path, rank: int, world_size: int, tagged: bool) -> int:
    """A new group and a new storage; how many layers it merges wrong."""
    (folder / "again").touch()
    join(folder / "store-again", rank, world_size)
    with create() as storage:
        return run_layers(storage, range(8), tagged)


def in_its_place(folder: Path, dead: int, world_size: int, tagged: bool) -> int:
    """A spare process comes when the first of the living does: joining has a limit, too."""
    wait_for_file(folder / "again")
    return again(folder, dead, world_size, tagged)


def a_rank_fails_and_lives(
    rank: int, world_size: int, folder: Path, tagged: bool, how: str
) -> dict[str, Any]:
    """Something is wrong with rank 1 in layer 3; after a collective reset all of them go on.

    `how`: it "raises" before its publish, is one step "behind", which it makes when the others have given up,
    or publishes a wrong "generation", the one before.
    """
    with create() as storage:
        wrong = run_layers(storage, range(3), tagged)
        dist.barrier()
        error = None
        if rank != 1 or how == "generation":
            if rank == 1:
                storage.publish_generations.sub_(1)
            with storage.slot_set() as slot:
                put(storage, 3, slot, tagged, here.short)
                take(storage, slot, tagged, here.short)
            try:
                storage.check()
            except msa_icp.IcpTimeoutError as caught:
                error = [caught.slot, list(caught.ranks), caught.count]
        elif how == "raises":
            with contextlib.suppress(KeyError), storage.slot_set():
                raise KeyError
        dist.barrier()
        if rank == 1 and how == "behind":
            wrong += run_layers(storage, range(3, 4), tagged)
        storage.reset()
        wrong += run_layers(storage, range(10, 16), tagged)
    return {"wrong": wrong, "error": error}


def nobody_resets_with_it(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 1 lives and does not come to the reset; a limit of its own ends it for the others."""
    storage = create()
    dist.barrier()
    began = time.monotonic()
    error, told = "", False
    if rank != 1:
        try:
            storage.reset(timeout=0.5)
        except RuntimeError as caught:
            error = str(caught)
            told = caught.__cause__ not in (None, caught)  # what gloo said
    else:
        time.sleep(1.5)
    return {"seconds": time.monotonic() - began, "error": error, "told": told}


def a_rank_is_gone_at_the_reset(rank: int, world_size: int, folder: Path, dead: int) -> dict[str, Any]:
    """A rank is killed some time before the others reset with a limit."""
    storage = create()
    dist.barrier()
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    began = time.monotonic()
    try:
        storage.reset(timeout=1.0)
    except RuntimeError as caught:
        return {"seconds": time.monotonic() - began, "error": str(caught)}
    return {}


def interrupted(rank: int, world_size: int, folder: Path, what: str) -> float:
    """Seconds until Ctrl-C, half a second into it, has ended rank 1's wait for rank 0, which stays away."""
    storage = create()
    dist.barrier()
    if rank == 0:
        time.sleep(3)
        return 0.0
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        if what == "create":
            create()
        else:
            storage.reset(None if what == "reset" else 2)
    return time.monotonic() - began


def a_broken_device(rank: int, world_size: int, folder: Path, timeout: float | None) -> dict[str, Any]:
    """Rank 1's device fails in a reset, and is well again at the next."""
    with create() as storage:
        run_layers(storage, range(4), tagged=True)
        own = msa_icp.storage._finish

        def broken(device: torch.device) -> None:
            raise RuntimeError("planted")

        dist.barrier()
        began = time.monotonic()
        if rank == 1:
            msa_icp.storage._finish = broken
        try:
            storage.reset(timeout)
            error = ""
        except RuntimeError as caught:
            error = str(caught)
        seconds = time.monotonic() - began
        msa_icp.storage._finish = own
        storage.reset(timeout)
        return {"error": error, "seconds": seconds, "wrong": run_layers(storage, range(4), tagged=True)}


def a_reset_with_a_limit(rank: int, world_size: int, folder: Path) -> int:
    """A reset for which everybody comes within its limit."""
    with create() as storage:
        wrong = run_layers(storage, range(4), tagged=True)
        time.sleep(0.1 * rank)
        storage.reset(timeout=20)
        return wrong + run_layers(storage, range(4), tagged=True)


def one_bad_argument(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 1 alone asks for the impossible; the other must not wait for it."""
    return {"error": attempt(TOKENS if rank == 0 else 0), "wrong": works_afterwards()}


def works_afterwards() -> int:
    """Layers merged wrong by a storage that is made after an attempt has failed."""
    with create() as storage:
        return run_layers(storage, range(3), tagged=True)


def unequal_sizes(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {"error": attempt(2 + rank), "left": mapped() + open_files()}
    with create() as storage:
        found["wrong"] = run_layers(storage, range(3), tagged=False)
    return found


def no_room(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """No memory on all ranks, then on one alone, then one that cannot map its peers'."""
    found = {}
    allocate, mapping = shared_memory.SharedBlock.allocate, shared_memory.SharedBlock.map
    for name, unlucky in (("everybody", (0, 1)), ("one", (1,))):
        if rank in unlucky:
            shared_memory.SharedBlock.allocate = staticmethod(_raise_full)
        found[name] = attempt(TOKENS)
        shared_memory.SharedBlock.allocate = staticmethod(allocate)
    if rank == 0:
        shared_memory.SharedBlock.map = _raise_full
    found["mapping"] = attempt(TOKENS)
    shared_memory.SharedBlock.map = mapping
    found["left"] = mapped() + open_files()
    with create() as storage:
        found["wrong"] = run_layers(storage, range(3), tagged=False)
    return found


def _raise_full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def named_files(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Where there is no memfd: temporary files, without a name as soon as all have mapped them."""
    right = shared_memory.SharedBlock.allocate
    shared_memory.SharedBlock.allocate = staticmethod(partial(right, anonymous=False))
    shared_memory.tempfile.tempdir = str(folder / "tmp")
    found = {"unequal": attempt(2 + rank)}
    with create() as storage:
        dist.barrier()  # every rank has given up its name
        found["names"] = sorted(p.name for p in (folder / "tmp").iterdir())
        found["mapped"] = mapped()
        found["legacy"] = run_layers(storage, range(6), tagged=False)
        found["tagged"] = run_layers(storage, range(6), tagged=True)
    found["left"] = mapped() + open_files()
    return found


def another_machine(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Ranks of two containers: the paths that they exchange exist on both sides and mean their own memory."""
    right = shared_memory.SharedBlock.allocate

    def allocate(nbytes: int, **rest: Any) -> Any:
        block = right(nbytes, **rest)
        os.dup2(block._fd, 200)
        block.path = "/proc/self/fd/200"
        return block

    shared_memory.SharedBlock.allocate = staticmethod(allocate)
    error = attempt(TOKENS)
    os.close(200)
    return {"error": error, "left": mapped() + open_files()}


def killed_in_the_rendezvous(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 1 is gone after it has allocated, before anybody has mapped its memory."""
    dist.barrier()  # everybody is connected
    if rank == 1:
        right = shared_memory.SharedBlock.allocate

        def allocate(*arguments: Any, **rest: Any) -> Any:
            right(*arguments, **rest)
            os.kill(os.getpid(), signal.SIGKILL)

        shared_memory.SharedBlock.allocate = staticmethod(allocate)
    began = time.monotonic()
    try:
        create()
        error = ""
    except Exception as caught:
        error = type(caught).__name__
    return {"error": error, "seconds": time.monotonic() - began, "left": mapped() + open_files()}
