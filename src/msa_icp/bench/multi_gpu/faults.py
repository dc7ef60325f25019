"""A rank is killed in the middle of a step: what the others learn, and that the group lives on with another.

The killed rank's kernels are in flight. The others end their steps within a spin limit and name it; they
leave the group and make a new one with the process that takes its place.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import msa_icp

from ..measure import capture
from . import together
from .correctness import CYCLE, NUM_VALID, Layers, exchange
from .team import Rank, Setting, Team

STEPS_AFTER = 10 * CYCLE
"""Steps of the group that is made anew."""
_KILLED_IN = 2
_ROUNDS = 6


def part(team: Team, all_kills: bool, row: Callable[[dict[str, Any]], None], until: float) -> None:
    """On the parent: for every backend a kill in each row form, one of them in the middle of graphs.

    If not `all_kills`, one of the two, in turns.
    """
    for backend, kills in planned(team.setting, all_kills):
        for form, graphs, dead in kills:
            if time.time() < until:
                row(kill(team, backend, form, graphs, dead))


def planned(setting: Setting, all_kills: bool) -> list[tuple[str, list[tuple[str, bool, int]]]]:
    """(row form, whether from graphs, rank) of the kills of each backend."""
    kills = [("tagged", setting.device == "cuda", setting.world_size - 1), ("legacy", False, 0)]
    return [
        (backend, kills if all_kills else [kills[number % 2]])
        for number, backend in enumerate(setting.backends)
    ]


def kill(team: Team, backend: str, form: str, graphs: bool, dead: int) -> dict[str, Any]:
    """Kill rank `dead` and replace it; a row of the document."""
    team.prepare(dead)
    found = team.run(_until_the_end, backend, form, graphs, dead, dying=(dead,))
    team.replace()
    again = team.run(exchange, backend, form, "eager", STEPS_AFTER)[0]
    living = {number: each for number, each in enumerate(found) if number != dead}
    return {
        "what": "killed",
        "backend": backend,
        "form": form,
        "run": "graphs" if graphs else "eager",
        "dead": dead,
        "named": {str(number): each["named"] for number, each in living.items()},
        "errors": {str(number): each["error"] for number, each in living.items()},
        "resets": {str(number): each["reset"] for number, each in living.items()},
        "seconds": round(max(each["seconds"] for each in living.values()), 3),
        "again": again,
        "ok": bool(again["ok"])
        and all(dead in each["named"] and each["usable"] and each["reset"] for each in living.values()),
    }


def _until_the_end(rank: Rank, backend: str, form: str, graphs: bool, dead: int) -> dict[str, Any]:
    """Task: layers until a rank is killed, and what this rank learns of it. It has left the group then."""
    polls = together.polls_per_second(rank, backend)
    storage = msa_icp.ReceiveStorage.create(capacity=len(NUM_VALID), device=rank.device)
    long = together.limit(polls, together.LONG_S)
    layers = Layers(storage, backend, tagged=form == "tagged", spin_limit=long)
    layers.with_the_host()
    layers.spin_limit = together.limit(polls, together.SHORT_S)
    cycle = capture(layers.cycle, rank.device) if graphs else layers.cycle
    dist.barrier()
    began = time.perf_counter()
    for number in range(_ROUNDS):
        if rank.number == dead and number == _KILLED_IN:
            _die(layers, cycle)
        cycle()
    found: dict[str, Any] = {"named": [], "error": "", "reset": ""}
    try:
        storage.check()
    except msa_icp.IcpTimeoutError as error:
        found["named"], found["error"] = list(error.ranks), str(error)
    found["seconds"] = time.perf_counter() - began
    found["usable"] = int(torch.arange(5, device=rank.device).sum()) == 10
    try:
        storage.reset(timeout=5)
    except RuntimeError as error:
        found["reset"] = str(error)
    storage.close()
    dist.destroy_process_group()
    return found


def _die(layers: Layers, cycle: Callable[[], None]) -> None:
    """Be killed with kernels in flight; on a CPU between the first publish of a round and its merge."""
    if layers.device.type == "cuda":
        torch.cuda._sleep(20_000_000)  # behind it the layers of a round
        cycle()
    else:
        layers.publish(0, slot=0)
    os.kill(os.getpid(), signal.SIGKILL)
