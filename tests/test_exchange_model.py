"""The model of the exchange: its quick checks, its assumptions about memory, and that it is our protocol.

`make model` runs every check (model/checks.py).
"""

from __future__ import annotations

import random
from itertools import count

import pytest
import torch
from model import planted
from model.buffers import BufferedLegacy, BufferedTagged
from model.checks import Check, every_check
from model.exchange import ANY_NUMBER, PUBLISH, Exchange, State
from model.explore import explore
from model.legacy import Legacy
from model.schedule import SLOT_SETS, Schedule, continued, every_sequence, restarted
from model.tagged import Tagged

import msa_icp
from msa_icp import ReceiveStorage, geometry, rows, verify

QUICK = [check for check in every_check() if check.quick]


@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.name)
def test_what_comes_out(check: Check) -> None:
    as_expected, outcome = check.run()
    assert as_expected, outcome


def test_a_trace_leads_to_what_goes_wrong() -> None:
    """Distance one, by hand: the fast rank's second row replaces the first, which the slow one wants."""
    outcome = explore(Tagged(2, Schedule((0, 0))))
    assert outcome.wrong == "stuck: rank 0 waits for the rows of use 1, rank 1 waits for the rows of use 0"
    assert outcome.trace == (
        "rank 0 publishes use 0 (slot set 0)",
        "rank 1 publishes use 0 (slot set 0)",
        "rank 0 merges use 0 (slot set 0)",
        "rank 0 publishes use 1 (slot set 0)",
        "rank 1 looks for use 0 and finds a newer word 0 from rank 0",
        "rank 1 looks for use 0 and finds a newer word 1 from rank 0",
    )


# ---------------------------------------------------------------- what is assumed of memory


class BufferedNoRelease(BufferedLegacy):
    """The ready word may become visible before the words of its row."""

    releases = False


class BufferedTagInOneWord(BufferedTagged, planted.TagInOneWord):
    """planted.TagInOneWord over store buffers."""


class BufferedTornWords(BufferedTagged, planted.TornWords):
    """planted.TornWords over store buffers."""


class BufferedNewerIsTaken(BufferedTagged, planted.NewerIsTaken):
    """planted.NewerIsTaken over store buffers."""


class BufferedCounterStays(BufferedTagged, planted.CounterStays):
    """planted.CounterStays over store buffers."""


class BufferedPublishDoesNotWait(planted.PublishDoesNotWait, BufferedLegacy):
    """planted.PublishDoesNotWait over store buffers."""


@pytest.mark.parametrize(
    ("windows", "buffers", "verdicts"),
    [
        (Tagged, BufferedTagged, {"right", "stuck"}),
        (planted.TagInOneWord, BufferedTagInOneWord, {"wrong row"}),
        (planted.TornWords, BufferedTornWords, {"wrong row"}),
        (planted.NewerIsTaken, BufferedNewerIsTaken, {"right", "wrong row"}),
        (Legacy, BufferedLegacy, {"right"}),
        (planted.NoRelease, BufferedNoRelease, {"wrong row"}),
        (planted.PublishDoesNotWait, BufferedPublishDoesNotWait, {"right", "wrong row"}),
    ],
)
def test_loads_that_choose_and_stores_that_wait_come_to_the_same(
    windows: type[Exchange], buffers: type[Exchange], verdicts: set[str]
) -> None:
    """The verdicts over windows and over store buffers agree for every sequence of four slot sets."""
    met = set()
    for slots in [*every_sequence(4), restarted(4, 2), continued(6, 1)]:
        found = [_verdict(protocol(2, Schedule(slots))) for protocol in (windows, buffers)]
        assert found[0] == found[1], slots
        met.add(found[0])
    assert met == verdicts


