"""The facade: its sizes, its checks, and that it does what the single functions do (contract, section 8)."""

from __future__ import annotations

import functools
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
from facade import LIMITS, Decode, Prefill, plan_of
from helpers import HEADS, SHORT_SPIN, assert_same, interpreted_only_if, snapshot

import msa_icp
from msa_icp import cases, indexer
from msa_icp.cases import LAYOUTS, bits
from msa_icp.prefill_cases import prefill_case

layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
forms = pytest.mark.parametrize("tagged", [False, True])


def batch(world_size=2, page_size=128, seq_lens=(300, 40, 2100), query_len=2, **rest):
    """Exact sums, so that every backend selects what the reference does."""
    lens = {"seq_lens": seq_lens, "decode_query_len": query_len}
    return cases.decode_case("", world_size, page_size, **lens, **rest)


def window(world_size=2, page_size=128):
    lens = {"qo_lens": (5, 0, 3), "kv_lens": (700, 0, 40)}
    return prefill_case("", world_size, page_size, **lens, init_blocks=1, local_blocks=1)


# ---------------------------------------------------------------- limits and sizes


def test_attributes():
    plan = plan_of(3, 4, 256)
    for name, value in LIMITS.items():
        assert getattr(plan, name) == value
    assert (plan.rank, plan.world_size, plan.page_size, plan.heads_per_rank) == (3, 4, 256, 1)
    assert (plan.index_scale, plan.index_offset) == (2, 1)
    assert plan.comm_layout == msa_icp.msa_icp_comm_layout(4, 1, 12)
    assert plan.decode_score_columns == 32  # 8192 keys in pages of 256
    assert plan.prefill_score_columns == 32
    assert (plan.fused_decode_min_batch, plan.pool) == (None, None)
    assert (plan.fused_prefill, plan.prefill_short_tokens) == (False, 0)
    assert plan.prefill_errors.tolist() == [0] * 4
    assert plan.device == torch.device("cpu")
    sizes = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=300, batch=8, device="cpu")
    assert plan.work_ranges.shape == (plan.max_prefill_windows, sizes["work_range_numel"])
    assert plan.work_info.shape == (plan.max_prefill_windows, sizes["work_info_numel"])
    assert plan.plan_workspace.numel() == sizes["workspace_bytes"]


@pytest.mark.parametrize(
    ("page_size", "longest", "batched", "scratch", "windows"),
    [
        # 8192 columns of P = 128: 256 MiB // (5 * 4 * 8192) = 1638, and down to 1536.
        (128, 1 << 20, 8192, (1536, 4, 8192), 6),
        (256, 1 << 20, 8192, (3200, 4, 4096), 3),
        (128, 1 << 17, 8192, (8192, 4, 1024), 1),
        (128, 1 << 17, 100, (100, 4, 1024), 1),
        (128, 129, 20000, (8192, 4, 16), 3),
    ],
)
def test_scratch_and_windows(page_size, longest, batched, scratch, windows):
    plan = plan_of(page_size=page_size, max_model_len=longest, max_num_batched_tokens=batched)
    assert plan.prefill_scratch_shape() == scratch == plan.prefill_scratch_shape(longest)
    assert plan.max_prefill_windows == windows
    assert plan.prefill_window_tokens() == min(8192, batched)
    assert plan.prefill_carrier_shape() == (2, 4, batched, 33)
    assert plan.decode_scores_shape() == (12, 4, min(8192, -(-longest // (4 * page_size)) * 4))
    pool = msa_icp.msa_icp_prefill_pool_bytes(total_q=min(8192, batched), batch=8, device="cpu")
    assert plan.prefill_pool_shape() == (pool,)


def test_shorter_contexts_have_longer_windows():
    plan = plan_of(max_model_len=1 << 20, max_num_batched_tokens=8192)
    assert plan.prefill_scratch_shape(1 << 17) == (8192, 4, 1024)
    with pytest.raises(ValueError, match="max_seq_len: must be an integer from 1 to 1048576"):
        plan.prefill_scratch_shape((1 << 20) + 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 3),
        ("rank", 2),
        ("rank", -1),
        ("num_index_heads", 8),
        ("page_size", 64),
        ("init_blocks", -1),
        ("init_blocks", 15),
        ("max_decode_tokens", 0),
        ("max_decode_query_len", 9),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 65537),
        ("max_model_len", 0),
        ("max_model_len", 8192 * 128 + 1),
        ("num_sparse_layers", 0),
        ("num_sparse_layers", True),
        ("max_model_len", 4.0),
        ("device", "no such device"),
        ("device", "meta"),
        ("backend", "other"),
        ("spin_limit", 0),
    ],
)
def test_a_wrong_limit_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}( \+ local_blocks)?:"):
        plan_of(**{name: value})


