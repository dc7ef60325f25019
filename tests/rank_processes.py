"""Ranks in processes of their own: starting them, the steps they share, and collecting what they found.

The same bodies run on a CPU and on GPUs. There rank r uses card r modulo the number of cards, and has a CUDA
context of its own, so one card serves as well as several.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
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
