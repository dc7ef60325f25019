"""Layer graphs: eager first, then captured, then replayed, and the same results throughout (section 8).

On a GPU the graphs are the device's, on a CPU those of graph_stand_in.py.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import sys
import weakref

import indexer_ranks
import pytest
import torch
from facade import Decode, Prefill, plan_of, run_in_turn
from graph_stand_in import StandIn
from helpers import assert_same, interpreted_only_if, snapshot
from rank_processes import PLACES, run_ranks
from test_indexer import batch, window
from test_indexer_steps import layer_inputs, prefill_step

import msa_icp
from msa_icp import cases
from msa_icp.indexer import MSAIcpDecodeStep, graphs


@pytest.fixture(params=[False, True], ids=["read", "copied"])
def query_is_copied(request, monkeypatch):
    """Whether a replay copies its query, as it does where the driver's part is missing."""
    monkeypatch.setattr(graphs, "can_be_moved", graphs.can_be_moved if not request.param else lambda: False)
    return request.param


@pytest.fixture
def stand_in(request, monkeypatch):
    """The stand-in on a CPU; on a GPU nothing is replaced and `do` just does it."""
    copied = "query_is_copied" in request.fixturenames and request.getfixturevalue("query_is_copied")
    made = StandIn(copies=copied)
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("device", "cpu") == "cpu":
        for name, ours in made.replaced().items():
            monkeypatch.setattr(graphs, name, ours)
    return made


def numbers(cache):
    return tuple(cache.stats[name] for name in graphs.STATS)


class Halves(MSAIcpDecodeStep):
    """A decode step of one rank whose publish and merge are layers of their own, for ranks in one thread."""

    def __init__(self, step, part):
        vars(self).update(vars(step))
        self.step, self.part, self.check_storage = step, part, step.check_storage

    def record(self, index_q, index_k, *, slot):
        return self.step.record(index_q, index_k, slot=slot)[self.part]


class Caches:
    """For every rank a cache for its publishes, and one for its merges."""

    def __init__(self, ranks, **options):
        self.ranks = ranks
        self.halves = [
            [plan.layer_graphs(**options) for plan in ranks.plans] for _ in (slice(None, -1), slice(-1, None))
        ]

    def begin(self, *, tagged, **changes):
        """Every rank's graph steps, of fresh prepared steps."""
        parts = (slice(None, -1), slice(-1, None))
        prepared = self.ranks.steps(tagged=tagged, **changes)
        tokens = self.ranks.case.tokens
        return [
            [
                cache.begin_step(decode=Halves(step, part), decode_tokens=tokens)
                for cache, step in zip(caches, prepared, strict=True)
            ]
            for caches, part in zip(self.halves, parts, strict=True)
        ]

    def numbers(self):
        return {numbers(cache) for caches in self.halves for cache in caches}


def run_layer(steps, layer, queries, keys, slot):
    for half in steps:
        for step, own in zip(half, keys, strict=True):
            step.run(layer, queries, own, slot=slot)


# ---------------------------------------------------------------- decode


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.exchange
def test_layers_become_graphs_and_stay_right(backend, device, tagged, query_is_copied, stand_in):
    """Four layers rotate through three slot sets, so a layer comes back to its slot set every third step."""
    interpreted_only_if(False, backend, device)
    ranks = Decode(batch(), backend, device)
    for plan in ranks.plans:
        plan.warmup()
    caches = Caches(ranks, capture_after=1, max_keys=1)
    keys = {layer: layer_inputs(ranks, layer)[1] for layer in range(4)}
    slot = 0
    for step_number in range(9):
        steps = caches.begin(tagged=tagged)
        for layer in range(4):
            ranks.queries = cases.exact(ranks.queries.shape, seed=31 * step_number + layer).to(device)
            run_layer(steps, layer, ranks.queries, keys[layer], slot)
            got = ranks.merged()
            ranks.keys = keys[layer]
            assert torch.equal(got, right(ranks, tagged)), (step_number, layer)
            slot = (slot + 1) % 3
    assert caches.numbers() == {(12, 12, 12, 0)}


