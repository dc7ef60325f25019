"""The serving benchmark at toy sizes: what is drawn, what is timed, what a first call costs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading import benchmark

import msa_icp
from msa_icp import cuda_backend
from msa_icp.bench import batch, decode_score, first_call, long_table, measure, serving

CPU = torch.device("cpu")
TINY = decode_score.Size("2 x 256", (256, 256))
needs_nvrtc = pytest.mark.skipif(
    cuda_backend.not_installed() is not None, reason=str(cuda_backend.not_installed())
)


def test_the_production_mix_is_drawn_as_it_says():
    assert sum(percent for _, percent in serving.MIX) == 100
    lens = serving.production_lens(20_000)
    assert lens == serving.production_lens(20_000)
    thousands = [-(-keys // 1024) for keys in lens]
    for size, percent in serving.MIX:
        assert thousands.count(size) / 200 == pytest.approx(percent, abs=1.5)
    assert all(0 <= size * 1024 - keys < 128 for size, keys in zip(thousands, lens, strict=True))


@pytest.fixture
def short_chains(monkeypatch):
    monkeypatch.setattr(measure, "chain_bytes", lambda device: 200_000)


def test_rows_of_the_production_mix(short_chains, monkeypatch):
    monkeypatch.setattr(serving, "production_lens", lambda count: [300, 1500, 129][:count])
    rows = list(
        serving.production_mix(CPU, ["torch"], requests=(1, 3), layouts=("P256W2",), query_lens=(1, 2))
    )
    assert [(row.requests, row.order, row.query_len) for row in rows] == [
        (count, order, query_len) for count in (1, 3) for order in batch.PAGE_ORDERS for query_len in (1, 2)
    ]
    assert {row.bytes for row in rows} == {2 * 128 * 128, (2 + 6 + 1) * 128 * 128}
    assert all(row.us > 0 and row.plain_read_us is None for row in rows)


def test_rows_of_the_serving_chain(short_chains):
    rows = list(serving.serving_chain(CPU, ["torch"], sizes=(TINY,), layouts=("P128W4",)))
    assert [row.enable_pdl for row in rows] == [True, False]
    assert all(row.us > row.without_scorer_us > 0 for row in rows)


def test_rows_of_the_layer_replay(monkeypatch):
    monkeypatch.setattr(measure, "_BURSTS", 2)
    monkeypatch.setattr(measure, "_BURST_CALLS", 2)
    rows = list(serving.layer_replay(CPU, ["torch"], requests=1))
    assert [row.steps for row in rows] == ["produce score publish merge", "produce score_publish merge"]
    assert all(row.eager_us > 0 and row.replay_us > 0 for row in rows)


def test_a_graph_is_captured_once_and_replayed(monkeypatch):
    """What `capture` does on a GPU, over a stand-in for its graphs."""
    log = []

    class Graph:
        def __enter__(self):
            log.append("capture")

        def __exit__(self, *error):
            log.append("end")

        def replay(self):
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
    monkeypatch.setattr(torch.cuda, "device", lambda device: Graph())
    replay = measure.capture(lambda: log.append("launch"), torch.device("cuda"))
    log.append("captured")
    replay()
    replay()
    assert log == ["capture", "capture", "launch", "end", "end", "captured", "replay", "replay"]


@needs_nvrtc
def test_a_first_call_is_cold_once():
    rows = list(first_call.rows(CPU, ["cuda"]))
    by_state = {
        state: {row.op: row.seconds for row in rows if row.state == state} for state in first_call.STATES
    }
    cold, warm = (by_state[state] for state in first_call.STATES)
    assert cold.keys() == warm.keys() >= {"decode_index_score_sharded", "merge_candidates"}
    assert next(iter(cold)) == first_call.COMPILER
    compiled = cold.keys() - {first_call.COMPILER}
    assert all(warm[source] < cold[source] / 2 for source in compiled)


def processes_that(monkeypatch, *leave):
    """Stand-ins for the processes, which leave such files in the folder of their caches."""
    remaining = list(leave)

    def stand_in(device, backend, folder, *what, processes=1):
        for name in remaining.pop(0):
            (Path(folder) / name).touch()
        return [{"op": 0.5, first_call.LAYOUT_WARMUP: 0.5}]

    monkeypatch.setattr(first_call, "_in_processes", stand_in)


def test_what_is_called_cold_finds_an_empty_folder(monkeypatch, tmp_path):
    processes_that(monkeypatch, ["kernel"], [])
    assert len(list(first_call.rows(CPU, ["cuda"]))) == 4
    (tmp_path / "kernel").touch()
    monkeypatch.setattr(first_call.tempfile, "TemporaryDirectory", lambda: contextlib.nullcontext(tmp_path))
    with pytest.raises(RuntimeError, match="is not empty, so no call of cuda would be cold"):
        list(first_call.rows(CPU, ["cuda"]))


def test_what_is_said_to_come_from_the_disk_cache_does(monkeypatch):
    processes_that(monkeypatch, [], [])
    with pytest.raises(RuntimeError, match="so cuda keeps its kernels elsewhere"):
        list(first_call.rows(CPU, ["cuda"]))
    processes_that(monkeypatch, [], [])
    assert len(list(first_call.rows(CPU, ["torch"]))) == 4


@needs_nvrtc
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_the_compiler_is_timed_before_the_first_op_of_the_backend_that_has_it(name):
    """In a process of its own, which has a stand-in for the GPU and for the ops."""
    program = (
        "import sys, types, torch, msa_icp; from msa_icp.bench import first_call\n"
        "said = lambda: print('cuda.core' in sys.modules)\n"
        "work = types.SimpleNamespace(Workload=lambda *_: types.SimpleNamespace(calls={'op': said}))\n"
        "sys.modules['msa_icp.bench.host_time'] = work\n"
        "torch.cuda.synchronize = msa_icp.warmup = lambda *_: None\n"
        f"print(*first_call.first_calls(torch.device('cpu'), {name!r}), sep=',')\n"
    )
    source = str(Path(msa_icp.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = ["op", first_call.WARMUP]
    wanted = [first_call.COMPILER, *rows] if name == "cuda" else rows
    assert ran.stdout.splitlines() == [str(name == "cuda"), ",".join(wanted)], ran.stderr


def test_a_first_call_that_fails_says_why():
    with pytest.raises(RuntimeError, match="nonsense"):
        list(first_call.rows(torch.device("cuda"), ["nonsense"]))


def test_the_script_writes_every_part(tmp_path, monkeypatch, capsys, short_chains):
    monkeypatch.setattr(serving, "production_lens", lambda count: [300] * count)
    monkeypatch.setattr(decode_score, "SIZES", (TINY,))
    monkeypatch.setattr(long_table, "MORE_SIZES", ())
    monkeypatch.setattr(
        "sys.argv",
        "serving --name toy --device cpu --backend torch --quick --requests 2 --commit abc "
        f"--part mix chain replay long-table --out {tmp_path}".split(),
    )
    benchmark("serving").main()
    document = json.loads((tmp_path / "serving_toy.json").read_text())
    assert document["commit"] == "abc"
    names = ["production mix"] * 3 + ["serving chain"] * 2 + ["long table"] * 3
    assert [row["what"] for row in document["rows"]] == names
    assert [row["room"] for row in document["rows"][5:]] == [0, 131072, 1048576]
    assert "order shared prefix" in capsys.readouterr().out


def test_tables_that_are_too_short_are_left_out(short_chains):
    small, large = decode_score.Size("small", (200,)), decode_score.Size("large", (40_000,))
    made = list(
        long_table.rows(CPU, ["torch"], sizes=(small, large), layouts=("P128W4",)),
    )
    assert [(row.batch, row.room) for row in made] == [
        *(("small", room) for room in (0, 131072, 1048576)),
        *(("large", room) for room in (0, 1048576)),
    ]
    assert all(row.us > 0 for row in made)
