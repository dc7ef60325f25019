"""The entry points under `torch.compile`: whole graphs, the caller's own buffers, the exchange in order."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import CALLS, Call, own_comm, unserved
from compiled_chain import Batch, Ranks, Window, decode_layers, decode_step, prefill_layer
from helpers import assert_same, snapshot
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import msa_icp
from msa_icp import dispatch, receive_rows

OPS = {
    "score": "decode_index_score_sharded",
    "publish": "topk_select_publish",
    "publish legacy": "topk_select_publish",
    "received": "merge_received",
    "fused": "decode_score_publish",
    "fused legacy": "decode_score_publish",
    "write": "write_index_keys",
    "device-plan": "index_score_sharded_plan_device",
    "prefill-score": "index_score_sharded",
    "prefill-select": "topk_select_prefill",
    "prefill-fused": "prefill_score_select",
    "merge prefill": "merge_prefill",
}
"""The op behind every call of `calls.py` that puts one into a graph."""
ONCE = {"publish legacy", "fused legacy", "received"}
"""Calls whose second run would wait for another rank."""
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def graph_of(call: Call, **changes: Any) -> list[torch.fx.Node]:
    """The nodes of our ops in the graph of a call, which is run, too."""
    nodes: list[torch.fx.Node] = []

    def keep(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nodes.extend(n for n in module.graph.nodes if str(n.target).startswith("msa_icp."))
        return module.forward

    compiled(lambda arguments: call.function(**arguments), keep, dynamic=False)({**call.arguments, **changes})
    return nodes


def op_call(name: str) -> tuple[Any, dict[str, Any]]:
    """The op behind a call, and its arguments as the entry point gives them."""
    call = CALLS[name]("cpu", "torch")
    given = dict(call.arguments)
    if "plan" in given:
        plan = given.pop("plan")
        given |= {"plan_tensors": plan.tensors(), "plan_numbers": plan.numbers()}
    if name == "merge prefill":
        given["received"] = given.pop("recv_slot")
        del given["expected_generations"], given["prefill"]
    if name == "received":
        storage = given.pop("comm")
        given |= {"recv_bases": storage.recv_bases, "errors": storage.errors, "expected_generations": None}
        given["address"] = storage.recv_address
        del given["tagged"]
    given["_keeps"] = call.group
    return getattr(torch.ops.msa_icp, OPS[name]).default, given


# ---------------------------------------------------------------- one op


def test_every_op_is_in_this_file():
    assert set(OPS.values()) == set(msa_icp.custom_ops.OPS)


@pytest.mark.parametrize("name", sorted(OPS.keys() - ONCE))
def test_opcheck(name):
    op, arguments = op_call(name)
    group = arguments.pop("_keeps")
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    fp8 = any(isinstance(t, Tensor) and t.dtype == torch.float8_e4m3fn for t in arguments.values())
    if not fp8:  # opcheck's own arithmetic has no FP8; the next test asks the same of every op
        tests.append("test_schema")
    torch.library.opcheck(op, (), arguments, test_utils=tests)
    assert all(int(storage.errors[0]) == 0 for storage in group)


@pytest.mark.parametrize("name", OPS)
def test_an_op_writes_what_its_schema_declares(name):
    op, arguments = op_call(name)
    group = arguments.pop("_keeps")
    lists = {k: v if isinstance(v, list) else [v] for k, v in arguments.items()}
    tensors = {key: values for key, values in lists.items() if isinstance(values[0], Tensor)}
    before = {key: [t.clone() for t in values] for key, values in tensors.items()}
    op(**arguments)
    changed = {key for key, values in tensors.items() if not all(map(same_bits, values, before[key]))}
    writes = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert changed <= writes
    assert (writes & tensors.keys()) - changed <= {"recv_bases", "errors", "pool"}
    assert ("recv_bases" in writes) == (len(group) > 0 and name != "merge prefill")  # they order exchanges


CHANGES = {
    "spin_limit": 101,
    "enable_pdl": True,
    "force_begin_blocks": 3,
    "force_end_blocks": 4,
    "init_blocks": 3,
    "local_blocks": 4,
    "index_scale": 2,
    "index_offset": 1,
}


@pytest.mark.parametrize("name", OPS)
def test_every_number_reaches_the_op(name):
    call = CALLS[name]("cpu", "torch")
    changes = {key: value for key, value in CHANGES.items() if key in call.arguments}
    if name == "merge prefill":
        del changes["enable_pdl"]
    (node,) = graph_of(call, **changes)
    schema = getattr(torch.ops.msa_icp, OPS[name]).default._schema
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
    for key, value in {**call.arguments, **changes}.items():
        if isinstance(value, (bool, int, float, str)) and key not in ("prefill", "tagged"):
            assert given[key] == value, key
    if "plan" in call.arguments:
        assert list(given["plan_numbers"]) == call.arguments["plan"].numbers()


@pytest.mark.parametrize("name", OPS)
def test_a_compiled_call_writes_what_the_eager_one_writes(backend, device, name):
    if reason := unserved(name, backend, device):
        pytest.skip(reason)
    eager, other = CALLS[name](device, backend), CALLS[name](device, backend)
    returned = eager.function(**eager.arguments)
    got = compiled(lambda arguments: other.function(**arguments))(other.arguments)
    assert type(got) is type(returned)
    if returned is not None:
        assert got.numbers() == returned.numbers()
        assert all(map(same_bits, got.tensors()[:-1], returned.tensors()[:-1]))  # but for the workspace
    for key, tensor in eager.tensors().items():
        assert key == "recv_bases" or same_bits(tensor, other.arguments[key]), key
    assert_same(snapshot(eager.group), snapshot(other.group))


def test_a_bad_argument_is_refused_when_the_graph_runs():
    call = CALLS["publish"]("cpu", "torch")
    before = snapshot(call.group)
    for change, message in (
        ({"slot": 5}, r"slot: must be an integer from 0 to 2, was 5"),
        ({"errors": call.arguments["errors"].long()}, r"errors: must be torch.int32, was torch.int64"),
        ({"backend": "numpy"}, "backend: must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled(lambda arguments: call.function(**arguments))({**call.arguments, **change})
    assert_same(before, snapshot(call.group))


def test_an_eager_call_while_another_thread_compiles(monkeypatch):
    """`torch.compiler.is_compiling()` is then true in every thread of the process."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    monkeypatch.setattr(torch.ops.msa_icp, "write_index_keys", None)
    call = CALLS["write"]("cpu", "torch")
    before = call.arguments["index_k"].clone()
    call.function(**call.arguments)
    assert not same_bits(before, call.arguments["index_k"])


