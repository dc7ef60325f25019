"""Prepared steps: every layer does what the call would; only the first is checked like one (section 8)."""

from __future__ import annotations

import threading

import pytest
import torch
from facade import Decode, Prefill, run_in_turn
from helpers import HEADS, SHORT_SPIN, assert_same, interpreted_only_if, snapshot
from test_indexer import batch, comm_of, window

import msa_icp
from msa_icp import cases, dispatch, indexer, launches, verify
from msa_icp.cases import bits
from msa_icp.prefill_cases import prefill_case

forms = pytest.mark.parametrize("tagged", [False, True])


def layer_inputs(ranks, layer):
    """Another query, and other K shards, of the same shapes."""
    queries = cases.exact(ranks.queries.shape, seed=layer).to(ranks.device)
    keys = [
        cases.exact(k.shape, seed=100 * layer + rank).to(ranks.device) for rank, k in enumerate(ranks.keys)
    ]
    return queries, [strided_like(new, old) for new, old in zip(keys, ranks.keys, strict=True)]


def strided_like(new, old):
    """`new` with the page pitch of `old`, in memory of its own."""
    memory = torch.empty_strided(old.shape, old.stride(), dtype=torch.uint8, device=old.device)
    return memory.copy_(new.view(torch.uint8)).view(cases.FP8)


# ---------------------------------------------------------------- decode


@forms
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.exchange
def test_layers_are_those_of_the_call(backend, device, tagged, pool):
    slow = verify.is_slow(backend, device)
    interpreted_only_if(tagged != pool, backend, device)
    lens = (300, 40) if slow else (300, 40, 2100)
    prepared, called = (Decode(batch(2, 256, lens), backend, device) for _ in range(2))
    memory = torch.zeros(12 * 4 * 128 * 16 * 8, dtype=torch.uint8, device=device) if pool else None
    steps = prepared.steps(tagged=tagged, pool=memory, debug=True)
    for layer in range(2 if slow else 5):
        queries, keys = layer_inputs(prepared, layer)
        slot = layer % 3
        run_in_turn([step.record(queries, own, slot=slot) for step, own in zip(steps, keys, strict=True)])
        called.queries, called.keys = queries, keys
        assert torch.equal(prepared.merged(), called.call(tagged=tagged, slot=slot, pool=memory))
    assert_same(snapshot(prepared.group), snapshot(called.group))


@pytest.mark.exchange
def test_only_the_first_layer_of_a_slot_set_is_checked_as_a_call(backend, device, monkeypatch):
    ranks = Decode(batch(), backend, device)
    step = ranks.steps(tagged=True)[0]
    calls = []
    chain = indexer.chains.decode
    monkeypatch.setattr(indexer.chains, "decode", lambda *a, **k: calls.append(k["slot"]) or chain(*a, **k))
    for layer in range(7):
        step.record(ranks.queries, ranks.keys[0], slot=layer % 3)
    assert calls == [0, 1, 2]


def test_run_launches_and_record_does_not():
    ranks = Decode(batch(), "torch", "cpu", spin_limit=SHORT_SPIN)
    step = ranks.steps(tagged=True)[0]
    before = snapshot(ranks.group)
    recorded = step.record(ranks.queries, ranks.keys[0], slot=0)
    assert [one.name for one in recorded] == [
        "decode_index_score_sharded",
        "topk_select_publish",
        "merge_candidates",
    ]
    assert_same(snapshot(ranks.group), before)
    step.run(ranks.queries, ranks.keys[0], slot=0)
    assert ranks.group[1].tagged_recv[0, 0].any()
    assert ranks.group[0].errors[0] > 0  # nobody else was there


def test_a_recorded_list_is_the_callers():
    """What is done to it changes no layer; the launches in it are those of every layer of the slot set."""
    ranks = Decode(batch(), "torch", "cpu", spin_limit=SHORT_SPIN)
    step = ranks.steps(tagged=True)[0]
    first = step.record(ranks.queries, ranks.keys[0], slot=0)
    kept = list(first)
    first.clear()
    again = step.record(ranks.queries, ranks.keys[0], slot=0)
    assert all(a is b for a, b in zip(again, kept, strict=True))
    again.clear()
    step.run(ranks.queries, ranks.keys[0], slot=0)
    assert ranks.group[1].tagged_recv[0, 0].any()


