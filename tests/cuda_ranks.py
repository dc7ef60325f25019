"""Ranks whose layers follow one another without the host between them: streams, graphs, processes on GPUs.

Outputs are compared with the reference on the device. On a CPU, where nothing is launched ahead, the same
layers run one by one.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import rank_processes
import storage_ranks
import torch
import torch.distributed as dist
from rank_processes import NUM_VALID, TOKENS, create, here, run_layers, step_scores, truth

import msa_icp
from msa_icp import symmetric_memory

CYCLE = 12
"""Layers of a step: they take each slot set four times, so the rotation goes on across steps."""
DELAY_CYCLES = 100_000
"""Of the clock of a GPU, the longest delay: some tens of microseconds, several launches."""


class Layers:
    """One rank's publish and merge of `CYCLE` layers over and over, in buffers at fixed addresses."""

    def __init__(
        self, storage: msa_icp.ReceiveStorage, backend: str, *, tagged: bool, spin_limit: int, seed: int = 0
    ) -> None:
        self.storage, self.backend, self.tagged, self.spin_limit = storage, backend, tagged, spin_limit
        self.random = random.Random(100 * seed + storage.rank)
        world, rank, device = storage.world_size, storage.rank, storage.device
        self.scores = [step_scores(world, layer)[rank].to(device) for layer in range(CYCLE)]
        self.expected = [
            torch.tensor(truth(world, layer, rank), dtype=torch.int32, device=device)
            for layer in range(CYCLE)
        ]
        self.num_valid = torch.tensor(NUM_VALID, dtype=torch.int32, device=device)
        self.output = torch.empty_like(self.expected[0])
        self.different = torch.empty_like(self.output)
        self.wrong_bits = torch.zeros_like(self.output)

    def run(self, step: int, slot: int, *, delays: bool = True) -> None:
        """Publish, merge and compare, after and between delays now and then."""
        layer, pdl = step % CYCLE, step % 2 == 0
        self._delay(delays)
        self.publish(layer, slot, pdl)
        self._delay(delays)
        self.output.fill_(-7)
        self.merge(slot, pdl)
        torch.bitwise_xor(self.output, self.expected[layer], out=self.different)
        self.wrong_bits.bitwise_or_(self.different)

    def publish(self, layer: int, slot: int, enable_pdl: bool = False) -> None:
        storage = self.storage
        msa_icp.msa_icp_topk_select_publish(
            self.scores[layer],
            self.num_valid,
            storage.tagged_recv_bases if self.tagged else storage.recv_bases,
            storage.errors,
            slot=slot,
            rank=storage.rank,
            world_size=storage.world_size,
            heads_per_rank=storage.heads_per_rank,
            capacity=storage.capacity,
            force_begin_blocks=1,
            force_end_blocks=1,
            spin_limit=self.spin_limit,
            enable_pdl=enable_pdl,
            generations=storage.publish_generations if self.tagged else None,
            backend=self.backend,
        )

    def merge(self, slot: int, enable_pdl: bool = False) -> None:
        storage = self.storage
        msa_icp.msa_icp_merge_candidates(
            (storage.tagged_recv if self.tagged else storage.recv)[slot],
            self.num_valid,
            self.output,
            storage.errors,
            init_blocks=1,
            local_blocks=1,
            spin_limit=self.spin_limit,
            enable_pdl=enable_pdl,
            expected_generations=storage.expected_generations[slot] if self.tagged else None,
            backend=self.backend,
        )

    def graph(self) -> torch.cuda.CUDAGraph:
        """A graph of the `CYCLE` layers; how long its delays are is drawn now."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(CYCLE):
                with self.storage.slot_set() as slot:
                    self.run(layer, slot)
        return graph

    def wrong(self) -> int:
        """How many ids have ever been wrong. Raises where a wait has failed."""
        self.storage.check()
        return int(self.wrong_bits.count_nonzero())

    def _delay(self, delays: bool) -> None:
        if delays and self.random.random() < 0.1:
            self.sleep(self.random.random())

    def sleep(self, share: float) -> None:
        """The stream (on a CPU the process) waits for this share of the longest delay."""
        if self.storage.device.type == "cuda":
            torch.cuda._sleep(1 + int(share * DELAY_CYCLES))
        else:
            time.sleep(share / 1000)


# ---------------------------------------------------------------- ranks in processes


def many_steps(
    rank: int, world_size: int, folder: Path, tagged: bool, steps: int, graphs: bool
) -> dict[str, int]:
    """Layers at each rank's own pace, launched far ahead of what runs."""
    with create() as storage:
        layers = Layers(storage, here.backend, tagged=tagged, spin_limit=here.long)
        _one_with_the_host(layers)
        if graphs:
            graph = layers.graph()
            dist.barrier()
            for _ in range(steps // CYCLE):
                layers.sleep(layers.random.random())
                graph.replay()
        else:
            for step in range(steps):
                with storage.slot_set() as slot:
                    layers.run(step, slot)
        return {"wrong": layers.wrong(), "waits": int(storage.errors[0])}


def _one_with_the_host(layers: Layers) -> None:
    """Run a cycle so that every kernel is loaded, with nobody waiting for one that loads."""
    for step in range(CYCLE):
        with layers.storage.slot_set() as slot:
            layers.publish(step, slot, enable_pdl=step % 2 == 0)
            dist.barrier()
            layers.merge(slot, enable_pdl=step % 2 == 0)
            torch.bitwise_xor(layers.output, layers.expected[step], out=layers.different)
            layers.wrong_bits.bitwise_or_(layers.different)
            layers.output.fill_(-7)
    assert layers.wrong() == 0
    dist.barrier()


def killed_in_flight(
    rank: int, world_size: int, folder: Path, dead: int, tagged: bool, graphs: bool
) -> dict[str, Any]:
    """A rank is killed while its kernels run or wait to run, in the middle of whatever layer that is."""
    if rank == world_size:
        return {"again": storage_ranks.in_its_place(folder, dead, world_size, tagged)}
    storage = create()
    layers = Layers(storage, here.backend, tagged=tagged, spin_limit=here.long)
    _one_with_the_host(layers)
    layers.spin_limit = here.short
    graph = layers.graph() if graphs else None
    dist.barrier()
    began = time.monotonic()
    for number in range(10):
        if rank == dead and number == 2:
            layers.sleep(500)  # behind it the rest of its layers
        if graph is not None:
            graph.replay()
        else:
            for step in range(CYCLE):
                layers.run(step, step % 3)
        if rank == dead and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, Any] = {}
    try:
        storage.check()
    except msa_icp.IcpTimeoutError as error:
        found["error"] = [list(error.ranks), error.count, error.slot]
    found["seconds"] = time.monotonic() - began
    found["usable"] = int(torch.arange(5, device=here.device).sum())
    storage.close()
    dist.destroy_process_group()
    found["again"] = storage_ranks.again(folder, rank, world_size, tagged)
    return found


