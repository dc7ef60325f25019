"""Schedules of the CUDA decode scorer, each timed over the sizes of its benchmark.

A candidate is a `Schedule` with a name: one form of the kernel for every size, with other values of its
constants, or a rule (the thresholds between the forms). Before anything is timed, every kernel that a
candidate needs is compiled, in several processes, and its registers and spills are read; one that spills, or
does not compile, is left out. A candidate whose scores are not those of the present schedule is an
error; where only the rounding differs (another matrix instruction may round otherwise) its row says so.
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

from msa_icp.cuda_backend.decode_index_score_sharded import Schedule
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


def _resident(schedule: Schedule, one: int | None = None, two: int | None = None) -> Schedule:
    """Other numbers of short CTAs that are to share a multiprocessor, for every number of query groups."""
    pairs = ((groups, (one or first, two or second)) for groups, (first, second) in schedule.short_resident)
    return replace(schedule, short_resident=tuple(pairs))


def _short(two_pieces_from: int) -> Schedule:
    """Short CTAs for every size, whose warps multiply each on its own."""
    schedule: Schedule = scorer.SCHEDULE
    return replace(schedule, two_pieces_from=two_pieces_from, packed_from=NEVER, together=())


def one_piece(residents: Sequence[int]) -> Iterator[Candidate]:
    """Short CTAs whose warps score one piece."""
    for count in residents:
        yield Candidate(f"one piece, resident {count}", _resident(_short(NEVER), one=count))


def two_pieces(residents: Sequence[int]) -> Iterator[Candidate]:
    """Short CTAs whose warps score two pieces."""
    for count in residents:
        yield Candidate(f"two pieces, resident {count}", _resident(_short(0), two=count))


def together(residents: Sequence[int], pieces: int) -> Iterator[Candidate]:
    """Short CTAs whose warps multiply as one warp group."""
    every = tuple(groups for groups, _ in scorer.SCHEDULE.together_resident)
    for count in residents:
        schedule = replace(
            _short(0 if pieces == 2 else NEVER),
            together=every,
            together_resident=tuple((groups, (count, count)) for groups in every),
        )
        yield Candidate(f"together, pieces {pieces}, resident {count}", schedule)


def packed(residents: Sequence[int], stages: Sequence[int], waves: Sequence[int]) -> Iterator[Candidate]:
    """CTAs that stay."""
    for count, depth, times in itertools.product(residents, stages, waves):
        schedule = replace(
            scorer.SCHEDULE,
            packed_from=0,
            packed_resident=tuple((groups, count) for groups, _ in scorer.SCHEDULE.packed_resident),
            packed_stages=depth,
            packed_waves=times,
        )
        yield Candidate(f"packed, resident {count}, stages {depth}, waves {times}", schedule)


def rules(thresholds: Sequence[tuple[int, int]]) -> Iterator[Candidate]:
    """The present constants with other thresholds: tiles from which on two pieces, and packed."""
    for two, stay in thresholds:
        schedule = replace(scorer.SCHEDULE, two_pieces_from=two, packed_from=stay)
        yield Candidate(f"rule: two pieces from {two}, packed from {stay}", schedule)


@contextmanager
def using(schedule: Schedule) -> Iterator[None]:
    """The scorer cuts its work by `schedule`; kernels that it has kept are forgotten, before and after."""
    own = scorer.SCHEDULE

    def put(other: Schedule) -> None:
        scorer.SCHEDULE = other  # type: ignore[attr-defined]
        for kept in vars(scorer).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()

    put(schedule)
    try:
        yield
    finally:
        put(own)


def variant_for(
    candidate: Candidate, size: Size, layout: ShardLayout, query_len: int, device: torch.device
) -> Variant:
    """The kernel that a candidate runs for a size."""
    with using(candidate.schedule):
        columns = int(ceil_div(max(size.columns(layout)), 4)) * 4
        kernel, _ = scorer._launch(len(size.keys), columns, layout, scorer._groups(query_len), device)
        variant: Variant = kernel.variant
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
