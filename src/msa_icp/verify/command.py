"""The command: every case on every backend that is there, and a table."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .. import cases, dispatch, prefill_cases
from ..cases import DecodeCase, PagedCase
from ..prefill_cases import PrefillCase
from . import decode, prefill
from .comparison import PREFILL_STEPS, Failure, Result, is_slow, no_prefill

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("decode", "prefill")
QUICK_LAYOUT = (4, 128)
QUICK_TOKENS = 8
SLOW = (
    "interpreted on a CPU, hundreds of times slower than on a GPU: 20 to 30 minutes on two cores. "
    "Shorter: --quick (3 to 6 minutes), --only decode (6 minutes)."
)


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


def run(
    backend: str | None, device: str, *, only: str | None = None, quick: bool = False, traces: bool = False
) -> int:
    """Check one backend, or with None every one that serves `device`; print a table.

    `only` is one of `KINDS`, `quick` takes cases of a few tokens on one layout, `traces` prints where a
    backend raised. Returns 0 where everything is equal and 1 on any difference or exception of a backend.
    Raises ValueError for a backend that is unknown or does not serve the device, with the reason, and
    ImportError without rich.
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
    slow = [name for name in names if is_slow(name, device)]
    if slow and not (quick or only):
        console.print(f"{', '.join(slow)}: {SLOW}", highlight=False)
    results = _check_all(_work(names, device, only, quick), device, console)
    _print(results, device, console, traces)
    return 1 if any(result.differences or result.failures for result in results) else 0


def _work(names: Sequence[str], device: str, only: str | None, quick: bool) -> list[tuple[PagedCase, str]]:
    """What is to be compared, in order: a case and a backend."""
    everything: list[PagedCase] = [*batches(), *windows()]
    return [
        (case, name)
        for case in everything
        for name in names
        if only in (None, kind_of(case)) and _chosen(case, is_slow(name, device), quick)
    ]


def kind_of(case: PagedCase) -> str:
    """One of `KINDS`."""
    return "prefill" if isinstance(case, PrefillCase) else "decode"


def _chosen(case: PagedCase, slow: bool, quick: bool) -> bool:
    if quick:
        layout = (case.world_size, case.page_size)
        return not case.large and layout == QUICK_LAYOUT and case.index_q.shape[0] <= QUICK_TOKENS
    # Interpreted, the small cases on two layouts take long as it is.
    return not slow or (not case.large and case.world_size * case.page_size == 512)


def _check_all(work: Sequence[tuple[PagedCase, str]], device: str, console: Console) -> list[Result]:
    """A bar on a terminal; elsewhere, where it would not be seen, a line for each case that is done."""
    from rich.progress import track

    results: dict[tuple[str, str, str], Result] = {}
    shown = console.is_terminal
    steps = track(work, "Comparing with the reference", console=console, transient=True) if shown else work
    for number, (case, name) in enumerate(steps, 1):
        kind = kind_of(case)
        result = results.setdefault((kind, case.name, name), Result(f"{kind} {case.name}", name))
        before, start = (len(result.differences), len(result.failures)), time.monotonic()
        _check(result, case, name, device)
        if not shown:
            wrong, failed = len(result.differences) - before[0], len(result.failures) - before[1]
            verdict = "failed" if failed else f"{wrong} differences" if wrong else result.skipped or "equal"
            where = f"{result.case}, {layout_of(case)}, {name}"
            seconds = time.monotonic() - start
            print(f"[{number}/{len(work)}] {where}: {verdict}, {seconds:.1f} s", flush=True)
    return list(results.values())


def layout_of(case: PagedCase) -> str:
    """For a reader."""
    return f"W={case.world_size} P={case.page_size}"


def _check(result: Result, case: PagedCase, name: str, device: str) -> None:
    """Compare; what the backend raises is noted, whatever it is, and the other cases go on."""
    try:
        if isinstance(case, DecodeCase):
            decode.check_case(result, case, name, device)
        elif isinstance(case, PrefillCase):
            result.skipped = no_prefill(name, PREFILL_STEPS) or ""
            if not result.skipped:
                prefill.check_case(result, case, name, device)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        result.failures.append(Failure(layout_of(case), said, traceback.format_exc()))


def _print(results: Sequence[Result], device: str, console: Console, traces: bool) -> None:
    from rich.table import Table

    table = Table(title=f"Backends on {device} against the FP64 reference")
    table.add_column("Case", overflow="fold")
    table.add_column("Backend")
    for title in ("Layouts", "Scores", "Rows", "Merged", "Differences"):
        table.add_column(title, justify="right")
    for r in results:
        table.add_row(r.case, r.backend, *map(str, (r.layouts, r.scores, r.rows, r.merged, r.verdict)))
    console.print(table)
    for reason in sorted({f"{r.backend}: {r.skipped}" for r in results if r.skipped}):
        console.print(f"Not compared, {reason}")
    for r in results:
        for difference in r.differences:
            console.print(f"{r.case}, {r.backend}: {difference}", style="red")
    _print_failures(results, console, traces)
    total = sum(r.scores + r.rows + r.merged for r in results)
    counts = {
        "cases failed": sum(bool(r.failures) for r in results),
        "cases differ": sum(bool(r.differences) for r in results),
    }
    verdict = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    console.print(f"{total} scores and rows compared in {len(results)} cases: {verdict or 'all equal'}")


def _print_failures(results: Sequence[Result], console: Console, traces: bool) -> None:
    failed = [(r, failure) for r in results for failure in r.failures]
    for r, failure in failed:
        if traces:
            console.print(failure.trace, style="dim", markup=False, highlight=False)
        where = f"{r.case}, {r.backend}, {failure.layout}"
        console.print(f"{where}: failed with {failure.message}", style="red", markup=False)
    if failed and not traces:
        console.print("--traceback shows where")
