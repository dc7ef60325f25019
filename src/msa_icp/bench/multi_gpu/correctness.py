"""The exchange between ranks on several GPUs, compared with the reference: thousands of steps at each rank's
own pace, with random delays, in both row forms, eagerly and from CUDA graphs; and the all-to-all of prefill.

Each form begins with a control: a wrong row is planted, which the comparison must report.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import msa_icp
from msa_icp import cases, reference
from msa_icp.geometry import LEGACY_WORDS, NUM_HEADS, TOP_K

from ..measure import capture
from ..producer import FORMS
from . import selection, together
from .team import ONE_CARD, Rank

CYCLE = 12
"""Layers that differ; each slot set is taken four times, so a graph of them goes on where it ended."""
COLUMNS = 48
NUM_VALID = (48, 11, 0, 33, 17)
"""Blocks of the tokens: more than the selection takes, fewer, none."""
PLANTED = (5, 0)
"""Layer and token of a planted wrong row, which the last rank sends for head 0."""
CHUNKS = (5, 3, 0, 1024, 1)
"""Tokens of the all-to-alls, one after another."""
_DELAY_CYCLES = 100_000
"""Of a GPU's clock, the longest delay: some tens of microseconds, several launches."""
_SHARED_STEPS = 480
"""The most steps of ranks that take turns on a card."""


# ---------------------------------------------------------------- publish and merge


def scores_of(rank: int, layer: int) -> Tensor:
    """float32 `[T, 4, COLUMNS]`: few distinct values, so ties; and NaN, -inf and -0.0."""
    generator = cases.generator(50 * layer + rank)
    shape = (len(NUM_VALID), NUM_HEADS, COLUMNS)
    scores = torch.randint(-6, 7, shape, generator=generator).float()
    kinds = torch.randint(0, 12, shape, generator=generator)
    for kind, value in enumerate((float("nan"), float("-inf"), -0.0)):
        scores[kinds == kind] = value
    return scores


def truth(world_size: int, layer: int, heads: Sequence[int]) -> Tensor:
    """int32 `[T, heads, 16]` on the CPU: what the owner of these heads must merge."""
    scores = [scores_of(rank, layer) for rank in range(world_size)]
    rows = []
    for token, valid in enumerate(NUM_VALID):
        for head in heads:
            sent = [
                (block, float(own[token, head, block]))
                for own in scores
                for block in reference.select(own[token, head], valid, 1, 1)
            ]
            ids = reference.merge(sent, valid, 1, 1)
            rows.append([*ids, *[-1] * (TOP_K - len(ids))])
    return torch.tensor(rows, dtype=torch.int32).view(len(NUM_VALID), len(heads), TOP_K)


