"""What `warmup` loads: whatever calls launch, but no kernel of another layout, op or backend."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
import torch

import msa_icp
from msa_icp import dispatch, geometry, verify
from msa_icp.cases import decode_case
from msa_icp.cuda_backend import loader
from msa_icp.prefill_cases import prefill_case
from msa_icp.verify.comparison import Result

layouts = pytest.mark.parametrize(("page_size", "world_size"), geometry.LAYOUTS)


def watch(monkeypatch, method, *, call_through):
    """What `Kernel.<method>` is called for, in both backends that have kernels: names with constants."""
    seen = []

    def watched(kind, name_of):
        original = getattr(kind, method)

        def call(self, *arguments, **options):
            seen.append(name_of(self, *arguments))
            return original(self, *arguments, **options) if call_through else None

        monkeypatch.setattr(kind, method, call)

    watched(loader.Kernel, lambda kernel, *rest: kernel.variant.name)
    if find_spec("triton") is not None:
        constants_at = {"launch": 2, "load": 0}[method]
        watched(
            importlib.import_module("msa_icp.triton_backend.launch").Kernel,
            lambda kernel, *arguments: (kernel.function.__name__, arguments[constants_at]),
        )
    return seen


def warmed(monkeypatch, *arguments, **layout):
    """The kernels that a warm-up loads."""
    with monkeypatch.context() as patch:
        loaded = watch(patch, "load", call_through=False)
        msa_icp.warmup(*arguments, **layout)
    assert len(set(loaded)) == len(loaded)
    return set(loaded)


def assert_warmed(launched, loads, backend):
    """What the backend has not, `verify` takes from another one."""
    own = {each for each in launched if isinstance(each, str) == (backend == "cuda")}
    assert own
    assert own <= loads


@layouts
def test_a_layout_launches_what_its_warmup_loads(backend, device, world_size, page_size, monkeypatch):
    """On a GPU as well: nothing of a whole `verify` of one batch and one window is loaded by a call."""
    if backend == "torch":
        pytest.skip("tensor code")
    loads = warmed(monkeypatch, device, backend, page_size=page_size, world_size=world_size)
    launched = watch(monkeypatch, "launch", call_through=True)
    result = Result("warmup", backend)
    batch = decode_case("batch", world_size, page_size, seq_lens=[140], decode_query_len=2)
    verify.decode.check_case(result, batch, backend, device)
    window = prefill_case("window", world_size, page_size, qo_lens=[2])
    verify.prefill.check_case(result, window, backend, device)
    assert not result.differences
    assert_warmed(launched, loads, backend)


@pytest.mark.prefill(["index_score_sharded"])
@layouts
def test_a_large_window_launches_what_its_warmup_loads(backend, device, world_size, page_size, monkeypatch):
    """More tokens a segment, and more segments, than the other variants of scorers and plan are for."""
    if backend == "torch":
        pytest.skip("tensor code")
    loads = warmed(monkeypatch, device, backend, page_size=page_size, world_size=world_size)
    launched = watch(monkeypatch, "launch", call_through=True)
    case = prefill_case("", world_size, page_size, qo_lens=[40 if device == "cuda" else 17, *[0] * 64])
    plan = verify.prefill.plan_on_device(case, backend, device)
    verify.prefill.run_scores(case, plan, 0, backend, compact=False, initialize=False)
    if not verify.no_prefill(backend, ["prefill_score_select"]):
        verify.prefill.run_fused(case, plan, 0, backend, case.num_valid_pages())
    assert_warmed(launched, loads, backend)


@pytest.fixture(params=["cuda", "triton"])
def kernels_of(request, monkeypatch):
    """A backend and what `warmup` of a layout loads of it, as if every backend served the CPU."""
    if request.param == "triton" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    package = dispatch.package(request.param)
    monkeypatch.setattr(package, "unavailable", lambda device: None)
    return lambda **layout: warmed(monkeypatch, "cpu", request.param, **layout)


def test_the_layouts_together_are_all(kernels_of):
    everything = kernels_of()
    parts = [kernels_of(page_size=p, world_size=w) for p, w in geometry.LAYOUTS]
    assert all(part < everything for part in parts)
    assert set.union(*parts) == everything
    assert kernels_of(world_size=4) == parts[1] | parts[3]
    assert kernels_of(page_size=256) == parts[2] | parts[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_gpu_loads_of_the_second_best_backend_what_the_best_has_not(monkeypatch):
    for name in dispatch.NAMES:
        monkeypatch.setattr(dispatch.package(name), "unavailable", lambda device: None)
    by_backend = dispatch._ops_by_backend("cake", torch.device("cuda", 0))
    assert by_backend["triton"] == ["index_score_sharded_plan_device", "prefill_score_select"]
    assert set(by_backend) == {"cuda", "triton"}
    assert sorted(op for ops in by_backend.values() for op in ops) == sorted(dispatch.OPS)


def test_no_backend_has_an_op_that_warmup_does_not_know():
    every = {name for backend in dispatch.NAMES for name in dispatch.package(backend).__all__}
    extras = {"ARCHITECTURE", "kernels", "not_installed", "to_load", "unavailable", "variants"}
    assert every - set(dispatch.OPS) == extras
    assert set(dispatch.OPS) <= every


def test_processes_go_their_own_ways(monkeypatch):
    """Ranks with one cold cache: each compiles what the others have not come to yet."""
    orders = []
    for process in (100, 101):
        order: list[int] = []
        loads = [lambda order=order, i=i: order.append(i) for i in range(40)]
        monkeypatch.setattr(dispatch.package("torch"), "to_load", lambda *arguments, loads=loads: loads)
        monkeypatch.setattr(dispatch.os, "getpid", lambda process=process: process)
        msa_icp.warmup("cpu", "torch")
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("wrong", [{"page_size": 64}, {"world_size": 3}, {"world_size": True}])
def test_a_wrong_layout_is_named(wrong):
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))}: must be \d+ or \d+, was"):
        msa_icp.warmup("cpu", **wrong)