# ---------------------------------------------------------------- decode


@layouts
@forms
@pytest.mark.exchange
def test_decode_is_the_unsharded_selection(backend, device, world_size, page_size, tagged):
    interpreted_only_if((world_size, page_size) == (4, 256), backend, device)
    ranks = Decode(batch(world_size, page_size), backend, device)
    for slot in (0, 2):
        assert torch.equal(ranks.call(tagged=tagged, slot=slot), ranks.truth())


@forms
@pytest.mark.exchange
def test_fused_with_a_pool_of_the_caller(backend, device, tagged):
    ranks = Decode(batch(), backend, device)
    pool = torch.full((12 * 4 * 128 * 16 * 8,), cases.NAN_BYTE, dtype=torch.uint8, device=device)
    ranks.scores = [None, None]
    assert torch.equal(ranks.call(tagged=tagged, slot=1, pool=pool), ranks.truth())


@pytest.mark.exchange
def test_fused_from_a_number_of_requests_on(backend, device, monkeypatch):
    """Where the rule says so, the plan has a pool and larger batches need no scores."""
    monkeypatch.setattr(indexer.rules, "fused_decode_min_batch", lambda *_: 3)
    ranks = Decode(batch(), backend, device)
    assert ranks.plans[0].fused_decode_min_batch == 3
    assert ranks.plans[0].pool.numel() == msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=12)
    ranks.scores = [None, None]
    assert torch.equal(ranks.call(tagged=True, slot=0), ranks.truth())
    fewer = Decode(batch(seq_lens=(300, 40)), backend, device)
    before = fewer.scores[0].clone()
    assert torch.equal(fewer.call(tagged=True, slot=0), fewer.truth())
    assert not torch.equal(fewer.scores[0].view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enable_pdl", [None, True, False])
def test_every_launch_of_a_layer_is_a_dependent_launch_or_none_is(enable_pdl, fused):
    """As the caller says, and unless told otherwise all of them."""
    ranks = Decode(batch(), "torch", "cpu")
    pool = torch.zeros(12 * 4 * 128 * 16 * 8, dtype=torch.uint8) if fused else None
    option = {} if enable_pdl is None else {"enable_pdl": enable_pdl}
    step = ranks.steps(tagged=True, pool=pool, **option)[0]
    called = ranks.plans[0].record_decode(
        *(ranks.queries, ranks.keys[0]),
        *ranks.buffers(0),
        **ranks.arguments(0, tagged=True, slot=0, pool=pool, **option),
    )
    names = ["decode_score_publish"] if fused else ["decode_index_score_sharded", "topk_select_publish"]
    for recorded in (called, step.record(ranks.queries, ranks.keys[0], slot=0)):
        found = [(one.name, one.arguments[-1]["enable_pdl"]) for one in recorded]
        assert found == [(name, enable_pdl is not False) for name in (*names, "merge_candidates")]


@forms
def test_ranks_in_threads(tagged):
    """The whole call: a merge waits for peers that are still on their way."""
    ranks = Decode(batch(4), "torch", "cpu", spin_limit=1 << 26)

    def layers(rank):
        for layer in range(6):
            ranks.plans[rank].decode(
                ranks.queries,
                ranks.keys[rank],
                *ranks.buffers(rank),
                **ranks.arguments(rank, tagged=tagged, slot=layer % 3),
            )

    threads = [threading.Thread(target=layers, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(ranks.merged(), ranks.truth())


def test_a_missing_peer_ends_within_the_limit_of_the_plan():
    ranks = Decode(batch(), "torch", "cpu", spin_limit=SHORT_SPIN)
    arguments = ranks.arguments(0, tagged=True, slot=2)
    step = ranks.steps(tagged=True)[0].record(ranks.queries, ranks.keys[0], slot=2)
    assert [one.arguments[-1].get("spin_limit") for one in step] == [None, SHORT_SPIN, SHORT_SPIN]
    ranks.plans[0].decode(ranks.queries, ranks.keys[0], *ranks.buffers(0), **arguments)
    assert (ranks.outputs[0] == -1).all()
    with pytest.raises(msa_icp.IcpTimeoutError, match="slot set 2: rank 1"):
        ranks.group[0].check()


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("output", lambda t: t[:, :, :8], "output"),
        ("output", lambda t: t[1:], "output|num_valid_pages"),
        ("scores", lambda t: t[:3], "scores"),
        ("scores", lambda _: None, "scores"),
        ("scores", lambda t: t[:, :, :6], "scores"),
        ("output", lambda t: t.repeat(3, 1, 1), "output|num_valid_pages"),
        ("num_valid_pages", lambda t: t[1:], "num_valid_pages"),
        ("seq_lens", lambda t: t.long(), "seq_lens"),
        ("index_q", lambda t: t.view(torch.uint8), "index_q"),
        ("index_k", lambda t: t[:, 1:], "index_k"),
        ("slot", 3, "slot"),
        ("slot", True, "slot"),
        ("tagged", 1, "tagged"),
        ("decode_query_len", 5, "decode_query_len"),
        ("decode_query_len", 1, "index_q"),
        ("enable_pdl", None, "enable_pdl"),
        ("pool", torch.zeros(8, dtype=torch.uint8), "pool"),
    ],
)
@pytest.mark.exchange
def test_a_wrong_argument_is_named_and_nothing_is_launched(backend, device, name, value, named):
    ranks = Decode(batch(), backend, device)
    names = ("block_table", "seq_lens", "num_valid_pages", "scores", "output")
    call = dict(zip(names, ranks.buffers(0), strict=True)) | ranks.arguments(0, tagged=True, slot=0)
    call |= {"index_q": ranks.queries, "index_k": ranks.keys[0]}
    call[name] = value(call[name]) if callable(value) else value
    before, scores = snapshot(ranks.group), ranks.scores[0].view(torch.int32).clone()
    with pytest.raises(ValueError, match=rf"^({named})[\.\[:]"):
        ranks.plans[0].decode(**call)
    assert_same(snapshot(ranks.group), before)
    assert torch.equal(ranks.scores[0].view(torch.int32), scores)


@pytest.mark.parametrize("call", ["decode", "decode_publish", "decode_merge", "a step"])
@pytest.mark.parametrize("room", ["scores of the limit", "more scores", "a pool"])
def test_too_many_tokens_are_told_from_their_limit(call, room):
    ranks = Decode(batch(seq_lens=(300,) * 7), "torch", "cpu")
    buffers, changes = list(ranks.buffers(0)), {}
    if room == "more scores":
        buffers[3] = torch.zeros(20, 4, 64)
    elif room == "a pool":
        changes["pool"] = torch.zeros(12 * 4 * 128 * 16 * 8, dtype=torch.uint8)
    arguments = ranks.arguments(0, tagged=True, **changes)
    layer = ranks.queries, ranks.keys[0]
    if call == "a step":
        step = ranks.plans[0].prepare_decode_step(*buffers, **arguments)
        run = functools.partial(step.run, *layer, slot=0)
    else:
        run = functools.partial(getattr(ranks.plans[0], call), *layer, *buffers, slot=0, **arguments)
    with pytest.raises(ValueError, match=r"^index_q\.shape\[0\]: must be at most max_decode_tokens = 12"):
        run()


def test_the_halves_of_decode_have_its_signature():
    decode, *halves = (
        inspect.signature(getattr(indexer.MSAIcpIndexerPlan, name))
        for name in ("decode", "decode_publish", "decode_merge")
    )
    assert halves == [decode] * 2


def test_tagged_rows_need_two_layers():
    ranks = Decode(batch(), "torch", "cpu", num_sparse_layers=1)
    with pytest.raises(ValueError, match=r"^tagged: must be False with fewer than 2 sparse layers.*=1"):
        ranks.call(tagged=True, slot=0)
    assert torch.equal(ranks.call(tagged=False, slot=0), ranks.truth())


# ---------------------------------------------------------------- the receive storage


FIELDS = {
    "recv": torch.int32,
    "tagged_recv": torch.int64,
    "recv_bases": torch.int64,
    "tagged_recv_bases": torch.int64,
    "publish_generations": torch.int32,
    "expected_generations": torch.int32,
    "errors": torch.int32,
}


def comm_of(storage):
    """A receive storage of an engine's own: an object with the fields, and nothing else."""
    return SimpleNamespace(**{name: getattr(storage, name) for name in FIELDS})


@pytest.mark.parametrize("name", FIELDS)
def test_a_wrong_field_of_comm_is_named(name):
    plan, storage = plan_of(), msa_icp.ReceiveStorage.in_process(2, capacity=12)[0]
    comm = comm_of(storage)
    plan.check_comm(comm)
    good = getattr(comm, name)
    worse = [None, good.float(), good.reshape(-1).repeat_interleave(2)[::2].view(good.shape)]
    worse.append(good[:0] if name == "errors" else good[..., 1:])
    for value in worse:
        setattr(comm, name, value)
        with pytest.raises(ValueError, match=rf"^comm\.{name}[\.:\[]"):
            plan.check_comm(comm)


def test_the_tagged_rows_lie_behind_the_others():
    plan, (storage, other) = plan_of(), msa_icp.ReceiveStorage.in_process(2, capacity=12)
    comm = comm_of(storage)
    comm.tagged_recv = other.tagged_recv
    with pytest.raises(ValueError, match=r"comm\.tagged_recv: must be 19008 bytes after comm\.recv"):
        plan.check_comm(comm)


def test_a_storage_of_another_capacity_is_refused():
    storage = msa_icp.ReceiveStorage.in_process(2, capacity=13)[0]
    with pytest.raises(ValueError, match=r"^comm\.capacity: must be max_decode_tokens .*, 12, was 13$"):
        plan_of().check_comm(storage)
    with pytest.raises(ValueError, match=r"comm\.recv: must be of shape \[3, 2, 2, 12, 33\]"):
        plan_of().check_comm(comm_of(storage))


def test_a_closed_storage_is_called_closed():
    ranks = Decode(batch(), "torch", "cpu")
    arguments = ranks.arguments(0, tagged=True, slot=0)
    ranks.group[0].close()
    call = (ranks.queries, ranks.keys[0], *ranks.buffers(0))
    for refused in (
        lambda: ranks.plans[0].check_comm(ranks.group[0]),
        lambda: ranks.plans[0].decode(*call, **arguments),
    ):
        with pytest.raises(
            ValueError, match=r"^comm: must be a receive storage that is open, was a closed one$"
        ):
            refused()


@pytest.mark.parametrize("half", ["decode", "decode_publish"])
def test_nothing_is_published_for_an_output_that_cannot_be_merged(half):
    ranks = Decode(batch(), "torch", "cpu")
    *buffers, output = ranks.buffers(0)
    arguments = ranks.arguments(0, tagged=True, slot=0)
    for wrong in (output.to(torch.int64), output[:, :, :8], output.expand(2, *output.shape)):
        with pytest.raises(ValueError, match=r"^output: must be "):
            getattr(ranks.plans[0], half)(ranks.queries, ranks.keys[0], *buffers, wrong, **arguments)
    assert not ranks.group[0].publish_generations.any()
    assert not any(storage.tagged_recv.any() for storage in ranks.group)


def test_a_query_elsewhere_is_named():
    ranks = Decode(batch(), "torch", "cpu")
    call = (ranks.queries.to("meta"), ranks.keys[0], *ranks.buffers(0))
    with pytest.raises(ValueError, match=r"^index_q: must be on cpu, as the indexer is, was on meta$"):
        ranks.plans[0].decode(*call, **ranks.arguments(0, tagged=True, slot=0))


def test_no_device_is_the_default_one():
    assert plan_of(device=None).device == msa_icp.prefill_plan.default_device()


def test_the_storage_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"^comm\.rank: must be 0, the rank of the indexer, was 1"):
        plan_of().check_comm(msa_icp.ReceiveStorage.in_process(2, capacity=12)[1])


