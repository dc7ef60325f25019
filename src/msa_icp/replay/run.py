"""Run a plan, in one process or in one for each rank, and gather what the ranks did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msa_icp

from .checker import WrongRow
from .engine import Counts
from .interrupt import Interrupt
from .loop import run_steps
from .plan import Plan
from .processes import run_processes
from .rank import Progress, Rank, RankResult
from .synth import Synth


@dataclass(frozen=True)
class Outcome:
    """What a replay did, as far as it came."""

    plan: Plan
    ranks: list[RankResult]
    counts: Counts
    seconds: float
    """Wall time, the start of the processes included."""
    interrupted: bool

    @property
    def progress(self) -> Progress:
        """Steps, tokens and bytes; the same for all ranks."""
        return self.ranks[0].progress

    @property
    def steps(self) -> int:
        """Steps of the engine that were run."""
        return self.progress.steps

    @property
    def tokens(self) -> int:
        """Tokens that were decoded."""
        return self.progress.tokens

    @property
    def k_bytes_per_rank(self) -> int:
        """Index-key bytes in the pages that each rank's decode scorer read; the same for all ranks."""
        return self.progress.k_bytes

    @property
    def replicated_k_bytes(self) -> int:
        """The same for an indexer that keeps all keys on every rank."""
        return self.k_bytes_per_rank * self.plan.options.world_size

    @property
    def rows_checked(self) -> int:
        """(token, head, layer) rows that were compared with the reference."""
        return sum(rank.rows_checked for rank in self.ranks)

    @property
    def prefill_rows_checked(self) -> int:
        """Those of them that belong to prompt tokens."""
        return sum(rank.prefill_rows_checked for rank in self.ranks)

    @property
    def rows_wrong(self) -> int:
        """Those of the checked rows that differed."""
        return sum(rank.rows_wrong for rank in self.ranks)

    @property
    def first_wrong(self) -> WrongRow | None:
        """The first row that differed."""
        return min((rank.first_wrong for rank in self.ranks if rank.first_wrong), default=None)

    @property
    def digest(self) -> str:
        """Stands for all merged rows of decoded tokens: equal for every world size, page size, row form and
        kind of run."""
        return f"{sum(rank.digest for rank in self.ranks) % 2**64:016x}"

    @property
    def prefill_digest(self) -> str:
        """The same for the prompt tokens that went through the indexer."""
        return f"{sum(rank.prefill_digest for rank in self.ranks) % 2**64:016x}"

    @property
    def phases(self) -> dict[str, dict[str, float]]:
        """Seconds that a rank spent in each phase of each part, the mean over the ranks."""
        return {
            part: {
                name: sum(rank.phases[part].get(name, 0.0) for rank in self.ranks) / len(self.ranks)
                for name in phases
            }
            for part, phases in self.ranks[0].phases.items()
        }

    def rate(self, part: str, tokens: int) -> float:
        """Tokens a second of a part of the work, its checks left out; 0 where there was none."""
        seconds = sum(time for name, time in self.phases.get(part, {}).items() if name != "checking")
        return tokens / seconds if seconds else 0.0


def replay(plan: Plan, progress: Callable[[Progress], None] = lambda _: None) -> Outcome:
    """Run a plan. Ctrl-C ends it early, with an outcome; raises RankFailure if a rank fails."""
    interrupt = Interrupt()
    start = time.monotonic()
    with interrupt.listening():
        run = _run_in_process if plan.options.in_process else run_processes
        ranks, counts = run(plan, interrupt, progress)
    return Outcome(plan, ranks, counts, time.monotonic() - start, interrupt.requested)


def _run_in_process(
    plan: Plan, interrupt: Interrupt, progress: Callable[[Progress], None]
) -> tuple[list[RankResult], Counts]:
    synth = Synth(plan.requests, plan.options.seed)
    with msa_icp.ReceiveStorage.in_process(
        plan.options.world_size, capacity=plan.options.capacity, device=plan.options.device
    ) as storages:
        ranks = [Rank(plan, synth, storage) for storage in storages]
        counts = run_steps(plan, ranks, _exchange, lambda: not interrupt.requested, progress)
        return [rank.result() for rank in ranks], counts


def _exchange(ranks: Sequence[Rank]) -> None:
    with ranks[0].watch("prefill", "exchange"):
        msa_icp.exchange_prefill(
            [rank.prefill.carrier for rank in ranks], [rank.prefill.received for rank in ranks]
        )