def test_recorded_lists_of_prefill_are_the_callers():
    ranks = Prefill(window(), "torch", "cpu")
    step = prefill_step(ranks)
    for record in (
        lambda: step.record(ranks.queries, ranks.keys[0]),
        lambda: step.record_local(ranks.queries, ranks.keys[0]),
        step.record_merge,
    ):
        first = record()
        kept = list(first)
        first.clear()
        assert kept
        assert all(a is b for a, b in zip(record(), kept, strict=True))


@pytest.mark.exchange
def test_a_layer_reads_what_the_buffers_hold_then(backend, device):
    """A step is prepared once; the metadata of the next batch is written into the same tensors."""
    ranks = Decode(batch(seq_lens=(300, 40, 2100)), backend, device)
    steps = ranks.steps(tagged=True)
    for step, keys in zip(steps, ranks.keys, strict=True):
        step.record(ranks.queries, keys, slot=0)
    later = Decode(batch(seq_lens=(2100, 40, 300)), backend, device)
    ranks.table.copy_(later.table)
    ranks.lens.copy_(later.lens)
    ranks.num_valid.copy_(later.num_valid)
    run_in_turn([step.record(later.queries, k, slot=0) for step, k in zip(steps, later.keys, strict=True)])
    assert torch.equal(ranks.merged(), later.truth())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("index_q", lambda q, k: (q[:4], k)),
        ("index_q", lambda q, k: (q.view(torch.uint8), k)),
        ("index_q", lambda q, k: (q.transpose(0, 1).contiguous().transpose(0, 1), k)),
        (
            "index_q",
            lambda q, k: (cases.off_by_one(q.flatten().view(torch.uint8)).view(cases.FP8).view(q.shape), k),
        ),
        ("index_q", lambda q, k: (q.to("meta"), k)),
        ("index_q", lambda q, k: (None, k)),
        ("index_k", lambda q, k: (q, k[1:])),
        ("index_k", lambda q, k: (q, k.repeat_interleave(2, 0)[::2])),
        ("index_k", lambda q, k: (q, k.float())),
        ("index_k", lambda q, k: (q, [k])),
    ],
)
@pytest.mark.exchange
def test_a_layer_unlike_the_first_is_refused(backend, device, name, change):
    ranks = Decode(batch(), backend, device)
    step = ranks.steps(tagged=True)[0]
    step.record(ranks.queries, ranks.keys[0], slot=0)
    before = snapshot(ranks.group)
    for slot in (0, 1):
        with pytest.raises(ValueError, match=rf"^{name}: must be like the first layer's"):
            step.run(*change(ranks.queries, ranks.keys[0]), slot=slot)
    assert_same(snapshot(ranks.group), before)


def test_a_first_layer_that_is_refused_is_no_first_layer():
    ranks = Decode(batch(), "torch", "cpu")
    step = ranks.steps(tagged=True)[0]
    with pytest.raises(ValueError, match=r"^index_q: must be of shape"):
        step.run(ranks.queries[:, :2], ranks.keys[0], slot=0)
    with pytest.raises(ValueError, match=r"^slot: must be an integer from 0 to 2, was 3"):
        step.run(ranks.queries, ranks.keys[0], slot=3)
    assert len(step.record(ranks.queries, ranks.keys[0], slot=0)) == 3
    with pytest.raises(ValueError, match=r"^slot"):
        step.run(ranks.queries, ranks.keys[0], slot=-1)
    assert len(step.record(ranks.queries, ranks.keys[0], slot=1)) == 3


@pytest.mark.exchange
def test_debug_finds_a_buffer_that_moved(backend, device):
    ranks = Decode(batch(), backend, device)
    comm = comm_of(ranks.group[0])
    buffers = ranks.buffers(0)
    step, blind = (
        ranks.plans[0].prepare_decode_step(
            *buffers, **ranks.arguments(0, tagged=True, comm=comm, debug=debug)
        )
        for debug in (True, False)
    )
    for each in (step, blind):
        each.record(ranks.queries, ranks.keys[0], slot=0)
        each.record(ranks.queries.clone(), ranks.keys[0], slot=0)
    comm.errors = comm.errors.clone()
    blind.record(ranks.queries, ranks.keys[0], slot=0)
    with pytest.raises(RuntimeError, match=r"debug: launch 1 of the prepared step"):
        step.run(ranks.queries, ranks.keys[0], slot=0)