@pytest.mark.parametrize("rank", [4, None, "first", torch.arange(2)])
def test_another_object_may_have_a_rank_of_its_own(rank):
    """An engine's own may have its rank of the whole job there."""
    ranks = Decode(batch(), "torch", "cpu")
    ranks.group = [comm_of(storage) for storage in ranks.group]
    for comm in ranks.group:
        comm.rank, comm.check = rank, lambda: None
        ranks.plans[0].check_comm(comm)
    assert torch.equal(ranks.call(tagged=True, slot=0), ranks.truth())


def test_two_storages_of_one_plan_in_two_threads():
    """Each call gets what is known of its own storage."""
    plan = plan_of()
    comms = [msa_icp.ReceiveStorage.in_process(2, capacity=12)[0] for _ in range(2)]
    mixed = []

    def look(comm):
        found = [plan.checked(comm) for _ in range(3000)]
        mixed.extend(checked for checked in found if not checked.still_describes(comm))

    threads = [threading.Thread(target=look, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mixed == []


def test_a_comm_is_checked_again_when_a_field_changes(monkeypatch):
    ranks = Decode(batch(), "torch", "cpu")
    plan, comm = ranks.plans[0], comm_of(ranks.group[0])
    checks = []
    checked = indexer.plan.CheckedComm
    monkeypatch.setattr(
        indexer.plan, "CheckedComm", lambda *arguments: checks.append(1) or checked(*arguments)
    )

    def publish():
        arguments = ranks.arguments(0, tagged=True, slot=0, comm=comm)
        plan.decode_publish(ranks.queries, ranks.keys[0], *ranks.buffers(0), **arguments)

    publish()
    publish()
    assert len(checks) == 1
    comm.errors = torch.zeros(4, dtype=torch.int32)  # another tensor
    publish()
    assert len(checks) == 2
    comm.errors.resize_(2)  # the same one, of another shape
    publish()
    assert len(checks) == 3
    comm.errors.set_(torch.zeros(2, dtype=torch.int32))  # elsewhere
    publish()
    assert len(checks) == 4
    comm.publish_generations = comm.publish_generations[:1]
    with pytest.raises(ValueError, match=r"comm\.publish_generations"):
        publish()


# ---------------------------------------------------------------- prefill


@layouts
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.prefill
@pytest.mark.exchange
def test_prefill_is_the_unsharded_selection(backend, device, world_size, page_size, fused):
    ranks = Prefill(window(world_size, page_size), backend, device)
    plans = ranks.window_plans()
    for rank, plan in enumerate(ranks.plans):
        plan.prefill_local(
            ranks.queries,
            ranks.keys[rank],
            ranks.table,
            plans[rank],
            None if fused else ranks.scratch,
            ranks.num_valid,
            ranks.carriers[rank],
            pool=ranks.pool if fused else None,
        )
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    for rank, plan in enumerate(ranks.plans):
        plan.prefill_merge(ranks.received[rank], ranks.num_valid, ranks.outputs[rank])
        assert plan.prefill_errors.tolist() == [0] * 4
    assert torch.equal(ranks.merged(), ranks.truth())


def test_every_window_has_a_plan_of_its_own():
    plan = plan_of(max_model_len=1 << 20, max_num_batched_tokens=3072)
    assert plan.max_prefill_windows == 2
    metadata = window().metadata()
    sizes = {"max_query_len": 8, "max_seq_len": 700}
    first, second = (plan.prefill_window_plan(w, **metadata, total_q=8, **sizes) for w in (0, 1))
    assert first.packed_work_info.data_ptr() != second.packed_work_info.data_ptr()
    assert torch.equal(first.packed_work_range, second.packed_work_range)
    assert first.workspace.data_ptr() == second.workspace.data_ptr() == plan.plan_workspace.data_ptr()
    with pytest.raises(ValueError, match=r"^window: must be an integer from 0 to 1, was 2"):
        plan.prefill_window_plan(2, **metadata, total_q=8, **sizes)
    with pytest.raises(ValueError, match=r"^total_q: must be an integer from 1 to 3072"):
        plan.prefill_window_plan(0, **metadata, total_q=3073, **sizes)
    with pytest.raises(ValueError, match=r"^max_seq_len: must be an integer from 1 to 1048576"):
        plan.prefill_window_plan(0, **metadata, total_q=8, max_query_len=8, max_seq_len=(1 << 20) + 1)
    many = {name: torch.zeros(9 + ("offsets" in name), dtype=torch.int32) for name in metadata}
    with pytest.raises(ValueError, match=r"^qo_segment_lens\.shape\[0\]: must be at most max_num_seqs=8"):
        plan.prefill_window_plan(0, **many, total_q=8, **sizes)


def test_prefill_needs_scratch_or_a_pool():
    ranks = Prefill(window(), "torch", "cpu")
    call = (ranks.queries, ranks.keys[0], ranks.table, ranks.window_plans()[0])
    rest = (ranks.num_valid, ranks.carriers[0])
    with pytest.raises(ValueError, match=r"^score_scratch: must be score rows where there is no pool"):
        ranks.plans[0].prefill_local(*call, None, *rest)
    with pytest.raises(ValueError, match=r"^score_scratch\.shape\[0\]: must be at least 8"):
        ranks.plans[0].prefill_local(*call, ranks.scratch[:4], *rest)


@pytest.mark.prefill
@pytest.mark.exchange
@pytest.mark.parametrize("page_size", [128, 256])
def test_prefill_writes_the_causal_prefixes_alone(backend, device, page_size):
    """Score rows are not filled first: what lies behind a token's prefix, or the tokens, keeps its bits."""
    interpreted_only_if(page_size == 128, backend, device)
    ranks = Prefill(window(2, page_size), backend, device)
    call = (ranks.queries, ranks.keys[0], ranks.table, ranks.window_plans()[0], ranks.scratch)
    ranks.plans[0].prefill_local(*call, ranks.num_valid, ranks.carriers[0])
    columns = torch.arange(ranks.scratch.shape[2])
    keys = columns * page_size  # that a column begins with
    position = torch.tensor([position for *_, position in ranks.case.tokens()])
    written = (keys <= position[:, None])[:, None].expand(-1, HEADS, -1)
    kept = bits(ranks.scratch) == cases.POISON
    assert torch.equal(kept[: len(position)], ~written)
    assert kept[len(position) :].all()
    assert not kept.all()


def local_call(ranks, **changes):
    """A valid call of `prefill_local`, by name."""
    call = {
        "query": ranks.queries,
        "index_k": ranks.keys[0],
        "block_table": ranks.table,
        "window_plan": ranks.window_plans()[0],
        "score_scratch": ranks.scratch,
        "num_valid_pages": ranks.num_valid,
        "carrier_view": ranks.carriers[0],
    }
    return {**call, **changes}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", lambda t: t[1:]),
        ("query", lambda t: t.view(torch.uint8)),
        ("index_k", lambda t: t.repeat(1, 2, 1)),  # a shard of pages of another size
        ("index_k", lambda t: t[:, :-1]),
        ("block_table", lambda t: t.long()),
        ("window_plan", lambda _: None),
        ("score_scratch", lambda t: t[:, :, :1]),
        ("score_scratch", lambda t: t.double()),
        ("num_valid_pages", lambda t: t[1:]),
        ("carrier_view", lambda t: t[:, 1:]),
        ("carrier_view", lambda t: t.long()),
    ],
)
def test_a_wrong_argument_of_prefill_local_is_named(name, value):
    ranks = Prefill(window(), "torch", "cpu")
    before = ranks.scratch.view(torch.int32).clone(), ranks.carriers[0].clone()
    call = local_call(ranks)
    with pytest.raises(ValueError, match=rf"^{name}[\.\[: ]"):
        ranks.plans[0].prefill_local(**{**call, name: value(call[name])})
    assert torch.equal(ranks.scratch.view(torch.int32), before[0])
    assert torch.equal(ranks.carriers[0], before[1])
    with pytest.raises(ValueError, match=r"^pool[\.:]"):
        ranks.plans[0].prefill_local(**{**call, "pool": ranks.pool[:8]})


