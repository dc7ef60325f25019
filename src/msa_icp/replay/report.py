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
from .plan import Plan
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
        "devices": list(outcome.plan.devices),
        "prefill_exchange": _prefill_exchange(outcome.plan),
        "row_form": "tagged" if options.tagged else "legacy",
        "processes": 1 if options.in_process else options.world_size,
        "max_batch": options.max_batch,
        "max_context": options.max_context,
        "chunk_tokens": options.chunk_tokens,
        "prefill_tokens_limit": options.prefill_tokens,
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
        "steps": outcome.steps,
        "steps_planned": len(outcome.plan.walk.contexts),
        **_decode_numbers(outcome),
        **_prefill_numbers(outcome),
        "rows_checked": outcome.rows_checked,
        "prefill_rows_checked": outcome.prefill_rows_checked,
        "rows_wrong": outcome.rows_wrong,
        "first_wrong": None if wrong is None else str(wrong),
        "selection_digest": outcome.digest,
        "prefill_digest": outcome.prefill_digest,
        "pages": outcome.plan.pages,
        "prompt_pages": counts.prompt_pages,
        "shared_pages": counts.shared_pages,
        "reused_pages": counts.reused_pages,
        "seconds": round(outcome.seconds, 3),
        "seconds_by_phase": {
            part: {name: round(seconds, 3) for name, seconds in phases.items()}
            for part, phases in outcome.phases.items()
        },
        "interrupted": outcome.interrupted,
        "versions": {
            "msa_icp": msa_icp.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }


def _decode_numbers(outcome: Outcome) -> dict[str, Any]:
    return {
        "decode_steps": outcome.progress.decode_steps,
        "decode_steps_planned": sum(any(contexts) for contexts in outcome.plan.walk.contexts),
        "decode_tokens": outcome.tokens,
        "decode_tokens_per_second": round(outcome.rate("decode", outcome.tokens), 1),
        "k_bytes_per_rank": outcome.k_bytes_per_rank,
        "replicated_k_bytes": outcome.replicated_k_bytes,
    }


def _prefill_numbers(outcome: Outcome) -> dict[str, Any]:
    progress, counts = outcome.progress, outcome.counts
    return {
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "assumed_tokens": counts.assumed_tokens,
        "prefill_windows": progress.prefill_windows,
        "prefill_tokens": progress.prefill_tokens,
        "prefill_tokens_planned": outcome.plan.walk.prefill_tokens,
        "prefill_tokens_per_second": round(outcome.rate("prefill", progress.prefill_tokens), 1),
        "prefill_k_bytes_per_rank": progress.prefill_k_bytes,
        "prefill_replicated_k_bytes": progress.prefill_k_bytes * outcome.plan.options.world_size,
        "prefill_backend": outcome.plan.prefill_backend,
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
    yield (
        "ranks",
        f"{options.world_size}, {where}; backend {outcome.plan.backend} on {_devices(outcome.plan)}",
    )
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
    yield "steps", f"{outcome.steps:,} of {len(outcome.plan.walk.contexts):,}{ended}"
    yield (
        "prompt pages",
        f"{counts.prompt_pages:,}, {counts.shared_pages:,} shared; {counts.reused_pages:,} reused",
    )
    yield from _prefill_lines(outcome)
    yield from _decode_lines(outcome)
    yield "seconds", f"{outcome.seconds:.1f}, a rank's mean by part:"
    for part, phases in outcome.phases.items():
        yield f"  {part}", ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    yield "selection digest", f"{outcome.digest}; of prompts {outcome.prefill_digest}"
    yield "rows checked", f"{outcome.rows_checked:,}, {outcome.prefill_rows_checked:,} of them of prompts"
    if outcome.rows_wrong:
        yield "[red]rows wrong[/red]", f"[red]{outcome.rows_wrong:,}; first: {outcome.first_wrong}[/red]"
    else:
        yield "rows wrong", "0"


def _devices(plan: Plan) -> str:
    """Where the ranks are, for a reader."""
    different = list(dict.fromkeys(plan.devices))
    return ", ".join(different) + (", which they share" if plan.share_a_card else "")


def _prefill_exchange(plan: Plan) -> str:
    """How the rows of prompts come to their owners."""
    if plan.options.in_process:
        return "copies"
    return "gloo" if plan.options.device == "cpu" else "gloo, through the host"


def _prefill_lines(outcome: Outcome) -> Iterator[tuple[str, str]]:
    options, counts, progress = outcome.plan.options, outcome.counts, outcome.progress
    assumed = (
        f"; {counts.assumed_tokens:,} taken as cached (--prefill-tokens {options.prefill_tokens})"
        if counts.assumed_tokens
        else ""
    )
    yield "prompt tokens", f"{counts.prompt_tokens:,}; {counts.cached_tokens:,} cached{assumed}"
    yield (
        "[bold]prefill[/bold]",
        f"{progress.prefill_tokens:,} tokens in {progress.prefill_windows:,} chunks of up to "
        f"{options.chunk_tokens}, {outcome.rate('prefill', progress.prefill_tokens):,.0f} tokens/s",
    )
    yield "  K read per rank", _read(outcome, progress.prefill_k_bytes)


def _decode_lines(outcome: Outcome) -> Iterator[tuple[str, str]]:
    planned = sum(any(contexts) for contexts in outcome.plan.walk.contexts)
    yield (
        "[bold]decode[/bold]",
        f"{outcome.tokens:,} tokens in {outcome.progress.decode_steps:,} of {planned:,} steps, "
        f"{outcome.rate('decode', outcome.tokens):,.0f} tokens/s",
    )
    scoring = outcome.phases.get("decode", {}).get("scoring", 0.0)
    rate = (
        f", {outcome.k_bytes_per_rank / scoring / 1e9:.2f} GB/s while scoring and selecting"
        if scoring
        else ""
    )
    yield "  K read per rank", _read(outcome, outcome.k_bytes_per_rank) + rate


def _contexts(outcome: Outcome) -> list[list[int]]:
    return outcome.plan.walk.contexts[: outcome.steps]


def _read(outcome: Outcome, k_bytes: int) -> str:
    """Bytes that a rank read, and what a replicated indexer reads."""
    replicated = k_bytes * outcome.plan.options.world_size
    return f"{k_bytes / 1e9:,.2f} GB of a replicated indexer's {replicated / 1e9:,.2f} GB"
