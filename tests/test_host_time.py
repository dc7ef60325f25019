"""The benchmark of host times runs here, and leaves the backends as they were."""

from __future__ import annotations

import pytest
import torch

from msa_icp import dispatch
from msa_icp.bench import host_time, measure

OPS = {
    "decode_index_score_sharded",
    "topk_select_publish",
    "merge_candidates",
    "decode_score_publish",
    "write_index_keys",
}


def test_every_op_has_a_row(monkeypatch):
    monkeypatch.setattr(measure, "_BURSTS", 2)
    monkeypatch.setattr(measure, "_BURST_CALLS", 3)
    where = torch.device("cpu")
    before = {op: dispatch.implementation(op, "cake", where) for op in OPS}
    rows = {row.op: row for row in host_time.rows(torch.device("cpu"))}
    assert rows.keys() == OPS
    assert {op: dispatch.implementation(op, "cake", where) for op in OPS} == before
    for row in rows.values():
        assert row.checks > 0
        assert row.whole == {}
        assert row.median["checks"] >= row.checks
        assert row.median.keys() == {"checks"} | ({"triton_op"} if row.triton_op is not None else set())


@pytest.mark.exchange
def test_the_calls_are_valid_and_wait_for_nobody(backend, device):
    work = host_time.Workload(torch.device(device), backend)
    for call in work.calls.values():
        for _ in range(2):
            call()


def test_a_layer_has_a_row_for_every_way(monkeypatch):
    monkeypatch.setattr(measure, "_BURSTS", 2)
    monkeypatch.setattr(measure, "_BURST_CALLS", 3)
    rows = {row.op: row for row in host_time.layer_rows(torch.device("cpu"))}
    assert list(rows) == ["layer, call", "layer, prepared step"]  # a CPU has no graphs
    assert all(row.checks > 0 and row.whole == {} for row in rows.values())
    assert all(row.median.keys() == {"checks"} for row in rows.values())


def test_a_row_is_rounded_and_has_the_medians_of_what_was_measured():
    times = measure.HostTime(1.234, 2.346)
    row = host_time.Row.of("an op", times, None, {"cuda": times})
    assert (row.checks, row.triton_op, row.whole) == (1.23, None, {"cuda": 1.23})
    assert row.median == {"checks": 2.35, "cuda": 2.35}
    assert host_time.Row.of("an op", None, times, {}).median == {"triton_op": 2.35}


def test_the_host_time_is_the_fastest_burst_and_their_median(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0])
    monkeypatch.setattr(measure, "_BURSTS", 3)
    monkeypatch.setattr(measure, "_BURST_CALLS", 1)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.host_times(lambda: None, torch.device("cpu")) == (1e6, 2e6)


@pytest.mark.exchange
def test_the_layers_are_valid_and_wait_for_nobody(backend, device):
    layer = host_time.Layer(torch.device(device), backend)
    for way in (layer.call, layer.step, layer.replay, layer.record_call, layer.record_step):
        way()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_of_every_layer_and_key_are_counted():
    found = host_time.graph_memory(torch.device("cuda"), layers=3, keys=2)
    assert found["graphs"] == 6  # its bytes are those of the whole card: other tests take and free some
