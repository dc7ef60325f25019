"""A wait makes as many polls as its limit says and, after a failure, one (contract, section 6).

Counted, because on a busy machine a clock does not tell a limit from four times as much. Triton's polls are
counted in test_triton_interpreted.py.
"""

from __future__ import annotations

import importlib
from collections import Counter

import cuda_emulation
import pytest
from helpers import merge, publish, random_scores

import msa_icp
from msa_icp.torch_backend import waiting

pytestmark = pytest.mark.exchange


@pytest.fixture
def polls_of(monkeypatch, backend, device):
    """Of a tensor's first word: begins to count how often it is polled, and gives a function that tells."""
    if backend == "torch":
        return count_looks(monkeypatch)
    if (backend, device) == ("cuda", "cpu"):
        return count_emulated(monkeypatch)
    return pytest.skip("polls are counted on a CPU, and Triton's in test_triton_interpreted.py")


def count_looks(monkeypatch):
    """A look at all rows is a poll, and so is one at the first row that is missing: the only one here."""
    count = [0]

    def counted(poll):
        def call():
            count[0] += 1
            return poll()

        return call

    def wait(rows, look, take, watch, *rest):
        return waiting.wait(rows, counted(look), take, lambda row: counted(watch(row)), *rest)

    def begin(words):
        for op in ("topk_select_publish", "merge_candidates"):
            monkeypatch.setattr(importlib.import_module(f"msa_icp.torch_backend.{op}"), "wait", wait)
        return lambda: count[0]

    return begin


def count_emulated(monkeypatch):
    def begin(words):
        monkeypatch.setattr(cuda_emulation, "POLLS", Counter({words.data_ptr(): 0}))
        return lambda: cuda_emulation.POLLS[words.data_ptr()]

    return begin


@pytest.mark.parametrize("failed", [0, 1, -1])
@pytest.mark.parametrize("limit", [1, 2, 9, 1000])
@pytest.mark.parametrize("op", ["publish", "merge", "merge tagged"])
def test_polls_of_a_wait(polls_of, backend, device, op, limit, failed):
    """Of one row, where all others are there: it is neither missed nor waited for any longer."""
    tagged = op == "merge tagged"
    group = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)
    storage, scores = group[0], random_scores(1, 4, seed=0)
    storage.errors[0] = failed
    if op == "publish":
        words = group[1].recv[0, 0, 1, 0, 32:]  # for head 3 of rank 0, and not taken yet
        words[0] = 1
        polls = polls_of(words)
        publish(storage, scores, [4], backend=backend, spin_limit=limit)
    else:
        for source in group:
            publish(source, scores, [4], backend=backend, tagged=tagged)
        row = (storage.tagged_recv if tagged else storage.recv)[0, 1, 0, 0]
        words = row if tagged else row[32:]
        words[0] = 0
        polls = polls_of(words)
        merge(storage, [4], backend=backend, tagged=tagged, spin_limit=limit)
    assert polls() == (limit if failed == 0 else 1)
    assert int(storage.errors[0]) == failed + 1
