"""Made-up keys and queries: a function of the prefix, exact in FP32, and worth searching in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msa_icp import reference
from msa_icp.replay.synth import SECTION, Synth, prefix_chain
from msa_icp.replay.trace import Request

REQUESTS = [
    Request(0, 0.0, 1500, 100, (1, 2, 3)),
    Request(1, 0.0, 1400, 100, (1, 2, 4)),
    Request(2, 0.0, 1100, 100, (9, 2, 3)),
    Request(3, 0.0, 9000, 100, tuple(range(100, 118))),
]


@pytest.fixture(scope="module")
def synth() -> Synth:
    return Synth(REQUESTS, seed=0)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def test_same_prefix_same_bytes_and_not_a_token_further(synth):
    first, second, third = (bits(synth.context(request, 1600, 0)) for request in range(3))
    same = (first == second).all(-1)
    assert same[: 2 * SECTION].all()
    assert same[2 * SECTION :].sum() == 0
    # Equal ids after another first one: another prompt, so other keys everywhere.
    assert (first == third).all(-1).sum() == 0


def test_decoded_tokens_are_private_and_follow_the_prompt_at_once():
    twins = Synth([Request(0, 0.0, 700, 9, (1, 2)), Request(1, 0.0, 700, 9, (1, 2))], seed=0)
    first, second = (bits(twins.context(request, 900, 0)) for request in range(2))
    assert (first == second).all(-1).tolist() == [True] * 700 + [False] * 200


@settings(deadline=None, max_examples=30)
@given(start=st.integers(0, 9050), count=st.integers(0, 200), layer=st.integers(0, 60))
def test_any_range_can_be_made_at_any_time(start, count, layer):
    synth = Synth(REQUESTS, seed=5)
    positions = torch.arange(start, start + count)
    part = synth.keys(torch.full((count,), 3), positions, layer)
    whole = Synth(REQUESTS, seed=5).context(3, start + count, layer)
    assert torch.equal(bits(part), bits(whole[start:]))


def test_seeds_and_layers_make_other_keys_and_queries(synth):
    request, position = torch.tensor([3]), torch.tensor([9001])
    keys = [synth.context(3, 256, 0), synth.context(3, 256, 1), Synth(REQUESTS, seed=1).context(3, 256, 0)]
    queries = [
        synth.queries(request, position, 0),
        synth.queries(request, position, 1),
        Synth(REQUESTS, seed=1).queries(request, position, 0),
        synth.queries(request, position + 1, 0),
    ]
    for made in (keys, queries):
        for i in range(len(made)):
            assert not any(torch.equal(bits(made[i]), bits(made[j])) for j in range(i))
    assert len({tuple(row) for row in bits(queries[0])[0].tolist()}) == 4, "each head has its own query"


def test_every_partial_sum_is_exact_in_fp32_in_any_order(synth):
    keys = synth.context(3, 9100, 2)
    queries = synth.queries(torch.full((100,), 3), torch.arange(9000, 9100), 2)
    for values in (keys, queries):
        quarters = values.to(torch.float64) * 4
        assert torch.equal(quarters, quarters.round())
        assert quarters.abs().max() <= 8
    products = queries[:16, :, None].to(torch.float32) * keys[None, None, :64].to(torch.float32)
    exact = products.to(torch.float64).sum(-1)
    generator = torch.Generator().manual_seed(0)
    for order in (torch.randperm(128, generator=generator) for _ in range(5)):
        partial = torch.zeros_like(products[..., 0])
        for dimension in order:
            partial += products[..., dimension]
        assert torch.equal(partial.to(torch.float64), exact)


def test_selecting_is_retrieving(synth):
    """Most of the sections that a query is made for are selected, and heads select different blocks."""
    position = torch.arange(9000, 9100, 20)
    request = torch.full_like(position, 3)
    queries = synth.queries(request, position, 0)
    sections = synth.focus_sections(request, position, 0)
    assert int(sections.max()) <= 9100 // SECTION
    chosen = reference.select_unsharded(queries, synth.context(3, 9100, 0), position, 0, 0)
    hits = [
        len({4 * s + i for i in range(4)} & set(chosen[t][h])) / 4
        for t in range(len(chosen))
        for h in range(4)
        for s in sections[t, h, :3].tolist()  # the last focus is the faint one
    ]
    assert sum(hits) / len(hits) > 0.8
    assert all(len({tuple(ids) for ids in heads}) == 4 for heads in chosen)


def test_foci_stay_for_dozens_of_tokens_and_move(synth):
    position = torch.arange(9000, 9400)
    sections = synth.focus_sections(torch.full_like(position, 3), position, 0)
    moves = (sections[1:] != sections[:-1]).sum(0)
    assert int(moves.min()) >= 1
    assert int(moves.max()) <= 400 // 24 + 1


def test_a_chain_stands_for_the_whole_prefix():
    assert prefix_chain([1, 2, 3])[:2] == prefix_chain([1, 2, 9])[:2]
    assert prefix_chain([1, 2])[1] != prefix_chain([7, 2])[1]
    assert prefix_chain([-1])[0] != prefix_chain([1])[0]
