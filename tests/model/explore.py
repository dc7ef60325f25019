"""Every state that a model can reach, breadth first: the first thing that goes wrong has a shortest trace."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Label = tuple[object, ...]


class GoesWrong(Exception):
    """Raised by a model in a step that must not happen; says what has happened."""


class Model(Protocol[State]):
    """What can be explored. Every step leads to a later state, so that there are no cycles."""

    def initial(self) -> State: ...

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """The steps that a state allows, each with what it leads to. Raises GoesWrong."""

    def is_final(self, state: State) -> bool:
        """Whether every rank is done. A state that is not and allows no step is stuck."""

    def waiting(self, state: State) -> str:
        """Who waits for what, in words."""

    def words(self, label: Label) -> str:
        """A step in words."""


@dataclass(frozen=True)
class Outcome:
    """What was found."""

    states: int
    wrong: str | None
    """What goes wrong, None where nothing does."""
    trace: tuple[str, ...] = ()
    """The steps that lead there, in words."""


def explore(model: Model[State], progress: Callable[[int], None] = lambda states: None) -> Outcome:
    """Explore every state; `progress` is told how many there were, level after level."""
    outcome = _levels(model, None, progress)
    if outcome.wrong is None:
        return outcome
    # Links to parents are worth their memory only where there is a trace to tell.
    return _levels(model, {}, lambda states: None)


def _levels(
    model: Model[State], parents: dict[State, tuple[State, Label]] | None, progress: Callable[[int], None]
) -> Outcome:
    """Level after level: only the states of one level are kept, since no step leads back."""
    level: dict[State, None] = {model.initial(): None}
    states = 0
    while level:
        following: dict[State, None] = {}
        for state in level:
            states += 1
            stuck = True
            try:
                for label, reached in model.steps(state):
                    stuck = False
                    if reached not in following:
                        following[reached] = None
                        if parents is not None:
                            parents.setdefault(reached, (state, label))
            except GoesWrong as error:
                return Outcome(states, str(error), _trace(model, state, parents))
            if stuck and not model.is_final(state):
                return Outcome(states, f"stuck: {model.waiting(state)}", _trace(model, state, parents))
        progress(states)
        level = following
    return Outcome(states, None)


def _trace(
    model: Model[State], state: State, parents: dict[State, tuple[State, Label]] | None
) -> tuple[str, ...]:
    steps: list[str] = []
    while parents and state in parents:
        state, label = parents[state]
        steps.append(model.words(label))
    return tuple(reversed(steps))
