"""Receive storage of ranks in processes of their own: gloo, and memory that they share."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import rank_processes
import storage_ranks
import torch
from rank_processes import CPU, PLACES, run_ranks

import msa_icp
from msa_icp import shared_memory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches /proc and /dev/shm")
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
places = pytest.mark.parametrize("place", PLACES, ids=str)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """No test of this file leaves anything of ours in the places where shared memory has a name."""

    def ours():
        folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
        return {path for folder in folders if folder.is_dir() for path in folder.glob("*msa*icp*")}

    before = ours()
    yield
    assert ours() <= before


@places
@pytest.mark.parametrize("world_size", [2, 4])
def test_both_forms_and_a_reset(place, world_size, tmp_path):
    results = run_ranks(storage_ranks.everything_works, world_size, tmp_path, place=place)
    for rank, found in enumerate(results):
        assert found == {
            "fields": [rank, world_size, 4 // world_size, 2],
            "mapped": world_size if place == CPU else 0,
            "descriptors": 0,
            "legacy": 0,
            "tagged": 0,
            "distinct": world_size,
            "after reset": 0,
            "legacy again": 0,
            "second": 0,
            "first": 0,
            "left": 0,
        }


@places
def test_two_groups_of_two(place, tmp_path):
    results = run_ranks(storage_ranks.groups_of_two, 4, tmp_path, place=place)
    assert sorted(found["ranks"] for found in results) == [[0, 0, 2], [0, 0, 2], [1, 1, 2], [1, 1, 2]]
    assert [found["wrong"] for found in results] == [0] * 4


@places
@pytest.mark.parametrize(
    ("world_size", "dead", "when", "tagged", "go_on"),
    [
        (2, 1, "after", False, "spare"),
        (2, 0, "before", True, "spare"),
        (4, 2, "before", False, "two"),
        (4, 2, "after", True, "spare"),
        (4, 3, "middle", True, "two"),
        (2, 1, "middle", False, "spare"),
        (2, 0, "before", False, "spare"),
        (2, 0, "after", True, "spare"),
        (2, 1, "middle", True, "spare"),
        (4, 1, "before", True, "two"),
        (4, 0, "after", False, "two"),
        (4, 3, "middle", False, "spare"),
    ],
)
def test_a_killed_rank_is_named_within_one_limit(place, world_size, dead, when, tagged, go_on, tmp_path):
    results = run_ranks(
        storage_ranks.a_rank_dies,
        world_size,
        tmp_path,
        dead,
        tagged,
        when,
        go_on,
        place=place,
        spares=int(go_on == "spare"),
    )
    assert results[dead] is None
    survivors = [found for rank, found in enumerate(results[:world_size]) if rank != dead]
    for found in survivors:
        assert found["wrong"] == 0
        first = int(when == "after")  # the first layer, after the fourth, that nobody can merge
        right = [[True, True]] * first + [[False, False]] * (8 - first)
        if when == "middle":
            right[0] = [True, False]
        assert found["rights"] == right
        slot, ranks, count, token, message = found["error"]
        assert (slot, ranks) == ((4 + first) % 3, [dead])
        assert token == 1 if when == "middle" else token == 0 or place != CPU
        assert count >= ((8 - first) * 2 - (when == "middle")) * (4 // world_size)
        assert f"rank {dead} did not come" in message
        assert found["left"] == 0
        assert "cannot be reached" in found["reset"][0]
        assert found["reset"][1] < rank_processes.GROUP_TIMEOUT_S + 10
        limit, rest = found["seconds"][first], found["seconds"][first + 1 :]
        assert sum(rest) < max(limit, 0.2), found["seconds"]
    again = [found["again"] for found in results if found and "again" in found]
    assert again == [0] * (world_size if go_on == "spare" else 2)


@places
@pytest.mark.parametrize(
    ("how", "tagged"),
    [("raises", False), ("raises", True), ("behind", False), ("behind", True), ("generation", True)],
)
def test_a_rank_that_fails_and_lives(place, how, tagged, tmp_path):
    results = run_ranks(storage_ranks.a_rank_fails_and_lives, 4, tmp_path, tagged, how, place=place)
    assert [found["wrong"] for found in results] == [0] * 4
    failed = [0, [1], rank_processes.TOKENS]
    assert [found["error"] for found in results] == [
        failed,
        failed if how == "generation" else None,
        failed,
        failed,
    ]


@places
def test_a_reset_ends_within_its_own_limit(place, tmp_path):
    results = run_ranks(storage_ranks.nobody_resets_with_it, 4, tmp_path, place=place)
    assert "rank 1 of the group cannot be reached" in results[0]["error"], results
    assert results[0]["told"]
    for rank in (0, 2, 3):  # the others end with gloo's connections
        assert results[rank]["seconds"] < 1.4, results
        assert "cannot be reached" in results[rank]["error"]


@pytest.mark.parametrize("what", ["create", "reset", "reset with a limit"])
def test_an_interrupt_ends_the_wait_for_a_rank(what, tmp_path):
    assert 0.4 < run_ranks(storage_ranks.interrupted, 2, tmp_path, what)[1] < 2


@pytest.mark.parametrize("dead", [0, 2])
def test_a_reset_without_a_killed_rank_ends_at_once_and_names_it(dead, tmp_path):
    """On all that live: no rank waits for the group's timeout, and none blames another that lives."""
    results = run_ranks(storage_ranks.a_rank_is_gone_at_the_reset, 4, tmp_path, dead)
    for rank, found in enumerate(results):
        if rank != dead:
            assert found["seconds"] < 1, results
            assert re.search(rf"rank {dead}( of the group)? cannot be reached", found["error"]), results
            assert "make a group without the ranks that are gone" in found["error"]
    assert results[dead] is None


