"""Replays with a process for each rank: same selections, and a clean end however it comes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from replay_cases import CONVERSATION, small_plan, write_trace

from msa_icp.replay.errors import RankFailure
from msa_icp.replay.options import ReplayOptions
from msa_icp.replay.plan import Plan, make_plan
from msa_icp.replay.run import replay
from msa_icp.replay.trace import load_trace

LONG = [(0, 1500, 3000, [0, 1, 2]), (0, 900, 3000, [0, 3])]
"""Thousands of steps: somebody will end it before it ends by itself."""


def shared_memory() -> set[str]:
    where = Path("/dev/shm")
    return set(os.listdir(where)) if where.exists() else set()


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Neither a process nor shared memory outlives a replay."""
    before = shared_memory()
    yield
    assert multiprocessing.active_children() == []
    assert shared_memory() <= before


def long_plan(folder: Path, world_size: int = 4, **settings: int) -> Plan:
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
    assert all("rank 2 did not come" in line or "cannot be reached" in line for line in others)
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
