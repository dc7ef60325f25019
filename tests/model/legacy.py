"""Legacy rows: a ready word hands each row to its owner and back.

A publish is a step for each row, since each waits on its own. A merge is one step, at the latest time it
could be: its loads are before its clearing stores (docs/exchange.md, lemma 2), and until those the sources
wait, so what it might have read before can still be read then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .exchange import PUBLISH, Exchange, State
from .explore import GoesWrong, Label
from .memory import NOT_READY, Ready, Window, announce, clear, seen_by_owner, seen_by_source


class Legacy(Exchange):
    """The protocol of ready words."""

    def no_ready(self, rows: int) -> tuple[Ready, ...]:
        return (NOT_READY,) * rows

    def todo_at(self, position: int, rank: int) -> int:
        kind, use = self.program[position]
        if kind != PUBLISH:
            return super().todo_at(position, rank)
        rows = range(self.schedule.rows(use))
        return sum(self._bit(owner, row) for owner in self.others(rank) for row in rows)

    # ------------------------------------------------------------ publish

    def publish(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        for owner in self.others(rank):
            for row in range(self.schedule.rows(use)):
                yield from self.publish_to(state, rank, use, owner, row)

    def publish_to(
        self, state: State, rank: int, use: int, owner: int, row: int
    ) -> Iterator[tuple[Label, State]]:
        bit = self._bit(owner, row)
        if not state.ranks[rank].todo & bit:
            return
        at = self.row(owner, rank, self.schedule.slots[use], row)
        seen = self.poll_of_source(state.ready[at])
        done = self.one_less(state, rank, bit)
        if seen is not None:
            yield ("publish to", rank, use, owner), self.published(done, at, use, seen)
        if self.may_fail_now(state, rank, use) and self.may_find_taken(state.ready[at]):
            late = self.failed(done, rank, use)
            yield ("no publish", rank, use, owner), self.late_publish(late, at, use)

    def alone(self, state: State, rank: int, use: int) -> list[tuple[Label, State]]:
        """The publish of a row that is free, or its failure: its owner cannot touch the row before."""
        for owner in self.others(rank):
            for row in range(self.schedule.rows(use)):
                steps = list(self.publish_to(state, rank, use, owner, row))
                if steps and steps[0][0][0] == "publish to":
                    return [*steps, *self.abandon(state, rank, use)]
        return []

    def poll_of_source(self, ready: Ready) -> Ready | None:
        """What a poll leaves that lets the source store its row; None where the row is not free."""
        return seen_by_source(ready)

    def may_find_taken(self, ready: Ready) -> bool:
        """Whether a poll of the source may find a 1."""
        return any(ready.stores[ready.source :])

    def published(self, state: State, at: int, use: int, seen: Ready) -> State:
        """The words of row `at` are stored, and then its ready word."""
        words, ready = list(state.words), list(state.ready)
        for cell in range(at * self.cells, (at + 1) * self.cells):
            words[cell] = (*words[cell], use + 1)
        ready[at] = announce(seen, use + 1)
        return state._replace(words=tuple(words), ready=tuple(ready))

    def late_publish(self, state: State, at: int, use: int) -> State:
        """A late publish stores nothing."""
        return state

    # ------------------------------------------------------------ merge

    def merge(self, state: State, rank: int, use: int, row: int) -> Iterator[tuple[Label, State]]:
        rows = self.rows_of(rank, use, row)
        polls = [self.polls_of_owner(state.ready[at]) for _, at in rows]
        for seen in product(*polls):
            looked = self.acquired(state, rows, seen)
            self.check(looked, rank, use, row)
            taken = self.one_less(looked, rank, 1 << row)
            yield ("merge", rank, use, row), self.with_ready_words_cleared(taken, rows)
        if self.may_fail_now(state, rank, use):
            late = self.one_less(self.failed(state, rank, use + 1), rank, 1 << row)
            for reached in self.late_merge(late, rows):
                yield ("no merge", rank, use, row), reached

    def polls_of_owner(self, ready: Ready) -> list[Ready]:
        """What polls that find a 1 may leave."""
        return seen_by_owner(ready)

    def readable(self, window: Window) -> Window:
        """What a load of a word may find."""
        return window

    def rows_of(self, rank: int, use: int, row: int) -> list[tuple[int, int]]:
        """The sources of a row that a rank merges: `(source, row of the memory)`."""
        slot = self.schedule.slots[use]
        return [(source, self.row(rank, source, slot, row)) for source in self.others(rank)]

    def acquired(self, state: State, rows: list[tuple[int, int]], seen: tuple[Ready, ...]) -> State:
        """The polls that found 1 have been made: the owner sees nothing older than the announced rows."""
        words, ready = list(state.words), list(state.ready)
        for (_, at), found in zip(rows, seen, strict=True):
            for cell in range(at * self.cells, (at + 1) * self.cells):
                words[cell] = self.after_poll(words[cell], found.stores[found.owner])
            ready[at] = found
        return state._replace(words=tuple(words), ready=tuple(ready))

    def after_poll(self, window: Window, announced: int) -> Window:
        """A word after a poll with acquire order that found a release of the row of use `announced`."""
        return window[window.index(announced) :] if announced in window else window

    def check(self, state: State, rank: int, use: int, row: int) -> None:
        """What a merge may promise, see docs/exchange.md, lemma 8 and section 5.

        A row is right if neither its source nor its owner had failed before. Rows of sources that have
        not failed are all of one use, even where the owner has failed.
        """
        taken = set()
        for source, at in self.rows_of(rank, use, row):
            cells = state.words[at * self.cells : (at + 1) * self.cells]
            values = {value for window in cells for value in self.readable(window)}
            if self.is_trusted(state, source, rank, use) and values != {use + 1}:
                odd = min(values - {use + 1})
                raise GoesWrong(
                    f"wrong row: rank {rank} merges use {use} with a word of rank {source} that is of "
                    + (f"use {odd - 1}" if odd else "a cleared storage")
                )
            ready = state.ready[at]
            if state.ranks[source].failed >= ready.stores[ready.owner]:
                taken.add(ready.stores[ready.owner] - 1)
        if len(taken) > 1:
            raise GoesWrong(f"mixed rows: rank {rank} merges rows of uses {sorted(taken)} into one selection")

    def is_trusted(self, state: State, source: int, rank: int, use: int) -> bool:
        """Whether the row of `source` must be right on `rank`."""
        return state.ranks[source].failed > use and state.ranks[rank].failed > use

    def with_ready_words_cleared(self, state: State, rows: list[tuple[int, int]]) -> State:
        ready = list(state.ready)
        for _, at in rows:
            ready[at] = clear(ready[at])
        return state._replace(ready=tuple(ready))

    def late_merge(self, state: State, rows: list[tuple[int, int]]) -> Iterator[State]:
        """A late merge clears no ready word."""
        yield state

    def _bit(self, owner: int, row: int) -> int:
        return 1 << row * self.world_size + owner
