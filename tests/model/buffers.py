"""The same protocols over store buffers, a second way to say what the memory does.

Here every store sits in a buffer until a step of its own makes it visible, in any order but that of one
location and that of a release: a ready word comes after the words of its row. A poll finds what is visible.
`memory.py` leaves such steps out and lets a load choose instead, with far fewer states. Both must come to the
same verdicts, which the tests compare.
"""

from __future__ import annotations

from collections.abc import Iterator

from .exchange import Exchange, State
from .explore import Label
from .legacy import Legacy
from .memory import Ready, Window, delivered
from .tagged import Tagged


class Buffered(Exchange):
    """Words that become visible one by one."""

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        yield from super().steps(state)
        for cell, window in enumerate(state.words):
            if len(window) > 1:
                words = (*state.words[:cell], window[1:], *state.words[cell + 1 :])
                yield ("visible", cell), state._replace(words=words)

    def readable(self, window: Window) -> Window:
        return window[:1]

    def words(self, label: Label) -> str:
        return (
            f"a store to cell {label[1]} becomes visible" if label[0] == "visible" else super().words(label)
        )


class BufferedTagged(Buffered, Tagged):
    """Tagged rows. That a word is overrun is here just the next store that becomes visible."""

    def overruns(
        self, state: State, rank: int, use: int, source: int, row: int, wanted: int
    ) -> Iterator[tuple[Label, State]]:
        yield from ()


class BufferedLegacy(Buffered, Legacy):
    """Legacy rows."""

    releases = True
    """Whether a ready word waits for the words of its row."""

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        yield from super().steps(state)
        for at, ready in enumerate(state.ready):
            if len(ready.stores) > ready.owner + 1 and self._may_be_seen(state, at):
                yield ("visible", at), self._delivered(state, at, delivered(ready, 1, 0))
            if len(ready.stores) > ready.source + 1:
                yield ("visible", at), self._delivered(state, at, delivered(ready, 0, 1))

    def _may_be_seen(self, state: State, at: int) -> bool:
        """Whether the next store to a ready word may become visible to the owner."""
        announced = state.ready[at].stores[state.ready[at].owner + 1]
        row = state.words[at * self.cells : (at + 1) * self.cells]
        return not self.releases or all(announced not in window[1:] for window in row)

    def _delivered(self, state: State, at: int, ready: Ready) -> State:
        return state._replace(ready=(*state.ready[:at], ready, *state.ready[at + 1 :]))

    def polls_of_owner(self, ready: Ready) -> list[Ready]:
        return [ready] if ready.stores[ready.owner] else []

    def poll_of_source(self, ready: Ready) -> Ready | None:
        return None if ready.stores[ready.source] else ready

    def may_find_taken(self, ready: Ready) -> bool:
        return ready.stores[ready.source] != 0

    def after_poll(self, window: Window, announced: int) -> Window:
        return window