@places
@pytest.mark.parametrize("timeout", [None, 20])
def test_a_reset_with_a_broken_device_ends_for_all(place, timeout, tmp_path):
    """Not after the group's timeout: the others learn what it was, and a second one goes on."""
    results = run_ranks(storage_ranks.a_broken_device, 2, tmp_path, timeout, place=place)
    assert results[1]["error"] == "planted"
    assert "rank 1 gives up: planted" in results[0]["error"]
    for found in results:
        assert found["seconds"] < 5
        assert found["wrong"] == 0


@places
def test_a_reset_with_a_limit(place, tmp_path):
    assert run_ranks(storage_ranks.a_reset_with_a_limit, 2, tmp_path, place=place) == [0, 0]


def test_unequal_sizes_are_refused_on_every_rank(tmp_path):
    for found in run_ranks(storage_ranks.unequal_sizes, 2, tmp_path):
        assert re.match(r"ValueError: capacity: must be the same on every rank", found["error"])
        assert found["left"] == 0
        assert found["wrong"] == 0


def test_a_bad_argument_on_one_rank_ends_the_attempt_on_all(tmp_path):
    results = run_ranks(storage_ranks.one_bad_argument, 2, tmp_path)
    assert results[1]["error"].startswith("ValueError: capacity: must be an integer from 1 to")
    assert results[0]["error"].startswith("RuntimeError: receive storage: rank 1 gives up: capacity: must be")
    assert [found["wrong"] for found in results] == [0, 0]


def test_no_room_on_one_rank_fails_on_all(tmp_path):
    for found in run_ranks(storage_ranks.no_room, 2, tmp_path):
        assert "rank 0 cannot allocate" in found["everybody"]
        assert "rank 1 cannot allocate" in found["everybody"]
        assert "rank 1 cannot allocate" in found["one"]
        assert "rank 0" not in found["one"]
        assert found["mapping"].startswith("RuntimeError: receive storage: ")
        assert "cannot map" in found["mapping"]
        assert found["left"] == 0
        assert found["wrong"] == 0


def test_named_files_where_there_is_no_memfd(tmp_path):
    (tmp_path / "tmp").mkdir()
    for found in run_ranks(storage_ranks.named_files, 2, tmp_path):
        assert found["unequal"].startswith("ValueError: capacity")
        assert found["names"] == []
        assert found["mapped"] == 2
        assert (found["legacy"], found["tagged"], found["left"]) == (0, 0, 0)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_ranks_that_share_no_memory_are_refused(tmp_path):
    """In two containers `/proc/7/fd/9` may well be each rank's own memory: the exchange would never meet."""
    for found in run_ranks(storage_ranks.another_machine, 2, tmp_path):
        assert found["error"].startswith("RuntimeError"), found
        assert "one machine" in found["error"]
        assert found["left"] == 0


def test_killed_in_the_rendezvous(tmp_path):
    results = run_ranks(storage_ranks.killed_in_the_rendezvous, 2, tmp_path)
    assert results[1] is None
    assert results[0]["error"]
    assert results[0]["seconds"] < 60
    assert results[0]["left"] == 0


# ---------------------------------------------------------------- the blocks themselves


@pytest.mark.parametrize("anonymous", [True, False])
def test_a_block_is_zeros_shared_and_gone(anonymous):
    block = shared_memory.SharedBlock.allocate(10_000, anonymous=anonymous)
    mine, theirs = block.map(torch.int32), block.map(torch.int32)
    assert mine.shape == (2500,)
    assert not mine.any()
    mine[2499] = 5
    assert theirs[2499] == 5
    block.forget()
    block.forget()
    theirs[0] = 6
    assert mine[0] == 6  # what is mapped stays
    assert not os.path.exists(block.path) or anonymous


@pytest.fixture
def small_files():
    """A limit on the size of files, so that a test that goes wrong does not take all memory."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("anonymous", [True, False])
def test_a_block_that_cannot_grow_leaves_nothing_open(small_files, anonymous):
    before = len(os.listdir("/proc/self/fd")), set(os.listdir(tempfile.gettempdir()))
    with pytest.raises(OSError, match=r"File too large|space|memory"):
        shared_memory.SharedBlock.allocate(128 << 20, anonymous=anonymous)
    assert len(os.listdir("/proc/self/fd")) == before[0]
    assert not any(name.startswith("msa-icp") for name in set(os.listdir(tempfile.gettempdir())) - before[1])


def test_more_memory_than_the_machine_has_is_refused_before_it_is_taken(small_files):
    """An anonymous file has no limit of its own: filling it would take the memory of everybody else."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(OSError, match=r".") as caught:
        shared_memory.SharedBlock.allocate(total + (1 << 30), anonymous=True)
    assert caught.value.errno == errno.ENOMEM, caught.value


def test_one_process_alone_needs_no_group():
    with msa_icp.ReceiveStorage.in_process(2, capacity=1) as group:
        assert len(group) == 2
