"""Receive storage of several ranks in one process."""

from __future__ import annotations

import ctypes
import gc
import itertools
import pickle
import threading
import weakref

import pytest
import torch

import msa_icp
from msa_icp import IcpTimeoutError, ReceiveStorage


@pytest.fixture(params=[2, 4])
def group(request):
    with ReceiveStorage.in_process(request.param, capacity=5) as ranks:
        yield ranks


def test_fields(group):
    world_size, hpr = len(group), 4 // len(group)
    layout = msa_icp.msa_icp_comm_layout(world_size, hpr, 5)
    for rank, storage in enumerate(group):
        assert (storage.rank, storage.world_size, storage.heads_per_rank, storage.capacity) == (
            rank,
            world_size,
            hpr,
            5,
        )
        expected = {
            "recv": (layout["legacy_shape"], torch.int32),
            "tagged_recv": (layout["tagged_shape"], torch.int64),
            "recv_bases": ((world_size,), torch.int64),
            "tagged_recv_bases": ((world_size,), torch.int64),
            "publish_generations": (layout["generations_shape"], torch.int32),
            "expected_generations": (layout["expected_shape"], torch.int32),
            "errors": ((4,), torch.int32),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(storage, name)
            assert tensor.shape == shape, name
            assert tensor.dtype == dtype, name
            assert tensor.is_contiguous(), name
            assert tensor.device == storage.device == torch.device("cpu")
            assert "bases" in name or not tensor.any(), name
        assert storage.recv.untyped_storage().data_ptr() == storage.tagged_recv.untyped_storage().data_ptr()
        assert storage.recv.untyped_storage().nbytes() == 4 * layout["storage_words"]
        offset = storage.tagged_recv.data_ptr() - storage.recv.data_ptr()
        assert offset == layout["tagged_offset_bytes"]


def test_bases_are_everybodys_addresses(group):
    for storage in group:
        assert storage.recv_bases.tolist() == [s.recv.data_ptr() for s in group]
        assert storage.tagged_recv_bases.tolist() == [s.tagged_recv.data_ptr() for s in group]
    ctypes.c_int32.from_address(int(group[0].recv_bases[-1])).value = 41
    assert int(group[-1].recv.flatten()[0]) == 41


def test_it_is_a_sequence_and_a_context_manager(group):
    assert [s.rank for s in group] == list(range(len(group)))
    assert group[-1] is group[len(group) - 1]


def test_sizes_and_devices_are_checked():
    with pytest.raises(ValueError, match=r"^world_size: must be 2 or 4, was 3$"):
        ReceiveStorage.in_process(3, capacity=1)
    with pytest.raises(ValueError, match=r"^heads_per_rank: must be 1, was 2$"):
        ReceiveStorage.in_process(4, capacity=1, heads_per_rank=2)
    with pytest.raises(ValueError, match=r"^capacity: must be an integer from 1 to 2147483647, was 0$"):
        ReceiveStorage.in_process(2, capacity=0)
    with pytest.raises(ValueError, match=r"^device: must be .*, was meta$"):
        ReceiveStorage.in_process(2, capacity=1, device="meta")
    assert ReceiveStorage.in_process(2, capacity=1, heads_per_rank=2)[0].heads_per_rank == 2


def test_create_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ReceiveStorage.create(capacity=1)


# ---------------------------------------------------------------- slot sets


def test_slots_rotate_and_never_restart(group):
    taken = []
    for _ in range(8):  # a step of 4 layers, twice: the rotation goes on
        with group[0].slot_set() as slot:
            taken.append(slot)
    assert taken == [0, 1, 2, 0, 1, 2, 0, 1]
    with group[1].slot_set() as slot:
        assert slot == 0


def test_a_chosen_slot(group):
    for wanted in (2, 0, 1, 1):
        with group[0].slot_set(wanted) as slot:
            assert slot == wanted
    for wrong in (3, -1, True, "0"):
        with pytest.raises(ValueError, match=r"^slot: must be"), group[0].slot_set(wrong):
            pass


def other_thread(body):
    result = []

    def run():
        try:
            result.append(body())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def test_another_thread_is_refused_while_a_slot_is_in_flight(group):
    storage = group[0]

    def take(slot=None):
        with storage.slot_set(slot) as chosen:
            return chosen

    with storage.slot_set(1):
        error = other_thread(lambda: take(1))
        assert isinstance(error, RuntimeError)
        assert "slot set 1 is in flight" in str(error)
        assert other_thread(lambda: take(2)) == 2
        assert other_thread(lambda: take(0)) == 0
        assert isinstance(other_thread(lambda: take()), RuntimeError)  # the rotation stands at 1
        assert other_thread(lambda: take(2)) == 2
    assert other_thread(lambda: take(1)) == 1


def test_another_stream_is_refused(group):
    storage = group[0]
    first, second = object(), object()
    with (
        storage.slot_set(0, stream=first),
        pytest.raises(RuntimeError, match="slot set 0 is in flight"),
        storage.slot_set(0, stream=second),
    ):
        pass
    with storage.slot_set(0, stream=second) as slot:
        assert slot == 0


def test_a_refused_caller_does_not_free_the_slot_of_the_other(group):
    with group[0].slot_set(0, stream="a"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in flight"), group[0].slot_set(0, stream="b"):
                pass


def test_an_error_frees_the_slot(group):
    with pytest.raises(KeyError), group[0].slot_set(0):
        raise KeyError
    with group[0].slot_set(0) as slot:
        assert slot == 0


def test_ranks_have_slots_of_their_own(group):
    with group[0].slot_set() as a, group[1].slot_set() as b:
        assert a == b == 0


# ---------------------------------------------------------------- failures


def test_check_is_silent_when_nothing_failed(group):
    for storage in group:
        assert storage.check() is None


@pytest.mark.parametrize(
    ("words", "ranks", "text"),
    [
        ([3, 2, 0b10, 4], (1,), "rank 1 "),
        ([1, 1, 0b11, 0], (0, 1), "rank 0, 1"),
        ([7, 3, 0, 2], (), "overwritten by a newer use"),
    ],
)
def test_check_says_what_failed(group, words, ranks, text):
    group[0].errors.copy_(torch.tensor(words))
    with pytest.raises(IcpTimeoutError, match=text) as caught:
        group[0].check()
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.count, error.slot, error.ranks, error.token) == (words[0], words[1] - 1, ranks, words[3])
    assert f"slot set {words[1] - 1}" in str(error)
    assert f"token {words[3]}" in str(error)
    assert f"{words[0]} (token, head) rows" in str(error)
    with pytest.raises(IcpTimeoutError):
        group[0].check()  # reading it does not clear it
    group[1].check()


def test_a_timeout_survives_pickling():
    """A pool of processes passes what a worker raises on that way; one that cannot be unpickled hangs it."""
    error = IcpTimeoutError(2, (1, 3), 7, 4)
    again = pickle.loads(pickle.dumps(error))
    assert (again.slot, again.ranks, again.count, again.token) == (2, (1, 3), 7, 4)
    assert str(again) == str(error)


def test_reset_clears_everything_of_everybody(group):
    for storage in group:
        for name in ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors"):
            getattr(storage, name).fill_(7)
        with storage.slot_set():
            pass
    group.reset()
    for storage in group:
        for name in ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors"):
            assert not getattr(storage, name).any(), name
        storage.check()
        with storage.slot_set() as slot:
            assert slot == 0


def test_a_closed_storage_is_of_no_use(group):
    group[1].close()
    group[0].errors.fill_(3)
    with pytest.raises(RuntimeError, match="reset: the receive storage is closed"):
        group.reset()
    assert group[0].errors.tolist() == [3] * 4  # all or none
    group.close()
    with pytest.raises(RuntimeError, match="reset: the receive storage is closed"):
        group.reset()
    with pytest.raises(RuntimeError, match="slot_set: the receive storage is closed"), group[0].slot_set():
        pass


def test_one_rank_alone_is_not_reset(group):
    with pytest.raises(RuntimeError, match="LocalGroup"):
        group[0].reset()


# ---------------------------------------------------------------- the end


def test_close_lets_go_of_the_memory():
    group = ReceiveStorage.in_process(2, capacity=3)
    memory = [weakref.ref(s.recv.untyped_storage()) for s in group]
    words = [weakref.ref(s._words) for s in group]
    group[0].close()
    gc.collect()
    assert words[0]() is not None  # rank 1 still publishes into it
    group.close()
    group.close()  # again: nothing happens
    gc.collect()
    assert all(ref() is None for ref in itertools.chain(words, memory))


def test_a_closed_storage_has_no_rows_and_no_verdict():
    storage = msa_icp.ReceiveStorage.in_process(2, capacity=2)[0]
    valid, output = torch.ones(1, dtype=torch.int32), torch.zeros((1, 2, 16), dtype=torch.int32)
    limits = {"slot": 0, "init_blocks": 0, "local_blocks": 0, "spin_limit": 1, "enable_pdl": False}
    assert not storage.closed
    storage.close()
    assert storage.closed
    with pytest.raises(RuntimeError, match="check: the receive storage is closed"):
        storage.check()
    for tagged, name in ((False, "recv"), (True, "tagged_recv")):
        with pytest.raises(ValueError, match=rf"^comm\.{name}: must be the 3 slot sets .* open, was \[0\]$"):
            msa_icp.merge_received(storage, valid, output, tagged=tagged, **limits)


def test_a_closed_storage_is_refused_by_publish_and_merge():
    group = ReceiveStorage.in_process(2, capacity=3)
    storage = group[0]
    group.close()
    with pytest.raises(ValueError, match="recv_bases"):
        msa_icp.msa_icp_topk_select_publish(
            torch.zeros(1, 4, 4),
            torch.ones(1, dtype=torch.int32),
            storage.recv_bases,
            storage.errors,
            slot=0,
            rank=0,
            world_size=2,
            heads_per_rank=2,
            capacity=3,
            force_begin_blocks=0,
            force_end_blocks=0,
        )
    with pytest.raises(ValueError, match="recv_slot"):
        msa_icp.msa_icp_merge_candidates(
            storage.recv,
            torch.ones(1, dtype=torch.int32),
            torch.zeros(1, 2, 16, dtype=torch.int32),
            storage.errors,
            init_blocks=0,
            local_blocks=0,
        )


def test_the_with_statement_closes_after_an_error_too():
    with pytest.raises(KeyError), ReceiveStorage.in_process(2, capacity=3) as group:
        raise KeyError
    assert group[0].recv.numel() == 0
    assert group[1].recv_bases.numel() == 0


def test_a_storage_that_does_not_fit_is_told_by_its_capacity(monkeypatch):
    def no_memory(*size, **options):
        raise RuntimeError("planted")

    monkeypatch.setattr(torch, "zeros", no_memory)
    with pytest.raises(RuntimeError, match=r"^capacity=7: 2 storages of \d+ bytes each on cpu: no memory"):
        ReceiveStorage.in_process(2, capacity=7)
