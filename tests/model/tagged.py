"""Tagged rows: every word carries the generation of its row, nothing else orders anything.

A publish stores all its rows in one step, because each store becomes visible on its own anyway. A merge
takes all rows in one step, at the latest time it could: whatever it might have read before can still be
read then. What else a poll may do is to find a word of a newer generation, and never see the one it wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .exchange import Exchange, State
from .explore import GoesWrong, Label
from .memory import Window
from .schedule import Schedule


class Tagged(Exchange):
    """The protocol of `generations` and `expected_generations`."""

    tags: tuple[bool, ...] = (True, True)
    """Which locations of a row hold its generation."""
    payload: tuple[bool, ...] = (True, True)
    """Which locations of a row hold something to merge."""

    def __init__(self, world_size: int, schedule: Schedule, **options: Any) -> None:
        super().__init__(world_size, schedule, **options)
        uses, rows = range(len(schedule.slots)), range(self.row_count)
        self._generations = [[schedule.generation(use, row) for row in rows] for use in uses]

    @property
    def cells(self) -> int:
        return len(self.tags)

    def generation_of(self, value: int, row: int) -> int:
        """The tag that was stored with a value; a cleared row has tag 0."""
        return self._generations[value - 1][row] if value else 0

    # ------------------------------------------------------------ publish

    def publish(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        words = list(state.words)
        slot = self.schedule.slots[use]
        for owner in self.others(rank):
            for row in range(self.schedule.rows(use)):
                first = self.row(owner, rank, slot, row) * self.cells
                for cell in range(first, first + self.cells):
                    words[cell] = (*words[cell], use + 1)
        position = state.ranks[rank].position + 1
        yield ("publish", rank, use), self.step_to(state, rank, position, words)

    # ------------------------------------------------------------ merge

    def readable(self, window: Window) -> Window:
        """What a poll may find."""
        return window

    def matches(self, tag: int, wanted: int) -> bool:
        return tag == wanted

    def merged_from(self, window: Window, at: int) -> Window:
        """What a merge may use of a word whose store `at` matched: the very copy."""
        return window[at : at + 1]

    def behind_after_failure(self, behind: tuple[int, ...], counter: int) -> tuple[int, ...]:
        """A late merge advances its counter like any other."""
        return behind

    def merge(self, state: State, rank: int, use: int, row: int) -> Iterator[tuple[Label, State]]:
        counter = self.schedule.slots[use] * self.row_count + row
        behind = state.ranks[rank].behind
        wanted = self._generations[use][row] - behind[counter]
        words = list(state.words)
        complete = True
        for source in self.others(rank):
            first = self.row(rank, source, self.schedule.slots[use], row) * self.cells
            taken = self._take(state.words[first : first + self.cells], row, wanted)
            complete = complete and taken is not None
            for cell, (kept, used) in enumerate(taken or ()):
                self._check(used, rank, source, use)
                words[first + cell] = kept
            yield from self.overruns(state, rank, use, source, row, wanted)
        done = self.one_less(state, rank, 1 << row)
        if complete:
            yield ("merge", rank, use, row), done._replace(words=tuple(words))
        if self.may_fail_now(state, rank, use):
            behind = self.behind_after_failure(behind, counter)
            yield ("no merge", rank, use, row), self.failed(done, rank, use + 1, behind=behind)

    def _take(self, windows: tuple[Window, ...], row: int, wanted: int) -> list[tuple[Window, Window]] | None:
        """For each location of a row: what may be read after a poll that matched, what is merged."""
        taken = []
        for cell, window in enumerate(windows):
            if not self.tags[cell]:
                taken.append((window, self.readable(window) if self.payload[cell] else ()))
                continue
            for place, value in enumerate(self.readable(window)):
                if self.matches(self.generation_of(value, row), wanted):
                    used = self.merged_from(window, place) if self.payload[cell] else ()
                    taken.append((window[place:], used))
                    break
            else:
                return None
        return taken

    def _check(self, used: Window, rank: int, source: int, use: int) -> None:
        """Tags tell uses apart whatever has failed before: what is merged is always right."""
        for value in used:
            if value != use + 1:
                raise GoesWrong(
                    f"wrong row: rank {rank} merges use {use} with a word of rank {source} that is of "
                    + (f"use {value - 1}" if value else "a cleared storage")
                )

    def overruns(
        self, state: State, rank: int, use: int, source: int, row: int, wanted: int
    ) -> Iterator[tuple[Label, State]]:
        """A poll finds a word newer than the wanted one, which it can then never see."""
        first = self.row(rank, source, self.schedule.slots[use], row) * self.cells
        for cell in range(self.cells):
            window = state.words[first + cell]
            if self.tags[cell] and len(window) > 1 and self.generation_of(window[-1], row) > wanted:
                words = (*state.words[: first + cell], window[-1:], *state.words[first + cell + 1 :])
                yield ("overrun", rank, use, cell, source), state._replace(words=words)
