"""The schedule of a serving engine: continuous batching over a paged cache, on a virtual clock.

Requests come in order of arrival. Between two steps, waiting requests are admitted while a batch row and
enough pages are there (first come, first served). A step gives every request whose prompt has entered
`query_len` new tokens, lets up to `chunk_tokens` tokens of the other prompts enter, those of the request
that waits longest first, and advances the clock by a fixed time. An idle engine jumps to the next arrival. A
request that has its output leaves, and its pages can be reused.

Not all of a prompt has to enter. What an earlier request has brought into the cache is there, in whole
sections of the trace's hash ids: in its pages, or, where those have been given up, in a store behind the
cache. Of the rest the last `prefill_tokens` enter, through the indexer; what is before them is taken as
cached too.

The schedule is a pure function of the requests, the options and the number of pages: every rank walks
through its own copy and arrives at the same steps, with no communication.
"""

from __future__ import annotations

import itertools
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
    """A request gets a batch row; the keys of `spans` have to be written before its prompt enters."""

    row: int
    request: int
    pages: list[int]
    """Of the prompt, in order of column."""
    spans: list[tuple[int, int]]
    """Ranges `[start, stop)` of the cached positions whose keys are not in their pages."""


@dataclass(frozen=True)
class Segment:
    """The prompt tokens `start ... stop - 1` of a request enter; the cache holds those before them."""

    row: int
    request: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many they are."""
        return self.stop - self.start


@dataclass(frozen=True)
class Window:
    """The prompt tokens that enter in one step, segment after segment."""

    number: int
    segments: list[Segment]

    @property
    def tokens(self) -> int:
        """Of all segments."""
        return sum(segment.tokens for segment in self.segments)


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
    """Ascending by row; rows that are missing are padding. Empty where nobody decodes."""
    window: Window | None
    """None where no prompt enters."""


@dataclass(frozen=True)
class Counts:
    """What the engine has done."""

    admitted: int
    finished: int
    prompt_tokens: int
    """Tokens of all admitted prompts."""
    cached_tokens: int
    """Those of them that an earlier request had brought into the cache."""
    assumed_tokens: int
    """Those of them that are taken as cached because of `--prefill-tokens`."""
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
    """Tokens in the cache."""
    prompt: int
    final: int
    pages: list[int] = field(default_factory=list)

    @property
    def entered(self) -> bool:
        """Whether all of its prompt has."""
        return self.seq_len >= self.prompt


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
        self._written: dict[int, int] = {}
        """How many positions of each page, from its first on, hold their keys."""
        self._sections: set[int] = set()
        """Whole sections of prompts, with all before them, that are in the cache."""
        self._chains = [prefix_chain(request.hash_ids) for request in requests]
        self._admitted = self._finished = self._prompt_pages = self._shared_pages = 0
        self._prompt_tokens = self._cached_tokens = self._assumed_tokens = 0

    @property
    def counts(self) -> Counts:
        """What was done in the steps so far."""
        return Counts(
            admitted=self._admitted,
            finished=self._finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            assumed_tokens=self._assumed_tokens,
            prompt_pages=self._prompt_pages,
            shared_pages=self._shared_pages,
            reused_pages=self._allocator.reused,
        )

    def steps(self) -> Iterator[Step]:
        """The steps until every request is done, or `--decode-steps` of them have decoded."""
        waiting = deque(range(len(self._requests)))
        running: dict[int, _Running] = {}  # by batch row, the longest there first
        clock, number, windows, decoded = 0.0, 0, 0, 0
        while (waiting or running) and decoded != self._options.decode_steps:
            if not running:
                clock = max(clock, self._requests[waiting[0]].arrival)
            admitted = self._admit(waiting, running, clock)
            decoding = sorted((r for r in running.values() if r.entered), key=lambda request: request.row)
            segments = self._segments(running)
            grown = self._grow(decoding)
            rows = [DecodeRow(request.row, request.request, request.seq_len) for request in decoding]
            yield Step(number, clock, admitted, grown, rows, Window(windows, segments) if segments else None)
            self._enter(running, segments)
            for row in [row for row, request in running.items() if request.seq_len == request.final]:
                # The tail of a prefix is the first to be given up: it is of less use than its head.
                self._allocator.release(reversed(running.pop(row).pages))
                self._finished += 1
            clock += self._options.step_ms / 1000
            number, windows, decoded = number + 1, windows + bool(segments), decoded + bool(rows)

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
            start = self._start(place)
            admission = self._place(row, place, keys, start)
            prompt = request.prompt_tokens
            running[row] = _Running(row, place, start, prompt, final, list(admission.pages))
            admitted.append(admission)
            self._admitted += 1
        return admitted

    def _start(self, place: int) -> int:
        """How many tokens of a prompt are taken from the cache: the others enter, at least one of them."""
        prompt = self._requests[place].prompt_tokens
        sections = itertools.takewhile(self._sections.__contains__, self._whole_sections(place, prompt))
        cached = min(HASH_TOKENS * sum(1 for _ in sections), prompt - 1)
        start = max(cached, prompt - self._options.prefill_tokens)
        self._prompt_tokens += prompt
        self._cached_tokens += cached
        self._assumed_tokens += start - cached
        return start

    def _whole_sections(self, place: int, tokens: int) -> list[int]:
        """The sections that the first tokens of a prompt fill."""
        return self._chains[place][: tokens // HASH_TOKENS]

    def _place(self, row: int, place: int, keys: list[tuple[int, int]], start: int) -> Admission:
        """Pages for the prompt: shared ones for the pages that it fills, a private one for the rest."""
        prompt = self._requests[place].prompt_tokens
        pages = []
        for page, fresh in self._allocator.acquire_shared(keys):
            pages.append(page)
            self._prompt_pages += 1
            self._shared_pages += not fresh
            if fresh:
                self._written[page] = 0
        if len(pages) * self._page_size < prompt:
            pages.append(self._allocator.acquire_private())
            self._prompt_pages += 1
            self._written[pages[-1]] = 0
        self._sections.update(self._whole_sections(place, start))
        return Admission(row, place, pages, self._write(pages, start))

    def _write(self, pages: list[int], stop: int) -> list[tuple[int, int]]:
        """Which positions before `stop`, of a request with these pages, are to be written; then they are."""
        spans = _Spans()
        for column, page in enumerate(pages[: self._columns(stop)]):
            first, need = column * self._page_size, min(stop - column * self._page_size, self._page_size)
            if self._written[page] < need:
                spans.add(first + self._written[page], first + need)
                self._written[page] = need
        return spans.ranges

    def _segments(self, running: dict[int, _Running]) -> list[Segment]:
        """The tokens that enter in this step, in the order in which the requests came."""
        left, segments = self._options.chunk_tokens, []
        for request in running.values():
            stop = min(request.prompt, request.seq_len + left)
            if request.seq_len < stop:
                segments.append(Segment(request.row, request.request, request.seq_len, stop))
                left -= segments[-1].tokens
        return segments

    def _enter(self, running: dict[int, _Running], segments: list[Segment]) -> None:
        """The step is over: its prompt tokens are in the cache, for everybody."""
        for segment in segments:
            request = running[segment.row]
            request.seq_len = segment.stop
            self._write(request.pages, segment.stop)
            self._sections.update(self._whole_sections(segment.request, segment.stop))

    def _grow(self, decoding: list[_Running]) -> list[tuple[int, int, int]]:
        """Add this step's tokens to every request that decodes, and a page to each that needs one."""
        grown = []
        for request in decoding:
            request.seq_len += self._options.query_len
            while len(request.pages) < self._columns(request.seq_len):
                page = self._allocator.acquire_private()
                grown.append((request.row, len(request.pages), page))
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
