"""Protocols with one fault each, or of which one thing too much is claimed: the checker must find them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from .exchange import CLEAR, ENTER_RESET, LEAVE_RESET, MERGE, PUBLISH, READ, Exchange, State
from .explore import Label
from .legacy import Legacy
from .memory import Ready, Window
from .tagged import Tagged

# ---------------------------------------------------------------- tagged rows


class TagInOneWord(Tagged):
    """The generation is in the first word only."""

    tags = (True, False)


class TornWords(Tagged):
    """The halves of a 64-bit word, tag and payload, are two stores."""

    tags = (True, False, True, False)
    payload = (False, True, False, True)


class NewerIsTaken(Tagged):
    """A merge takes words of the wanted generation or a newer one."""

    def matches(self, tag: int, wanted: int) -> bool:
        return tag >= wanted


class ReadAgain(Tagged):
    """A merge looks at the tags and then reads the words again, instead of the copy that it has looked at."""

    def merged_from(self, window: Window, at: int) -> Window:
        return window[at:]


class CounterStays(Tagged):
    """A late merge does not advance its counter."""

    def behind_after_failure(self, behind: tuple[int, ...], counter: int) -> tuple[int, ...]:
        return (*behind[:counter], behind[counter] + 1, *behind[counter + 1 :])


# ---------------------------------------------------------------- legacy rows


class NoRelease(Legacy):
    """The ready word is stored without release order, or polled without acquire order."""

    def after_poll(self, window: Window, announced: int) -> Window:
        return window


class PublishDoesNotWait(Legacy):
    """A publish does not look at the ready word."""

    def poll_of_source(self, ready: Ready) -> Ready | None:
        return ready


class ClearedBeforeRead(Legacy):
    """The ready words are cleared before the rows are read, or without release order."""

    def phases(self) -> tuple[int, ...]:
        return PUBLISH, MERGE, READ

    def check(self, state: State, rank: int, use: int, row: int) -> None:
        if self.program[state.ranks[rank].position][0] == READ:
            super().check(state, rank, use, row)

    def merge(self, state: State, rank: int, use: int, row: int) -> Iterator[tuple[Label, State]]:
        for (what, *rest), reached in super().merge(state, rank, use, row):
            yield ("look" if what == "merge" else what, *rest), reached

    def read(self, state: State, rank: int, use: int) -> Iterator[tuple[Label, State]]:
        for row in range(self.schedule.rows(use)):
            self.check(state, rank, use, row)
        yield ("read", rank, use), self.step_to(state, rank, state.ranks[rank].position + 1)


class LatePublishStores(Legacy):
    """A publish whose wait has failed stores its row all the same."""

    def late_publish(self, state: State, at: int, use: int) -> State:
        return self.published(state, at, use, state.ready[at])


class LateMergeClears(Legacy):
    """A late merge clears the ready words that it has found."""

    def late_merge(self, state: State, rows: list[tuple[int, int]]) -> Iterator[State]:
        found = [at for _, at in rows if any(state.ready[at].stores[state.ready[at].owner :])]
        for count in range(len(found) + 1):
            for some in combinations(found, count):
                yield self.with_ready_words_cleared(state, [(0, at) for at in some])


class OwnErrorsSuffice(Legacy):
    """The claim that a rank's merges are right as long as no wait of its own has failed."""

    def is_trusted(self, state: State, source: int, rank: int, use: int) -> bool:
        return state.ranks[rank].failed > use


# ---------------------------------------------------------------- the reset, of either


class ClearsAtOnce(Exchange):
    """A reset clears before all ranks have come to it."""

    def reset_phases(self) -> tuple[int, ...]:
        return CLEAR, LEAVE_RESET


class GoesOnAtOnce(Exchange):
    """A reset does not wait until all ranks have cleared."""

    def reset_phases(self) -> tuple[int, ...]:
        return ENTER_RESET, CLEAR


class StoresInFlight(Exchange):
    """A rank comes to the reset while stores of its last kernels are still under way."""

    def clear(self, state: State, rank: int) -> Iterator[tuple[Label, State]]:
        for keep in (False, True):
            yield ("clear", rank), self.cleared(state, rank, keep=keep)


class TaggedClearsAtOnce(ClearsAtOnce, Tagged):
    """ClearsAtOnce with tagged rows."""


class LegacyClearsAtOnce(ClearsAtOnce, Legacy):
    """ClearsAtOnce with legacy rows."""


class TaggedGoesOnAtOnce(GoesOnAtOnce, Tagged):
    """GoesOnAtOnce with tagged rows."""


class LegacyGoesOnAtOnce(GoesOnAtOnce, Legacy):
    """GoesOnAtOnce with legacy rows."""


class TaggedStoresInFlight(StoresInFlight, Tagged):
    """StoresInFlight with tagged rows."""


class LegacyStoresInFlight(StoresInFlight, Legacy):
    """StoresInFlight with legacy rows."""
