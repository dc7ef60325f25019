"""Replays with a process for each rank: same selections, and a clean end however it comes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import time
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import pytest
import replay_stand_in
import torch
from rank_processes import CPU, PLACES
from replay_cases import CONVERSATION, small_plan, write_trace

from msa_icp.replay import processes, report
from msa_icp.replay.errors import RankFailure
from msa_icp.replay.options import ReplayOptions
from msa_icp.replay.plan import Plan, make_plan
from msa_icp.replay.run import replay
from msa_icp.replay.trace import load_trace

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stand-in uses /proc")
gpu_places = pytest.mark.parametrize(
    "place", PLACES[1:] or [pytest.param(CPU, marks=pytest.mark.skip(reason="no GPU"))], ids=str
)

LONG = [(0, 1500, 3000, [0, 1, 2]), (0, 900, 3000, [0, 3])]
"""Thousands of steps: somebody will end it before it ends by itself."""


def shared_memory() -> set[str]:
    where = Path("/dev/shm")
    names = os.listdir(where) if where.exists() else []
    return {
        name for name in names if not name.startswith("cuda.shm")
    }  # CUDA's own: a killed process leaves it


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Neither a process nor shared memory outlives a replay."""
    before = shared_memory()
    yield
    assert multiprocessing.active_children() == []
    assert shared_memory() <= before


def long_plan(folder: Path, world_size: int = 4, **settings: Any) -> Plan:
    options = ReplayOptions(sparse_layers=2, check_every=0, world_size=world_size, **settings)
    return make_plan(load_trace(write_trace(folder, LONG)), options)


def endless_prefill(folder: Path) -> Plan:
    """Nobody decodes for thousands of steps."""
    return long_plan(folder, chunk_tokens=1, prefill_tokens=2**20)


def process_of(rank: int) -> int:
    """Process id of a rank."""
    found = [p.pid for p in multiprocessing.active_children() if p.name == f"msa-icp-rank-{rank}"]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("options", [{}, {"world_size": 2, "page_size": 256, "tagged": False}])
def test_processes_select_what_one_process_selects(tmp_path, options):
    seen = []
    outcome = replay(small_plan(tmp_path, in_process=False, **options), seen.append)
    alone = replay(small_plan(tmp_path))
    assert outcome.digest == alone.digest
    assert outcome.prefill_digest == alone.prefill_digest
    assert outcome.rows_wrong == 0
    assert outcome.rows_checked == alone.rows_checked > outcome.prefill_rows_checked > 0
    assert outcome.counts.finished == len(CONVERSATION)
    assert seen
    assert seen == sorted(seen, key=lambda progress: progress.steps)


@pytest.mark.parametrize("while_it", ["decodes", "prefills"])
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, while_it):
    plan = long_plan(tmp_path) if while_it == "decodes" else endless_prefill(tmp_path)
    killed = []

    def kill(progress):
        started = progress.decode_steps if while_it == "decodes" else progress.prefill_windows
        if started > 3 and not killed:
            killed.append(time.monotonic())
            os.kill(process_of(2), signal.SIGKILL)

    with pytest.raises(RankFailure) as caught:
        replay(plan, kill)
    first, *others = str(caught.value).splitlines()
    assert first == "rank 2: killed by SIGKILL"
    assert others
    # It may be named beside one that has ended because of it, whose rows may also have overwritten others.
    named = re.compile(
        r"ranks? (\d+(, | and ))*2(( and |, )\d+)* did not come|cannot be reached|overwritten by a newer use"
    )
    assert all(named.search(line) for line in others), others
    assert time.monotonic() - killed[0] < 60


def test_ctrl_c_ends_all_ranks_in_the_middle_of_a_prompt(tmp_path):
    outcome = replay(endless_prefill(tmp_path), lambda progress: signal.raise_signal(signal.SIGINT))
    assert outcome.interrupted
    assert outcome.progress.decode_steps == 0
    assert 0 < outcome.progress.prefill_windows < outcome.plan.walk.prefill_tokens
    assert len({rank.progress for rank in outcome.ranks}) == 1


def test_ranks_that_raise_say_what(tmp_path):
    plan = small_plan(tmp_path, in_process=False)
    broken = replace(plan, options=replace(plan.options, backend="none"))
    with pytest.raises(RankFailure, match="UsageError: --backend must be") as caught:
        replay(broken)
    assert str(caught.value).startswith("ranks 0, 1, 2, 3: ")
    assert "Traceback" in caught.value.trace


def test_ctrl_c_ends_all_ranks_after_the_same_step(tmp_path):
    told = []

    def interrupt(progress):
        if not told:
            told.append(progress.steps)
            for number in (0, 1):
                os.kill(process_of(number), signal.SIGINT)  # a terminal sends it to everybody
            signal.raise_signal(signal.SIGINT)

    outcome = replay(long_plan(tmp_path, world_size=2), interrupt)
    assert outcome.interrupted
    assert told[0] <= outcome.steps < len(outcome.plan.walk.contexts)
    assert len({rank.progress for rank in outcome.ranks}) == 1


def test_the_second_ctrl_c_ends_all_ranks_at_once(tmp_path):
    def insist(progress):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        replay(long_plan(tmp_path, world_size=2), insist)


# ---------------------------------------------------------------- ranks on GPUs


