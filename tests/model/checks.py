"""What is explored, and what must come out: nothing, or something that goes wrong.

A check of the protocols as they are comes for 2 and 4 ranks. The planted faults and the uses that the
contract forbids must go wrong in the way that is named; the limits are things that docs/exchange.md does not
claim, each with the check that says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from . import planted
from .exchange import ANY_NUMBER, Exchange
from .explore import Outcome, explore
from .legacy import Legacy
from .schedule import Schedule, continued, every_sequence, nearest, restarted
from .tagged import Tagged

RIGHT = ""
STUCK = "stuck"
WRONG_ROW = "wrong row"
MIXED_ROWS = "mixed rows"


@dataclass(frozen=True)
class Case:
    """A model, and how what goes wrong in it begins; RIGHT where nothing may."""

    make: Callable[[], Exchange]
    expected: str


@dataclass(frozen=True)
class Check:
    """Cases that answer one question."""

    name: str
    cases: tuple[Case, ...]
    quick: bool = True
    """Whether the tests run it too; `python -m model` runs all."""

    @property
    def goes_wrong(self) -> bool:
        return any(case.expected for case in self.cases)

    def run(self, progress: Callable[[int], None] = lambda states: None) -> tuple[bool, Outcome]:
        """Whether everything came out as it must; the last case's outcome, with the states of all."""
        states = 0
        for case in self.cases:
            outcome = explore(case.make(), partial(_add, progress, states))
            states += outcome.states
            if not _as_expected(case.expected, outcome.wrong):
                return False, Outcome(states, outcome.wrong, outcome.trace)
        return True, Outcome(states, outcome.wrong, outcome.trace)


def _add(progress: Callable[[int], None], before: int, states: int) -> None:
    progress(before + states)


def _as_expected(expected: str, wrong: str | None) -> bool:
    return wrong is None if expected == RIGHT else wrong is not None and wrong.startswith(expected)


def _one(
    name: str,
    protocol: type[Exchange],
    world_size: int,
    schedule: Schedule,
    expected: str = RIGHT,
    *,
    quick: bool = True,
    **options: object,
) -> Check:
    """A check of one case; `options` as for Exchange."""
    case = Case(partial(protocol, world_size, schedule, **options), expected)  # type: ignore[arg-type]
    return Check(f"{name}, W={world_size}", (case,), quick)


def _rotations(world_size: int) -> Iterator[Check]:
    """Tagged rows: which orders of the slot sets are safe. Two uses of one slot set in a row never are."""

    def tagged(name: str, slots: tuple[int, ...], expected: str = RIGHT, **options: bool) -> Check:
        return _one(f"tagged, {name}", Tagged, world_size, Schedule(slots), expected, **options)

    yield tagged("distance 1", (0,) * 4, STUCK)
    yield tagged("distance 2", (0, 1) * 6)
    for layers in (4, 5, 6, 7, 58, 60):
        steps = 2 if layers > 7 else 4
        quick = layers <= 7 or world_size == 2
        yield tagged(
            f"rotation goes on, {layers} layers x {steps} steps", continued(layers, steps), quick=quick
        )
        yield tagged(
            f"rotation restarts, {layers} layers x {steps} steps",
            restarted(layers, steps),
            STUCK if layers % 3 == 1 else RIGHT,
            quick=quick,
        )
    yield tagged("a graph of 4 layers over slot sets 0 1 2 1, replayed", (0, 1, 2, 1) * 4)
    uses = 6 if world_size == 2 else 5
    for protocol in (Tagged, Legacy):
        yield Check(
            f"{protocol.__name__.lower()}, every sequence of {uses} slot sets, W={world_size}",
            tuple(
                Case(
                    partial(protocol, world_size, Schedule(slots), reduced=True),
                    STUCK if protocol is Tagged and nearest(slots) == 1 else RIGHT,
                )
                for slots in every_sequence(uses)
            ),
            quick=world_size == 2,
        )


