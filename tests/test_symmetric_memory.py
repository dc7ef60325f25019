"""Receive storage on CUDA without a GPU: over a stand-in for PyTorch's symmetric memory."""

from __future__ import annotations

import re
import sys

import pytest
import symmetric_stand_in as stand_in
import torch
from rank_processes import run_ranks

import msa_icp
from msa_icp import agreement, storage, symmetric_memory

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stand-in uses /proc")


@linux
@pytest.mark.parametrize("world_size", [2, 4])
def test_both_forms_a_reset_and_nothing_left(world_size, tmp_path):
    for rank, found in enumerate(run_ranks(stand_in.works, world_size, tmp_path)):
        assert found == {
            "synchronized": [
                rank + 1,
                0,
            ],  # the mark is there before the peers look, and gone before they store
            "cleared": True,
            "distinct": world_size,
            "mine": True,
            "legacy": 0,
            "tagged": 0,
            "again": 0,
            "multicast": ["1", None],
            "left": 0,
        }


REFUSED = {
    "one card": r"ranks 0, 1 share one card.*set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.*gloo",
    "allowed on one rank": r"ranks 0, 1 share one card",
    "hidden cards": r"ranks 0, 1 have cards of their own of one name \(CUDA_VISIBLE_DEVICES\?\)",
    "no access": r"cuda:1 of rank 1 has no peer access to cuda:0 of rank 0",
    "folders": r"TMPDIR.*it is /tmp on rank 0, .*tmp on rank 1",
    "allocation": r"cannot allocate \d+ bytes on cuda:1 \(capacity=2\): out of memory",
    "early": r"PyTorch cannot map the memory of cuda:0 \(rank 0\), cuda:1 \(rank 1\) .*invalid argument",
    "late": r"into the process of rank 1: CUDA driver error",
    "mapping": r"the marks of the ranks are \[0, 2\]",
    "capacities": r"capacity: must be the same on every rank, the ranks have \[2, 3\], was",
    "devices": r"device: must be the same on every rank, the ranks have \['cuda', 'cpu'\]",
    "no such card": r"device: must be cpu, or a CUDA device .* was cuda:9 \(this process sees 4 of them\)",
}


@linux
def test_what_goes_wrong_on_one_rank_ends_the_attempt_on_all(tmp_path):
    """Without waiting for a rank that does not come, and the same group can try again."""
    both = ("one card", "allowed on one rank", "hidden cards", "folders", "capacities", "devices")
    for rank, found in enumerate(run_ranks(stand_in.refusals, 2, tmp_path)):
        for fault, pattern in REFUSED.items():
            kind = (
                "ValueError" if fault in both[-2:] or (fault == "no such card" and rank) else "RuntimeError"
            )
            told = "" if fault in both or rank == 1 else "receive storage: rank 1 gives up: "
            assert re.match(rf"{kind}: {told}.*{pattern}", found[fault]), (rank, fault, found[fault])
        assert found["allowed"] == found["unseen card"] == ""
        assert found["left"] == 0
        assert found["wrong"] == 0


@linux
def test_a_process_that_takes_the_place_of_a_dead_one(tmp_path):
    """PyTorch's own count of its rendezvous differs between the two; they must meet all the same."""
    assert run_ranks(stand_in.replaced, 2, tmp_path, spares=1) == [0, None, 0]


@linux
def test_a_group_that_moves_no_objects_is_refused_by_name(tmp_path):
    for found in run_ranks(stand_in.a_group_without_objects, 2, tmp_path):
        for error, name in zip(found, ("cpu:fake", "cuda:nccl"), strict=True):
            assert error.startswith("ValueError: group: must be one whose backend moves Python objects"), (
                error
            )
            assert name in error