def right(ranks, tagged):
    """The same layer through the call, with a receive storage of its own."""
    other = Decode(ranks.case, ranks.plans[0].backend, ranks.device)
    other.queries, other.keys = ranks.queries, ranks.keys
    return other.call(tagged=tagged, slot=0)


@pytest.mark.exchange
def test_a_graph_reads_the_buffers_anew(backend, device, stand_in):
    """Metadata that is written into the same tensors is part of no key."""
    interpreted_only_if(False, backend, device)
    ranks, later = (
        Decode(batch(seq_lens=lens), backend, device) for lens in ((300, 40, 2100), (2100, 40, 300))
    )
    for plan in ranks.plans:
        plan.warmup()
    caches = Caches(ranks, capture_after=0)
    steps = caches.begin(tagged=True)
    run_layer(steps, 0, ranks.queries, ranks.keys, 0)
    assert torch.equal(ranks.merged(), ranks.truth())
    ranks.table.copy_(later.table)
    ranks.lens.copy_(later.lens)
    ranks.num_valid.copy_(later.num_valid)
    for own, new in zip(ranks.keys, later.keys, strict=True):
        own.view(torch.uint8).copy_(new.view(torch.uint8))
    run_layer(caches.begin(tagged=True), 0, later.queries, ranks.keys, 0)
    assert torch.equal(ranks.merged(), later.truth())
    assert caches.numbers() == {(0, 1, 1, 0)}


def one_rank(ranks, cache, **changes):
    """A graph step of rank 0's publish."""
    step = ranks.steps(tagged=True, **changes)[0]
    return cache.begin_step(decode=Halves(step, slice(None, -1)), decode_tokens=ranks.case.tokens)


MOVED = {
    "nothing": (lambda ranks: None, False),
    "lens": (lambda ranks: setattr(ranks, "lens", ranks.lens.clone()), True),
    "table": (lambda ranks: setattr(ranks, "table", ranks.table.clone()), True),
    "counts": (lambda ranks: setattr(ranks, "num_valid", ranks.num_valid.clone()), True),
    "scores": (lambda ranks: setattr(ranks, "scores", [s.clone() for s in ranks.scores]), True),
    "keys": (lambda ranks: setattr(ranks, "keys", [k.clone() for k in ranks.keys]), True),
    "query": (lambda ranks: setattr(ranks, "queries", ranks.queries.clone()), False),
    "limit": (lambda ranks: setattr(ranks.plans[0], "spin_limit", 77), True),
    "storage": (
        lambda ranks: setattr(
            ranks, "group", msa_icp.ReceiveStorage.in_process(2, capacity=12, device=ranks.device)
        ),
        True,
    ),
}


@pytest.mark.exchange
def test_every_launch_that_may_start_early_is_another_one(backend, device, monkeypatch):
    """Dependent launch is part of a launch's key, also where no gap of the CUDA scorer's tells."""
    if backend == "triton" and device == "cpu":
        pytest.skip("no interpreted program starts early")
    if backend == "cuda":
        scorer = importlib.import_module("msa_icp.cuda_backend.decode_index_score_sharded")
        monkeypatch.setattr(scorer, "SCHEDULE", dataclasses.replace(scorer.SCHEDULE, gaps_below=0))
    ranks = Decode(batch(), backend, device)
    early, late = (
        ranks.steps(tagged=True, enable_pdl=how)[0].record(ranks.queries, ranks.keys[0], slot=0)
        for how in (True, False)
    )
    assert len(early) == len(late) == 3
    assert not {one.key() for one in early} & {one.key() for one in late}


