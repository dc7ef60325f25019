"""Ranks in processes of their own: starting them, what they run, and collecting what they found.

The same bodies run on a CPU and on GPUs. There rank r uses card r modulo the number of cards, and has a CUDA
context of its own, so one card serves as well as several.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import HEADS, merge, polls_in, publish, random_scores

import msa_icp
from msa_icp import reference, shared_memory, symmetric_memory
from msa_icp.verify import padded

TOKENS, COLUMNS, NUM_VALID = 2, 30, [30, 11]
GROUP_TIMEOUT_S = 30
"""Of the collectives of gloo: how long a reset may wait where a rank is gone."""
SHORT_S, LONG_S = 0.3, 20
HANGS_AFTER_S = 170


@dataclass(frozen=True)
class Place:
    """Where the ranks of a test run."""

    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


CPU = Place("cpu", "torch")
PLACES = [CPU]
if torch.cuda.is_available():
    PLACES += [
        Place("cuda", name)
        for name, reason in msa_icp.backends("cuda").items()
        if reason is None and name != "torch"
    ]


@dataclass
class Here:
    """What a rank's process knows of its place."""

    device: torch.device
    backend: str
    short: int = 1 << 17
    """Polls of a wait that fails. On a CPU some tenths of a second, and more on a busy machine, as every poll
    yields; on a GPU as many as take `SHORT_S`."""
    long: int = 1 << 27
    """Polls of a wait that must not fail."""


here = Here(torch.device("cpu"), CPU.backend)


# ---------------------------------------------------------------- starting


def run_ranks(
    scenario: Callable[..., Any],
    world_size: int,
    folder: Path,
    *arguments: Any,
    place: Place = CPU,
    spares: int = 0,
) -> list[Any]:
    """What `scenario(rank, world_size, folder, *arguments)` returned on every rank; None: it was killed.

    `spares` more processes run it with ranks from `world_size` on, outside the group.
    """
    start = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload(["torch", "torch.distributed", "msa_icp"])
    ranks = [
        context.Process(target=_body, args=(scenario, rank, world_size, folder, arguments, place, spares))
        for rank in range(world_size + spares)
    ]
    for process in ranks:
        process.start()
    try:
        until = time.monotonic() + HANGS_AFTER_S
        while working := [
            r for r, process in enumerate(ranks) if process.is_alive() and not _ended(folder, r)
        ]:
            assert time.monotonic() < until, f"ranks {working} hang"
            time.sleep(0.02)
        (folder / "leave").touch()
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    errors = [f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("error-*"))]
    assert not errors, "\n".join(errors)
    found = [folder / f"result-{rank}.json" for rank in range(len(ranks))]
    for rank, process in enumerate(ranks):
        assert found[rank].exists() or process.exitcode == -signal.SIGKILL, (
            f"rank {rank} ended without a word"
        )
    return [json.loads(path.read_text()) if path.exists() else None for path in found]


def _body(scenario, rank: int, world_size: int, folder: Path, arguments, place: Place, spares: int) -> None:
    torch.set_num_threads(1)
    try:
        if place.device == "cuda":
            _to_card(rank, world_size, place.backend, processes=world_size + spares)
        if rank < world_size:
            join(folder / "store", rank, world_size)
            for turn in range(world_size if place.device == "cuda" else 0):
                if turn == rank:
                    _measure_polls(world_size)
                dist.barrier()
        elif place.device == "cuda":
            _measure_polls(world_size)
        result = scenario(rank, world_size, folder, *arguments)
        _write(folder / f"result-{rank}.json", json.dumps(result))
    except BaseException:
        _write(folder / f"error-{rank}", traceback.format_exc())
    # A rank that leaves looks dead to one that has not come as far, even to one that still joins the group.
    wait_for_file(folder / "leave")
    # Not through the teardown of a group that has lost a rank.
    os._exit(0)


def wait_for_file(path: Path, seconds: float = HANGS_AFTER_S) -> None:
    """Until it is there, or so long."""
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)


def _write(path: Path, text: str) -> None:
    """All of it or nothing: the parent looks for the name."""
    draft = path.with_name(f"draft-{path.name}")
    draft.write_text(text)
    draft.rename(path)


