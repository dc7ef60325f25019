"""Schedules of the CUDA decode scorer, each timed over the sizes of its benchmark.

A candidate is a `Schedule` with a name: one form of the kernel for every size. Before anything is timed,
every kernel that a candidate needs is compiled, in several processes, and its registers and spills are
read; one that spills, or does not compile, is left out. A candidate whose scores are not those of the
present schedule is an error; where only the rounding differs (another matrix instruction may round
otherwise) its row says so.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from msa_icp.cuda_backend.decode_index_score_sharded import Form, Schedule
from msa_icp.cuda_backend.loader import Report, Variant
from msa_icp.geometry import ShardLayout, ceil_div

from . import ruler
from .batch import random_keys
from .decode_score import LAYOUTS, SIZES, Size, Workload
from .measure import chain_bytes, time_chain

scorer = importlib.import_module("msa_icp.cuda_backend.decode_index_score_sharded")  # not the op of that name
NEVER = 1 << 60
_MOST_SHARED_BYTES = 48 << 10
"""That a kernel may declare."""
_ROUNDING = 2.0**-17
"""Of the largest score: more than FP32 sums of other order differ by."""
PRESENT = "present"
"""The name of the schedule that the library has."""


@dataclass(frozen=True)
class Candidate:
    """A schedule, and what a reader calls it."""

    name: str
    schedule: Schedule


def everywhere(form: Form, rounds: int) -> Schedule:
    """One form for every size and every number of query groups, with `rounds` a CTA."""
    schedule: Schedule = scorer.SCHEDULE
    groups = dict.fromkeys(count for count, *_ in schedule.forms)
    return replace(
        schedule,
        forms=tuple((count, 0, form, 1 if form.stages == 1 else rounds) for count in groups),
        gaps_below=NEVER,
        many_rounds=NEVER,
        long_table=NEVER,
    )


def forms(
    stages: int,
    residents: Sequence[int],
    chains: Sequence[int],
    gaps: Sequence[int],
    rounds: Sequence[int],
    together: bool,
) -> Iterator[Candidate]:
    """Every combination. With one stage a CTA has one round."""
    for resident, side_by_side, waiting, own in itertools.product(residents, chains, gaps, rounds):
        form = Form(stages, resident, side_by_side, together, waiting)
        how = "together" if together else f"chains {side_by_side}"
        name = f"rounds {own}, {how}, resident {resident}, gaps {waiting}"
        yield Candidate(name, everywhere(form, own))


@contextmanager
def using(schedule: Schedule) -> Iterator[None]:
    """The scorer cuts its work by `schedule`."""
    own = scorer.SCHEDULE
    scorer.SCHEDULE = schedule  # type: ignore[attr-defined]
    try:
        yield
    finally:
        scorer.SCHEDULE = own  # type: ignore[attr-defined]


def variant_for(
    candidate: Candidate, size: Size, layout: ShardLayout, query_len: int, device: torch.device
) -> Variant:
    """The kernel that a candidate runs for a size."""
    columns = int(ceil_div(max(size.columns(layout)), 4)) * 4
    layout_key = (layout.page_size, layout.world_size)
    work = scorer.plan(candidate.schedule, len(size.keys), columns, layout_key, query_len, True, device)
    variant: Variant = work.kernel.variant
    return variant


def compile_all(variants: Sequence[Variant]) -> dict[Variant, Report | str]:
    """What each compiles to, or why it does not; those that do not spill are on disk afterwards."""
    workers = min(len(variants), os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")  # a fork would take a GPU's context along
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return dict(zip(variants, pool.map(_compile, variants), strict=True))


def _compile(variant: Variant) -> Report | str:
    try:
        report = variant.report()
        if report.spills == 0:
            variant.compile()
    except Exception as error:  # whatever the compiler raises is what the reader is to see
        return str(error).strip().splitlines()[-1]
    return report


@dataclass(frozen=True)
class Row:
    """One candidate: microseconds a launch by size, beside the plain read of the same bytes."""

    layout: str
    query_len: int
    candidate: str
    registers: int
    """Of the kernel that takes most."""
    us: dict[str, float]
    plain_read_us: dict[str, float | None]
    same_bits: bool
    """Whether all scores are those of the present schedule to the bit."""

    @property
    def ratios(self) -> dict[str, float]:
        """Plain read / ours by size; where there is no plain read, 1 / ours."""
        return {size: (self.plain_read_us[size] or 1.0) / us for size, us in self.us.items()}

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.us))


@dataclass(frozen=True)
class LeftOut:
    """A candidate that is not timed, and why."""

    layout: str
    query_len: int
    candidate: str
    reason: str


Compiler = Callable[[Sequence[Variant]], dict[Variant, Report | str]]


class Tuner:
    """Times candidates over `sizes`, for one layout and query length after the other."""

    def __init__(
        self, device: torch.device, sizes: Sequence[Size] = SIZES[1:], compiler: Compiler = compile_all
    ) -> None:
        self.device = device
        self._sizes, self._compiler = sizes, compiler
        largest = max(size.k_bytes(layout) for size in sizes for layout in LAYOUTS.values())
        self._pool = random_keys(largest + chain_bytes(device), device)
        self._ruler = ruler.Ruler(device) if ruler.unavailable(device) is None else None
        self._reads: dict[int, float | None] = {}

    def rows(
        self, candidates: Sequence[Candidate], layouts: Sequence[str], query_lens: Sequence[int]
    ) -> Iterator[Row | LeftOut]:
        """Time every candidate, the present schedule first, and yield each as soon as it is there."""
        everybody = [Candidate(PRESENT, scorer.SCHEDULE), *candidates]
        cases = list(itertools.product(layouts, query_lens))
        needs = {
            (layout, query_len, candidate.name): self._variants(candidate, layout, query_len)
            for (layout, query_len), candidate in itertools.product(cases, everybody)
        }
        reports = self._compiler(list(dict.fromkeys(itertools.chain.from_iterable(needs.values()))))
        for layout, query_len in cases:
            works = [Workload(self._pool, size, LAYOUTS[layout], query_len) for size in self._sizes]
            plain = {size.name: self._read(work) for size, work in zip(self._sizes, works, strict=True)}
            for work in works:
                self._score_once(work)
            right = [work.score_out.clone() for work in works]
            for candidate in everybody:
                case = (layout, query_len, candidate.name)
                reason = why_not(needs[case], reports)
                if reason is not None:
                    yield LeftOut(*case, reason)
                    continue
                registers = max(_report(reports[variant]).registers for variant in needs[case])
                us, same_bits = self._time(candidate, works, right)
                yield Row(*case, registers, us, plain, same_bits)

    def _variants(self, candidate: Candidate, layout: str, query_len: int) -> list[Variant]:
        return [variant_for(candidate, size, LAYOUTS[layout], query_len, self.device) for size in self._sizes]

    def _read(self, work: Workload) -> float | None:
        if self._ruler is not None and work.k_bytes not in self._reads:
            self._reads[work.k_bytes] = self._ruler.time(work.buffers)[0]
        return self._reads.get(work.k_bytes)

    @staticmethod
    def _score_once(work: Workload) -> None:
        work.score_out.zero_()
        work.score(0, "cuda")

    def _time(
        self, candidate: Candidate, works: Sequence[Workload], right: Sequence[torch.Tensor]
    ) -> tuple[dict[str, float], bool]:
        us, same_bits = {}, True
        with using(candidate.schedule):
            for size, work, scores in zip(self._sizes, works, right, strict=True):
                self._score_once(work)
                same_bits = same_bits and torch.equal(work.score_out, scores)
                if not torch.allclose(
                    work.score_out, scores, rtol=_ROUNDING, atol=_ROUNDING * _largest(scores)
                ):
                    raise RuntimeError(
                        f"{candidate.name}, {size.name}: other scores than the present schedule's"
                    )
                launch = functools.partial(work.score, backend="cuda")
                us[size.name] = round(time_chain(launch, len(work.layers), self.device), 3)
        return us, same_bits


def _largest(scores: torch.Tensor) -> float:
    return float(scores[scores.isfinite()].abs().max())


def why_not(variants: Sequence[Variant], reports: dict[Variant, Report | str]) -> str | None:
    """None where every kernel compiles, none spills and all can be launched, else the first reason."""
    for variant in variants:
        report = reports[variant]
        if isinstance(report, str):
            return f"{variant.name}: {report}"
        if report.spills:
            return f"{variant.name}: {report.spills} bytes spilled at {report.registers} registers"
        if report.shared > _MOST_SHARED_BYTES:  # which the compiler lets pass, and the driver does not
            return f"{variant.name}: {report.shared} bytes of shared memory"
    return None


def _report(report: Report | str) -> Report:
    assert isinstance(report, Report)
    return report


def best_by_size(rows: Sequence[Row]) -> dict[str, Row]:
    """For each size the candidate that is fastest there; `rows` are of one layout and query length."""
    return {size: min(rows, key=lambda row: row.us[size]) for size in rows[0].us}