def a_second_stream(rank: int, world_size: int, folder: Path) -> str:
    """While a slot set is in flight another stream is refused, before it launches anything."""
    other = torch.cuda.Stream()
    with create() as storage:
        with storage.slot_set(1):
            torch.cuda._sleep(100_000_000)
        try:
            with torch.cuda.stream(other), storage.slot_set(1):
                return "taken"
        except RuntimeError as error:
            return str(error)


def memory_comes_back(rank: int, world_size: int, folder: Path) -> list[int] | None:
    """MiB of the card that three large storages, one after the other, have taken and not given back.

    None: somebody else takes memory of this card or gives it back.
    """
    free = set()
    for _ in range(20):
        dist.barrier()
        free.add(torch.cuda.mem_get_info()[0])
        dist.barrier()
        time.sleep(0.05)
    if len(free) > 1:
        return None
    taken = []
    for _ in range(3):
        dist.barrier()
        before = torch.cuda.mem_get_info()[0]
        dist.barrier()
        with create(capacity=50_000):
            dist.barrier()
            used = before - torch.cuda.mem_get_info()[0]
            dist.barrier()
        dist.barrier()
        taken += [used >> 20, (before - torch.cuda.mem_get_info()[0]) >> 20]
    return taken


def one_card_without_leave(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Several ranks on a card and the variable not set: what to set is said at once."""
    os.environ.pop(symmetric_memory.ONE_CARD)
    began = time.monotonic()
    found: dict[str, Any] = {"error": rank_processes.attempt(TOKENS), "seconds": time.monotonic() - began}
    os.environ[symmetric_memory.ONE_CARD] = "1"
    with create() as storage:
        found["wrong"] = run_layers(storage, range(3), tagged=True)
    return found
