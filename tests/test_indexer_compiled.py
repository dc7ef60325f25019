"""The facade in functions that `torch.compile` traces as one graph (docs/contract.md, section 11)."""

from __future__ import annotations

import functools

import pytest
import torch
from facade import Decode, Prefill
from test_indexer import batch, window

import msa_icp
from msa_icp.cases import poisoned


def compiled(function):
    """Traced as one graph, or not at all; run op by op, without code of inductor's."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(("tagged", "fused"), [(False, False), (True, False), (True, True)])
def test_decode(tagged, fused):
    """Both halves of a layer of all ranks, in every slot set."""
    ranks = Decode(batch(), "torch", "cpu")
    pool = torch.zeros(12 * 4 * 128 * 16 * 8, dtype=torch.uint8) if fused else None

    @compiled
    def layer(queries, slot):
        for half in ("decode_publish", "decode_merge"):
            for rank, plan in enumerate(ranks.plans):
                arguments = ranks.arguments(rank, tagged=tagged, slot=slot, pool=pool)
                getattr(plan, half)(queries, ranks.keys[rank], *ranks.buffers(rank), **arguments)
        return ranks.outputs[0] + 1

    for slot in range(3):
        for output in ranks.outputs:
            output.copy_(poisoned(output.shape, torch.int32))
        after = layer(ranks.queries, slot)
        assert torch.equal(ranks.merged(), ranks.truth())
        assert torch.equal(after, ranks.outputs[0] + 1)


def test_one_call():
    """`decode` whole, of a rank whose peer has published."""
    ranks = Decode(batch(), "torch", "cpu")
    arguments = [ranks.arguments(rank, tagged=True, slot=0) for rank in (0, 1)]

    @compiled
    def layer(queries):
        ranks.plans[0].decode(queries, ranks.keys[0], *ranks.buffers(0), **arguments[0])

    ranks.plans[1].decode_publish(ranks.queries, ranks.keys[1], *ranks.buffers(1), **arguments[1])
    layer(ranks.queries)
    ranks.plans[1].decode_merge(ranks.queries, ranks.keys[1], *ranks.buffers(1), **arguments[1])
    assert torch.equal(ranks.merged(), ranks.truth())


@pytest.mark.parametrize("fused", [False, True])
def test_prefill(fused):
    ranks = Prefill(window(2, 256), "torch", "cpu")
    windows = ranks.window_plans()

    @compiled
    def local(queries):
        for rank, plan in enumerate(ranks.plans):
            plan.prefill_local(
                queries,
                ranks.keys[rank],
                ranks.table,
                windows[rank],
                None if fused else ranks.scratch,
                ranks.num_valid,
                ranks.carriers[rank],
                pool=ranks.pool if fused else None,
            )

    @compiled
    def merge(received):
        for plan, rows, output in zip(ranks.plans, received, ranks.outputs, strict=True):
            plan.prefill_merge(rows, ranks.num_valid, output)

    local(ranks.queries)
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    merge(ranks.received)
    assert torch.equal(ranks.merged(), ranks.truth())


def test_a_wrong_number_is_an_error_of_the_graph():
    ranks = Decode(batch(), "torch", "cpu", num_sparse_layers=1)

    @compiled
    def layer(queries):
        arguments = ranks.arguments(0, tagged=True, slot=0)
        ranks.plans[0].decode(queries, ranks.keys[0], *ranks.buffers(0), **arguments)

    with pytest.raises(Exception, match="tagged: must be False with fewer than 2 sparse layers"):
        layer(ranks.queries)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("whose", ["smaller", "other"])
def test_a_storage_that_is_not_the_plans_is_refused(whose, tagged, fullgraph):
    """Rows of a plan's capacity would be written behind the end of a smaller storage."""
    ranks = Decode(batch(seq_lens=(300,), query_len=1), "torch", "cpu")
    group = msa_icp.ReceiveStorage.in_process(2, capacity=ranks.plans[0].max_decode_tokens - 1)
    comm = group[0] if whose == "smaller" else ranks.group[1]
    arguments = ranks.arguments(0, tagged=tagged, slot=2, comm=comm)

    def layer(queries):
        ranks.plans[0].decode_publish(queries, ranks.keys[0], *ranks.buffers(0), **arguments)

    torch._dynamo.reset()
    field = "capacity: must be" if whose == "smaller" else "rank: must be 0"
    with pytest.raises(Exception, match=rf"comm\.{field}"):
        torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(ranks.queries)
    for storage in (*group, *ranks.group):
        assert not storage.recv.any()
        assert not storage.tagged_recv.any()
        assert not storage.publish_generations.any()


def refused(what, function, *arguments):
    """As a part of a graph: launches that were recorded hold addresses."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"{what}: runs eagerly and cannot be compiled"):
        compiled(function)(*arguments)


def run_disabled(function, *arguments):
    """As the error says: in a compiled function, and eagerly."""
    eager = torch.compiler.disable(function)

    def outer(number):
        eager(*arguments)
        return number + 1

    torch._dynamo.reset()
    assert torch.compile(outer, backend="aot_eager")(torch.zeros(1)) == 1


def test_prepared_steps_are_not_traced():
    ranks = Decode(batch(), "torch", "cpu")
    steps = ranks.steps(tagged=True)
    for half in ("publish", "merge"):
        for step, keys in zip(steps, ranks.keys, strict=True):
            arguments = (ranks.queries, keys) if half == "publish" else ()
            call = functools.partial(getattr(step, half), slot=1)
            refused("prepared step", call, *arguments)
            run_disabled(call, *arguments)
    assert torch.equal(ranks.merged(), ranks.truth())
    refused("prepared step", functools.partial(steps[0].run, slot=1), ranks.queries, ranks.keys[0])


def test_layer_graphs_are_not_traced():
    ranks = Decode(batch(), "torch", "cpu")
    steps = ranks.steps(tagged=True)
    graphs = ranks.plans[0].layer_graphs().begin_step(decode=steps[0], decode_tokens=steps[0].tokens)
    layer = functools.partial(graphs.run, slot=1)
    refused("layer graph", layer, 0, ranks.queries, ranks.keys[0])
    steps[1].publish(ranks.queries, ranks.keys[1], slot=1)
    run_disabled(layer, 0, ranks.queries, ranks.keys[0])
    steps[1].merge(slot=1)
    assert torch.equal(ranks.merged(), ranks.truth())


def test_prepared_prefill_steps_are_not_traced():
    ranks = Prefill(window(2, 128), "torch", "cpu")
    tokens = ranks.case.total_q
    for rank, (plan, own) in enumerate(zip(ranks.plans, ranks.window_plans(), strict=True)):
        step = plan.prepare_prefill_step(
            [(0, tokens, ranks.table, own)],
            ranks.scratch,
            ranks.num_valid,
            ranks.carriers[rank],
            ranks.received[rank],
            ranks.outputs[rank],
        )
        refused("prepared step", step.local, ranks.queries, ranks.keys[rank])
        refused("prepared step", step.merge)
        run_disabled(step.local, ranks.queries, ranks.keys[rank])
    msa_icp.exchange_prefill(ranks.carriers, ranks.received)
    run_disabled(step.merge)
    assert torch.equal(ranks.outputs[-1], ranks.truth()[:, -ranks.outputs[-1].shape[1] :])