@pytest.mark.parametrize("what", MOVED)
@pytest.mark.exchange
def test_what_makes_another_key(backend, device, what, stand_in):
    interpreted_only_if(what in ("nothing", "lens", "keys", "query"), backend, device)
    ranks = Decode(batch(seq_lens=(300, 40)), backend, device)
    cache = ranks.plans[0].layer_graphs()
    for _ in range(2):
        one_rank(ranks, cache).run(3, ranks.queries, ranks.keys[0], slot=1)
    assert numbers(cache) == (1, 1, 0, 0)
    change, another = MOVED[what]
    change(ranks)
    one_rank(ranks, cache).run(3, ranks.queries, ranks.keys[0], slot=1)
    assert numbers(cache) == ((2, 1, 0, 0) if another else (1, 1, 1, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are processes of Linux")
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("tagged", [False, True])
def test_ranks_may_disagree_on_eager_or_replay(place, tagged, tmp_path):
    """The communication of a layer is the same, whichever way it is launched."""
    found = run_ranks(indexer_ranks.eager_and_replayed, 2, tmp_path, tagged, place=place)
    assert [one["wrong"] for one in found] == [0, 0]
    assert found[0]["numbers"] == [48, 0, 0, 0]
    assert found[1]["numbers"] == [0, 12, 36, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="the ranks are processes of Linux")
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_ranks_warm_up_at_once_from_a_cold_cache(place, tmp_path):
    if place.backend != "cuda":
        pytest.skip("tensor code has nothing to compile, and Triton takes minutes for all its kernels")
    for found in run_ranks(indexer_ranks.warm_at_once, 2, tmp_path, place=place):
        assert found["wrong"] == 0
        assert found["kept"] > 0


@pytest.mark.parametrize(("layer", "slot"), [(4, 1), (3, 2)])
def test_a_layer_and_a_slot_set_have_graphs_of_their_own(layer, slot, stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=0)
    for where in ((3, 1), (layer, slot), (3, 1)):
        one_rank(ranks, cache).run(where[0], ranks.queries, ranks.keys[0], slot=where[1])
    assert numbers(cache) == (0, 2, 1, 0)


def test_the_least_recently_used_key_goes(stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=0, max_keys=2)
    scores = [torch.zeros(12, 4, 64) for _ in range(3)]

    def run(place):
        ranks.scores = [scores[place]] * 2
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])

    for place in (0, 1, 0, 2, 0):  # 2 takes the place of 1
        run(place)
    assert numbers(cache) == (0, 3, 2, 1)
    cache.clear()
    assert numbers(cache) == (0, 0, 0, 0)
    run(1)
    assert numbers(cache) == (0, 1, 0, 0)


@pytest.mark.parametrize("how", ["evicted", "cleared"])
def test_a_key_that_is_pushed_out_frees_its_graphs_and_its_staging_buffer(how, stand_in):
    """Though the step that used it is still there, and captures anew when it comes back."""
    ranks = Decode(batch(), "torch", "cpu")
    cache, prepared = ranks.plans[0].layer_graphs(capture_after=0, max_keys=1), ranks.steps(tagged=True)[0]
    step = cache.begin_step(decode=Halves(prepared, slice(None, -1)), decode_tokens=ranks.case.tokens)
    for slot in (0, 1):
        step.run(0, ranks.queries, ranks.keys[0], slot=slot)
    (entry,) = cache._keys.values()
    kept = [weakref.ref(entry.staging), *(weakref.ref(layer.graph) for layer in entry.layers.values())]
    del entry
    assert len(kept) == 3
    assert all(one() is not None for one in kept)
    if how == "evicted":
        ranks.scores = [torch.zeros(12, 4, 64)] * 2
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])
    else:
        cache.clear()
    for slot in (0, 1):  # launches of tensor code hold the query that they are bound to
        prepared.record(ranks.queries, ranks.keys[0], slot=slot)
    gc.collect()
    assert [one() for one in kept] == [None] * 3
    before = cache.stats["captured_layers"]
    step.run(0, ranks.queries, ranks.keys[0])
    assert cache.stats["captured_layers"] == before + 1


def test_graphs_captured_in_inference_mode_are_replayed_outside_of_it(query_is_copied, stand_in):
    """And the other way round: an engine's first steps may run in another mode than the others."""
    ranks = Decode(batch(), "torch", "cpu")
    caches = Caches(ranks, capture_after=0)
    for turn, mode in enumerate((True, False, True, False)):
        ranks.queries = cases.exact(ranks.queries.shape, seed=turn)
        with torch.inference_mode(mode):
            run_layer(caches.begin(tagged=True), 0, ranks.queries, ranks.keys, 0)
        assert torch.equal(ranks.merged(), right(ranks, tagged=True)), turn
    assert caches.numbers() == {(0, 1, 3, 0)}


def test_sizes_that_come_once_do_not_push_out_one_that_stays(stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(max_keys=1)
    steady = ranks.scores
    for once in [torch.zeros(12, 4, 64) for _ in range(4)]:
        ranks.scores = steady
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])
        ranks.scores = [once, once]
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (5, 1, 2, 0)