@pytest.mark.parametrize("missed", ["query", "keys"])
@pytest.mark.exchange
def test_debug_finds_a_layer_with_the_query_or_the_keys_of_another(backend, device, missed, monkeypatch):
    """Of a launch that is bound to half of its layer."""
    ranks = Decode(batch(), backend, device)
    step = ranks.steps(tagged=True, debug=True)[0]
    step.record(ranks.queries, ranks.keys[0], slot=0)
    first, bind = (ranks.queries, ranks.keys[0]), launches.Launch.bind

    def half(one, queries, keys):
        bind(one, first[0] if missed == "query" else queries, first[1] if missed == "keys" else keys)

    monkeypatch.setattr(launches.Launch, "bind", half)
    (queries, keys), before = layer_inputs(ranks, 1), snapshot(ranks.group)
    with pytest.raises(RuntimeError, match=r"debug: launch 0 of the prepared step"):
        step.run(queries, keys[0], slot=0)
    assert_same(snapshot(ranks.group), before)


def test_a_closed_storage_is_noticed_before_a_launch():
    ranks = Decode(batch(), "torch", "cpu")
    step = ranks.steps(tagged=True)[0]
    step.publish(ranks.queries, ranks.keys[0], slot=0)
    ranks.group[0].close()
    for use in (
        lambda: step.run(ranks.queries, ranks.keys[0], slot=0),
        lambda: step.publish(ranks.queries, ranks.keys[0], slot=0),
        lambda: step.merge(slot=0),
    ):
        with pytest.raises(ValueError, match=r"^comm: must be the receive storage that .*, was closed"):
            use()


@pytest.mark.parametrize("slot", [True, 1.0, [0], None, "0"])
def test_a_slot_is_an_integer_with_and_without_launches_for_it(slot):
    ranks = Decode(batch(), "torch", "cpu")
    step = ranks.steps(tagged=True)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^slot: must be an integer from 0 to 2"):
            step.record(ranks.queries, ranks.keys[0], slot=slot)
        step.record(ranks.queries, ranks.keys[0], slot=1)
    with pytest.raises(ValueError, match=r"^slot: must be an integer from 0 to 2"):
        step.merge(slot=slot)


@pytest.mark.parametrize("output", [None, torch.zeros(6, 2, 15, dtype=torch.int32), torch.zeros(6, 2, 16)])
def test_a_wrong_output_is_named_when_the_step_is_prepared(output):
    ranks = Decode(batch(), "torch", "cpu")
    ranks.outputs[0] = output
    with pytest.raises(ValueError, match=r"^output: must be"):
        ranks.steps(tagged=True)


# ---------------------------------------------------------------- prefill


def run_prefill(ranks, steps):
    """A layer of prepared steps; what the ranks merged."""
    for step, keys in zip(steps, ranks.keys, strict=True):
        step.local(ranks.queries, keys)
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    for step in steps:
        step.merge()
    return ranks.merged()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.prefill
@pytest.mark.exchange
def test_prefill_layers(backend, device, fused):
    ranks = Prefill(window(2, 256), backend, device)
    windows = [[(0, 8, ranks.table, plan)] for plan in ranks.window_plans()]
    pool = {"pool": ranks.pool} if fused else {}
    steps = [
        plan.prepare_prefill_step(
            windows[rank],
            None if fused else ranks.scratch,
            ranks.num_valid,
            ranks.carriers[rank],
            ranks.received[rank],
            ranks.outputs[rank],
            debug=True,
            **pool,
        )
        for rank, plan in enumerate(ranks.plans)
    ]
    assert torch.equal(run_prefill(ranks, steps), ranks.truth())
    ranks.queries = cases.exact(ranks.queries.shape, seed=9).to(device)
    first = [strided_like(cases.exact(k.shape, seed=5 + r).to(device), k) for r, k in enumerate(ranks.keys)]
    ranks.keys = first
    again = run_prefill(ranks, steps)
    before = [bits(carrier) for carrier in ranks.carriers]
    for rank, plan in enumerate(ranks.plans):
        plan.prefill_local(
            ranks.queries,
            first[rank],
            ranks.table,
            windows[rank][0][3],
            None if fused else ranks.scratch,
            ranks.num_valid,
            ranks.carriers[rank],
            **pool,
        )
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, ranks.carriers, strict=True))
    assert [len(step.record(ranks.queries, own)) for step, own in zip(steps, first, strict=True)]
    assert not torch.equal(again, ranks.truth() + 1)


