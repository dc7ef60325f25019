"""The schedule of a serving engine: continuous batching over a paged cache, on a virtual clock.

Requests come in order of arrival. Between two decode steps, waiting requests are admitted while a
batch row and enough pages are there (first come, first served); a decode step gives every running
request `query_len` new tokens and advances the clock by a fixed time, and an idle engine jumps to the
next arrival. A request that has its output leaves, and its pages can be reused.

The schedule is a pure function of the requests, the options and the number of pages: every rank walks
through its own copy and arrives at the same steps, with no communication.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .options import ReplayOptions
from .pages import PageAllocator
from .synth import prefix_chain
from .trace import HASH_TOKENS, Request


@dataclass(frozen=True)
class Admission:
    """A request enters the batch; the keys of `spans` have to be written before it decodes."""

    row: int
    request: int
    pages: list[int]
    """Of the prompt, in order of column."""
    spans: list[tuple[int, int]]
    """Ranges of prompt positions `[start, stop)` whose pages hold nothing yet."""


@dataclass(frozen=True)
class DecodeRow:
    """A request of the batch: this step adds its tokens `seq_len - query_len ... seq_len - 1`."""

    row: int
    request: int
    seq_len: int


@dataclass(frozen=True)
class Step:
    """What the engine does between two ticks of its clock. Requests are named by place."""

    number: int
    clock: float
    admitted: list[Admission]
    grown: list[tuple[int, int, int]]
    """New block-table entries `(row, column, page)` of requests that outgrew their pages."""
    rows: list[DecodeRow]
    """Ascending by row; rows that are missing are padding."""


@dataclass(frozen=True)
class Counts:
    """What the engine has done."""

    admitted: int
    finished: int
    prompt_pages: int
    """Prompt pages of all admitted requests."""
    shared_pages: int
    """Those of them that another request with the same prefix had written."""
    reused_pages: int
    """Cached pages that were given up for new contents."""


@dataclass
class _Running:
    row: int
    request: int
    seq_len: int
    final: int
    pages: list[int] = field(default_factory=list)


class Engine:
    """Schedules `requests`, which are in order of arrival and each fit `pages` pages alone."""

    def __init__(self, requests: Sequence[Request], options: ReplayOptions, pages: int) -> None:
        self._requests = requests
        self._options = options
        self._page_size = options.page_size
        # In a serving engine page ids are in no order; a shuffled list makes them so from the start.
        order = list(range(pages))
        random.Random(options.seed).shuffle(order)
        self._allocator = PageAllocator(order)
        self._admitted = self._finished = self._prompt_pages = self._shared_pages = 0

    @property
    def counts(self) -> Counts:
        """What was done in the steps so far."""
        return Counts(
            self._admitted, self._finished, self._prompt_pages, self._shared_pages, self._allocator.reused
        )

    def steps(self) -> Iterator[Step]:
        """The steps until every request is done, or `--decode-steps` of them."""
        waiting = deque(range(len(self._requests)))
        running: dict[int, _Running] = {}  # by batch row
        clock, number = 0.0, 0
        while (waiting or running) and number != self._options.decode_steps:
            if not running:
                clock = max(clock, self._requests[waiting[0]].arrival)
            admitted = self._admit(waiting, running, clock)
            grown = self._grow(running)
            rows = [DecodeRow(row, running[row].request, running[row].seq_len) for row in sorted(running)]
            yield Step(number, clock, admitted, grown, rows)
            for row in [row for row, request in running.items() if request.seq_len == request.final]:
                # The tail of a prefix is the first to be given up: it is of less use than its head.
                self._allocator.release(reversed(running.pop(row).pages))
                self._finished += 1
            clock += self._options.step_ms / 1000
            number += 1

    def _admit(self, waiting: deque[int], running: dict[int, _Running], clock: float) -> list[Admission]:
        admitted = []
        while waiting and len(running) < self._options.max_batch:
            place = waiting[0]
            request = self._requests[place]
            if request.arrival > clock:
                break
            keys = prefix_keys(request, self._page_size)
            final = self._options.final_context(request.prompt_tokens, request.output_tokens)
            private = self._columns(final) - len(keys)
            # Requests that run already will take the pages of their coming tokens.
            promised = sum(self._columns(other.final) - len(other.pages) for other in running.values())
            if self._allocator.cost(keys) + private > self._allocator.available - promised:
                break
            waiting.popleft()
            row = next(row for row in range(self._options.max_batch) if row not in running)
            admission = self._place(row, place, keys)
            running[row] = _Running(row, place, request.prompt_tokens, final, list(admission.pages))
            admitted.append(admission)
            self._admitted += 1
        return admitted

    def _place(self, row: int, place: int, keys: list[tuple[int, int]]) -> Admission:
        """Pages for the prompt: shared ones for the pages that it fills, a private one for the rest."""
        prompt = self._requests[place].prompt_tokens
        pages, spans = [], _Spans()
        for column, (page, fresh) in enumerate(self._allocator.acquire_shared(keys)):
            pages.append(page)
            self._prompt_pages += 1
            self._shared_pages += not fresh
            if fresh:
                spans.add(column * self._page_size, (column + 1) * self._page_size)
        if len(pages) * self._page_size < prompt:
            spans.add(len(pages) * self._page_size, prompt)
            pages.append(self._allocator.acquire_private())
            self._prompt_pages += 1
        return Admission(row, place, pages, spans.ranges)

    def _grow(self, running: dict[int, _Running]) -> list[tuple[int, int, int]]:
        """Add this step's tokens to every request, and a page to each that needs one."""
        grown = []
        for row in sorted(running):
            request = running[row]
            request.seq_len += self._options.query_len
            while len(request.pages) < self._columns(request.seq_len):
                page = self._allocator.acquire_private()
                grown.append((row, len(request.pages), page))
                request.pages.append(page)
        return grown

    def _columns(self, tokens: int) -> int:
        return -(-tokens // self._page_size)


def prefix_keys(request: Request, page_size: int) -> list[tuple[int, int]]:
    """A key for each page that the prompt fills; equal keys hold the same prompt up to their end."""
    chain = prefix_chain(request.hash_ids)
    full = request.prompt_tokens // page_size
    return [(chain[column * page_size // HASH_TOKENS], column) for column in range(full)]


class _Spans:
    """Ranges of positions, adjacent ones joined."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            start, _ = self.ranges.pop()
        self.ranges.append((start, stop))
