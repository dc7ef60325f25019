"""No method of the facade makes a tensor or reads a value of the device (contract, sections 8 and 11).

Kernels get addresses: of PyTorch the facade needs views, of which none is of memory of its own. With kernels,
on a GPU or emulated, all that a method does is watched; on a GPU its allocator as well, and every call that
would synchronize raises. Tensor code makes tensors, so there ops that do nothing take its place, and what is
watched is the facade's own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from facade import Decode, Prefill
from graph_stand_in import StandIn
from test_indexer import batch, window
from test_indexer_graphs import joined
from torch.utils._python_dispatch import TorchDispatchMode

import msa_icp
from msa_icp import dispatch, verify
from msa_icp.indexer import graphs
from msa_icp.launches import tensor_code

VIEWS = {"slice", "unbind", "select", "view", "detach", "alias", "as_strided"}


class _Operations(TorchDispatchMode):
    """Names of the operations of PyTorch that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_is_made(device: str) -> Iterator[None]:
    on_gpu = device == "cuda"
    before = torch.cuda.memory_stats().get("allocation.all.allocated") if on_gpu else 0
    if on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Operations() as operations:
            yield
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    assert set(operations.names) <= VIEWS
    if on_gpu:
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.fixture
def ops_without_tensors(backend, device, monkeypatch):
    """Tensor code does nothing. True where it has been replaced, so that there are no results to look at."""
    if backend != "torch":
        if device == "cpu" and backend == "triton":
            pytest.skip("Triton's interpreter makes tensors")
        return False
    for op in dispatch.OPS:

        def nothing(*tensors, **numbers):
            pass

        nothing.__name__ = op
        takes_query = "score" in op and "plan" not in op
        monkeypatch.setattr(dispatch.package("torch"), op, tensor_code(takes_query=takes_query)(nothing))
    return True


def call_all(ranks, slot, **changes):
    """A layer of every rank, by the two halves of the call."""
    for half in ("decode_publish", "decode_merge"):
        for rank, plan in enumerate(ranks.plans):
            arguments = ranks.arguments(rank, tagged=True, slot=slot, **changes)
            getattr(plan, half)(ranks.queries, ranks.keys[rank], *ranks.buffers(rank), **arguments)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.exchange
def test_decode_makes_no_tensor(backend, device, fused, ops_without_tensors):
    ranks = Decode(batch(), backend, device)
    for plan in ranks.plans:
        plan.warmup()
    pool = torch.zeros(12 * 4 * 128 * 16 * 8, dtype=torch.uint8, device=device) if fused else None
    steps = ranks.steps(tagged=True, pool=pool)
    call_all(ranks, 0, pool=pool)
    with nothing_is_made(device):
        call_all(ranks, 1, pool=pool)
        for _ in range(2):
            for step, keys in zip(steps, ranks.keys, strict=True):
                step.publish(ranks.queries, keys, slot=2)
            for step in steps:
                step.merge(slot=2)
    if not ops_without_tensors:
        assert torch.equal(ranks.merged(), ranks.truth())


def prefill_steps(ranks, plans, **local):
    """Every rank's step, of one window."""
    return [
        plan.prepare_prefill_step(
            [(0, 8, ranks.table, plans[rank])],
            None if local else ranks.scratch,
            ranks.num_valid,
            ranks.carriers[rank],
            ranks.received[rank],
            ranks.outputs[rank],
            **local,
        )
        for rank, plan in enumerate(ranks.plans)
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.prefill
@pytest.mark.exchange
def test_prefill_makes_no_tensor(backend, device, fused, ops_without_tensors):
    ranks = Prefill(window(), backend, device)
    for plan in ranks.plans:
        plan.warmup()
    local = {"pool": ranks.pool} if fused else {}
    metadata, sizes = ranks.case.metadata(device), {"max_query_len": 8, "max_seq_len": ranks.case.max_seq_len}
    prepared = prefill_steps(ranks, ranks.window_plans(), **local)  # the same words as those that follow
    with nothing_is_made(device):
        for rank, plan in enumerate(ranks.plans):
            planned = plan.prefill_window_plan(0, **metadata, total_q=8, **sizes)
            plan.prefill_local(
                ranks.queries,
                ranks.keys[rank],
                ranks.table,
                planned,
                None if fused else ranks.scratch,
                ranks.num_valid,
                ranks.carriers[rank],
                **local,
            )
            plan.prefill_merge(ranks.received[rank], ranks.num_valid, ranks.outputs[rank])
        for _ in range(2):
            for step, keys in zip(prepared, ranks.keys, strict=True):
                step.local(ranks.queries, keys)
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    with nothing_is_made(device):
        for step in prepared:
            step.merge()
    if not ops_without_tensors:
        assert torch.equal(ranks.merged(), ranks.truth())


@pytest.mark.exchange
def test_a_replay_makes_no_tensor(backend, device, ops_without_tensors, monkeypatch):
    """Of decode, and of decode and prefill where the backend has both; the query moves or stays."""
    if device == "cpu":
        for name, ours in StandIn().replaced().items():
            monkeypatch.setattr(graphs, name, ours)
    elif not graphs.can_be_moved():
        pytest.skip("the query is copied here")
    decode = Decode(batch(init_blocks=1, local_blocks=1), backend, device)
    plan, keys, queries = decode.plans[0], decode.keys[0], decode.queries
    plan.warmup()
    parts = {"decode": decode.steps(tagged=True)[0], "decode_tokens": decode.case.tokens}
    if verify.no_prefill(backend, device) is None:
        prefill = Prefill(window(), backend, device)
        prefill.plans = decode.plans
        parts |= {"prefill": prefill_steps(prefill, prefill.window_plans())[0], "exchange": lambda: None}
        decode.table += prefill.keys[0].shape[0]  # behind the pages of the window
        keys, queries = joined(prefill.keys[0], keys), joined(queries, prefill.queries)
    plan.spin_limit = 1  # the other rank is not there
    cache = plan.layer_graphs(capture_after=0)
    for _ in range(2):
        cache.begin_step(**parts).run(0, queries, keys, slot=0)
    elsewhere = queries.clone()
    with nothing_is_made(device):
        step = cache.begin_step(**parts)
        for each in (queries, elsewhere, elsewhere, queries):
            step.run(0, each, keys, slot=0)
    assert cache.stats["replayed_layers"] == 5
