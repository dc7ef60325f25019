"""The merge of the ranks' candidates (contract, section 6)."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import SHORT_SPIN, assert_same, merge, signed, snapshot, tag, words_of
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference
from msa_icp.cases import poisoned
from msa_icp.verify import padded

pytestmark = pytest.mark.exchange
worlds = pytest.mark.parametrize("world_size", [2, 4])
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
NAN, INF = float("nan"), float("inf")
PAD = [-1] * 16


def group_of(world_size, device, capacity=5):
    return msa_icp.ReceiveStorage.in_process(world_size, capacity=capacity, device=device)


def put(storage, slot, rank, head, t, pairs, *, tagged=False, generation=1):
    """One received row of `(id, score)` pairs, as a peer would have stored it."""
    words = words_of([score for _, score in pairs], [block for block, _ in pairs])
    if tagged:
        row = torch.tensor(tag(generation, words))
        storage.tagged_recv[slot, rank, head, t] = row.to(storage.device)
    else:
        row = torch.tensor([*words, 1], dtype=torch.int32)
        storage.recv[slot, rank, head, t] = row.to(storage.device)


def random_pairs(seed, count, ids):
    gen = cases.generator(seed)
    scores = torch.randint(-4, 5, (count,), generator=gen).float()
    scores[torch.randint(0, 9, (count,), generator=gen) == 0] = NAN
    scores[torch.randint(0, 9, (count,), generator=gen) == 0] = -0.0
    picked = torch.randint(0, len(ids), (count,), generator=gen).tolist()
    return [(ids[i], s) for i, s in zip(picked, scores.tolist(), strict=True)]


@forms
@worlds
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_random_rows(backend, device, world_size, tagged, slot):
    num_valid, force = [50, 17, 16, 4], (1, 2)
    group = group_of(world_size, device)
    storage = group[-1]
    truth = torch.empty(4, storage.heads_per_rank, 16, dtype=torch.int32)
    for t, h in itertools.product(range(4), range(storage.heads_per_rank)):
        pairs = [random_pairs(100 * t + 10 * h + r, 16 - t, range(50)) for r in range(world_size)]
        for rank in range(world_size):
            put(storage, slot, rank, h, t, pairs[rank], tagged=tagged)
        truth[t, h] = torch.tensor(padded(reference.merge(itertools.chain(*pairs), num_valid[t], *force)))
    before = snapshot(group)
    got = merge(storage, num_valid, backend=backend, slot=slot, tagged=tagged, force=force)
    assert torch.equal(got, truth)
    # What else changed: legacy, the ready words of these rows; tagged, the counters of these tokens.
    if tagged:
        before[-1][3][slot, :, :4] += 1
    else:
        before[-1][0][slot, :, :, :4, 32] = 0
    assert_same(before, snapshot(group))


def merge_pairs(backend, device, rows, num_valid, force=(0, 0)):
    """The merge of one token of rank 0 of 2, both heads: `rows` are the pairs of either rank."""
    storage = group_of(2, device)[0]
    for rank, pairs in enumerate(rows):
        for head in range(2):
            put(storage, 0, rank, head, 0, pairs)
    got = merge(storage, [num_valid], backend=backend, force=force)[0].tolist()
    assert got[0] == got[1]
    return got[0]


def test_a_block_of_two_ranks_keeps_its_larger_score(backend, device):
    low = [(b, 1.0) for b in range(16)]
    assert merge_pairs(backend, device, [low, [(20, 2.0), (30, 0.5)]], 40) == [*range(15), 20]
    assert merge_pairs(backend, device, [[*low[:15], (20, 0.0)], [(20, 2.0), (30, 0.5)]], 40) == [
        *range(15),
        20,
    ]
    # 20 has 0.0 and -1.0: it loses to 30 in the first case, wins with 0.75 in the second, whoever sent it.
    assert merge_pairs(backend, device, [[*low[:15], (20, 0.0)], [(20, -1.0), (30, 0.5)]], 40)[-1] == 30
    assert merge_pairs(backend, device, [[*low[:15], (20, -1.0)], [(20, 0.75), (30, 0.5)]], 40)[-1] == 20
    assert merge_pairs(backend, device, [[(20, 0.75), (30, 0.5)], [*low[:15], (20, -1.0)]], 40)[-1] == 20


def test_nan_scores_count_as_minus_infinity(backend, device):
    row = [(b, 0.0) for b in range(15)]
    assert merge_pairs(backend, device, [[*row, (20, NAN)], [(21, -INF)]], 40) == [*range(15), 20]
    assert merge_pairs(backend, device, [[*row, (20, NAN)], [(20, -5.0), (19, -6.0)]], 40)[-1] == 20
    assert merge_pairs(backend, device, [[*row, (20, NAN)], [(20, -7.0), (19, -6.0)]], 40)[-1] == 19
    assert merge_pairs(backend, device, [[*row, (20, NAN)], [(19, -INF)]], 40)[-1] == 19
    assert merge_pairs(backend, device, [[(3, NAN)], [(2, NAN)]], 40) == padded([2, 3])


def test_ids_that_are_no_blocks_are_dropped(backend, device):
    strange = [(-1, 9.0), (-2, 9.0), (-(2**31), 9.0), (2**31 - 1, 9.0), (8192, 9.0), (40, 9.0), (39, 1.0)]
    assert merge_pairs(backend, device, [strange, [(5, 0.0)]], 40) == padded([5, 39])
    assert merge_pairs(backend, device, [[(8191, 0.0), (8192, 1.0)], [(8193, 2.0)]], 20000) == padded([8191])
    assert merge_pairs(backend, device, [[(8191 + 16384, 1.0)], [(16384, 1.0)]], 2**31 - 1) == PAD


def test_forced_blocks_come_first_if_somebody_sent_them(backend, device):
    low = [(b, 5.0) for b in range(4, 20)]
    assert merge_pairs(backend, device, [low, [(0, -9.0), (29, NAN)]], 30, (1, 1)) == [0, *range(4, 18), 29]
    assert merge_pairs(backend, device, [low, [(1, -9.0)]], 30, (1, 1)) == list(range(4, 20))
    assert merge_pairs(backend, device, [low, [(1, -9.0), (2, 0.0)]], 3, (9, 7)) == padded([1, 2])
    last = [(b, 0.0) for b in range(20, 36)]
    assert merge_pairs(backend, device, [low, last], 36, (0, 16)) == list(range(20, 36))


def test_ties_go_to_the_lower_id_whoever_sent_it(backend, device):
    even = [(2 * b, 0.0) for b in range(16)]
    odd = [(2 * b + 1, -0.0) for b in range(16)]
    assert merge_pairs(backend, device, [even, odd], 40) == list(range(16))
    assert merge_pairs(backend, device, [odd, even], 40) == list(range(16))


@worlds
def test_blocks_that_every_rank_sent(backend, device, world_size):
    """All ranks send the same 16, or the last one another block among them."""
    storage = group_of(world_size, device)[0]
    same = [(3 * b, float(b)) for b in range(16)]
    for others in ([], [(1, 0.5)], [(1, 99.0)]):
        for rank in range(world_size):
            pairs = [*others, *same[len(others) :]] if rank == world_size - 1 else same
            for head in range(storage.heads_per_rank):
                put(storage, 0, rank, head, 0, pairs)
        got = merge(storage, [100], backend=backend)[0].tolist()
        every = [*same, *others]
        truth = padded(reference.merge(every, 100, 0, 0))
        assert got == [truth] * storage.heads_per_rank


def test_a_block_twice_and_none_to_spare(backend, device):
    """The 17th best candidate comes in where two of the best 16 are one block."""
    first = [(b, 10.0 + b) for b in range(16)]
    second = [(b, 10.5 + b) for b in range(8)] + [(40 + b, float(b)) for b in range(8)]
    assert merge_pairs(backend, device, [first, second], 100) == list(range(16))
    assert merge_pairs(backend, device, [first[:15], second], 100) == [*range(15), 47]
    assert merge_pairs(backend, device, [[(5, 1.0)] * 16, [(5, 1.0)] * 15 + [(4, 0.0)]], 100) == padded(
        [4, 5]
    )


@pytest.mark.parametrize("num_valid", [0, -1, -(2**31)])
def test_padding(backend, device, num_valid):
    rows = [[(0, 1.0), (1, 2.0)], [(2, 3.0)]]
    assert merge_pairs(backend, device, rows, num_valid, (1, 1)) == PAD
    storage = group_of(2, device)[0]
    got = prefill_merge(storage, [num_valid, 3], backend, rows=rows)
    assert got[0].tolist() == [[0, *PAD[1:]]] * 2
    assert got[1].tolist() == [padded([0, 1, 2])] * 2


def prefill_merge(storage, num_valid, backend, rows=None, recv=None):
    if recv is None:
        recv = storage.recv[0]
        for t in range(len(num_valid)):
            for rank, pairs in enumerate(rows):
                for head in range(storage.heads_per_rank):
                    put(storage, 0, rank, head, t, pairs)
    output = poisoned((len(num_valid), storage.heads_per_rank, 16), torch.int32, storage.device)
    msa_icp.msa_icp_merge_candidates(
        recv,
        torch.tensor(num_valid, dtype=torch.int32, device=storage.device),
        output,
        storage.errors,
        init_blocks=0,
        local_blocks=0,
        spin_limit=SHORT_SPIN,
        prefill=True,
        backend=backend,
    )
    return output.cpu()


@pytest.mark.parametrize("ready", [0, 1, 7, -1])
def test_prefill_waits_for_nothing_and_clears_nothing(backend, device, ready):
    group = group_of(2, device)
    storage = group[0]
    for rank, head in itertools.product(range(2), range(2)):
        put(storage, 0, rank, head, 0, [(3 * rank + head, 1.0)])
    storage.recv[0, ..., 32] = ready
    storage.errors[0] = 0
    before = snapshot(group)
    assert prefill_merge(storage, [9], backend, recv=storage.recv[0]).tolist() == [
        [padded([0, 3]), padded([1, 4])]
    ]
    assert_same(before, snapshot(group))


@worlds
def test_received_carrier_as_the_all_to_all_leaves_it(backend, device, world_size):
    """`[W, hpr, T, 33]` with gaps between tokens and ranks: prefill takes any separate rows."""
    hpr, tokens = 4 // world_size, 3
    values = torch.zeros(world_size, hpr, tokens, 33, dtype=torch.int32)
    for rank, head, t in itertools.product(range(world_size), range(hpr), range(tokens)):
        words = words_of([1.0, 2.0], [5 * rank + head, 5 * rank + t + 20])
        values[rank, head, t, :32] = torch.tensor(words, dtype=torch.int32)
    recv = cases.strided(values, (hpr * tokens * 40 + 3, tokens * 40, 40, 1), device=device)
    storage = group_of(world_size, device)[0]
    got = prefill_merge(storage, [100] * tokens, backend, recv=recv)
    for head, t in itertools.product(range(hpr), range(tokens)):
        ids = {5 * r + head for r in range(world_size)} | {5 * r + t + 20 for r in range(world_size)}
        assert got[t, head].tolist() == padded(sorted(ids))


@pytest.mark.parametrize("order", ["tokens first", "heads first", "gaps"])
def test_output_of_any_separate_rows(backend, device, order):
    group = group_of(2, device)
    for rank, head, t in itertools.product(range(2), range(2), range(3)):
        put(group[1], 0, rank, head, t, [(t + 4 * head + 10 * rank, 1.0)])
    strides = {"tokens first": (32, 16, 1), "heads first": (16, 48, 1), "gaps": (50, 17, 1)}[order]
    output = cases.strided(poisoned((3, 2, 16), torch.int32), strides, device=device, fill=0x11)
    memory = output.as_strided((output.untyped_storage().nbytes() // 4,), (1,))
    inside = torch.zeros(memory.shape, dtype=torch.bool)
    inside.as_strided((3, 2, 16), strides).fill_(True)
    msa_icp.msa_icp_merge_candidates(
        group[1].recv[0],
        torch.full((3,), 100, dtype=torch.int32, device=device),
        output,
        group[1].errors,
        init_blocks=0,
        local_blocks=0,
        backend=backend,
    )
    for t, head in itertools.product(range(3), range(2)):
        assert output[t, head].tolist() == padded([t + 4 * head, t + 4 * head + 10])
    assert (memory.cpu()[~inside] == 0x11111111).all()


@forms
def test_no_tokens_and_full_capacity(backend, device, tagged):
    group = group_of(4, device, capacity=2)
    before = snapshot(group)
    assert merge(group[0], [], backend=backend, tagged=tagged).shape == (0, 1, 16)
    assert_same(before, snapshot(group))
    for rank, t in itertools.product(range(4), range(2)):
        put(group[0], 0, rank, 0, t, [(rank, 1.0)], tagged=tagged)
    got = merge(group[0], [9, 2], backend=backend, tagged=tagged)
    assert got[:, 0].tolist() == [padded([0, 1, 2, 3]), padded([0, 1])]


@pytest.mark.parametrize("expected", [0, 5, 2**31 - 2, 2**31 - 1, 2**32 - 2, 2**32 - 1])
def test_generations_wrap(backend, device, expected):
    storage = group_of(2, device)[0]
    storage.expected_generations.fill_(signed(expected))
    for rank, head in itertools.product(range(2), range(2)):
        put(storage, 1, rank, head, 0, [(rank, -1.0)], tagged=True, generation=expected + 1)
    assert merge(storage, [9], backend=backend, slot=1, tagged=True)[0, 0].tolist() == padded([0, 1])
    counters = storage.expected_generations.cpu()
    assert counters[1, :, 0].tolist() == [signed(expected + 1)] * 2
    assert (counters[1, :, 1:] == signed(expected)).all()
    assert (counters[[0, 2]] == signed(expected)).all()


@pytest.mark.parametrize("word", [0, 15, 16, 31])
@pytest.mark.parametrize("wrong", [-1, 1, 2**31])
def test_every_word_of_a_tagged_row_must_match(backend, device, word, wrong):
    """One word of an older or newer generation, and the row is not there."""
    storage = group_of(2, device)[0]
    for rank, head in itertools.product(range(2), range(2)):
        put(storage, 0, rank, head, 0, [(rank, 1.0)], tagged=True)
    row = storage.tagged_recv[0, 1, 1, 0]
    row[word] = (signed(1 + wrong) << 32) | (int(row[word]) & 0xFFFFFFFF)
    got = merge(storage, [9], backend=backend, tagged=True, spin_limit=SHORT_SPIN)[0].tolist()
    assert got == [padded([0, 1]), PAD]
    assert storage.errors.tolist() == [1, 1, 2, 0]
    assert storage.expected_generations[0, :, 0].tolist() == [1, 1]


def test_a_ready_word_other_than_one_is_not_ready(backend, device):
    storage = group_of(2, device)[0]
    for rank, head in itertools.product(range(2), range(2)):
        put(storage, 0, rank, head, 0, [(rank, 1.0)])
    storage.recv[0, 0, 0, 0, 32] = 2
    got = merge(storage, [9], backend=backend, spin_limit=SHORT_SPIN)[0].tolist()
    assert got == [PAD, padded([0, 1])]
    assert storage.recv[0, :, :, 0, 32].tolist() == [[2, 0], [1, 0]]


def test_single_error_word(backend, device):
    storage = group_of(2, device)[0]
    errors = torch.zeros(1, dtype=torch.int32, device=device)
    got = merge(storage, [9, 9], backend=backend, spin_limit=SHORT_SPIN, errors=errors)
    assert (got == -1).all()
    assert errors.tolist() == [4]


@st.composite
def candidate_rows(draw):
    world_size = draw(st.sampled_from([2, 4]))
    begin = draw(st.integers(0, 16))
    scores = st.sampled_from([NAN, INF, -INF, -0.0, 0.0, 1.0, -1.0, 2.0, 1e-38])
    ids = st.integers(-2, 30) | st.sampled_from([8191, 8192, 2**31 - 1, -(2**31)])
    row = st.lists(st.tuples(ids, scores), max_size=16)
    return {
        "rows": draw(st.lists(row, min_size=world_size, max_size=world_size)),
        "num_valid": draw(st.integers(-1, 30) | st.sampled_from([8192, 9000])),
        "force": (begin, draw(st.integers(0, 16 - begin))),
        "tagged": draw(st.booleans()),
    }


@given(drawn=candidate_rows())
def test_any_rows(backend, device, drawn):
    """Also rows that no publish makes: unsorted, an id twice in one row."""
    rows, num_valid, tagged = drawn["rows"], drawn["num_valid"], drawn["tagged"]
    storage = group_of(len(rows), device)[0]
    for rank, pairs in enumerate(rows):
        for head in range(storage.heads_per_rank):
            put(storage, 0, rank, head, 0, pairs, tagged=tagged)
    got = merge(storage, [num_valid], backend=backend, tagged=tagged, force=drawn["force"])[0]
    truth = padded(reference.merge(itertools.chain(*rows), num_valid, *drawn["force"]))
    assert got.tolist() == [truth] * storage.heads_per_rank