class Layers:
    """One rank's publish and merge of `CYCLE` layers over and over, in buffers at fixed addresses."""

    def __init__(
        self, storage: msa_icp.ReceiveStorage, backend: str, *, tagged: bool, spin_limit: int
    ) -> None:
        self.storage, self.device, self.spin_limit = storage, storage.device, spin_limit
        self._how: dict[str, Any] = {"backend": backend, "tagged": tagged}
        self._random = random.Random(storage.rank)
        first = storage.rank * storage.heads_per_rank
        self._heads = range(first, first + storage.heads_per_rank)
        self._scores = [scores_of(storage.rank, layer).to(self.device) for layer in range(CYCLE)]
        self._expected = [
            truth(storage.world_size, layer, self._heads).to(self.device) for layer in range(CYCLE)
        ]
        self._valid = torch.tensor(NUM_VALID, dtype=torch.int32, device=self.device)
        self._output = torch.empty_like(self._expected[0])
        shape = (CYCLE, *self._output.shape[:2])
        self._wrong = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def plant(self) -> None:
        """Make the row of PLANTED wrong on whichever rank owns head 0: blocks that are not its best are."""
        if self.storage.rank == self.storage.world_size - 1:
            layer, token = PLANTED
            row = self._scores[layer][token, 0]
            best = truth(self.storage.world_size, layer, [0])[token, 0]
            others = [block for block in range(NUM_VALID[token]) if block not in best.tolist()]
            row[others] = float("inf")

    def run(self, step: int, slot: int) -> None:
        """Publish, merge and compare, after and between delays now and then."""
        pdl = step % 2 == 0
        self._delay()
        self.publish(step, slot, enable_pdl=pdl)
        self._delay()
        self.merge(step, slot, enable_pdl=pdl)

    def publish(self, step: int, slot: int, **more: Any) -> None:
        scores = self._scores[step % CYCLE]
        together.publish(
            self.storage, scores, self._valid, slot=slot, spin_limit=self.spin_limit, **self._how, **more
        )

    def merge(self, step: int, slot: int, **more: Any) -> None:
        """Merge into an output that is wrong everywhere, and count the rows that differ."""
        self._output.fill_(-7)
        together.merge(
            self.storage,
            self._valid,
            self._output,
            slot=slot,
            spin_limit=self.spin_limit,
            **self._how,
            **more,
        )
        self._wrong[step % CYCLE] += (self._output != self._expected[step % CYCLE]).any(-1)

    def with_the_host(self) -> None:
        """Collective: a cycle in which every merge finds its rows: nobody waits for what is loaded."""
        for step in range(CYCLE):
            with self.storage.slot_set() as slot:
                self.publish(step, slot, enable_pdl=step % 2 == 0)
                together.finish(self.device)
                dist.barrier()
                self.merge(step, slot, enable_pdl=step % 2 == 0)
        together.finish(self.device)
        dist.barrier()

    def cycle(self) -> None:
        """All layers once."""
        for layer in range(CYCLE):
            with self.storage.slot_set() as slot:
                self.run(layer, slot)

    def found(self) -> dict[str, Any]:
        """Wrong rows, where the first of them is (layer, token, head), and what a wait in vain says."""
        together.finish(self.device)
        error = ""
        try:
            self.storage.check()
        except msa_icp.IcpTimeoutError as late:
            error = str(late)
        places = self._wrong.nonzero().tolist()
        first = [*places[0][:2], self._heads[places[0][2]]] if places else None
        return {"wrong": int(self._wrong.sum()), "first": first, "error": error}

    def sleep(self, share: float) -> None:
        """The stream (on a CPU the process) waits for this share of the longest delay."""
        if self.device.type == "cuda":
            torch.cuda._sleep(1 + int(share * _DELAY_CYCLES))
        else:
            time.sleep(share / 1000)

    def _delay(self) -> None:
        if self._random.random() < 0.1:
            self.sleep(self._random.random())


