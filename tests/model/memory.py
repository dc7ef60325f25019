"""Memory as one reader sees it: what has been stored and may still be read.

A location that one rank stores to and another one reads is a *window*: the stores from the newest one that
the reader has read to the newest there is, in coherence order. A read returns any of them and drops what
is older. So a store becomes visible at any time after it was made, in any order with stores to other
locations, and stores to one location in their order: relaxed memory. A read with acquire order of a store
with release order drops, from other windows, what the writer had overwritten before it.

Nothing else is assumed. Orders that hold through a third rank are left out, so the model allows more than
the hardware. Loads are not moved behind later stores of the same rank: docs/exchange.md, lemma 2, says why.

A value is the number of the use that stored it, counted from 1; 0 is what a cleared storage holds.
"""

from __future__ import annotations

from typing import NamedTuple

Window = tuple[int, ...]

CLEARED: Window = (0,)


class Ready(NamedTuple):
    """A ready word, which both sides write and read: its stores, and how far each side has read them.

    A store is 0 (cleared by the owner) or the use whose row it announces.
    """

    stores: tuple[int, ...]
    owner: int
    source: int


NOT_READY = Ready((0,), 0, 0)


def announce(ready: Ready, use: int) -> Ready:
    """The source stores 1 and has, of course, seen its own store."""
    return _trim((*ready.stores, use), ready.owner, len(ready.stores))


def clear(ready: Ready) -> Ready:
    """The owner stores 0."""
    return _trim((*ready.stores, 0), len(ready.stores), ready.source)


def seen_by_owner(ready: Ready) -> list[Ready]:
    """What the owner's poll may leave when it finds a 1; the store is the first that the owner may read."""
    return [
        _trim(ready.stores, at, ready.source)
        for at in range(ready.owner, len(ready.stores))
        if ready.stores[at] != 0
    ]


def seen_by_source(ready: Ready) -> Ready | None:
    """What the source's poll leaves when it finds a 0, or None where it cannot."""
    for at in range(len(ready.stores) - 1, ready.source - 1, -1):
        if ready.stores[at] == 0:
            return _trim(ready.stores, ready.owner, at)
    return None


def delivered(ready: Ready, owner: int, source: int) -> Ready:
    """The sides have come to see so many more stores."""
    return _trim(ready.stores, ready.owner + owner, ready.source + source)


def _trim(stores: tuple[int, ...], owner: int, source: int) -> Ready:
    """Forget what nobody can read any more, so that equal futures are equal states."""
    gone = min(owner, source)
    return Ready(stores[gone:], owner - gone, source - gone)
