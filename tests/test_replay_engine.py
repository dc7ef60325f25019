"""The schedule: continuous batching whose pages hold, at every step, what their requests need."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_cases import CONVERSATION, small_plan

import msa_icp
from msa_icp.replay import plan as plan_module
from msa_icp.replay.engine import Engine, Step
from msa_icp.replay.errors import UsageError
from msa_icp.replay.options import ReplayOptions
from msa_icp.replay.plan import k_bytes, make_plan, rank_devices
from msa_icp.replay.synth import prefix_chain
from msa_icp.replay.trace import HASH_TOKENS, Request


class Shadow:
    """A cache that holds, instead of keys, the name of each token: what a rank writes, seen from outside."""

    def __init__(self, requests: list[Request], options: ReplayOptions, pages: int) -> None:
        self.requests, self.options, self.pages = requests, options, pages
        self.chains = [prefix_chain(request.hash_ids) for request in requests]
        self.memory: dict[tuple[int, int], tuple] = {}
        self.table: dict[int, list[int]] = {}

    def name(self, request: int, position: int) -> tuple:
        """Same prefix, same name; decoded tokens are the request's own."""
        if position < self.requests[request].prompt_tokens:
            return "prompt", self.chains[request][position // HASH_TOKENS], position
        return "decoded", request, position

    def write(self, row: int, request: int, positions: range) -> None:
        size = self.options.page_size
        for position in positions:
            page = self.table[row][position // size]
            assert 0 <= page < self.pages
            self.memory[page, position % size] = self.name(request, position)

    def run(self, step: Step) -> None:
        for admission in step.admitted:
            self.table[admission.row] = list(admission.pages)
        for row, column, page in step.grown:
            assert column == len(self.table[row])
            self.table[row].append(page)
        for admission in step.admitted:
            for start, stop in admission.spans:
                self.write(admission.row, admission.request, range(start, stop))
        segments = step.window.segments if step.window else []
        for row in step.rows:
            new = range(row.seq_len - self.options.query_len, row.seq_len)
            self.write(row.row, row.request, new)
        for segment in segments:
            self.write(segment.row, segment.request, range(segment.start, segment.stop))
        for row in step.rows:
            assert len(self.table[row.row]) == -(-row.seq_len // self.options.page_size)
            self.check(row.row, row.request, row.seq_len)
        for segment in segments:
            self.check(segment.row, segment.request, segment.stop)

    def check(self, row: int, request: int, seq_len: int) -> None:
        size = self.options.page_size
        for position in range(seq_len):
            page = self.table[row][position // size]
            assert self.memory[page, position % size] == self.name(request, position)


class Prompts:
    """The rules by which prompts enter, kept apart from how the engine does it."""

    def __init__(self, requests: list[Request], options: ReplayOptions) -> None:
        self.requests, self.options = requests, options
        self.reached: dict[int, int] = {}
        self.windows = self.tokens = 0

    def follow(self, step: Step) -> None:
        for row in step.rows:
            assert self.reached[row.request] == self.requests[row.request].prompt_tokens
        if step.window is None:
            return
        segments = step.window.segments
        assert step.window.number == self.windows
        assert 1 <= step.window.tokens <= self.options.chunk_tokens
        assert [s.request for s in segments] == sorted(s.request for s in segments), "in order of arrival"
        for segment, last in zip(segments, [False] * (len(segments) - 1) + [True], strict=True):
            prompt = self.requests[segment.request].prompt_tokens
            # It begins at a whole section, or where the option says, and goes on where it ended.
            first = max(prompt - self.options.prefill_tokens, 0)
            at = self.reached.get(segment.request, segment.start)
            assert segment.start == at
            assert at >= first
            assert at == first or segment.request in self.reached or at % HASH_TOKENS == 0 or at == prompt - 1
            assert segment.stop == prompt or last
            assert segment.stop <= prompt
            self.reached[segment.request] = segment.stop
        self.windows += 1
        self.tokens += step.window.tokens


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests whose hash ids come from so few that prefixes are often shared."""
    requests = []
    for index in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(1, 1600))
        ids = tuple(draw(st.integers(0, 1)) for _ in range(-(-prompt // HASH_TOKENS)))
        arrival = draw(st.sampled_from([0.0, 0.01, 0.05, 3.0]))
        requests.append(Request(index, arrival, prompt, draw(st.integers(0, 140)), ids))
    return sorted(requests, key=lambda request: (request.arrival, request.index))


@settings(max_examples=25)
@given(
    requests=traces(),
    page_size=st.sampled_from([128, 256]),
    query_len=st.integers(1, 8),
    max_batch=st.integers(1, 4),
    tight=st.booleans(),
    chunk_tokens=st.sampled_from([40, 70, 200, 512, 2000]),
    prefill_tokens=st.sampled_from([1, 90, 700, 2000]),
)
def test_every_step_finds_its_context_in_its_pages(
    requests, page_size, query_len, max_batch, tight, chunk_tokens, prefill_tokens
):
    longest = max(r.prompt_tokens + r.output_tokens for r in requests) + 8
    options = ReplayOptions(
        page_size=page_size,
        query_len=query_len,
        max_batch=max_batch,
        cache_tokens=longest + page_size if tight else None,
        chunk_tokens=chunk_tokens,
        prefill_tokens=prefill_tokens,
    )
    plan = make_plan(requests, options)
    shadow = Shadow(requests, options, plan.pages)
    engine = Engine(requests, options, plan.pages)
    decoded: Counter[int] = Counter()
    entered: list[int] = []
    prompts = Prompts(requests, options)
    clock = -1.0
    for number, step in enumerate(engine.steps()):
        assert step.number == number
        assert step.clock > clock
        clock = step.clock
        assert step.rows or step.window
        assert len(step.rows) + (len(step.window.segments) if step.window else 0) <= max_batch
        assert len({row.row for row in step.rows}) == len(step.rows)
        assert all(requests[admission.request].arrival <= step.clock for admission in step.admitted)
        entered += [admission.request for admission in step.admitted]
        decoded.update(row.request for row in step.rows)
        prompts.follow(step)
        shadow.run(step)
    assert entered == list(range(len(requests))), "first come, first served"
    for request, steps in decoded.items():
        assert steps == max(1, -(-requests[request].output_tokens // query_len))
    counts = engine.counts
    assert counts.admitted == counts.finished == len(requests)
    assert counts.prompt_tokens == sum(request.prompt_tokens for request in requests)
    assert counts.cached_tokens + counts.assumed_tokens + prompts.tokens == counts.prompt_tokens
    assert plan.walk.prefill_tokens == prompts.tokens
    assert counts.prompt_pages == sum(-(-r.prompt_tokens // page_size) for r in requests)
    assert [len(row) for row in plan.walk.contexts] == [max_batch] * len(plan.walk.contexts)


def test_requests_with_the_same_prefix_have_the_same_pages(tmp_path):
    plan = small_plan(tmp_path, max_batch=8)
    first = next(Engine(plan.requests, plan.options, plan.pages).steps())
    one, other = (admission.pages for admission in first.admitted)
    assert one[:4] == other[:4], "hash id 0: 512 tokens, four pages"
    assert not set(one[4:]) & set(other[4:])
    assert first.admitted[1].spans == [(512, 2260)], "what is shared is not written again"
    assert one != sorted(one), "physical pages are in no order"


def test_a_prompt_enters_in_chunks_while_others_decode(tmp_path):
    plan = small_plan(tmp_path, chunk_tokens=300, prefill_tokens=2**20, max_batch=8)
    steps = list(Engine(plan.requests, plan.options, plan.pages).steps())
    windows = [step.window for step in steps if step.window]
    first = [(s.request, s.start, s.stop) for window in windows[:5] for s in window.segments]
    # 1100 tokens of the one, then the other's: they came together, so neither found the other's section.
    assert first == [
        (0, 0, 300), (0, 300, 600), (0, 600, 900), (0, 900, 1100), (1, 0, 100), (1, 100, 400),
    ]  # fmt: skip
    assert any(step.rows and step.window for step in steps)
    assert any(len(window.segments) > 1 for window in windows)
    assert max(window.tokens for window in windows) == 300
    late = [s for window in windows for s in window.segments if s.request == 6]
    assert [(s.start, s.stop) for s in late] == [(512, 513)], "its first section is request 0's"


def test_what_is_in_the_cache_does_not_enter_again(tmp_path):
    plan = small_plan(tmp_path, prefill_tokens=2**20, chunk_tokens=8192, max_batch=1)
    engine = Engine(plan.requests, plan.options, plan.pages)
    starts = [s.start for step in engine.steps() if step.window for s in step.window.segments]
    # One after the other: nothing, sections 0 | 0, 1 | nothing | 0, 1 | 0, 3, 4, 5 | 0
    assert starts == [0, 512, 1024, 0, 1024, 2048, 512]
    assert engine.counts.cached_tokens == sum(starts)
    assert engine.counts.assumed_tokens == 0
    plan = small_plan(tmp_path, prefill_tokens=40, chunk_tokens=8192, max_batch=1)
    engine = Engine(plan.requests, plan.options, plan.pages)
    segments = [s for step in engine.steps() if step.window for s in step.window.segments]
    assert [s.tokens for s in segments] == [40, 40, 6, 40, 40, 40, 1]
    assert engine.counts.cached_tokens == sum(starts), "what is taken as cached changes nothing in that"


def test_keys_are_written_once_while_their_page_is_there(tmp_path):
    plan = small_plan(tmp_path, prefill_tokens=2**20, max_batch=2, cache_tokens=20_000)
    steps = list(Engine(plan.requests, plan.options, plan.pages).steps())
    assert [admission.spans for step in steps for admission in step.admitted] == [[]] * len(CONVERSATION)
    # In a cache for one request, what others have brought comes back from behind it.
    plan = small_plan(tmp_path, prefill_tokens=2**20, max_batch=2, cache_tokens=2700)
    steps = list(Engine(plan.requests, plan.options, plan.pages).steps())
    assert any(admission.spans for step in steps for admission in step.admitted)


def test_an_idle_engine_jumps_to_the_next_arrival(tmp_path):
    plan = small_plan(tmp_path)
    clocks = [step.clock for step in Engine(plan.requests, plan.options, plan.pages).steps()]
    assert 9.0 in clocks
    assert max(after - before for before, after in itertools.pairwise(clocks)) > 8


def test_the_schedule_does_not_depend_on_the_page_size(tmp_path):
    small, large = (small_plan(tmp_path, page_size=size) for size in (128, 256))
    assert small.walk == large.walk


def test_a_tight_cache_gives_up_prefixes_and_lets_requests_wait(tmp_path):
    plan = small_plan(tmp_path, cache_tokens=2700)
    engine = Engine(plan.requests, plan.options, plan.pages)
    shadow = Shadow(plan.requests, plan.options, plan.pages)
    steps = []
    for step in engine.steps():
        shadow.run(step)
        steps.append(step)
    assert engine.counts.reused_pages > 0
    assert engine.counts.finished == len(CONVERSATION)
    assert len(steps) > len(list(Engine(plan.requests, plan.options, 1000).steps()))


def test_requests_that_are_too_long_are_passed_over(tmp_path):
    plan = small_plan(tmp_path, max_context=1200, requests=3)
    assert [request.index for request in plan.requests] == [0, 2, 3]
    assert plan.skipped == 1
    with pytest.raises(UsageError, match=r"no request of the trace fits --max-context 100: .* 212 tokens"):
        small_plan(tmp_path, max_context=100)


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 128), (2, 256), (4, 256)])
def test_ranks_together_read_what_a_replicated_indexer_reads(tmp_path, world_size, page_size):
    plan = small_plan(tmp_path, world_size=world_size, page_size=page_size, decode_steps=9)
    contexts, windows = plan.walk.contexts, plan.walk.windows
    page_bytes = page_size * 128 * plan.options.sparse_layers / world_size
    for of_step in (contexts, windows):
        pages = [sum(-(-context // page_size) for context in step) for step in of_step]
        assert k_bytes(plan, of_step) == [count * page_bytes for count in pages]
        assert any(pages)
    assert windows[0] == [1060 + 24]
    assert windows[1] == [1100, 2260 + 8]
    assert contexts[0] == contexts[1] == [0, 0, 0]
    assert contexts[2] == [1101, 0, 0]


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("world_size", 3, "--world-size must be 2 or 4, was 3"),
        ("page_size", 64, "--page-size must be 128 or 256, was 64"),
        ("query_len", 9, "--query-len must be from 1 to 8, was 9"),
        ("sparse_layers", 0, "--sparse-layers must be from 1 to 1024, was 0"),
        ("max_context", 2**20 + 1, "--max-context must be from 1 to 1048576, was 1048577"),
        ("decode_steps", 0, "--decode-steps must be from 1 to 2147483647, was 0"),
        ("requests", -1, "--requests must be from 1 to 2147483647, was -1"),
        ("chunk_tokens", 0, "--chunk-tokens must be from 1 to 8192, was 0"),
        ("prefill_tokens", 0, "--prefill-tokens must be from 1 to 1048576, was 0"),
        ("step_ms", float("nan"), "--step-ms must be more than 0 and at most 1000000, was nan"),
        ("check_rows", 3, "--check-rows must be from 4 to 2147483647, was 3"),
        ("init_blocks", 16, "--init-blocks + --local-blocks must be from 0 to 16, was 17"),
        ("cache_tokens", 2000, "--cache-tokens must be at least 2635 for the longest request, was 2000"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(tmp_path, option, value, sentence):
    with pytest.raises(UsageError) as caught:
        small_plan(tmp_path, **{option: value})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("chosen", "cards", "devices"),
    [
        ({"device": "cpu"}, 8, ["cpu"] * 4),
        ({"device": "cuda"}, 1, ["cuda:0"] * 4),
        ({"device": "cuda"}, 3, ["cuda:0"] * 4),
        ({"device": "cuda"}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ({"device": "cuda", "world_size": 2}, 8, ["cuda:0", "cuda:1"]),
        ({"device": "cuda", "world_size": 2}, 0, ["cuda:0"] * 2),  # the backends say that there is none
        ({"device": "cuda:1", "world_size": 2}, 2, ["cuda:1"] * 2),
        ({"device": "cuda:1", "world_size": 2}, 0, ["cuda:1"] * 2),
        ({"device": "cuda", "in_process": True}, 8, ["cuda"] * 4),
        ({"device": "cuda:7", "in_process": True}, 8, ["cuda:7"] * 4),
    ],
)
def test_ranks_have_a_card_each_where_there_are_enough(chosen, cards, devices):
    assert rank_devices(ReplayOptions(**chosen), cards) == tuple(devices)


def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"--device cuda:2 is not there: the GPUs .* end with cuda:1"):
        rank_devices(ReplayOptions(device="cuda:2"), 2)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "cuda:1\n", "cuda:01", ""])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(UsageError, match="--device must be cpu, cuda or cuda:N, was "):
        ReplayOptions(device=device)


@pytest.mark.parametrize(
    ("devices", "in_process", "shared"),
    [
        (("cpu", "cpu"), False, False),
        (("cuda:0", "cuda:0"), False, True),
        (("cuda:0", "cuda:1"), False, False),
        (("cuda", "cuda"), True, False),
    ],
)
def test_processes_that_take_turns_on_a_card(tmp_path, devices, in_process, shared):
    plan = small_plan(tmp_path, world_size=2, in_process=in_process)
    assert replace(plan, devices=devices).share_a_card == shared


def test_prompts_go_to_a_backend_that_has_prefill(tmp_path, monkeypatch):
    plan = small_plan(tmp_path)
    assert plan.prefill_backend == plan.backend == "torch"

    def without(name, device, op):
        assert (name, device, op) == ("torch", torch.device("cpu"), "prefill_score_select")
        raise ValueError("it has none")

    monkeypatch.setattr(plan_module, "resolve", without)
    assert plan.prefill_backend == "auto"


def test_a_backend_that_is_not_there_is_refused_with_the_reason(tmp_path, monkeypatch):
    reasons = {"torch": None, "abacus": "it is for beads"}
    monkeypatch.setattr(msa_icp, "backends", lambda device: reasons)
    with pytest.raises(UsageError, match="must be one of cake, auto, torch, abacus, was cuda9"):
        small_plan(tmp_path, backend="cuda9")
    with pytest.raises(UsageError, match="--backend abacus does not serve --device cpu: it is for beads"):
        small_plan(tmp_path, backend="abacus")
    assert small_plan(tmp_path, backend="auto").backend == "torch"
    reasons["torch"] = "it is away"
    with pytest.raises(UsageError, match=r"^no backend serves --device cpu \(torch: it is away; abacus: "):
        small_plan(tmp_path, backend="auto")