def _batches(world_size: int) -> Iterator[Check]:
    """Batches that shrink and grow, and the step without tokens, which is no use."""
    for protocol in (Tagged, Legacy):
        form = protocol.__name__.lower()
        yield _one(
            f"{form}, a batch that shrinks and grows",
            protocol,
            world_size,
            Schedule(continued(4, 3), (2,) * 4 + (1,) * 4 + (2,) * 4),
            reduced=True,
            quick=world_size == 2,
        )
        yield _one(
            f"{form}, a step without tokens that takes slot sets, 5 layers",
            protocol,
            world_size,
            Schedule(continued(5, 3), (1,) * 5 + (0,) * 5 + (1,) * 5),
            STUCK if protocol is Tagged else RIGHT,
            reduced=True,
        )


def _legacy(world_size: int) -> Iterator[Check]:
    """Legacy rows are safe at every distance."""
    for name, slots in (
        ("distance 1", (0,) * 9),
        ("distance 2", (0, 1) * 5),
        ("rotation goes on, 58 layers x 2 steps", continued(58, 2)),
        ("rotation restarts, 4 layers x 3 steps", restarted(4, 3)),
    ):
        yield _one(f"legacy, {name}", Legacy, world_size, Schedule(slots), reduced=True)
    # The same without the reduction, as far as that goes.
    for name, slots in (("distance 1", (0,) * 4), ("rotation", continued(4, 1))):
        yield _one(
            f"legacy, {name}, every interleaving",
            Legacy,
            world_size,
            Schedule(slots),
            quick=world_size == 2,
        )


def _tagged_failures(world_size: int) -> Iterator[Check]:
    """Waits that fail: what is merged stays right."""
    two = world_size == 2

    def tagged(name: str, uses: int, **options: object) -> Check:
        return _one(f"tagged, {name}", Tagged, world_size, Schedule(continued(uses, 1)), **options)  # type: ignore[arg-type]

    everybody = (ANY_NUMBER,) * world_size
    yield tagged("any waits fail", 6 if two else 3, may_fail=everybody, quick=False)
    yield tagged(
        "one wait of each rank fails",
        6 if two else 5,
        may_fail=(1,) * world_size,
        must_end=False,
        quick=two,
    )
    yield tagged("after one failed wait all go on", 9 if two else 5, may_fail=(1, *(0,) * (world_size - 1)))


def _legacy_failures(world_size: int) -> Iterator[Check]:
    """Waits that fail: between a source and an owner that have not failed, what is merged stays right."""
    two = world_size == 2

    def legacy(name: str, slots: tuple[int, ...], may_fail: tuple[int, ...], quick: bool) -> Check:
        return _one(
            f"legacy, {name}",
            Legacy,
            world_size,
            Schedule(slots),
            may_fail=may_fail,
            must_end=False,
            reduced=True,
            quick=quick,
        )

    if two:
        yield legacy("any waits fail", continued(5, 1), (ANY_NUMBER,) * 2, False)
    else:
        yield legacy("any waits of one rank fail", continued(5, 1), (ANY_NUMBER, 0, 0, 0), False)
    yield legacy(
        "one wait of two ranks fails",
        continued(6 if two else 5, 1),
        (1, 1, *(0,) * (world_size - 2)),
        two,
    )
    yield legacy("one wait of each rank fails, distance 1", (0,) * (5 if two else 2), (1,) * world_size, two)


def _resets(world_size: int) -> Iterator[Check]:
    """Whatever has failed, a group that resets decodes again."""
    uses, reset_before = (7, 4) if world_size == 2 else (3, 1)
    for protocol in (Tagged, Legacy):
        yield _one(
            f"{protocol.__name__.lower()}, any waits fail, then a reset",
            protocol,
            world_size,
            Schedule(continued(uses, 1), reset_before=reset_before),
            may_fail=(ANY_NUMBER,) * world_size,
            reduced=True,
            quick=False,
        )