@linux
@pytest.mark.parametrize(
    ("device", "cards", "options", "where"),
    [
        ("cuda", 1, {}, "cuda:0, which they share"),
        ("cuda:1", 4, {"world_size": 2, "tagged": False}, "cuda:1, which they share"),
        ("cuda", 2, {"world_size": 2, "page_size": 256}, "cuda:0, cuda:1"),
    ],
    ids=["the_only_one", "one_of_four", "a_card_each"],
)
def test_the_way_to_cards_over_a_stand_in(tmp_path, monkeypatch, device, cards, options, where):
    """Cards chosen, symmetric memory, prefill through the host: the digests of one process on a CPU."""
    monkeypatch.setattr(processes, "_rank_main", replay_stand_in.rank_main)
    plan = small_plan(tmp_path, in_process=False, **options)
    outcome = replay(replay_stand_in.on_cards(plan, device, cards))
    alone = replay(small_plan(tmp_path))
    assert outcome.digest == alone.digest
    assert outcome.prefill_digest == alone.prefill_digest
    assert outcome.rows_wrong == 0
    assert outcome.rows_checked == alone.rows_checked > outcome.prefill_rows_checked > 0
    monkeypatch.setattr("msa_icp.replay.plan.resolve_backend", lambda options: "torch")
    assert ("ranks", f"{plan.options.world_size}, each a process; backend torch on {where}") in report._lines(
        outcome
    )
    summary = report.summary(outcome, tmp_path / "trace.jsonl")
    assert summary["devices"] == list(outcome.plan.devices)
    assert summary["prefill_exchange"] == "gloo, through the host"


@linux
def test_a_killed_rank_of_a_stand_in_is_named(tmp_path, monkeypatch):
    """In the middle of prompts, which the others exchange through the host."""
    monkeypatch.setattr(processes, "_rank_main", replay_stand_in.rank_main)
    kill_rank(1, replay_stand_in.on_cards(long_plan(tmp_path, 2, chunk_tokens=1), "cuda", 1))


def kill_rank(rank, plan):
    """Kill it in the third step: it is named, and the others end."""
    killed = []

    def kill(progress):
        if progress.steps > 3 and not killed:
            killed.append(time.monotonic())
            os.kill(process_of(rank), signal.SIGKILL)

    with pytest.raises(RankFailure) as caught:
        replay(plan, kill)
    first, *others = str(caught.value).splitlines()
    assert first == f"rank {rank}: killed by SIGKILL"
    told = (f"rank {rank} did not come", "cannot be reached", "did not end in time")
    assert others
    assert all(any(words in line for words in told) for line in others), others
    assert time.monotonic() - killed[0] < 60


def sample_plan(**settings) -> Plan:
    """The first requests of the trace that the package ships."""
    options = {
        "sparse_layers": 3,
        "max_batch": 4,
        "requests": 6,
        "decode_steps": 48,
        "chunk_tokens": 96,
        "prefill_tokens": 128,
        "check_every": 4,
        "check_rows": 16,
        **settings,
    }
    with as_file(files("msa_icp") / "data" / "sample_trace.jsonl") as trace:
        return make_plan(load_trace(trace), ReplayOptions(**options))


@pytest.fixture(scope="module")
def sample_on_the_cpu():
    """What the torch backend selects in one process."""
    return replay(sample_plan(in_process=True, backend="torch"))


def on_gpus(place, device, sample, **options):
    """Replay the sample in processes on this device, and compare."""
    seen = []
    outcome = replay(sample_plan(backend=place.backend, device=device, **options), seen.append)
    assert outcome.rows_wrong == 0, outcome.first_wrong
    assert (outcome.digest, outcome.prefill_digest) == (sample.digest, sample.prefill_digest)
    assert outcome.rows_checked == sample.rows_checked > outcome.prefill_rows_checked > 0
    assert outcome.counts.finished == sample.counts.finished
    assert outcome.progress.steps == sample.progress.steps
    assert seen
    return outcome


@gpu_places
@pytest.mark.parametrize("options", [
    {"world_size": 2},
    {"world_size": 4},
    {"world_size": 2, "page_size": 256, "tagged": False},
    {"world_size": 4, "page_size": 256, "tagged": False},
])  # fmt: skip
def test_processes_that_share_a_card_select_what_a_cpu_selects(place, options, sample_on_the_cpu):
    outcome = on_gpus(place, "cuda:0", sample_on_the_cpu, **options)
    assert outcome.plan.share_a_card


@gpu_places
@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_with_a_card_each_select_what_a_cpu_selects(place, world_size, sample_on_the_cpu):
    if torch.cuda.device_count() < world_size:
        pytest.skip("fewer GPUs than ranks")
    outcome = on_gpus(place, "cuda", sample_on_the_cpu, world_size=world_size)
    assert len(set(outcome.plan.devices)) == world_size


@gpu_places
@pytest.mark.parametrize("chunk_tokens", [1, 512], ids=["prefills", "decodes"])
def test_a_killed_rank_on_a_card_is_named(place, chunk_tokens, tmp_path):
    kill_rank(1, long_plan(tmp_path, 2, chunk_tokens=chunk_tokens, backend=place.backend, device="cuda:0"))


@gpu_places
def test_ctrl_c_ends_all_ranks_on_a_card_after_the_same_step(place, tmp_path):
    told = []

    def interrupt(progress):
        if not told:
            told.append(progress.steps)
            signal.raise_signal(signal.SIGINT)

    outcome = replay(long_plan(tmp_path, 4, backend=place.backend, device="cuda:0"), interrupt)
    assert outcome.interrupted
    assert 0 < outcome.steps < len(outcome.plan.walk.contexts)
    assert len({rank.progress for rank in outcome.ranks}) == 1