# ---------------------------------------------------------------- the chain


def record_addresses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Op, position and address of every tensor that a backend is given from now on."""
    found: list[tuple[str, int, int]] = []
    chosen = dispatch.implementation

    def implementation(op: str, backend: str, device: torch.device) -> Callable[..., None]:
        def run(*arguments: Any, **numbers: Any) -> None:
            for place, value in enumerate([*arguments, *numbers.values()]):
                if isinstance(value, Tensor):
                    found.append((op, place, value.data_ptr()))
            chosen(op, backend, device)(*arguments, **numbers)

        return run

    monkeypatch.setattr(dispatch, "implementation", implementation)
    return found


def assert_ranks_equal(left: Ranks, right: Ranks) -> None:
    assert_same(snapshot(left.group), snapshot(right.group))
    for name in ("scores", "outputs"):
        assert all(map(same_bits, getattr(left, name), getattr(right, name))), name
    assert all(int(storage.errors[0]) == 0 for storage in right.group)


@pytest.mark.exchange
@pytest.mark.large
@pytest.mark.parametrize(
    ("world_size", "fused", "tagged"),
    [(2, False, False), (2, True, True), (4, False, True), (4, True, False)],
)
def test_decode_chain(backend, device, world_size, fused, tagged, monkeypatch):
    """Bit for bit the eager chain: one graph for the first batch, and one for any size and slot set."""
    eager, other = (Ranks.of(world_size, device, backend, tagged=tagged, fused=fused) for _ in range(2))
    step = compiled(decode_step)
    given = record_addresses(monkeypatch)
    for requests, slot in ((3, 1), (5, 2), (2, 2)):
        batches = [Batch.of(requests, world_size, device) for _ in range(2)]
        expected = decode_step(eager, batches[0], slot)
        given.clear()
        got = step(other, batches[1], slot)
        assert same_bits(got, expected)
        assert all(map(same_bits, batches[0].shards, batches[1].shards))
        assert_ranks_equal(eager, other)
        rows = [storage.tagged_recv if tagged else storage.recv for storage in other.group]
        merged = [address for op, place, address in given if op == "merge_candidates" and place == 0]
        assert merged == [r[slot].data_ptr() for r in rows]  # no copy of them
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.mark.exchange
@pytest.mark.large
def test_inductor_copies_nothing(backend, device, monkeypatch):
    """Whatever an op writes or waits for in the compiled chain is the caller's own memory."""
    eager, other = (Ranks.of(2, device, backend, tagged=True, fused=False) for _ in range(2))
    layers = compiled(decode_layers, "inductor", dynamic=True)
    for requests in (3, 5):
        batches = [Batch.of(requests, 2, device) for _ in range(2)]
        num_valid = msa_icp.num_valid_pages(batches[0].seq_lens, 1)
        decode_layers(eager, batches[0], num_valid, (0, 1))
        with monkeypatch.context() as patch:
            given = record_addresses(patch)
            layers(other, batches[1], num_valid, (0, 1))
        assert_ranks_equal(eager, other)
        owned = [*batches[1].shards, *other.scores, *other.outputs]
        for storage in other.group:
            owned += [storage.tagged_recv_bases, storage.errors, storage.publish_generations]
            owned += [*storage.tagged_recv, *storage.expected_generations]
        mine = {t.data_ptr() for t in owned}
        written = {"decode_index_score_sharded": (1, 4), "topk_select_publish": (0, 2, 3, 13)}
        written |= {"merge_candidates": (0, 2, 3, 8), "write_index_keys": (4,)}
        for op, places in written.items():
            seen = [(place, address) for name, place, address in given if name == op]
            assert {place for place, address in seen if address in mine} == set(places), op
            assert all(address in mine for place, address in seen if place in places), op