# ---------------------------------------------------------------- in one process


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"available": False}, "finds no GPU"),
        ({"index": 4}, "sees 4 of them"),
        ({"backend": "NVSHMEM"}, "set to NVSHMEM"),
        ({"backend": None}, "set to None"),
        ({"missing": "cannot import name '_SymmetricMemory'"}, "lacks .*cannot import name"),
    ],
)
def test_why_a_device_has_no_symmetric_memory(monkeypatch, change, reason):
    monkeypatch.setattr(symmetric_memory, "_MISSING", change.get("missing", ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: change.get("available", True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    parts = stand_in.StandIn(0)
    parts.get_backend = lambda device: change.get("backend", "CUDA")
    monkeypatch.setattr(symmetric_memory, "_SymmetricMemory", parts, raising=False)
    found = symmetric_memory.unavailable(torch.device("cuda", change.get("index", 0)))
    assert found is None if reason is None else re.search(reason, found)


def test_this_torch_has_what_is_needed():
    """Names and signatures that a later PyTorch may have changed."""
    assert symmetric_memory._MISSING == ""
    for name in ("empty_strided_p2p", "rendezvous", "get_buffer", "get_backend"):
        assert hasattr(symmetric_memory._SymmetricMemory, name)


class Log:
    """A group of one, and everything that a reset does in its order."""

    rank, world_size, group = 0, 1, None

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, mine):
        self.events.append("exchange" if mine[0] is None else mine[0])
        return [mine]

    def wait_for_all(self, timeout):
        self.events.append(f"wait {timeout}")


@pytest.fixture
def logged(monkeypatch):
    """One rank's storage whose waits for the device, clears and exchanges are logged."""
    log = Log()
    made = msa_icp.ReceiveStorage.in_process(2, capacity=1)[0]
    made._exchange = log
    monkeypatch.setattr(storage, "_finish", lambda device: log.events.append("finish"))
    clear = made._clear
    monkeypatch.setattr(made, "_clear", lambda: (log.events.append("clear"), clear()))
    return made, log


def test_a_reset_clears_between_two_agreements_with_nothing_in_flight(logged):
    made, log = logged
    made.errors.fill_(3)
    made.reset(timeout=2.5)
    assert log.events == ["finish", "wait 2.5", "exchange", "clear", "finish", "exchange"]
    made.check()


def test_a_reset_tells_the_others_of_a_broken_device(logged, monkeypatch):
    """They would wait for the group's timeout."""
    made, log = logged

    def broken(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(storage, "_finish", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        made.reset()
    assert log.events == ["gives up: CUDA error: an illegal memory access was encountered"]


def test_a_folder_for_sockets_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(RuntimeError, match=r"sockets in .*gone, .*set TMPDIR to a folder"):
        symmetric_memory.Card.of(torch.device("cuda", 0))


def test_a_broken_device_comes_to_the_barrier_as_well(logged, monkeypatch):
    made, log = logged

    def broken(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(storage, "_finish", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        made.reset(timeout=3)
    assert log.events == ["wait 3.0", "gives up: CUDA error"]


@pytest.mark.parametrize(
    "timeout",
    [0, -1, 1e-4, float("nan"), float("inf"), 1e12, pytest.param(10**400, id="past a float"), "5", True],
)
def test_a_limit_that_is_none_is_refused_before_anything(logged, timeout):
    made, log = logged
    with pytest.raises(ValueError, match=r"^timeout: must be seconds, from 0.001 to"):
        made.reset(timeout=timeout)
    assert log.events == []


def test_a_closed_storage_is_not_reset(logged):
    made, log = logged
    made.close()
    with pytest.raises(RuntimeError, match="closed"):
        made.reset()
    assert log.events == ["finish"]
    assert made._exchange is None  # a group that is destroyed then closes its connections


def test_close_lets_go_of_the_memory_of_a_broken_device(logged, monkeypatch):
    made, _ = logged

    def broken(device):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(storage, "_finish", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        made.close()
    assert made.recv.numel() == 0
    assert made._peers == ()


# ---------------------------------------------------------------- agreement


def exchanging(*others):
    """The exchange of rank 0 where the others send these reports, one list after the other."""
    rounds = iter(others)
    sent = []

    def exchange(mine):
        sent.append(mine)
        return [mine, *next(rounds)]

    return exchange, sent


def test_agreement_ends_with_everybody():
    exchange, sent = exchanging([(None, 5)], [(None, None)])
    with agreement.agreement(exchange):
        assert agreement.gather(exchange, 4) == [4, 5]
    assert sent == [(None, 4), (None, None)]


def test_an_error_here_is_told_once():
    exchange, sent = exchanging([(None, 1)])
    with pytest.raises(KeyError), agreement.agreement(exchange):
        raise KeyError("x")
    assert sent == [("gives up: 'x'", None)]


def test_an_error_there_is_not_answered():
    """The rank that has given up waits for nothing more: a second exchange would hang."""
    exchange, sent = exchanging([("gives up: no", None)])
    with (
        pytest.raises(agreement.NoAgreementError, match="rank 1 gives up: no"),
        agreement.agreement(exchange),
    ):
        agreement.gather(exchange, 1)
    assert sent == [(None, 1)]


def test_an_error_there_at_the_end():
    exchange, _ = exchanging([("gives up: no", None)])
    with (
        pytest.raises(agreement.NoAgreementError, match="rank 1 gives up: no"),
        agreement.agreement(exchange),
    ):
        pass
