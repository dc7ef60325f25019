"""Publish and merge read nothing before the kernels of the step that come first have ended.

A dependent launch starts while its predecessor runs. The emulator knows what a thread may not have seen yet:
each CTA finds something else, plausible and wrong, in what the predecessor may write, until it waits.
"""

from __future__ import annotations

import cuda_emulation
import pytest
import torch
from cuda_emulation import Late
from helpers import HEADS, SHORT_SPIN, merge, publish, random_scores
from test_decode_score_publish import fused

import msa_icp
from msa_icp import cases

pytestmark = pytest.mark.skipif(
    not cuda_emulation.REQUESTED, reason="the emulator alone knows the moment of the wait"
)
on_cpu = pytest.mark.parametrize("device", ["cpu"], ids=["cuda-cpu"])
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
worlds = pytest.mark.parametrize("world_size", [2, 4])
COUNTS, WRONG_COUNTS = [24, 9, 0], [7, 24, 3]


def group_of(world_size, device):
    return msa_icp.ReceiveStorage.in_process(world_size, capacity=len(COUNTS), device=device)


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def late(monkeypatch, *pieces):
    """From now on the predecessor writes these: `(tensor, what is there before)`."""
    made = [Late(tensor, before, tensor.clone()) for tensor, before in pieces]
    monkeypatch.setattr(cuda_emulation, "LATE", made)


def assert_same_rows(left, right):
    for mine, others in zip(left, right, strict=True):
        assert torch.equal(mine.recv, others.recv)
        assert torch.equal(mine.tagged_recv, others.tagged_recv)
        mine.check()


@on_cpu
@forms
@worlds
@pytest.mark.parametrize("columns", [24, 1300])
def test_publish(monkeypatch, device, world_size, tagged, columns):
    """The scorer writes the scores; who came before it the counts, the owners' addresses, the counters."""
    expected, group = group_of(world_size, device), group_of(world_size, device)
    scores, others = (random_scores(3, columns, seed) for seed in (1, 2))
    counts = int32([columns - 24 + count for count in COUNTS])
    publish(expected[1], scores, counts, backend="cuda", tagged=tagged)
    bases = group[1].tagged_recv_bases if tagged else group[1].recv_bases
    counters = group[1].publish_generations
    late(
        monkeypatch,
        (scores, others),
        (counts, int32(WRONG_COUNTS)),
        (bases, bases.flip(0)),
        (counters, counters + 5),
    )
    publish(group[1], scores, counts, backend="cuda", tagged=tagged, enable_pdl=True)
    assert_same_rows(group, expected)


@on_cpu
@forms
@pytest.mark.parametrize(("world_size", "page_size"), [(2, 256), (4, 128)])
def test_fused(monkeypatch, device, world_size, page_size, tagged):
    """The scores are in the pool, where the launch before puts them."""
    lens = (page_size * 23 + 1, page_size * 9, page_size)
    case = cases.decode_case("", world_size, page_size, seq_lens=lens)
    expected, group = group_of(world_size, device), group_of(world_size, device)
    counts = case.num_valid_pages()
    pool = torch.empty(msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=3), dtype=torch.uint8)
    fused(case, expected[1], "cuda", tagged=tagged, pool=pool, enable_pdl=False)
    others = random_scores(3, pool.numel() // (3 * HEADS * 4), seed=3)
    late(
        monkeypatch,
        (pool, others.view(torch.uint8).view(-1)),
        (counts, int32(WRONG_COUNTS)),
        (group[1].publish_generations, group[1].publish_generations + 5),
    )
    fused(case, group[1], "cuda", tagged=tagged, pool=pool, num_valid_pages=counts, enable_pdl=True)
    assert_same_rows(group, expected)


@on_cpu
@forms
@worlds
def test_merge(monkeypatch, device, world_size, tagged):
    """A rank's own row comes from the launch before, and the rest may be older: rows, counts, counters."""
    group, other = group_of(world_size, device), group_of(world_size, device)
    for seed, ranks in enumerate((group, other)):
        for storage in ranks:
            scores = random_scores(3, 24, seed=10 * seed + storage.rank)
            publish(storage, scores, COUNTS, backend="cuda", slot=1, tagged=tagged)
    counts = int32(COUNTS)
    rows, wrong = ((each[1].tagged_recv if tagged else each[1].recv)[1] for each in (group, other))
    counters = group[1].expected_generations[1]
    sent = rows.clone()
    expected = merge(group[1], counts, backend="cuda", slot=1, tagged=tagged)
    assert (expected[:2] >= 0).any()
    rows.copy_(sent)
    counters.zero_()
    late(monkeypatch, (rows, wrong), (counts, int32(WRONG_COUNTS)), (counters, counters + 5))
    again = merge(
        group[1], counts, backend="cuda", slot=1, tagged=tagged, spin_limit=SHORT_SPIN, enable_pdl=True
    )
    assert torch.equal(again, expected)
    group[1].check()