@pytest.mark.parametrize(
    ("received", "output", "named"),
    [
        (lambda t: t.view(4, 1, *t.shape[2:]), lambda t: t[:, :1], "received"),  # of four ranks
        (lambda t: t.long(), lambda t: t, "received"),
        (lambda t: t[..., :32], lambda t: t, "received"),
        (lambda t: t, lambda t: t[..., :8], "output"),
        (lambda t: t, lambda t: t[:, :1], "output"),
    ],
)
def test_a_wrong_argument_of_prefill_merge_is_named(received, output, named):
    ranks = Prefill(window(), "torch", "cpu")
    rows, blocks = received(ranks.received[0]), output(ranks.outputs[0])
    with pytest.raises(ValueError, match=rf"^{named}[\.\[:]"):
        ranks.plans[0].prefill_merge(rows, ranks.num_valid, blocks)


@pytest.mark.parametrize(("init", "local"), [(0, 3), (2, 0)])
def test_prefill_forces_blocks_at_either_end(init, local):
    """What a merge forces is what the selections have forced."""
    lens = {"qo_lens": (4,), "kv_lens": (2600,)}
    ranks = Prefill(prefill_case("", 2, 128, **lens, init_blocks=init, local_blocks=local), "torch", "cpu")
    plans = ranks.window_plans()
    for rank, plan in enumerate(ranks.plans):
        call = local_call(ranks, index_k=ranks.keys[rank], window_plan=plans[rank])
        plan.prefill_local(**{**call, "carrier_view": ranks.carriers[rank]})
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    for rank, plan in enumerate(ranks.plans):
        plan.prefill_merge(ranks.received[rank], ranks.num_valid, ranks.outputs[rank])
    assert torch.equal(ranks.merged(), ranks.truth())