def _ended(folder: Path, rank: int) -> bool:
    return (folder / f"result-{rank}.json").exists() or (folder / f"error-{rank}").exists()


def _to_card(rank: int, world_size: int, backend: str, *, processes: int) -> None:
    """This process's card, with everything loaded that would otherwise load while a peer waits."""
    cards = torch.cuda.device_count()
    if cards < processes:
        os.environ[symmetric_memory.ONE_CARD] = "1"
    here.device, here.backend = torch.device("cuda", rank % cards), backend
    torch.cuda.set_device(here.device)
    torch.cuda._sleep(1)
    with msa_icp.ReceiveStorage.in_process(world_size, capacity=TOKENS, device=here.device) as group:
        for tagged in (False, True):
            for storage in group:
                put(storage, 0, 0, tagged)
            for storage in group:
                take(storage, 0, tagged)
                storage.check()


def _measure_polls(world_size: int) -> None:
    """On the card alone, one rank after the other: processes on one card take turns on it."""
    here.short = polls_in(SHORT_S, world_size, here.backend, here.device)
    here.long = polls_in(LONG_S, world_size, here.backend, here.device)


def join(store: Path, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


# ---------------------------------------------------------------- a rank's work


def step_scores(world_size: int, layer: int) -> list[torch.Tensor]:
    return [random_scores(TOKENS, COLUMNS, seed=50 * layer + rank) for rank in range(world_size)]


def truth(world_size: int, layer: int, rank: int) -> list[list[list[int]]]:
    """The merged ids of a rank's heads, from the scores of all ranks."""
    scores = step_scores(world_size, layer)
    hpr = HEADS // world_size
    return [
        [
            padded(
                reference.merge(
                    [
                        (b, float(mine[t, h, b]))
                        for mine in scores
                        for b in reference.select(mine[t, h], NUM_VALID[t], 1, 1)
                    ],
                    NUM_VALID[t],
                    1,
                    1,
                )
            )
            for h in range(rank * hpr, (rank + 1) * hpr)
        ]
        for t in range(TOKENS)
    ]


def put(storage, layer: int, slot: int, tagged: bool, spin_limit: int | None = None) -> None:
    mine = step_scores(storage.world_size, layer)[storage.rank]
    publish(
        storage,
        mine.to(storage.device),
        NUM_VALID,
        backend=here.backend,
        slot=slot,
        tagged=tagged,
        force=(1, 1),
        spin_limit=spin_limit or here.long,
    )


def take(storage, slot: int, tagged: bool, spin_limit: int | None = None) -> list:
    got = merge(
        storage,
        NUM_VALID,
        backend=here.backend,
        slot=slot,
        tagged=tagged,
        force=(1, 1),
        spin_limit=spin_limit or here.long,
    )
    return got.tolist()


def run_layers(storage, layers: range, tagged: bool) -> int:
    """Publish and merge, layer after layer; how many were merged wrong."""
    wrong = 0
    for layer in layers:
        with storage.slot_set() as slot:
            put(storage, layer, slot, tagged)
            got = take(storage, slot, tagged)
        wrong += got != truth(storage.world_size, layer, storage.rank)
    storage.check()
    return wrong


def create(group=None, capacity: int = TOKENS) -> msa_icp.ReceiveStorage:
    return msa_icp.ReceiveStorage.create(group, capacity=capacity, device=here.device)


def mapped() -> int:
    """How often memory of a receive storage is mapped into this process."""
    return Path("/proc/self/maps").read_text().count(shared_memory.NAME)


def open_files() -> int:
    """Open descriptors of shared blocks of this process."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += shared_memory.NAME in os.readlink(link)
    return count


def attempt(capacity: int, group=None) -> str:
    """Try to create a storage; the error as text, empty where it worked."""
    try:
        create(group, capacity).close()
    except (ValueError, RuntimeError) as error:
        return f"{'ValueError' if isinstance(error, ValueError) else 'RuntimeError'}: {error}"
    return ""


# ---------------------------------------------------------------- scenarios


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
