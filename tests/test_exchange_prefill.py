"""The all-to-all of prefill: over gloo between processes, between ranks of one process, and over NCCL."""

from __future__ import annotations

import sys
from pathlib import Path

import prefill_exchange_ranks as ranks
import pytest
import torch
from helpers import HEADS
from prefill_exchange_ranks import CHUNKS, buffers, carrier_words, received_words, wrong_words
from rank_processes import run_ranks

import msa_icp

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches how processes end")
worlds = pytest.mark.parametrize("world_size", [2, 4])
RIGHT = [0, 0, 0]
"""Wrong words of the receive buffer, changed ones of the carrier, written ones of everything else."""


# ---------------------------------------------------------------- between processes


@worlds
def test_uneven_chunks_reach_the_owners(world_size, tmp_path):
    for found in run_ranks(ranks.uneven_chunks, world_size, tmp_path):
        assert found == [RIGHT] * (2 * len(CHUNKS))


def test_no_tensor_is_made(tmp_path):
    """Views, the copy of a rank's own rows, and messages."""
    allowed = {"aten.select", "aten.slice", "aten.copy_", "c10d.send", "c10d.recv_"}
    for operations in run_ranks(ranks.without_allocation, 2, tmp_path):
        assert set(operations) <= allowed
        assert {"c10d.send", "c10d.recv_", "aten.copy_"} <= set(operations)


def test_buffers_of_inference_mode_are_written_outside_of_it(tmp_path):
    assert run_ranks(ranks.made_in_inference_mode, 2, tmp_path) == [RIGHT] * 2


def test_groups_of_a_larger_job(tmp_path):
    for found in run_ranks(ranks.groups_of_two, 4, tmp_path):
        *words, refused = found
        assert words == [RIGHT] * 3
        assert refused.startswith("group: must be one that this process belongs to, or None, was one that it")


@on_linux
@pytest.mark.parametrize(("world_size", "dead", "order"), [(2, 0, 1), (4, 2, 1), (4, 2, -1), (4, 0, 1)])
def test_a_killed_rank_is_named(world_size, dead, order, tmp_path):
    results = run_ranks(ranks.a_rank_dies, world_size, tmp_path, dead, order)
    assert results[dead] is None
    for found in results[:dead] + results[dead + 1 :]:
        assert found["wrong"] == [RIGHT] * 2
        assert f"rank {dead} of {world_size} is gone" in found["error"]
        assert found["seconds"] < 40


def test_a_rank_that_does_not_come_is_named_within_the_timeout_of_the_group(tmp_path):
    waited, _ = run_ranks(ranks.a_rank_does_not_come, 2, tmp_path)
    assert "rank 1 of 2 is gone, or did not come within the group's timeout" in waited["error"]
    assert ranks.SHORT_TIMEOUT_S / 2 < waited["seconds"] < ranks.SHORT_TIMEOUT_S + 10


def test_a_waiting_rank_handles_signals(tmp_path):
    waited, _ = run_ranks(ranks.an_interrupt, 2, tmp_path)
    assert waited["handled"] == 1
    assert waited["raised"] == "KeyboardInterrupt"
    assert waited["seconds"] < ranks.SHORT_TIMEOUT_S - 1


@worlds
def test_a_wrong_argument_is_named_and_nothing_is_sent(world_size, tmp_path):
    for found in run_ranks(ranks.bad_arguments, world_size, tmp_path):
        assert found["unexpected"] == []
        assert found["count"] > 10
        assert found["pair"] == "group: must be None where carrier is a sequence, was ProcessGroup"
        assert found["string"].startswith("group: must be one that this process belongs to")
        assert found["wrong"] == RIGHT


def test_a_group_without_a_backend_for_the_device(tmp_path):
    for said in run_ranks(ranks.no_backend, 2, tmp_path):
        for kind, refused in zip(("meta", "cuda"), said, strict=True):
            expected = f"group: must be one with a backend that sends {kind} tensors, was one of cpu:gloo"
            assert refused.startswith(expected)


def test_without_a_group():
    carrier, received = buffers(2, 3, False)[1:]
    with pytest.raises(RuntimeError, match=r"group: torch\.distributed is not initialised"):
        msa_icp.exchange_prefill(carrier, received)


# ---------------------------------------------------------------- in one process


def in_process(world_size: int, tokens: int, sliced: bool, device: str) -> list[list[int]]:
    made = [buffers(world_size, tokens, sliced, device) for _ in range(world_size)]
    carriers, received = [c for _, c, _ in made], tuple(r for _, _, r in made)
    for rank, carrier in enumerate(carriers):
        carrier.copy_(carrier_words(rank, tokens))
    msa_icp.exchange_prefill(carriers, received)
    return [
        wrong_words(*made[rank], carrier_words(rank, tokens), received_words(rank, world_size, tokens))
        for rank in range(world_size)
    ]


@worlds
@pytest.mark.parametrize("tokens", CHUNKS)
@pytest.mark.parametrize("sliced", [False, True])
def test_ranks_of_one_process(world_size, tokens, sliced):
    assert in_process(world_size, tokens, sliced, "cpu") == [RIGHT] * world_size