@pytest.mark.exchange
@pytest.mark.large
@forms
def test_any_order_that_the_graph_allows_is_right(backend, device, tagged):
    """Of the nodes whose inputs are there the one that the program has last runs first."""
    orders: list[list[int]] = []

    def last_first(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        nodes = list(module.graph.nodes)
        inner = [n for n in nodes if n.op == "call_function" and n.target is not torch.ops.aten.copy_.default]
        done = {n for n in nodes if n.op == "placeholder"}
        order: list[torch.fx.Node] = []
        while len(order) < len(inner):
            order.append(next(n for n in reversed(inner) if n not in done and done >= set(n.all_input_nodes)))
            done.add(order[-1])
        orders.append([inner.index(n) for n in order])
        graph, copies = torch.fx.Graph(), {}
        ends = [n for n in nodes if n.op != "placeholder" and n not in done]
        for node in [*(n for n in nodes if n.op == "placeholder"), *order, *ends]:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return torch.fx.GraphModule(module, graph)

    eager, other = (Ranks.of(2, device, backend, tagged=tagged, fused=False) for _ in range(2))
    batches = [Batch.of(3, 2, device) for _ in range(2)]
    num_valid = msa_icp.num_valid_pages(batches[0].seq_lens, 1)
    decode_layers(eager, batches[0], num_valid, (0, 1))
    layers = compiled(decode_layers, aot_autograd(fw_compiler=last_first))
    layers(other, batches[1], num_valid, (0, 1))
    assert orders != [sorted(orders[0])]
    assert_ranks_equal(eager, other)


@pytest.mark.exchange
@pytest.mark.prefill
@pytest.mark.large
def test_prefill_chain(backend, device):
    layer = compiled(prefill_layer)
    for tokens in (3, 7, 5):
        eager, other = Window(tokens, device, backend), Window(tokens, device, backend)
        prefill_layer(eager)
        layer(other)
        assert all(map(same_bits, eager.written(), other.written()))


def test_layers_cut_out_of_one_record(monkeypatch):
    """What an engine has: the shards of all layers in one record a page. Inductor writes each where it is."""
    call = CALLS["write"]("cpu", "torch")
    pages, rows, _ = call.arguments["index_k"].shape
    records = [torch.zeros(pages, 2, rows * 128 + 32, dtype=torch.uint8) for _ in range(2)]

    def write(record: Tensor) -> None:
        for layer in range(2):
            shard = record[:, layer, : rows * 128].unflatten(1, (rows, 128))
            call.function(**{**call.arguments, "index_k": shard})

    write(records[0].view(torch.float8_e4m3fn))
    given = record_addresses(monkeypatch)
    compiled(write, "inductor")(records[1].view(torch.float8_e4m3fn))
    assert torch.equal(*records)
    shards = [address for op, place, address in given if op == "write_index_keys" and place == 4]
    assert shards == [records[1][:, layer].data_ptr() for layer in range(2)]


# ---------------------------------------------------------------- receive rows by address


@forms
def test_a_merge_of_a_tensor_is_refused_by_name(tagged):
    call = CALLS["merge tagged" if tagged else "merge"]("cpu", "torch")
    before = snapshot(call.group)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call merge_received"):
        compiled(lambda arguments: call.function(**arguments))(call.arguments)
    assert_same(before, snapshot(call.group))


def test_where_graphs_may_break_a_merge_of_a_tensor_runs_eagerly():
    eager, other = CALLS["merge"]("cpu", "torch"), CALLS["merge"]("cpu", "torch")
    eager.function(**eager.arguments)
    torch.compile(lambda arguments: other.function(**arguments), backend="eager")(other.arguments)
    assert same_bits(eager.arguments["output"], other.arguments["output"])
    assert_same(snapshot(eager.group), snapshot(other.group))


def test_a_callers_own_communicator():
    call = CALLS["received"]("cpu", "torch")
    comm = own_comm(call.group[0])
    merge = compiled(lambda arguments: call.function(**arguments))
    with pytest.raises(ValueError, match="known by register_comm"):
        merge({**call.arguments, "comm": comm})
    msa_icp.register_comm(comm)
    merge({**call.arguments, "comm": comm})
    assert int(comm.recv[1, ..., 32].sum()) == 0
    assert int(comm.errors[0]) == 0


def test_other_storages_in_the_same_compiled_function():
    calls = [CALLS["received"]("cpu", "torch") for _ in range(3)]
    merge = compiled(lambda arguments: msa_icp.merge_received(**arguments))
    for call in calls:
        merge(call.arguments)
        assert int(call.group[0].recv[1, ..., 32].sum()) == 0
    kept = calls[2].group[0].recv
    calls[2].group[0].close()
    with pytest.raises(ValueError, match="comm: must be an open ReceiveStorage"):
        merge(calls[2].arguments)
    assert kept.numel() > 0  # still there, but no longer to be found


def test_rows_are_found_while_their_tensor_lives():
    group = msa_icp.ReceiveStorage.in_process(2, capacity=3)
    address = group[1].tagged_recv_address
    assert receive_rows.at(address).data_ptr() == group[1].tagged_recv.data_ptr() == address
    assert receive_rows.at(group[1].recv_address).dtype == torch.int32
    del group
    gc.collect()
    with pytest.raises(ValueError, match=f"one without live receive rows at {address:#x}"):
        receive_rows.at(address)


@pytest.mark.exchange
@forms
def test_an_eager_merge_by_communicator(backend, device, tagged):
    left, right = (CALLS["merge tagged" if tagged else "merge"](device, backend) for _ in range(2))
    for call in (left, right):
        call.group[0].tagged_recv[1] = 1 << 32
    left.function(**left.arguments)
    shared = ("num_valid_pages", "output", "init_blocks", "local_blocks", "spin_limit", "backend")
    given = {key: right.arguments[key] for key in shared}
    msa_icp.merge_received(right.group[0], slot=1, tagged=tagged, **given)
    assert same_bits(left.arguments["output"], right.arguments["output"])
    assert_same(snapshot(left.group), snapshot(right.group))


@pytest.mark.parametrize(("tagged", "name"), [(False, "recv"), (True, "tagged_recv")])
def test_an_object_without_the_fields_is_refused_by_name(tagged, name):
    valid, output = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"^comm\.{name}: must be a torch.Tensor, was NoneType"):
        msa_icp.merge_received(object(), valid, output, slot=0, tagged=tagged, init_blocks=0, local_blocks=1)


def test_views_of_a_storage_do_not_take_its_place():
    """What another object announces of the same memory may go; the storage is found all the same."""
    with msa_icp.ReceiveStorage.in_process(2, capacity=2) as group:
        views = SimpleNamespace(recv=group[0].recv[:], tagged_recv=group[0].tagged_recv[:])
        msa_icp.register_comm(views)
        assert views.recv_address == group[0].recv_address
        del views
        assert receive_rows.at(group[0].recv_address) is group[0].recv
