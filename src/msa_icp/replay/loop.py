"""The loop over steps and layers: the same for one rank of many processes and for all ranks of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .engine import Counts, Engine
from .plan import Plan
from .rank import Progress, Rank


def run_steps(
    plan: Plan, ranks: Sequence[Rank], go_on: Callable[[], bool], progress: Callable[[Progress], None]
) -> Counts:
    """Run the schedule on the ranks of this process, to its end or until `go_on()` is false in some step."""
    engine = Engine(plan.requests, plan.options, plan.pages)
    for step in engine.steps():
        for rank in ranks:
            rank.begin(step)
        if not go_on():
            break
        for layer in range(plan.options.sparse_layers):
            with ExitStack() as stack:
                slots = [stack.enter_context(rank.storage.slot_set()) for rank in ranks]
                for rank, slot in zip(ranks, slots, strict=True):
                    rank.publish(layer, slot)
                for rank, slot in zip(ranks, slots, strict=True):
                    rank.merge(layer, slot)
        for rank in ranks:
            rank.finish()
        progress(ranks[0].progress)
    return engine.counts