CUDA_DEVICES = [d for d in ("cpu", "cuda") if msa_icp.backends(d)["cuda"] is None]


@pytest.mark.parametrize("device", CUDA_DEVICES, ids=lambda device: f"cuda-{device}")
@pytest.mark.parametrize("fused", [False, True])
def test_prefill_layers_of_several_backends(monkeypatch, device, fused):
    """As "cake" is on a Hopper GPU: `cuda` scores, selects and merges; plan and fused form are another's."""
    monkeypatch.setattr(dispatch, "_by_preference", lambda device: dispatch.NAMES)
    monkeypatch.setattr(dispatch, "_found", {})
    ops = ("index_score_sharded", "topk_select_prefill", "merge_candidates")
    others = ("index_score_sharded_plan_device", "prefill_score_select")
    for op in ops + others:
        chosen = dispatch.implementation(op, "cake", torch.device(device))
        assert ("cuda_backend" in chosen.__module__) == (op in ops), op
    test_prefill_layers("cake", device, fused)


@pytest.mark.prefill
@pytest.mark.exchange
def test_windows_take_their_rows(backend, device):
    """Two windows of one query: each has its rows of the query, the counts and the carrier."""
    interpreted_only_if(False, backend, device)
    whole = Prefill(prefill_case("", 2, 128, qo_lens=(5, 3), kv_lens=(700, 40)), backend, device)
    halves = Prefill(whole.case, backend, device, max_num_batched_tokens=8192, max_model_len=1 << 20)
    assert halves.plans[0].max_prefill_windows > 1
    windows = [[(0, 8, whole.table, plan)] for plan in whole.window_plans()]
    one_window = [
        plan.prepare_prefill_step(
            windows[rank],
            whole.scratch,
            whole.num_valid,
            whole.carriers[rank],
            whole.received[rank],
            whole.outputs[rank],
        )
        for rank, plan in enumerate(whole.plans)
    ]
    expected = run_prefill(whole, one_window)
    parts, steps = ((0, 5, 0), (5, 8, 1)), []
    for rank, plan in enumerate(halves.plans):
        windows = []
        for number, (start, end, segment) in enumerate(parts):
            one = slice(segment, segment + 1)
            lens, counts = whole.case.kv_lens[one].to(device), whole.case.qo_lens[one].to(device)
            offsets = [torch.nn.functional.pad(t, (1, 0)) for t in (counts, lens)]
            planned = plan.prefill_window_plan(
                number,
                counts,
                lens,
                *offsets,
                whole.case.qo_offset[one].to(device),
                total_q=end - start,
                max_query_len=end - start,
                max_seq_len=700,
            )
            windows.append((start, end, halves.table[one], planned))
        steps.append(
            plan.prepare_prefill_step(
                windows,
                halves.scratch,
                halves.num_valid,
                halves.carriers[rank],
                halves.received[rank],
                halves.outputs[rank],
                debug=True,
            )
        )
    assert torch.equal(run_prefill(halves, steps), expected)


@pytest.mark.parametrize(
    ("windows", "named"),
    [
        ([], "windows"),
        ([(0, 0)], r"windows\[0\] end"),
        ([(-1, 4)], r"windows\[0\] start"),
        ([(0, 9)], r"windows\[0\] end"),
        ([(4, 8), (0, 4)], r"windows\[1\] start"),
        ([(0, 5), (4, 8)], r"windows\[1\] start"),
        ([(0, 8), (8, 8)], r"windows\[1\] start"),
    ],
)
def test_windows_are_ordered_disjoint_and_not_empty(windows, named):
    ranks = Prefill(window(), "torch", "cpu")
    plan = ranks.window_plans()[0]
    with pytest.raises(ValueError, match=rf"^{named}: must be"):
        ranks.plans[0].prepare_prefill_step(
            [(*rows, ranks.table, plan) for rows in windows],
            ranks.scratch,
            ranks.num_valid,
            ranks.carriers[0],
            ranks.received[0],
            ranks.outputs[0],
        )