@pytest.mark.parametrize(
    ("windows", "buffers", "slots"),
    [
        (Tagged, BufferedTagged, continued(6, 1)),
        (Tagged, BufferedTagged, (0, 1) * 3),
        (planted.CounterStays, BufferedCounterStays, continued(6, 1)),
        (Legacy, BufferedLegacy, (0,) * 3),
    ],
)
def test_failed_waits_come_to_the_same(
    windows: type[Exchange], buffers: type[Exchange], slots: tuple[int, ...]
) -> None:
    found = [_verdict(protocol(2, Schedule(slots), may_fail=(1, 0))) for protocol in (windows, buffers)]
    assert found[0] == found[1]


def _verdict(model: Exchange) -> str:
    return (explore(model).wrong or "right").split(":")[0]


@pytest.mark.parametrize("slots", [(0,) * 4, (0, 1, 0, 1), continued(4, 1)])
def test_the_reduction_leaves_the_verdict(slots: tuple[int, ...]) -> None:
    for protocol, may_fail in (
        (Legacy, (0, 0)),
        (Legacy, (1, 1)),
        (planted.OwnErrorsSuffice, (ANY_NUMBER, 0)),
    ):
        options = {"may_fail": may_fail, "must_end": False}
        full = explore(protocol(2, Schedule(slots), **options))
        reduced = explore(protocol(2, Schedule(slots), reduced=True, **options))
        assert (full.wrong is None) == (reduced.wrong is None)
        assert reduced.states < full.states


# ---------------------------------------------------------------- that it is our protocol


@pytest.mark.parametrize("layers", [4, 7, 58])
def test_the_storage_hands_out_the_rotation_that_goes_on(layers: int) -> None:
    assert SLOT_SETS == geometry.SLOT_SETS
    handed_out = []
    with ReceiveStorage.in_process(2, capacity=1) as (storage, _):
        for _ in range(2 * layers):
            with storage.slot_set() as slot:
                handed_out.append(slot)
    assert tuple(handed_out) == continued(layers, 2)
    assert explore(Tagged(2, Schedule(tuple(handed_out)))).wrong is None


@pytest.mark.exchange
@pytest.mark.parametrize("protocol", [Tagged, Legacy])
def test_the_backends_take_the_steps_of_the_model(
    protocol: type[Exchange], backend: str, device: str
) -> None:
    """Random walks: every op does to rows, ready words, counters and outputs what the model's step says."""
    slow = verify.is_slow(backend, device)
    failures = 0
    for seed in range(1 if slow else 12):
        uses = 4 if slow else 7
        tokens = tuple(random.Random(seed).choices((1, 2), k=uses))
        schedule = Schedule(continued(uses, 1) if seed % 3 else (0,) * uses, tokens)
        model = protocol(2, schedule, may_fail=(ANY_NUMBER,) * 2)
        with ReceiveStorage.in_process(2, capacity=2, device=device) as group:
            walk = _Walk(model, list(group), backend)
            walk.to_the_end(random.Random(seed))
            failures += walk.failures
    assert failures > 0 or slow  # or the walks are too tame


