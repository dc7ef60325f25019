"""The loop over steps and layers: the same for one rank of many processes and for all ranks of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .engine import Counts, Engine, Step
from .plan import Plan
from .rank import Progress, Rank

Exchange = Callable[[Sequence[Rank]], None]
"""Moves the carriers of a window to the owners of the heads, for the ranks of this process."""


def run_steps(
    plan: Plan,
    ranks: Sequence[Rank],
    exchange: Exchange,
    go_on: Callable[[], bool],
    progress: Callable[[Progress], None],
) -> Counts:
    """Run the schedule on the ranks of this process, to its end or until `go_on()` is false in some step."""
    engine = Engine(plan.requests, plan.options, plan.pages)
    for step in engine.steps():
        for rank in ranks:
            rank.begin(step)
        if not go_on():
            break
        for layer in range(plan.options.sparse_layers):
            _run_layer(step, layer, ranks, exchange)
        for rank in ranks:
            rank.finish()
        progress(ranks[0].progress)
    return engine.counts


def _run_layer(step: Step, layer: int, ranks: Sequence[Rank], exchange: Exchange) -> None:
    """The rows that decode first, then the prompt tokens that enter."""
    if step.rows:
        with ExitStack() as stack:
            slots = [stack.enter_context(rank.storage.slot_set()) for rank in ranks]
            for rank, slot in zip(ranks, slots, strict=True):
                rank.publish(layer, slot)
            for rank, slot in zip(ranks, slots, strict=True):
                rank.merge(layer, slot)
    if step.window is not None:
        for rank in ranks:
            rank.prefill.local(layer)
        exchange(ranks)
        for rank in ranks:
            rank.prefill.merge(layer)