def test_what_is_remembered_is_bounded(stand_in):
    """Of keys without graphs, and of a layer whose K shard moves."""
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=1)
    for once in [torch.zeros(12, 4, 64) for _ in range(100)]:
        ranks.scores = [once, once]
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])
    assert len(cache._keys) == 64
    step, kept = one_rank(ranks, cache), []
    for _ in range(10):
        kept.append(ranks.keys[0].clone())
        for _ in range(2):
            step.run(0, ranks.queries, kept[-1])
    (entry,) = [entry for entry in cache._keys.values() if entry.staging is not None]
    assert len(entry.layers) == 1
    assert numbers(cache) == (110, 10, 0, 0)


def test_batches_of_two_sizes_have_a_query_each(stand_in):
    small, large = Decode(batch(seq_lens=(300, 40)), "torch", "cpu"), Decode(batch(), "torch", "cpu")
    small.plans, small.group = large.plans, large.group
    caches = [Caches(ranks, capture_after=0) for ranks in (small, large)]
    for mine in caches[0].halves, caches[1].halves:
        mine[:] = caches[0].halves
    for turn in range(3):
        for ranks, own in zip((small, large), caches, strict=True):
            ranks.queries = cases.exact(ranks.queries.shape, seed=turn)
            run_layer(own.begin(tagged=True), 0, ranks.queries, ranks.keys, turn % 3)
            assert torch.equal(ranks.merged(), right(ranks, tagged=True))
    assert caches[0].numbers() == {(0, 6, 0, 0)}


@pytest.mark.parametrize("capture_after", [0, 10**6], ids=["replayed", "eager"])
def test_a_query_off_the_alignment_is_refused_by_a_replay_too(capture_after, query_is_copied, stand_in):
    """Or a rank that replays would launch a layer that its eager peer refuses, and wait for it."""
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=capture_after)
    step = one_rank(ranks, cache)
    bytes_ = ranks.queries.flatten().view(torch.uint8)
    off = cases.off_by_one(bytes_).view(cases.FP8).view(ranks.queries.shape)
    for _ in range(2):
        step.run(0, ranks.queries, ranks.keys[0])
        before, stats = snapshot(ranks.group), numbers(cache)
        with pytest.raises(ValueError, match=r"^index_q: must be like the first.*, was .* 1 bytes past"):
            step.run(0, off, ranks.keys[0])
        assert_same(snapshot(ranks.group), before)
        assert numbers(cache) == stats