def test_windows_planned_in_one_place_are_refused():
    """The plan of the second has overwritten the first one's; a plan that serves two windows has not."""
    limits = {"max_num_batched_tokens": 8192, "max_model_len": 1 << 20}
    ranks = Prefill(prefill_case("", 2, 128, qo_lens=(4,), kv_lens=(700,)), "torch", "cpu", **limits)

    def planned(number):
        names = (
            "qo_segment_lens",
            "kv_segment_lens",
            "qo_segment_offsets",
            "kv_segment_offsets",
            "qo_offset",
        )
        metadata = [ranks.case.metadata()[name] for name in names]
        return ranks.plans[0].prefill_window_plan(
            number, *metadata, total_q=4, max_query_len=4, max_seq_len=700
        )

    def step(*plans):
        carrier = torch.zeros(HEADS, 4 * len(plans), 33, dtype=torch.int32)
        counts = torch.zeros(4 * len(plans), dtype=torch.int32)
        windows = [(4 * i, 4 * i + 4, ranks.table, plan) for i, plan in enumerate(plans)]
        rest = (carrier.view(2, 2, -1, 33), torch.zeros(4 * len(plans), 2, 16, dtype=torch.int32))
        ranks.plans[0].prepare_prefill_step(windows, ranks.scratch, counts, carrier, *rest)

    one = planned(0)
    step(one, planned(1), one)
    message = r"^windows\[2\] plan: must be in storage of its own .*planned over that of windows\[0\]$"
    with pytest.raises(ValueError, match=message):
        step(one, planned(1), planned(0))


def prefill_step(ranks, **changes):
    """Rank 0's step, of one window."""
    arguments = {
        "windows": [(0, 8, ranks.table, ranks.window_plan())],
        "score_scratch": ranks.scratch,
        "num_valid_pages": ranks.num_valid,
        "send": ranks.carriers[0],
        "received": ranks.received[0],
        "output": ranks.outputs[0],
    }
    return ranks.plans[0].prepare_prefill_step(**{**arguments, **changes})


def test_what_a_prefill_step_holds_can_be_read():
    """An exchange may take its buffers from the step; what is set there would come too late."""
    ranks = Prefill(window(), "torch", "cpu")
    plans = ranks.window_plans()
    given = {
        "windows": ((0, 8, ranks.table, plans[0]),),
        "score_scratch": ranks.scratch,
        "num_valid_pages": ranks.num_valid,
        "output": ranks.outputs[0],
        "debug": True,
    }
    steps = [
        plan.prepare_prefill_step(
            **{**given, "windows": [(0, 8, ranks.table, plans[rank])], "output": ranks.outputs[rank]},
            send=ranks.carriers[rank],
            received=ranks.received[rank],
        )
        for rank, plan in enumerate(ranks.plans)
    ]
    for step, keys in zip(steps, ranks.keys, strict=True):
        step.local(ranks.queries, keys)
    msa_icp.exchange_prefill([step.send for step in steps], [step.received for step in steps])
    for step in steps:
        step.merge()
    assert torch.equal(ranks.merged(), ranks.truth())
    for name, value in {**given, "tokens": 8}.items():
        found = getattr(steps[0], name)
        assert found is value or found == value, name
    for name in (*given, "send", "received", "tokens"):
        with pytest.raises(AttributeError):
            setattr(steps[0], name, None)


def test_what_a_decode_step_holds_can_be_read():
    ranks = Decode(batch(), "torch", "cpu")
    step = ranks.steps(tagged=True, debug=True)[0]
    assert (step.debug, step.tokens) == (True, 6)
    assert step.output is ranks.outputs[0]
    for name in ("debug", "tokens", "output"):
        with pytest.raises(AttributeError):
            setattr(step, name, None)


@pytest.mark.parametrize("windows", [5, "windows", [None], [(0, 8)], [(0, 8, None, None)]])
def test_malformed_windows_are_refused(windows):
    with pytest.raises(ValueError, match=r"^windows(\[0\])?( plan)?: must be"):
        prefill_step(Prefill(window(), "torch", "cpu"), windows=windows)