class _Walk:
    """A model and real storages in step. What the ops find is what was stored last: one thread runs them."""

    def __init__(self, model: Exchange, group: list[ReceiveStorage], backend: str) -> None:
        self.model = model
        self.group = group
        self.backend = backend
        self.state: State = model.initial()
        self.tagged = isinstance(model, Tagged)
        self.failures = 0

    def to_the_end(self, choice: random.Random) -> None:
        for _ in count():
            going = [r for r, at in enumerate(self.state.ranks) if at.position < len(self.model.program) - 1]
            if not going:
                return
            rank = choice.choice(going)
            kind, use = self.model.program[self.state.ranks[rank].position]
            if kind == PUBLISH:
                self._publish(rank, use)
            else:
                self._merge(rank, use)
            self._compare_memory()

    def _publish(self, rank: int, use: int) -> None:
        at = self.state.ranks[rank].position
        while self.state.ranks[rank].position == at:
            self._step(rank, "publish" if self.tagged else "publish to", "no publish")
        storage, (scores, num_valid) = self.group[rank], self._inputs(rank, use)
        msa_icp.msa_icp_topk_select_publish(
            scores,
            num_valid,
            storage.tagged_recv_bases if self.tagged else storage.recv_bases,
            storage.errors,
            slot=self.model.schedule.slots[use],
            rank=rank,
            world_size=2,
            heads_per_rank=2,
            capacity=2,
            force_begin_blocks=0,
            force_end_blocks=0,
            spin_limit=1,
            generations=storage.publish_generations if self.tagged else None,
            backend=self.backend,
        )

    def _merge(self, rank: int, use: int) -> None:
        trusted = self.tagged or all(at.failed > use for at in self.state.ranks)
        tokens, slot = self.model.schedule.rows(use), self.model.schedule.slots[use]
        merged = [self._step(rank, "merge", "no merge", row) for row in range(tokens)]
        storage, (_, num_valid) = self.group[rank], self._inputs(rank, use)
        output = torch.full((tokens, 2, 16), -2, dtype=torch.int32, device=storage.device)
        msa_icp.msa_icp_merge_candidates(
            (storage.tagged_recv if self.tagged else storage.recv)[slot],
            num_valid,
            output,
            storage.errors,
            init_blocks=0,
            local_blocks=0,
            spin_limit=1,
            expected_generations=storage.expected_generations[slot] if self.tagged else None,
            backend=self.backend,
        )
        for row, complete in enumerate(merged):
            if not complete:
                assert output[row].tolist() == [[-1] * 16] * 2
            elif trusted:
                assert output[row].tolist() == [list(range(16 * use, 16 * use + 16))] * 2

    def _inputs(self, rank: int, use: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and block counts: of the sixteen best blocks, the use's own, each rank sees eight."""
        tokens, blocks = self.model.schedule.rows(use), 16 * len(self.model.schedule.slots)
        scores = torch.zeros(tokens, 4, blocks)
        scores[:, :, 16 * use + 8 * rank : 16 * use + 8 * rank + 8] = 1.0
        device = self.group[rank].device
        return scores.to(device), torch.full((tokens,), blocks, dtype=torch.int32, device=device)

    def _step(self, rank: int, good: str, bad: str, row: int = 0) -> bool:
        """Take the step of a rank whose polls find the newest stores; whether it was the good one."""
        steps = [step for step in self.model.steps(self.state) if step[0][1] == rank]
        if good == "merge":
            steps = [step for step in steps if step[0][3] == row]
        found = [step for step in steps if step[0][0] == good] if self._newest_allow(rank, good, row) else []
        _, self.state = found[-1] if found else next(step for step in steps if step[0][0] == bad)
        self.failures += not found
        return bool(found)

    def _newest_allow(self, rank: int, good: str, row: int) -> bool:
        if good != "merge":
            return True  # where the model's poll may find 0, the newest store is one
        use = self.model.program[self.state.ranks[rank].position][1]
        at = self.model.row(rank, 1 - rank, self.model.schedule.slots[use], row)
        if self.tagged:
            return self.state.words[2 * at][-1] == use + 1
        return self.state.ready[at].stores[-1] != 0

    def _compare_memory(self) -> None:
        for owner, source, slot, row in (
            (o, 1 - o, s, t) for o in (0, 1) for s in range(SLOT_SETS) for t in range(self.model.row_count)
        ):
            at = self.model.row(owner, source, slot, row)
            storage = self.group[owner]
            if isinstance(self.model, Tagged):
                tags, _ = rows.untag(storage.tagged_recv[slot, source, :, row])
                want = self.model.generation_of(self.state.words[2 * at][-1], row)
                assert (tags == want).all()
            else:
                ready = storage.recv[slot, source, :, row, rows.READY_WORD]
                assert (ready == int(self.state.ready[at].stores[-1] > 0)).all()
        for rank, at in zip(self.group, self.state.ranks, strict=True):
            assert bool(rank.errors[0] > 0) or at.failed > len(self.model.schedule.slots)