@worlds
def test_a_wrong_argument_of_one_rank_is_named(world_size):
    for name, pattern, change in ranks.bad_tensors(world_size):
        made = [buffers(world_size, 4, True) for _ in range(world_size)]
        before = [memory.clone() for memory, _, _ in made]
        carriers, received = [c for _, c, _ in made], [r for _, _, r in made]
        carriers[1], received[1] = change(carriers[1], received[1])
        numbered = pattern.replace("carrier", r"carrier\[1\]", 1).replace("received", r"received\[1\]", 1)
        if name in ("3 heads", "32 words"):
            numbered = r"carrier\[1\]: must be of shape \[4, 4, 33\], was .*"
        with pytest.raises(ValueError, match=f"^{numbered}$"):
            msa_icp.exchange_prefill(carriers, received)
        assert all(torch.equal(memory, old) for (memory, _, _), old in zip(made, before, strict=True)), name


@worlds
def test_receive_buffers_of_one_process_lie_apart(world_size):
    made = [buffers(world_size, 4, True)[1:] for _ in range(world_size)]
    carriers, received = [c for c, _ in made], [r for _, r in made]
    with pytest.raises(ValueError, match=r"^received\[[01]\]: must be .* was on rows of received\[[01]\]$"):
        msa_icp.exchange_prefill(carriers, [received[0], received[0], *received[2:]])
    last = carriers[-1].reshape(received[0].shape)
    carriers[-1] = last.view(HEADS, 4, -1)
    name = rf"carrier\[{world_size - 1}\]"
    with pytest.raises(ValueError, match=rf"^received\[0\]: must be .* was on rows of {name}$"):
        msa_icp.exchange_prefill(carriers, [last, *received[1:]])
    assert not last.eq(0).any()
    msa_icp.exchange_prefill([carriers[0]] * world_size, received)  # what is only read may be the same


def test_slices_of_one_buffer_lie_apart():
    """Head by head: the ranges of a carrier and of a receive buffer may enclose each other."""
    memory = torch.arange(HEADS * 12 * 33, dtype=torch.int32).view(HEADS, 12, 33)
    carriers = [memory[:, :3], memory[:, 3:6]]
    received = [memory[:, at : at + 3].view(2, 2, 3, 33) for at in (6, 9)]
    sent = [carrier.clone() for carrier in carriers]
    msa_icp.exchange_prefill(carriers, received)
    for owner, rows in enumerate(received):
        assert torch.equal(rows, torch.stack([words[2 * owner : 2 * owner + 2] for words in sent]))
    with pytest.raises(ValueError, match=r"^received\[1\]: must be .* was on rows of received\[0\]$"):
        msa_icp.exchange_prefill(carriers, [received[0], memory[:, 8:11].view(2, 2, 3, 33)])


@pytest.mark.parametrize(
    ("carriers", "received", "sentence"),
    [
        (3, 3, "carrier: must be those of 2 or 4 ranks, was a sequence of 3"),
        (2, 4, "received: must be a sequence of 2 tensors, as carrier is, was one of 4"),
        (2, None, "received: must be a sequence of 2 tensors, as carrier is, was NoneType"),
        (None, 2, "carrier: must be a torch.Tensor, or a sequence of one for each rank, was NoneType"),
    ],
)
def test_as_many_carriers_as_receive_buffers(carriers, received, sentence):
    carrier, rows = buffers(2, 3, False)[1:]
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        msa_icp.exchange_prefill(
            None if carriers is None else [carrier] * carriers,
            None if received is None else [rows] * received,
        )


# ---------------------------------------------------------------- on GPUs

GPUS = torch.cuda.device_count()
on_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device")


@on_gpu
@worlds
def test_virtual_ranks_of_one_card(world_size):
    for tokens in CHUNKS:
        assert in_process(world_size, tokens, True, "cuda") == [RIGHT] * world_size


@on_gpu
def test_virtual_ranks_in_a_graph():
    made = [buffers(4, 5, True, "cuda") for _ in range(4)]
    carriers, received = [c for _, c, _ in made], [r for _, _, r in made]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        msa_icp.exchange_prefill(carriers, received)
    for layer in range(2):
        for rank, carrier in enumerate(carriers):
            carrier.copy_(carrier_words(rank, 5, layer))
        graph.replay()
        for rank in range(4):
            assert torch.equal(received[rank].cpu(), received_words(rank, 4, 5, layer))


@worlds
def test_nccl(world_size, tmp_path):
    if world_size > GPUS:
        pytest.skip(f"NCCL needs a GPU for each of {world_size} ranks, {GPUS} are here")
    for found in run_ranks(ranks.over_nccl, world_size, Path(tmp_path)):
        assert found["eager"] == [RIGHT] * len(CHUNKS)
        assert found["allocated"] == 0
        assert found["graph"] == [0, 0]
        assert found["cpu tensors"].startswith("group: must be one with a backend that sends cpu")