@pytest.mark.parametrize("debug", [False, True])
def test_a_replay_with_debug_is_compared_with_the_call(debug, stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    prepared = ranks.steps(tagged=True, debug=debug)[0]
    cache = ranks.plans[0].layer_graphs(capture_after=0)
    step = cache.begin_step(decode=Halves(prepared, slice(None, -1)), decode_tokens=ranks.case.tokens)
    for _ in range(2):
        step.run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (0, 1, 1, 0)
    table, lens, counts, scores, output = prepared._buffers
    prepared._buffers = (table, lens, counts, scores.clone(), output)
    if debug:
        before = snapshot(ranks.group)
        with pytest.raises(RuntimeError, match=r"debug: launch 0 of the prepared step"):
            step.run(0, ranks.queries, ranks.keys[0])
        assert_same(snapshot(ranks.group), before)
    else:
        step.run(0, ranks.queries, ranks.keys[0])
    assert cache.stats["replayed_layers"] == (1 if debug else 2)


def test_a_replay_with_debug_of_prefill_is_compared_too(stand_in):
    ranks = Prefill(window(), "torch", "cpu")
    prepared, cache = prefill_step(ranks, debug=True), ranks.plans[0].layer_graphs(capture_after=0)
    step = cache.begin_step(prefill=prepared, exchange=lambda: None)
    for _ in range(2):
        step.run(0, ranks.queries, ranks.keys[0])
    prepared._scratch = ranks.scratch.clone()
    with pytest.raises(RuntimeError, match=r"debug: launch 0 of the prepared step is index_score_sharded"):
        step.run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (0, 1, 1, 0)


def test_a_closed_storage_is_noticed_before_a_replay(stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    step = one_rank(ranks, ranks.plans[0].layer_graphs(capture_after=0))
    step.run(0, ranks.queries, ranks.keys[0])
    ranks.group[0].close()
    with pytest.raises(ValueError, match=r"^comm: must be the receive storage"):
        step.run(0, ranks.queries, ranks.keys[0])


def test_without_graphs_every_layer_is_eager():
    ranks = Decode(batch(), "torch", "cpu")
    caches = Caches(ranks, capture_after=0)
    for step in range(3):
        run_layer(caches.begin(tagged=True), 0, ranks.queries, ranks.keys, step)
        assert torch.equal(ranks.merged(), ranks.truth())
    assert caches.numbers() == {(3, 0, 0, 0)}


def test_a_graph_is_left_alone_while_another_one_is_captured(stand_in, monkeypatch):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=0)
    for capturing in (False, True, False):
        monkeypatch.setattr(graphs, "can_capture", lambda device, capturing=capturing: not capturing)
        one_rank(ranks, cache).run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (1, 1, 1, 0)


@pytest.mark.exchange
def test_a_graph_of_the_caller_holds_calls_steps_and_layer_graphs(backend, device):
    if device == "cpu":
        pytest.skip("a CPU has no graphs")
    ranks = Decode(batch(), backend, device)
    for plan in ranks.plans:
        plan.warmup()
    caches, prepared = Caches(ranks, capture_after=0), ranks.steps(tagged=True)
    run_layer(caches.begin(tagged=True), 0, ranks.queries, ranks.keys, 0)  # graphs that must not be replayed
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for half in ("decode_publish", "decode_merge"):
            for rank, plan in enumerate(ranks.plans):
                arguments = ranks.arguments(rank, tagged=True, slot=1)
                getattr(plan, half)(ranks.queries, ranks.keys[rank], *ranks.buffers(rank), **arguments)
        run_in_turn(
            [step.record(ranks.queries, k, slot=2) for step, k in zip(prepared, ranks.keys, strict=True)]
        )
        run_layer(caches.begin(tagged=True), 0, ranks.queries, ranks.keys, 0)
    assert caches.numbers() == {(1, 1, 0, 0)}
    for seed in range(3):
        ranks.queries.copy_(cases.exact(ranks.queries.shape, seed=seed))
        for output in ranks.outputs:
            output.fill_(-7)
        graph.replay()
        assert torch.equal(ranks.merged(), right(ranks, tagged=True))


def test_a_replay_refuses_a_layer_unlike_the_first(stand_in):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=0)
    step = one_rank(ranks, cache)
    step.run(0, ranks.queries, ranks.keys[0])
    with pytest.raises(ValueError, match=r"^index_q: must be like the first layer's"):
        step.run(0, ranks.queries.float(), ranks.keys[0])
    with pytest.raises(ValueError, match=r"^index_q: .* on meta"):
        step.run(0, ranks.queries.to("meta"), ranks.keys[0])
    with pytest.raises(ValueError, match=r"^index_k: must be like the first layer's"):
        step.run(0, ranks.queries, ranks.keys[0][1:])
    assert numbers(cache) == (0, 1, 0, 0)