def test_a_window_is_planned_for_the_threads_of_the_construction():
    ranks = Prefill(window(), "torch", "cpu")
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match=r"^torch.get_num_threads\(\): must be 1, as at construction, was 2"):
        ranks.window_plans()


def test_what_is_made_in_inference_mode_works_outside():
    with torch.inference_mode():
        plan = plan_of()
    plan.prefill_window_plan(0, **window().metadata(), total_q=8, max_query_len=8, max_seq_len=700)


@pytest.mark.prefill
@pytest.mark.exchange
def test_buffers_that_were_made_in_inference_mode_are_written_outside_of_it(backend, device):
    """An engine runs its model in that mode. A call that could not write its output would have published."""
    interpreted_only_if(False, backend, device)
    decode, prefill = Decode(batch(), backend, device), Prefill(window(), backend, device)
    with torch.inference_mode():
        decode.scores = [scores.clone() for scores in decode.scores]
        for ranks in (decode, prefill):
            ranks.outputs = [output.clone() for output in ranks.outputs]
        for name in ("carriers", "received"):
            setattr(prefill, name, [rows.clone() for rows in getattr(prefill, name)])
        prefill.scratch = prefill.scratch.clone()
    for half in ("decode_publish", "decode_merge"):
        for rank, plan in enumerate(decode.plans):
            arguments = decode.arguments(rank, tagged=True, slot=0)
            getattr(plan, half)(decode.queries, decode.keys[rank], *decode.buffers(rank), **arguments)
    assert torch.equal(decode.merged(), decode.truth())
    plans = prefill.window_plans()
    for rank, plan in enumerate(prefill.plans):
        call = local_call(prefill, index_k=prefill.keys[rank], window_plan=plans[rank])
        plan.prefill_local(**{**call, "carrier_view": prefill.carriers[rank]})
    msa_icp.exchange_prefill(prefill.carriers, prefill.received)
    for rank, plan in enumerate(prefill.plans):
        plan.prefill_merge(prefill.received[rank], prefill.num_valid, prefill.outputs[rank])
    assert torch.equal(prefill.merged(), prefill.truth())


# ---------------------------------------------------------------- loading, and what is allocated


def test_warmup_is_that_of_the_backend(monkeypatch):
    asked = []
    monkeypatch.setattr(
        indexer.plan.dispatch, "warmup", lambda *arguments, **layout: asked.append((arguments, layout))
    )
    plan_of(backend="torch").warmup()
    assert asked == [((torch.device("cpu"), "torch"), {"page_size": 128, "world_size": 2})]


def test_the_pool_is_the_only_buffer_that_a_rule_adds():
    """What the docstring of `prepare_msa_icp_indexer` says is allocated."""
    plan = plan_of()
    tensors = {name for name, value in vars(plan).items() if isinstance(value, torch.Tensor)}
    assert tensors == {"work_ranges", "work_info", "plan_workspace", "prefill_errors"}
