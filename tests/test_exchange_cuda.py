"""The exchange between ranks that really run at the same time: streams of one process, and processes.

What has no need of CUDA runs on a CPU too, with the same bodies.
"""

from __future__ import annotations

import random
import sys

import cuda_ranks
import pytest
import torch
from cuda_ranks import CYCLE, Layers
from helpers import merge, polls_in, publish, random_scores
from rank_processes import CPU, LONG_S, PLACES, TOKENS, run_ranks

import msa_icp

STEPS = 10_000
"""Of the ranks in streams: each takes a microsecond or ten."""
PROCESS_STEPS = 480
"""Of the ranks in processes, which take turns on a card."""
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="starts processes and watches /proc")
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
worlds = pytest.mark.parametrize("world_size", [2, 4])
runs = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
places = pytest.mark.parametrize("place", PLACES, ids=str)
gpu_places = pytest.mark.parametrize(
    "place", PLACES[1:] or [pytest.param(CPU, marks=pytest.mark.skip(reason="no GPU"))], ids=str
)


# ---------------------------------------------------------------- streams of one process


@gpu_places
@worlds
@forms
@runs
def test_streams_of_one_process(place, world_size, tagged, graphs):
    """Every rank on a stream of its own, through all three slot sets, with delays on any of them."""
    device = torch.device("cuda", 0)
    limit = polls_in(LONG_S, world_size, place.backend, device)
    with msa_icp.ReceiveStorage.in_process(world_size, capacity=TOKENS, device=device) as group:
        ranks = [Layers(storage, place.backend, tagged=tagged, spin_limit=limit) for storage in group]
        load(ranks)
        streams = [torch.cuda.Stream(device) for _ in ranks]
        torch.cuda.synchronize()
        if graphs:
            replay_on_streams(ranks, streams, STEPS // CYCLE + 1)
        else:
            run_on_streams(ranks, streams, STEPS)
        torch.cuda.synchronize()
        assert [rank.wrong() for rank in ranks] == [0] * world_size
        if tagged:
            steps = (STEPS // CYCLE + 1) * CYCLE if graphs else STEPS
            merged = CYCLE + steps
            per_slot = [len(range(slot, merged, 3)) for slot in range(3)]
            for storage in group:
                assert storage.expected_generations.amax((1, 2)).tolist() == per_slot


def load(ranks):
    """A cycle on one stream, every rank's publish before the first merge: afterwards nothing is loaded."""
    torch.cuda._sleep(1)
    for step in range(CYCLE):
        for rank in ranks:
            rank.publish(step, step % 3, enable_pdl=step % 2 == 0)
        for rank in ranks:
            rank.output.fill_(-7)
            rank.merge(step % 3, enable_pdl=step % 2 == 0)
            torch.bitwise_xor(rank.output, rank.expected[step], out=rank.different)
            rank.wrong_bits.bitwise_or_(rank.different)
    assert [rank.wrong() for rank in ranks] == [0] * len(ranks)


def run_on_streams(ranks, streams, steps):
    order = list(zip(ranks, streams, strict=True))
    shuffle = random.Random(1)
    for step in range(steps):
        shuffle.shuffle(order)
        for rank, stream in order:
            with torch.cuda.stream(stream), rank.storage.slot_set() as slot:
                assert slot == step % 3
                rank.run(step, slot)


def replay_on_streams(ranks, streams, replays):
    graphs = [rank.graph() for rank in ranks]
    order = list(zip(ranks, graphs, streams, strict=True))
    shuffle = random.Random(2)
    for _ in range(replays):
        shuffle.shuffle(order)
        for rank, graph, stream in order:
            with torch.cuda.stream(stream):
                rank.sleep(shuffle.random())
                graph.replay()


@gpu_places
@forms
def test_check_and_reset_wait_for_every_stream(place, tagged):
    """A failure on another stream is seen, and a publish in flight does not outlive a reset."""
    device = torch.device("cuda", 0)
    group = msa_icp.ReceiveStorage.in_process(2, capacity=TOKENS, device=device)
    short = polls_in(0.01, 2, place.backend, device)
    scores = random_scores(TOKENS, 24, seed=1).to(device)
    num_valid = torch.tensor([24, 9], dtype=torch.int32, device=device)
    publish(group[1], scores, num_valid, backend=place.backend, tagged=tagged)  # loads the kernel
    group.reset()
    stream = torch.cuda.Stream(device)
    rank = Layers(group[0], place.backend, tagged=tagged, spin_limit=short)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), group[0].slot_set(2):
        torch.cuda._sleep(50_000_000)
        rank.merge(2)
    with pytest.raises(msa_icp.IcpTimeoutError) as caught:
        group[0].check()
    assert (caught.value.slot, caught.value.ranks) == (2, (0, 1))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        publish(group[1], scores, num_valid, backend=place.backend, tagged=tagged)
    group.reset()
    torch.cuda.synchronize()
    for storage in group:
        assert not storage.recv.any()
        assert not storage.tagged_recv.any()
        assert not storage.publish_generations.any()
        storage.check()


@gpu_places
def test_a_slot_set_under_capture(place):
    """What is captured is not in flight, and the storage looks at no event meanwhile."""
    device = torch.device("cuda", 0)
    storage = msa_icp.ReceiveStorage.in_process(2, capacity=TOKENS, device=device)[0]
    merge(storage, [1, 1], backend=place.backend, spin_limit=1)
    word = torch.zeros(1, device=device)
    with storage.slot_set(0):
        word.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), storage.slot_set(0):
        word.add_(1)
    graph.replay()
    assert word.item() == 2
    with storage.slot_set(0):
        pass