def test_a_capture_that_fails_leaves_no_graph(stand_in, monkeypatch):
    ranks = Decode(batch(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs(capture_after=0)
    step = one_rank(ranks, cache)

    def refuse(body, device):
        raise RuntimeError("topk_select_publish is not loaded")

    with monkeypatch.context() as patched:
        patched.setattr(graphs, "capture", refuse)
        with pytest.raises(RuntimeError, match="not loaded"):
            step.run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (0, 0, 0, 0)
    step.run(0, ranks.queries, ranks.keys[0])
    assert numbers(cache) == (0, 1, 0, 0)


# ---------------------------------------------------------------- decode and prefill together


@pytest.mark.prefill
@pytest.mark.exchange
def test_decode_rows_come_first(backend, device, stand_in):
    """A layer of both; its exchange is part of the graph. Of all ranks of a process, as one rank's step."""
    interpreted_only_if(False, backend, device)
    decode = Decode(batch(init_blocks=1, local_blocks=1), backend, device)
    prefill = Prefill(window(), backend, device)
    prefill.plans = decode.plans
    for plan in decode.plans:
        plan.warmup()
    planned = prefill.window_plans()
    steps = [
        plan.prepare_prefill_step(
            [(0, 8, prefill.table, planned[rank])],
            prefill.scratch,
            prefill.num_valid,
            prefill.carriers[rank],
            prefill.received[rank],
            prefill.outputs[rank],
        )
        for rank, plan in enumerate(prefill.plans)
    ]
    # One K shard for both: the pages of the window, then those of the decode batch.
    keys = [joined(*both) for both in zip(prefill.keys, decode.keys, strict=True)]
    decode.table = decode.table + prefill.keys[0].shape[0]
    caches = [plan.layer_graphs(capture_after=1) for plan in decode.plans]
    publishes = decode.steps(tagged=True)
    count = decode.case.tokens
    for turn in range(3):  # one after the other, so that one slot set will do
        decode.queries, prefill.queries = decode.queries.clone(), prefill.queries.clone()
        queries = joined(decode.queries, prefill.queries)
        for rank in (0, 1):
            # Both ranks share a thread: rank 1's exchange moves the rows of both, rank 0's none.
            def move(rank=rank):
                if rank:
                    msa_icp.exchange_prefill(prefill.carriers, prefill.received)

            step = caches[rank].begin_step(
                decode=Halves(publishes[rank], slice(None, -1)),
                prefill=steps[rank],
                exchange=lambda move=move: stand_in.do(move),
                exchange_key=("in process", rank),
                decode_tokens=count,
            )
            step.run(0, queries, keys[rank], slot=0)
        for rank in (0, 1):
            publishes[rank].record(decode.queries, keys[rank], slot=0)[-1]()
        steps[0].merge()  # rank 0 merged before rank 1 had sent
        assert torch.equal(decode.merged(), decode.truth())
        assert torch.equal(prefill.merged(), prefill.truth())
        for memory in (*prefill.outputs, *prefill.received, *prefill.carriers, *decode.outputs):
            memory.fill_(turn)
    assert [numbers(cache) for cache in caches] == [(1, 1, 1, 0)] * 2


PREFILL_MOVED = {
    "nothing": ({}, False),
    "score_scratch": ({"score_scratch": lambda r: r.scratch.clone()}, True),
    "num_valid_pages": ({"num_valid_pages": lambda r: r.num_valid.clone()}, True),
    "send": ({"send": lambda r: r.carriers[0].clone()}, True),
    "received": ({"received": lambda r: r.received[0].clone()}, True),
    "output": ({"output": lambda r: r.outputs[0].clone()}, True),
    "table": ({"windows": lambda r: [(0, 8, r.table.clone(), r.window_plan())]}, True),
    "plan": ({"windows": lambda r: [(0, 8, r.table, longer(r))]}, True),
    "exchange_key": ({}, True),
}


def longer(ranks):
    """The same window, planned for longer contexts."""
    plan, case = ranks.plans[0], ranks.case
    sizes = {"total_q": 8, "max_query_len": 8, "max_seq_len": case.max_seq_len + 128}
    return plan.prefill_window_plan(0, **case.metadata(), **sizes)


@pytest.mark.parametrize("what", PREFILL_MOVED)
def test_what_makes_another_key_of_prefill(what, stand_in):
    ranks = Prefill(window(), "torch", "cpu")
    cache = ranks.plans[0].layer_graphs()
    changes, another = PREFILL_MOVED[what]

    def run(slot, **moved):
        step = prefill_step(ranks, **moved)
        key = "other" if what == "exchange_key" and slot == 2 else "same"
        begun = cache.begin_step(prefill=step, exchange=lambda: None, exchange_key=key)
        begun.run(0, ranks.queries, ranks.keys[0], slot=slot)  # a slot set is the decode step's alone

    run(0)
    run(1)
    assert numbers(cache) == (1, 1, 0, 0)
    run(2, **{name: make(ranks) for name, make in changes.items()})
    assert numbers(cache) == ((2, 1, 0, 0) if another else (1, 1, 1, 0))


def joined(*tensors):
    """Tensors of fp8, one after the other."""
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(cases.FP8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "prefill, decode"),
        ({"decode": 1, "exchange": 1, "decode_tokens": 6}, "exchange"),
        ({"prefill": 1}, "exchange"),
        ({"decode": 1}, "decode_tokens"),
        ({"decode": 1, "decode_tokens": 5}, "decode_tokens"),
        ({"prefill": 1, "exchange": 1, "decode_tokens": 6}, "decode_tokens"),
    ],
)
def test_parts_that_do_not_fit(arguments, named):
    ranks, windows = Decode(batch(), "torch", "cpu"), Prefill(window(), "torch", "cpu")
    plan = ranks.plans[0]
    made = {
        "decode": lambda: ranks.steps(tagged=True)[0],
        "prefill": lambda: plan.prepare_prefill_step(
            [(0, 8, windows.table, windows.window_plans()[0])],
            windows.scratch,
            windows.num_valid,
            windows.carriers[0],
            windows.received[0],
            windows.outputs[0],
        ),
        "exchange": lambda: lambda: None,
    }
    given = {name: made[name]() if name in made else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=rf"^{named}: must be"):
        plan.layer_graphs().begin_step(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("decode", 5), ("prefill", 5), ("exchange", 5), ("exchange_key", [])],
)
def test_what_is_no_step_is_named(name, value):
    ranks, windows = Decode(batch(), "torch", "cpu"), Prefill(window(), "torch", "cpu")
    windows.plans = ranks.plans
    given = {"prefill": prefill_step(windows), "exchange": lambda: None, name: value}
    with pytest.raises(ValueError, match=rf"^{name}: must be"):
        ranks.plans[0].layer_graphs().begin_step(**given)