def exchange(
    rank: Rank, backend: str, form: str, run: str, steps: int, *, plant: bool = False
) -> dict[str, Any]:
    """Collective: so many steps with everything that is compared; a row of the document.

    `run` is "eager", "graphs", or "control": eager steps with a wrong row that must be found. `plant` makes
    that row wrong in any case.
    """
    spin_limit = together.limit(together.polls_per_second(rank, backend), together.LONG_S)
    with msa_icp.ReceiveStorage.create(capacity=len(NUM_VALID), device=rank.device) as storage:
        layers = Layers(storage, backend, tagged=form == "tagged", spin_limit=spin_limit)
        if plant or run == "control":
            layers.plant()
        layers.with_the_host()
        cycles = max(1, steps // CYCLE)
        cycle = capture(layers.cycle, rank.device) if run == "graphs" else layers.cycle
        dist.barrier()
        began = time.perf_counter()
        for _ in range(cycles):
            layers.sleep(random.random())
            cycle()
        together.finish(rank.device)
        seconds = time.perf_counter() - began
        found = rank.gather({**layers.found(), "seconds": seconds})
    row = {
        "what": "exchange",
        "backend": backend,
        "form": form,
        "run": run,
        "steps": CYCLE + cycles * CYCLE,
        "wrong_rows": [each["wrong"] for each in found],
        "first_wrong": [each["first"] for each in found],
        "errors": [each["error"] for each in found],
        "us_a_step": round(max(each["seconds"] for each in found) / (cycles * CYCLE) * 1e6, 2),
    }
    return {**row, "ok": _right(row)}


def _right(row: dict[str, Any]) -> bool:
    """Nothing wrong; and of a control, exactly what was planted is, once a cycle, on the owner of head 0."""
    if any(row["errors"]):
        return False
    wanted = [0] * len(row["wrong_rows"])
    if row["run"] == "control":
        wanted[0] = row["steps"] // CYCLE
    return bool(row["wrong_rows"] == wanted)


# ---------------------------------------------------------------- the all-to-all


def carrier_words(rank: int, tokens: int, layer: int) -> Tensor:
    """int32 `[4, tokens, 33]`, each word another one, and other ones for every rank and layer."""
    count = NUM_HEADS * tokens * LEGACY_WORDS
    words = torch.arange(count, dtype=torch.int32) + (10 * layer + rank) * 10_000_000
    return words.view(NUM_HEADS, tokens, LEGACY_WORDS)


class AllToAll:
    """One rank's carrier and receive buffer, and what has come wrong."""

    def __init__(self, rank: Rank, group: dist.ProcessGroup | None, tokens: int, plant: bool) -> None:
        self._rank, self._group, self._plant, self._tokens = rank, group, plant, tokens
        self._heads = NUM_HEADS // rank.world_size
        # Token slices of larger buffers.
        wide = torch.zeros((NUM_HEADS, tokens + 3, LEGACY_WORDS), dtype=torch.int32, device=rank.device)
        self._carrier = wide[:, 3:]
        into = (rank.world_size, self._heads, tokens + 3, LEGACY_WORDS)
        self._received = torch.zeros(into, dtype=torch.int32, device=rank.device)[:, :, 3:]

    def send(self) -> None:
        msa_icp.exchange_prefill(self._carrier, self._received, self._group)

    def fill(self, layer: int) -> None:
        self._carrier.copy_(carrier_words(self._rank.number, self._tokens, layer))
        if self._plant and self._rank.number == self._rank.world_size - 1 and self._tokens:
            self._carrier[0, 0, 0] += 1
        self._received.fill_(-7)

    def wrong(self, layer: int) -> int:
        """Words that are not what the owner must have, head by head as the contract says it."""
        first = self._rank.number * self._heads
        expected = torch.stack(
            [
                carrier_words(source, self._tokens, layer)[first:][: self._heads]
                for source in range(self._rank.world_size)
            ]
        )
        return int((self._received.cpu() != expected).sum())


def all_to_all(
    rank: Rank, group: dist.ProcessGroup | None, run: str, *, plant: bool = False
) -> dict[str, Any]:
    """Collective: exchanges of several sizes, or one size replayed; a row, as of `exchange`."""
    plant = plant or run == "control"
    wrong = exchanges = planted = 0
    for tokens in (257,) if run == "graphs" else CHUNKS:
        mine = AllToAll(rank, group, tokens, plant)
        send: Callable[[], None] = mine.send
        if run == "graphs":
            send()  # a group's first exchange cannot be captured
            together.finish(rank.device)
            send = capture(mine.send, rank.device)
        for layer in range(3):
            mine.fill(layer)
            if layer % rank.world_size == rank.number:
                time.sleep(0.002)
            send()
            wrong += mine.wrong(layer)
            exchanges += 1
            planted += tokens > 0
    row = {
        "what": "prefill all-to-all",
        "over": "gloo" if group is None else "nccl",
        "run": run,
        "steps": exchanges,
        "wrong_words": rank.gather(wrong),
    }
    wanted = [planted if run == "control" else 0, *[0] * (rank.world_size - 1)]
    return {**row, "ok": row["wrong_words"] == wanted}


# ---------------------------------------------------------------- the part


def part(rank: Rank, steps: int, plant: bool, until: float) -> None:
    """Task: every combination, `until` that time; `plant` makes all of them wrong, as the rows then say."""
    runs = ("control", "eager", "graphs") if rank.graphs else ("control", "eager")
    if rank.place == ONE_CARD:
        steps = min(steps, _SHARED_STEPS)
    for backend, form, run in itertools.product(rank.setting.backends, FORMS, runs):
        if not rank.go_on(until):
            return
        rank.row(exchange(rank, backend, form, run, CYCLE if run == "control" else steps, plant=plant))
    for row in selection.rows(rank, plant=plant, until=until):
        rank.row(row)
    if rank.place == ONE_CARD:
        rank.say("prefill all-to-all: left out, NCCL wants a card for every rank")
        return
    for run in runs:
        rank.row(all_to_all(rank, rank.prefill_group(), run, plant=plant))
