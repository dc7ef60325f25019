"""What both protocols have in common: ranks that publish and merge use after use, fail, reset and go on.

A rank is a thread of control: kernels of one stream, one after the other. Every rank owns one head and
sends every other rank a row, or several, in every use; a row is two words, which is enough to tear one. What
a rank sends itself is ordered by its own stream and left out. Ids and scores are left out as well: a word
holds the number of the use that it belongs to, so a row that is merged is right where all its words do.

A wait may fail as often as `may_fail` says, whatever is there: a store may be invisible for any time, and
so a poll may always have come too early. A rank that dies takes no more steps; every state is explored,
so what holds in all of them holds whoever dies in whichever.

Two steps of different ranks commute unless they touch the same row, so not every order is a state of its own.
Where a protocol knows a step that commutes with whatever the others may do before it (`alone`), that step
is the only one that is taken from a state: a persistent set, as partial-order reduction calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .explore import Label
from .memory import CLEARED, Ready, Window
from .schedule import SLOT_SETS, Schedule

WORDS = 2
NEVER = 1 << 20
"""A use that no schedule reaches."""
ANY_NUMBER = 1 << 20
"""Of failed waits."""

PUBLISH, MERGE, READ, ENTER_RESET, CLEAR, LEAVE_RESET, DONE = range(7)


class Rank(NamedTuple):
    """Where a rank is."""

    position: int
    """Index into the program."""
    todo: int
    """Bit mask of the rows that it has still to publish, or to merge, in this use; each waits on its own."""
    failed: int
    """The first use whose row from this rank, or output on it, a failure has made worthless; or NEVER."""
    may_fail: int
    """How many of its waits may still fail."""
    behind: tuple[int, ...]
    """By how much the tagged counters of [slot set, row] lag behind the uses: never, but for a fault."""


class State(NamedTuple):
    """The group: its ranks and its memory."""

    ranks: tuple[Rank, ...]
    words: tuple[Window, ...]
    ready: tuple[Ready, ...]


class Exchange:
    """The part of the model that does not depend on the row form."""

    def __init__(
        self,
        world_size: int,
        schedule: Schedule,
        *,
        may_fail: tuple[int, ...] = (),
        must_end: bool = True,
        reduced: bool = False,
    ) -> None:
        """`may_fail`: of each rank; `must_end`: a rank that is stuck is a fault; `reduced`: see above."""
        self.world_size = world_size
        self.schedule = schedule
        self.may_fail = may_fail or (0,) * world_size
        self.must_end = must_end
        self.reduced = reduced
        self.row_count = schedule.most_rows
        self.program = self.make_program()
        resets = [at for at, (kind, _) in enumerate(self.program) if kind in (ENTER_RESET, CLEAR)]
        self.reset_at = resets[0] if resets else None

    @property
    def cells(self) -> int:
        """Locations of a row that become visible on their own."""
        return WORDS

    # ------------------------------------------------------------ what every rank does

    def phases(self) -> tuple[int, ...]:
        """The parts of a use."""
        return PUBLISH, MERGE

    def reset_phases(self) -> tuple[int, ...]:
        """The parts of a reset: nobody clears before all have come or goes on before all have cleared."""
        return ENTER_RESET, CLEAR, LEAVE_RESET

    def make_program(self) -> tuple[tuple[int, int], ...]:
        """Every rank's steps, `(kind, use)`."""
        program: list[tuple[int, int]] = []
        for use in range(len(self.schedule.slots)):
            if use == self.schedule.reset_before:
                program += [(kind, use) for kind in self.reset_phases()]
            if self.schedule.rows(use) > 0:
                program += [(kind, use) for kind in self.phases()]
        return (*program, (DONE, len(self.schedule.slots)))

    # ------------------------------------------------------------ states

    def initial(self) -> State:
        rows = self.world_size**2 * SLOT_SETS * self.row_count
        behind = (0,) * (SLOT_SETS * self.row_count)
        ranks = tuple(
            Rank(0, self.todo_at(0, rank), NEVER, may_fail, behind)
            for rank, may_fail in enumerate(self.may_fail)
        )
        return State(ranks, (CLEARED,) * (rows * self.cells), self.no_ready(rows))

    def no_ready(self, rows: int) -> tuple[Ready, ...]:
        """The ready words of so many rows; none where rows have none."""
        return ()

    def todo_at(self, position: int, rank: int) -> int:
        """What `Rank.todo` is at the beginning of a step of the rank's program."""
        kind, use = self.program[position]
        return (1 << self.schedule.rows(use)) - 1 if kind == MERGE else 0

    def row(self, owner: int, source: int, slot: int, row: int) -> int:
        """Which row of the group's memory it is."""
        return ((owner * self.world_size + source) * SLOT_SETS + slot) * self.row_count + row

    def others(self, rank: int) -> list[int]:
        return [other for other in range(self.world_size) if other != rank]

    def is_final(self, state: State) -> bool:
        return not self.must_end or all(self.program[rank.position][0] == DONE for rank in state.ranks)

    def step_to(
        self, state: State, rank: int, position: int, words: list[Window] | None = None, **changes: object
    ) -> State:
        """The state in which `rank` is at `position`, with other `words`; `changes` are of the rank."""
        new = state.ranks[rank]._replace(
            position=position,
            todo=self.todo_at(position, rank),
            **changes,  # type: ignore[arg-type]
        )
        ranks = (*state.ranks[:rank], new, *state.ranks[rank + 1 :])
        return State(ranks, state.words if words is None else tuple(words), state.ready)

    def one_less(self, state: State, rank: int, bit: int) -> State:
        """The row `bit` is done; with none left to do the rank goes on."""
        at = state.ranks[rank]
        if at.todo == bit:
            return self.step_to(state, rank, at.position + 1)
        return self.changed(state, rank, todo=at.todo & ~bit)

    def failed(self, state: State, rank: int, use: int, **changes: object) -> State:
        """A wait has failed: from `use` on the rank's rows and outputs may be worth nothing."""
        at = state.ranks[rank]
        left = at.may_fail if at.may_fail == ANY_NUMBER else at.may_fail - 1
        return self.changed(state, rank, failed=min(at.failed, use), may_fail=left, **changes)

    def changed(self, state: State, rank: int, **changes: object) -> State:
        """The state with `changes` of a rank."""
        new = state.ranks[rank]._replace(**changes)  # type: ignore[arg-type]
        return state._replace(ranks=(*state.ranks[:rank], new, *state.ranks[rank + 1 :]))

    # ------------------------------------------------------------ steps

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        if self.reduced:
            for rank, at in enumerate(state.ranks):
                kind, use = self.program[at.position]
                if kind == PUBLISH and (alone := self.alone(state, rank, use)):
                    yield from alone
                    return
        for rank, at in enumerate(state.ranks):
            kind, use = self.program[at.position]
            if kind == PUBLISH:
                yield from self.publish(state, rank, use)
                yield from self.abandon(state, rank, use)
            elif kind == MERGE:
                for row in range(self.schedule.rows(use)):
                    if at.todo >> row & 1:
                        yield from self.merge(state, rank, use, row)
            elif kind == READ:
                yield from self.read(state, rank, use)
            elif kind == CLEAR:
                yield from self.clear(state, rank)
            elif kind in (ENTER_RESET, LEAVE_RESET) and all(r.position >= at.position for r in state.ranks):
                yield ("pass", rank, kind), self.step_to(state, rank, at.position + 1)

    def alone(self, state: State, rank: int, use: int) -> list[tuple[Label, State]]:
        """Steps of a rank that commute with all steps of the others; none where the protocol knows none."""
        return []

    def abandon(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        """Before a reset a rank may stop at any use: its host has seen a failure, or has been told of one."""
        if self.reset_at is not None and state.ranks[rank].position < self.reset_at:
            yield ("abandon", rank, use), self.step_to(state, rank, self.reset_at)

    def publish(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        raise NotImplementedError

    def merge(self, state: State, rank: int, use: int, row: int) -> Iterator[tuple[Label, State]]:
        """Merge a row of every rank."""
        raise NotImplementedError

    def read(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        """A step that only a faulty merge has."""
        raise NotImplementedError

    def clear(self, state: State, rank: int) -> Iterator[tuple[Label, State]]:
        """The owner's part of a reset. All stores to its rows have been made and are overwritten."""
        yield ("clear", rank), self.cleared(state, rank, keep=False)

    def cleared(self, state: State, rank: int, *, keep: bool) -> State:
        """The rank's rows and counters are 0; `keep`: stores that it has not seen come after the zeros."""
        words, ready = list(state.words), list(state.ready)
        first, last = self.row(rank, 0, 0, 0), self.row(rank + 1, 0, 0, 0)
        for cell in range(first * self.cells, last * self.cells):
            words[cell] = (0, *words[cell][1:]) if keep else CLEARED
        for row in range(first, last) if ready else ():
            pending = [s for s in ready[row].stores[ready[row].owner + 1 :] if s] if keep else []
            ready[row] = Ready((0, *pending), 0, len(pending))
        at = state.ranks[rank]
        behind = (0,) * len(at.behind)
        return self.step_to(
            state._replace(ready=tuple(ready)), rank, at.position + 1, words, failed=NEVER, behind=behind
        )

    def may_fail_now(self, state: State, rank: int, use: int) -> bool:
        """Whether a wait of this use may fail. After the reset all of them must succeed again."""
        reset = self.schedule.reset_before
        return state.ranks[rank].may_fail > 0 and (reset is None or use < reset)

    # ------------------------------------------------------------ words

    def waiting(self, state: State) -> str:
        kinds = {
            PUBLISH: "to publish use {}", MERGE: "for the rows of use {}", READ: "to read use {}",
            ENTER_RESET: "to reset", CLEAR: "to clear", LEAVE_RESET: "for the others to clear",
        }  # fmt: skip
        waits = []
        for rank, at in enumerate(state.ranks):
            kind, use = self.program[at.position]
            if kind != DONE:
                waits.append(f"rank {rank} waits {kinds[kind].format(use)}")
        return ", ".join(waits)

    def words(self, label: Label) -> str:
        what, rank, *rest = label
        text = {
            "publish": "publishes use {}",
            "publish to": "publishes use {} to rank {}",
            "no publish": "gives up publishing use {} to rank {}",
            "merge": "merges use {}",
            "no merge": "gives up merging use {}",
            "look": "finds all rows of use {} ready and clears their ready words",
            "read": "reads the rows of use {}",
            "overrun": "looks for use {} and finds a newer word {} from rank {}",
            "abandon": "gives up its step at use {} and goes to the reset",
            "clear": "clears its rows and counters",
        }
        if what == "pass":
            return f"rank {rank} {'enters' if rest == [ENTER_RESET] else 'leaves'} the reset"
        line = f"rank {rank} " + text[str(what)].format(*rest)
        if what in ("publish", "publish to", "merge", "look"):
            line += f" (slot set {self.schedule.slots[int(str(rest[0]))]})"
        return line