def test_a_step_of_the_other_kind_is_named():
    """A decode step for prefill, or the other way round, is refused here, not in its first layer."""
    ranks, windows = Decode(batch(), "torch", "cpu"), Prefill(window(), "torch", "cpu")
    windows.plans = ranks.plans
    decode, prefill = ranks.steps(tagged=True)[0], prefill_step(windows)
    cache = ranks.plans[0].layer_graphs()
    with pytest.raises(ValueError, match=r"^prefill: must be a prepared prefill step.*MSAIcpDecodeStep"):
        cache.begin_step(prefill=decode, exchange=lambda: None)
    with pytest.raises(ValueError, match=r"^decode: must be a prepared decode step.*MSAIcpPrefillStep"):
        cache.begin_step(decode=prefill, decode_tokens=8)
    cache.begin_step(decode=decode, prefill=prefill, exchange=lambda: None, decode_tokens=6)


def test_steps_of_another_indexer_are_refused():
    ours, other = Decode(batch(), "torch", "cpu"), Decode(batch(), "torch", "cpu")
    with pytest.raises(ValueError, match=r"^decode: must be a prepared decode step.*another indexer"):
        ours.plans[0].layer_graphs().begin_step(decode=other.steps(tagged=True)[0], decode_tokens=6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("layer", None), ("layer", []), ("slot", 3), ("slot", "0"), ("index_q", None), ("index_q", "more")],
)
def test_a_wrong_argument_of_a_layer_is_named(name, value):
    ranks = Decode(batch(), "torch", "cpu")
    step = one_rank(ranks, ranks.plans[0].layer_graphs())
    call = {"layer": 0, "index_q": ranks.queries, "index_k": ranks.keys[0], "slot": 0}
    call[name] = joined(ranks.queries, ranks.queries) if value == "more" else value
    with pytest.raises(ValueError, match=rf"^{name}: must be"):
        step.run(**call)


def test_what_layer_graphs_were_made_with_can_be_read():
    plan = plan_of()
    cache = plan.layer_graphs(capture_after=3, max_keys=5)
    assert cache.indexer is plan
    assert (cache.capture_after, cache.max_keys, cache.device) == (3, 5, plan.device)
    for name in ("indexer", "capture_after", "max_keys"):
        with pytest.raises(AttributeError):
            setattr(cache, name, 1)


@pytest.mark.parametrize(("name", "value"), [("capture_after", -1), ("max_keys", 0), ("max_keys", True)])
def test_a_wrong_option_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: must be an integer"):
        plan_of().layer_graphs(**{name: value})
