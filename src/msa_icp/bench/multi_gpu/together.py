"""How the ranks of a group are timed together.

Ranks that wait for each other are as slow as the slowest, so that is the figure: of every replay the longest
time that a rank took, of these the median. A replay begins behind a gate, an exchange of its own on the
stream, which no rank passes before all are there. Before the gate the stream sleeps, so that the host is done
launching.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import msa_icp
from msa_icp.geometry import NUM_HEADS, SLOT_SETS

from ..measure import capture
from .team import Rank

LONG_S, SHORT_S = 20.0, 0.3
"""Of a wait that must not fail, and of one that is to fail."""
_SLEEP_CYCLES = 1_000_000
"""Of a GPU's clock: about half a millisecond, longer than the launches of a replay take."""
_REPLAYS = {"cuda": 15, "cpu": 5}


def publish(
    storage: msa_icp.ReceiveStorage,
    scores: Tensor,
    num_valid: Tensor,
    *,
    backend: str,
    slot: int,
    tagged: bool,
    spin_limit: int,
    enable_pdl: bool = False,
) -> None:
    """`msa_icp_topk_select_publish` of a rank that holds rows of every block; a forced block at each end."""
    msa_icp.msa_icp_topk_select_publish(
        scores,
        num_valid,
        storage.tagged_recv_bases if tagged else storage.recv_bases,
        storage.errors,
        slot=slot,
        rank=storage.rank,
        world_size=storage.world_size,
        heads_per_rank=storage.heads_per_rank,
        capacity=storage.capacity,
        force_begin_blocks=1,
        force_end_blocks=1,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        generations=storage.publish_generations if tagged else None,
        backend=backend,
    )


def merge(
    storage: msa_icp.ReceiveStorage,
    num_valid: Tensor,
    output: Tensor,
    *,
    backend: str,
    slot: int,
    tagged: bool,
    spin_limit: int,
    enable_pdl: bool = False,
) -> None:
    """`msa_icp_merge_candidates` of what `publish` has sent."""
    msa_icp.msa_icp_merge_candidates(
        (storage.tagged_recv if tagged else storage.recv)[slot],
        num_valid,
        output,
        storage.errors,
        init_blocks=1,
        local_blocks=1,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        expected_generations=storage.expected_generations[slot] if tagged else None,
        backend=backend,
    )


def polls_per_second(rank: Rank, backend: str) -> float:
    """Collective: how often a merge in vain looks; one rank after the other, as they may share a card."""
    measured = 0.0
    for turn in range(rank.world_size):
        if turn == rank.number:
            measured = _polls_per_second(rank, backend)
        dist.barrier()
    return measured


def _polls_per_second(rank: Rank, backend: str) -> float:
    with msa_icp.ReceiveStorage.in_process(rank.world_size, capacity=1, device=rank.device) as group:
        storage, polls, times = group[0], 1, [0.0]
        valid = torch.ones(1, dtype=torch.int32, device=rank.device)
        output = torch.empty((1, storage.heads_per_rank, 16), dtype=torch.int32, device=rank.device)

        def in_vain(polls: int) -> float:
            """Seconds of a merge that looks so often."""
            storage.errors.zero_()  # or it would give up after one poll
            finish(rank.device)
            began = time.perf_counter()
            merge(storage, valid, output, backend=backend, slot=0, tagged=True, spin_limit=polls)
            finish(rank.device)
            return time.perf_counter() - began

        in_vain(1)  # loads what is not loaded yet
        while min(times) < 0.02:  # against which the time of a launch is little
            polls *= 8
            times = [in_vain(polls) for _ in range(2)]  # the longer one may have been interrupted
        return polls / min(times)


def limit(polls_per_s: float, seconds: float) -> int:
    """The spin limit of a wait of so many seconds."""
    return max(1, min(int(polls_per_s * seconds), 2**31 - 1))


def finish(device: torch.device) -> None:
    """Until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Gate:
    """An exchange that no rank's stream passes before all ranks' streams are there. Collective."""

    def __init__(self, rank: Rank, backend: str) -> None:
        self._rank, self._backend = rank, backend
        self.spin_limit = limit(polls_per_second(rank, backend), LONG_S)
        self._storage = msa_icp.ReceiveStorage.create(capacity=1, device=rank.device)
        self._scores = torch.zeros((1, NUM_HEADS, 4), device=rank.device)
        self._valid = torch.ones(1, dtype=torch.int32, device=rank.device)
        heads = self._storage.heads_per_rank
        self._output = torch.empty((1, heads, 16), dtype=torch.int32, device=rank.device)
        self()  # loads what is not loaded yet
        finish(rank.device)
        dist.barrier()

    def __call__(self) -> None:
        how: dict[str, Any] = {"backend": self._backend, "tagged": True, "spin_limit": self.spin_limit}
        with self._storage.slot_set() as slot:
            publish(self._storage, self._scores, self._valid, slot=slot, **how)
            merge(self._storage, self._valid, self._output, slot=slot, **how)

    def time(self, layer: Callable[[int], None], layers: int) -> float:
        """Microseconds of one of `layer(0) ... layer(layers - 1)`, run back to back on every rank.

        `layers` is a multiple of the slot sets where layers take them in rotation from 0 on: what runs before
        and between the replays keeps to that.
        """
        device = self._rank.device
        for index in range(SLOT_SETS):  # compiles and loads what is not loaded yet
            layer(index)
        finish(device)

        def chain() -> None:
            for index in range(layers):
                layer(index)

        run = capture(chain, device)
        times = [self._once(run) for _ in range(1 + _REPLAYS[device.type])][1:]
        self._storage.check()
        slowest = [max(of_one_replay) for of_one_replay in zip(*self._rank.gather(times), strict=True)]
        return float(statistics.median(slowest)) / layers * 1e6

    def _once(self, run: Callable[[], None]) -> float:
        """Seconds of `run()` on this rank, from the gate on."""
        device = self._rank.device
        dist.barrier()
        if device.type != "cuda":
            self()
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)
        self()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def close(self) -> None:
        self._storage.close()