# ---------------------------------------------------------------- processes


@linux
@places
@worlds
@forms
@runs
def test_processes(place, world_size, tagged, graphs, tmp_path):
    """Ranks with a context each, launched ahead, with delays in any of them."""
    if place == CPU and graphs:
        pytest.skip("graphs are CUDA's")
    steps = 48 if place == CPU else PROCESS_STEPS
    results = run_ranks(cuda_ranks.many_steps, world_size, tmp_path, tagged, steps, graphs, place=place)
    assert results == [{"wrong": 0, "waits": 0}] * world_size


@linux
@places
@pytest.mark.parametrize(
    ("world_size", "dead", "tagged", "graphs"),
    [(2, 0, False, False), (2, 1, True, True), (4, 1, True, False), (4, 3, False, True)],
)
def test_a_rank_is_killed_with_kernels_in_flight(place, world_size, dead, tagged, graphs, tmp_path):
    if place == CPU and graphs:
        pytest.skip("graphs are CUDA's")
    results = run_ranks(
        cuda_ranks.killed_in_flight, world_size, tmp_path, dead, tagged, graphs, place=place, spares=1
    )
    assert results[dead] is None
    assert results[world_size] == {"again": 0}
    living = results[:dead] + results[dead + 1 : world_size]
    named = [found["error"][0] for found in living]
    assert any(dead in ranks for ranks in named)
    for found, ranks in zip(living, named, strict=True):
        # With the dead one perhaps another, which has failed a layer earlier; or nobody, where all rows had
        # come and such another has overwritten its own.
        assert dead in ranks or not ranks, named
        assert found["error"][1] > 0
        assert found["seconds"] < 20
        assert found["usable"] == 10
        assert found["again"] == 0


@linux
@gpu_places
def test_a_second_stream_of_a_rank(place, tmp_path):
    for error in run_ranks(cuda_ranks.a_second_stream, 2, tmp_path, place=place):
        assert "slot set 1 is in flight on stream" in error


@linux
@gpu_places
def test_memory_of_the_card_comes_back(place, tmp_path):
    """Two storages of about 230 MiB on the card at a time; afterwards, but for contexts, nothing."""
    ranks = run_ranks(cuda_ranks.memory_comes_back, 2, tmp_path, place=place)
    if None in ranks:
        pytest.skip("others take memory of this card meanwhile")
    for found in ranks:
        assert min(found[::2]) > 150, found
        assert max(found[1::2]) < 100, found


@linux
@gpu_places
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="every rank has a card of its own")
def test_one_card_without_leave(place, tmp_path):
    for found in run_ranks(cuda_ranks.one_card_without_leave, 2, tmp_path, place=place):
        assert "ranks 0, 1 share one card" in found["error"]
        assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1" in found["error"]
        assert found["seconds"] < 10
        assert found["wrong"] == 0