def test_windows_may_come_from_a_generator():
    ranks = Prefill(window(), "torch", "cpu")
    one = (0, 8, ranks.table, ranks.window_plans()[0])
    step = prefill_step(ranks, windows=(w for w in [one]))
    assert len(step.record(ranks.queries, ranks.keys[0])) == 3


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("send", None, "send"),
        ("send", torch.zeros(4, 7, 33, dtype=torch.int32), "send"),
        ("received", torch.zeros(4, 1, 8, 33, dtype=torch.int32), "received"),
        ("output", torch.zeros(8, 2, 8, dtype=torch.int32), "output"),
        ("score_scratch", torch.zeros(8, 4, 1), "score_scratch"),
        ("pool", torch.zeros(8, dtype=torch.uint8), "pool"),
    ],
)
def test_the_first_layer_of_prefill_checks_both_halves_before_it_launches(name, value, named):
    ranks = Prefill(window(), "torch", "cpu")
    step, before = prefill_step(ranks, **{name: value}), ranks.carriers[0].clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{named}[\.\[:]"):
            step.local(ranks.queries, ranks.keys[0])
    assert torch.equal(ranks.carriers[0], before)


def test_a_first_prefill_layer_that_is_refused_is_no_first_layer():
    ranks = Prefill(window(), "torch", "cpu")
    step = prefill_step(ranks)
    with pytest.raises(ValueError, match=r"^index_k"):
        step.local(ranks.queries, ranks.keys[0][:, 1:])
    step.local(ranks.queries, ranks.keys[0])


@pytest.mark.parametrize(("name", "value"), [("debug", 3), ("unknown", 1)])
def test_a_wrong_option_of_a_prefill_step_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: must be"):
        prefill_step(Prefill(window(), "torch", "cpu"), **{name: value})


def test_prefill_debug_finds_a_buffer_that_was_replaced():
    ranks = Prefill(window(), "torch", "cpu")
    step = prefill_step(ranks, debug=True)
    step.local(ranks.queries, ranks.keys[0])
    step._scratch = ranks.scratch.clone()
    with pytest.raises(RuntimeError, match=r"debug: launch 0 of the prepared step is index_score_sharded"):
        step.local(ranks.queries, ranks.keys[0])


def test_prefill_debug_finds_a_plan_that_changed():
    ranks = Prefill(window(), "torch", "cpu")
    step = prefill_step(ranks, debug=True)
    step.local(ranks.queries, ranks.keys[0])
    step.merge()
    with pytest.raises(ValueError, match=r"^index_q: must be like the first layer's"):
        step.local(ranks.queries[:4], ranks.keys[0])
    ranks.plans[0].prefill_errors = torch.zeros(4, dtype=torch.int32)
    step.local(ranks.queries, ranks.keys[0])
    with pytest.raises(RuntimeError, match=r"debug: launch 0 of the prepared step is merge_candidates"):
        step.merge()


# ---------------------------------------------------------------- recording


def test_recording_is_of_one_thread_and_ends():
    seen = []
    with launches.recording() as outer:
        with launches.recording() as inner:
            thread = threading.Thread(target=lambda: seen.append(launches.recorder.launches))
            thread.start()
            thread.join()
            assert launches.recorder.launches is inner
        assert launches.recorder.launches is outer
        with pytest.raises(KeyError), launches.recording():
            raise KeyError
        assert launches.recorder.launches is outer
    assert launches.recorder.launches is None
    assert seen == [None]


def test_a_key_tells_memory_numbers_and_windows_apart():
    tensor = torch.zeros(4, 4)

    def launch(*arguments, name="op", grid=(), window=None):
        one = launches.Launch(name, lambda *_: None, arguments, grid=grid, takes_query=False, addresses=False)
        one.window = window
        return one.key()

    same = launch(tensor, 3)
    assert same == launch(tensor.view(4, 4), 3)
    others = [
        launch(tensor.clone(), 3),
        launch(tensor[:2], 3),
        launch(tensor.t(), 3),
        launch(tensor.view(torch.int32), 3),
        launch(tensor, 4),
        launch(tensor, 3, name="other"),
        launch(tensor, 3, grid=(1,)),
        launch(tensor, 3, window=(0, 1)),
        launch(tensor, {"n": 3}),
    ]
    assert same not in others
    assert len(set(others)) == len(others)
