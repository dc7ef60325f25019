"""In which order a group uses its slot sets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

SLOT_SETS = 3


@dataclass(frozen=True)
class Schedule:
    """The uses of a group, publish and merge each, in the order in which every rank makes them.

    Attributes:
        slots: the slot set of each use.
        tokens: how many rows a source sends an owner in each use, one where it is empty. A use without rows
            launches nothing.
        reset_before: the use before which the group resets its storage, if it does.
    """

    slots: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    reset_before: int | None = None

    def rows(self, use: int) -> int:
        """Rows of a (source, owner) in a use."""
        return self.tokens[use] if self.tokens else 1

    @property
    def most_rows(self) -> int:
        return max(self.tokens, default=1)

    def generation(self, use: int, row: int) -> int:
        """The tag of a row: how often the row of the slot set has been used since the last reset."""
        first = self.reset_before if self.reset_before is not None and use >= self.reset_before else 0
        return sum(
            self.slots[earlier] == self.slots[use] and row < self.rows(earlier)
            for earlier in range(first, use + 1)
        )


def continued(layers: int, steps: int) -> tuple[int, ...]:
    """The rotation 0, 1, 2 that goes on across steps: what `ReceiveStorage.slot_set` does."""
    return tuple(use % SLOT_SETS for use in range(layers * steps))


def restarted(layers: int, steps: int) -> tuple[int, ...]:
    """`layer % 3`, in every step anew: also what a CUDA graph of a whole step does when it is replayed."""
    return tuple(layer % SLOT_SETS for layer in range(layers)) * steps


def every_sequence(uses: int) -> list[tuple[int, ...]]:
    """Every sequence of slot sets, one of each that differ in the names of the slot sets alone."""
    return [
        slots
        for slots in product(range(SLOT_SETS), repeat=uses)
        if all(slot <= max(slots[:use], default=-1) + 1 for use, slot in enumerate(slots))
    ]


def nearest(slots: tuple[int, ...]) -> int:
    """The smallest distance of two uses of one slot set."""
    return min(
        (later - use for use, slot in enumerate(slots) for later in range(use + 1, len(slots))
         if slots[later] == slot),
        default=len(slots),
    )  # fmt: skip