def _limits() -> Iterator[Check]:
    """What is not claimed, and why."""

    def limit(
        name: str, protocol: type[Exchange], slots: tuple[int, ...], *rest: str, **options: object
    ) -> Check:
        return _one(f"limit: {name}", protocol, 2, Schedule(slots), *rest, **options)  # type: ignore[arg-type]

    yield limit(
        "tagged, after two failed waits in a row a slow peer's row is lost",
        Tagged,
        continued(6, 1),
        STUCK,
        may_fail=(2, 0),
    )
    yield limit(
        "tagged at distance 2, after one failed wait a slow peer's row is lost",
        Tagged,
        (0, 1) * 3,
        STUCK,
        may_fail=(1, 0),
    )
    yield limit(
        "legacy, a rank without errors merges a wrong row of one that has failed",
        planted.OwnErrorsSuffice,
        continued(8, 1),
        WRONG_ROW,
        may_fail=(ANY_NUMBER, 0),
        must_end=False,
    )
    yield limit(
        "legacy, after a failed publish only a reset helps",
        Legacy,
        (0,) * 3,
        STUCK,
        may_fail=(ANY_NUMBER, 0),
    )
    yield limit(
        "legacy, from distance 2 on nothing goes wrong if a publish does not wait",
        planted.PublishDoesNotWait,
        continued(7, 1),
    )
    yield limit(
        "legacy, from distance 2 on nothing goes wrong if rows are read after the clearing",
        planted.ClearedBeforeRead,
        continued(7, 1),
    )


ROTATION = Schedule(continued(6, 1))
ONE_SLOT_SET = Schedule((0,) * 3)
ONE_FAILS: dict[str, object] = {"may_fail": (ANY_NUMBER, 0), "must_end": False}

PLANTED: tuple[tuple[str, type[Exchange], Schedule, dict[str, object]], ...] = (
    ("tagged, the tag is in one word only", planted.TagInOneWord, ROTATION, {}),
    ("tagged, 64-bit words are torn", planted.TornWords, ROTATION, {}),
    ("tagged, a newer generation is taken", planted.NewerIsTaken, ONE_SLOT_SET, {}),
    ("tagged, the words are read again", planted.ReadAgain, ROTATION, ONE_FAILS),
    ("tagged, a late merge's counter stays", planted.CounterStays, ROTATION, {"may_fail": (1, 0)}),
    ("legacy, no release on the ready word", planted.NoRelease, ROTATION, {}),
    ("legacy, a publish does not wait", planted.PublishDoesNotWait, ONE_SLOT_SET, {}),
    ("legacy, cleared before the row is read", planted.ClearedBeforeRead, ONE_SLOT_SET, {}),
    ("legacy, a late publish stores", planted.LatePublishStores, ROTATION, ONE_FAILS),
)
"""Faults that lead to a wrong row between two ranks."""

PLANTED_RESETS: tuple[tuple[str, type[Exchange], str], ...] = (
    ("tagged, a reset clears before all have come", planted.TaggedClearsAtOnce, WRONG_ROW),
    ("legacy, a reset clears before all have come", planted.LegacyClearsAtOnce, WRONG_ROW),
    ("tagged, a reset does not wait until all have cleared", planted.TaggedGoesOnAtOnce, STUCK),
    ("legacy, a reset does not wait until all have cleared", planted.LegacyGoesOnAtOnce, STUCK),
    ("tagged, a reset comes with stores in flight", planted.TaggedStoresInFlight, WRONG_ROW),
    ("legacy, a reset comes with stores in flight", planted.LegacyStoresInFlight, WRONG_ROW),
)


def _planted() -> Iterator[Check]:
    """Faults, each of which must go wrong."""
    for name, protocol, schedule, options in PLANTED:
        yield _one(f"planted: {name}", protocol, 2, schedule, WRONG_ROW, **options)  # type: ignore[arg-type]
    yield _one(
        "planted: legacy, a late merge clears ready words",
        planted.LateMergeClears,
        4,
        Schedule(continued(4, 1)),
        MIXED_ROWS,
        may_fail=(1, 0, 0, 0),
        must_end=False,
        reduced=True,
    )
    two_uses_each = Schedule(continued(4, 1), reset_before=2)
    for name, protocol, expected in PLANTED_RESETS:
        yield _one(
            f"planted: {name}", protocol, 2, two_uses_each, expected, may_fail=(ANY_NUMBER, ANY_NUMBER)
        )


def every_check() -> list[Check]:
    """All checks, by what they are about."""
    checks: list[Check] = []
    for world_size in (2, 4):
        for group in (_rotations, _batches, _legacy, _tagged_failures, _legacy_failures, _resets):
            checks += group(world_size)
    return [*checks, *_limits(), *_planted()]
