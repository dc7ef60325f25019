"""The command: every case on every backend that is there, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .. import cases, dispatch, prefill_cases
from ..cases import DecodeCase, PagedCase
from ..prefill_cases import PrefillCase
from . import decode, prefill
from .comparison import PREFILL_STEPS, Result, is_slow, no_prefill

if TYPE_CHECKING:
    from rich.console import Console


def batches() -> Iterator[DecodeCase]:
    """Every case with every layout."""
    for world_size, page_size in cases.LAYOUTS:
        yield from cases.random_cases(world_size, page_size)
        yield from cases.nasty_cases(world_size, page_size)


def windows() -> Iterator[PrefillCase]:
    """Every prefill window with every layout."""
    for world_size, page_size in cases.LAYOUTS:
        yield from prefill_cases.random_cases(world_size, page_size)
        yield from prefill_cases.nasty_cases(world_size, page_size)


def run(backend: str | None, device: str) -> int:
    """Check one backend, or with None every one that serves `device`; print a table.

    Returns 0 where everything is equal and 1 on any difference. Raises ValueError for a backend that is
    unknown or does not serve the device, with the reason, and ImportError without rich.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("verify prints with rich; install it with: pip install 'msa-icp[cli]'") from error
    where = torch.device(device)
    if backend is None:
        names = [name for name, reason in dispatch.backends(where).items() if reason is None]
        if not names:
            dispatch.resolve("auto", where)  # raises with every backend's reason
    else:
        dispatch.resolve(backend, where)
        names = [backend]
    console = Console()
    results = _check_all(names, device, console)
    _print(results, device, console)
    wrong = [result for result in results if result.differences]
    return 1 if wrong else 0


def _check_all(names: Sequence[str], device: str, console: Console) -> list[Result]:
    from rich.progress import track

    results: dict[tuple[str, str, str], Result] = {}
    everything: list[PagedCase] = [*batches(), *windows()]
    for case in track(everything, "Comparing with the reference", console=console, transient=True):
        for name in names:
            if is_slow(name, device) and (case.large or case.world_size * case.page_size != 512):
                continue  # interpreted: the small cases on two layouts take minutes as it is
            kind = "prefill" if isinstance(case, PrefillCase) else "decode"
            result = results.setdefault((kind, case.name, name), Result(f"{kind} {case.name}", name))
            if isinstance(case, DecodeCase):
                decode.check_case(result, case, name, device)
            elif isinstance(case, PrefillCase):
                result.skipped = no_prefill(name, PREFILL_STEPS) or ""
                if not result.skipped:
                    prefill.check_case(result, case, name, device)
    return list(results.values())


def _print(results: Sequence[Result], device: str, console: Console) -> None:
    from rich.table import Table

    table = Table(title=f"Backends on {device} against the FP64 reference")
    table.add_column("Case", overflow="fold")
    table.add_column("Backend")
    for title in ("Layouts", "Scores", "Rows", "Merged", "Differences"):
        table.add_column(title, justify="right")
    for r in results:
        verdict = str(len(r.differences)) if r.differences else "none"
        table.add_row(r.case, r.backend, *map(str, (r.layouts, r.scores, r.rows, r.merged, verdict)))
    console.print(table)
    for reason in sorted({f"{r.backend}: {r.skipped}" for r in results if r.skipped}):
        console.print(f"Not compared, {reason}")
    for r in results:
        for difference in r.differences:
            console.print(f"{r.case}, {r.backend}: {difference}", style="red")
    total = sum(r.scores + r.rows + r.merged for r in results)
    wrong = sum(bool(r.differences) for r in results)
    console.print(
        f"{total} scores and rows compared in {len(results)} cases: "
        + (f"{wrong} cases differ" if wrong else "all equal")
    )
