"""What a replay leaves behind: a table for the terminal, and a folder with numbers and pictures."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import msa_icp

from . import pictures
from .errors import UsageError
from .run import Outcome

SUMMARY, SELECTION, BYTES = "summary.json", "selection.png", "bytes.png"


def prepare_folder(folder: Path) -> None:
    """Make the folder before the work begins. Raises UsageError where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--report {folder} cannot be made a folder: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--report {folder} cannot be written")


def drop_folder(folder: Path) -> None:
    """Take the folder away again where nothing was written into it."""
    with contextlib.suppress(OSError):  # not empty: somebody else's files
        folder.rmdir()


def write_report(outcome: Outcome, trace: Path, folder: Path) -> None:
    """Write summary.json and the pictures."""
    text = json.dumps(summary(outcome, trace), indent=2)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
    pictures.draw_selection(outcome, folder / SELECTION)
    pictures.draw_bytes(outcome, folder / BYTES)


def summary(outcome: Outcome, trace: Path) -> dict[str, Any]:
    """The numbers of a replay, ready for JSON; docs/replay.md explains them."""
    options, counts, wrong = outcome.plan.options, outcome.counts, outcome.first_wrong
    return {
        "trace": trace.name,
        "world_size": options.world_size,
        "page_size": options.page_size,
        "query_len": options.query_len,
        "sparse_layers": options.sparse_layers,
        "backend": outcome.plan.backend,
        "device": options.device,
        "row_form": "tagged" if options.tagged else "legacy",
        "processes": 1 if options.in_process else options.world_size,
        "max_batch": options.max_batch,
        "max_context": options.max_context,
        "step_ms": options.step_ms,
        "init_blocks": options.init_blocks,
        "local_blocks": options.local_blocks,
        "check_every": options.check_every,
        "check_rows": options.check_rows,
        "seed": options.seed,
        "requests": counts.admitted,
        "requests_finished": counts.finished,
        "requests_planned": len(outcome.plan.requests),
        "requests_skipped": outcome.plan.skipped,
        "longest_context": max((max(row) for row in _contexts(outcome)), default=0),
        "decode_steps": outcome.steps,
        "decode_steps_planned": len(outcome.plan.walk.contexts),
        "decode_tokens": outcome.tokens,
        "rows_checked": outcome.rows_checked,
        "rows_wrong": outcome.rows_wrong,
        "first_wrong": None if wrong is None else str(wrong),
        "selection_digest": outcome.digest,
        "k_bytes_per_rank": outcome.k_bytes_per_rank,
        "replicated_k_bytes": outcome.replicated_k_bytes,
        "pages": outcome.plan.pages,
        "prompt_pages": counts.prompt_pages,
        "shared_pages": counts.shared_pages,
        "reused_pages": counts.reused_pages,
        "seconds": round(outcome.seconds, 3),
        "seconds_by_phase": {name: round(seconds, 3) for name, seconds in outcome.phases.items()},
        "interrupted": outcome.interrupted,
        "versions": {
            "msa_icp": msa_icp.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }


def table(outcome: Outcome, trace: Path) -> Table:
    """The end of a replay on the terminal."""
    view = Table(title=f"Replay of {trace.name}", show_header=False, title_justify="left")
    view.add_column(style="bold")
    view.add_column()
    for name, value in _lines(outcome):
        view.add_row(name, value)
    return view


def _lines(outcome: Outcome) -> Iterator[tuple[str, str]]:
    options, counts = outcome.plan.options, outcome.counts
    where = "in one process" if options.in_process else "each a process"
    yield "ranks", f"{options.world_size}, {where}; backend {outcome.plan.backend} on {options.device}"
    form = "tagged" if options.tagged else "legacy"
    yield (
        "layout",
        f"pages of {options.page_size}, {options.sparse_layers} sparse layers, "
        f"query length {options.query_len}, {form} rows",
    )
    skipped = f", {outcome.plan.skipped} skipped as too long" if outcome.plan.skipped else ""
    yield (
        "requests",
        f"{counts.admitted} of {len(outcome.plan.requests)} admitted, {counts.finished} finished{skipped}",
    )
    longest = max((max(row) for row in _contexts(outcome)), default=0)
    yield "longest context", f"{longest:,} tokens"
    ended = ", interrupted" if outcome.interrupted else ""
    planned = len(outcome.plan.walk.contexts)
    yield "decode steps", f"{outcome.steps:,} of {planned:,}{ended}"
    yield "decoded tokens", f"{outcome.tokens:,}, {outcome.tokens / outcome.seconds:,.0f} a second"
    yield (
        "prompt pages",
        f"{counts.prompt_pages:,}, {counts.shared_pages:,} shared; {counts.reused_pages:,} reused",
    )
    yield "K read per rank", f"{_gigabytes(outcome.k_bytes_per_rank)}{_rate(outcome)}"
    yield "replicated indexer", f"{_gigabytes(outcome.replicated_k_bytes)} on every rank"
    yield "seconds", f"{outcome.seconds:.1f} ({_phases(outcome)})"
    yield "selection digest", outcome.digest
    yield "rows checked", f"{outcome.rows_checked:,}"
    if outcome.rows_wrong:
        yield "[red]rows wrong[/red]", f"[red]{outcome.rows_wrong:,}; first: {outcome.first_wrong}[/red]"
    else:
        yield "rows wrong", "0"


def _contexts(outcome: Outcome) -> list[list[int]]:
    return outcome.plan.walk.contexts[: outcome.steps]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB"


def _rate(outcome: Outcome) -> str:
    scoring = outcome.phases.get("scoring", 0.0)
    return f", {outcome.k_bytes_per_rank / scoring / 1e9:.2f} GB/s while scoring" if scoring else ""


def _phases(outcome: Outcome) -> str:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.phases.items())
    return f"a rank's mean: {parts}" if parts else "nothing was run"
