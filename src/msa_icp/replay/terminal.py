"""A replay on a terminal: progress while it runs, the table at its end."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import rank, report
from .errors import RankFailure
from .options import ReplayOptions
from .plan import make_plan
from .run import Outcome, replay
from .trace import load_trace


def replay_trace(trace: Path, options: ReplayOptions, folder: Path | None) -> int:
    """Replay a trace file; returns the exit code. Raises ReplayError."""
    console = Console()
    plan = make_plan(load_trace(trace), options)
    if folder is not None:
        report.prepare_folder(folder)
    with _Bar(console, len(plan.walk.contexts)) as bar:
        try:
            outcome = replay(plan, bar.update)
        except RankFailure as failure:
            if folder is not None:
                report.drop_folder(folder)
            if failure.trace:
                console.print(failure.trace, style="dim", markup=False, highlight=False)
            raise
        bar.update(outcome.ranks[0].progress)
    console.print(report.table(outcome, trace))
    if folder is not None:
        report.write_report(outcome, trace, folder)
        console.print(f"Report: {folder}/", highlight=False)
    return _verdict(outcome)


def _verdict(outcome: Outcome) -> int:
    return 1 if outcome.rows_wrong else 0


class _Bar:
    """Steps, tokens a second of prompts and decoding, and index-key bytes a second of each rank."""

    def __init__(self, console: Console, steps: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
        )
        self._task = self._bar.add_task("starting ranks, loading kernels", total=steps, rates="")
        self._start: float | None = None
        self._steps = self._decode_steps = 0  # as far as was heard

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: rank.Progress) -> None:
        """Show how far it has come; rates count from the first step that was heard of."""
        if self._start is None:
            self._start, self._first = time.monotonic(), progress
        seconds = time.monotonic() - self._start
        rates = ""
        if seconds > 0:
            first = self._first
            prompts = (progress.prefill_tokens - first.prefill_tokens) / seconds
            tokens = (progress.tokens - first.tokens) / seconds
            k_bytes = progress.k_bytes + progress.prefill_k_bytes - first.k_bytes - first.prefill_k_bytes
            megabytes = k_bytes / seconds / 1e6
            rates = f"prefill {prompts:,.0f}, decode {tokens:,.0f} tokens/s, {megabytes:,.0f} MB/s K"
        if progress.steps > self._steps:  # the last call repeats what is known
            doing = "decoding" if progress.decode_steps > self._decode_steps else "prefilling"
            self._bar.update(self._task, description=doing)
        self._steps, self._decode_steps = progress.steps, progress.decode_steps
        self._bar.update(self._task, completed=progress.steps, rates=rates)
