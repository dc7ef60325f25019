"""Selection of a rank's Top16 and its storing into the owners (contract, sections 5 and 6)."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    HEADS,
    NEG_INF,
    SHORT_SPIN,
    assert_same,
    interpreted_only_if,
    publish,
    random_scores,
    selected_words,
    signed,
    snapshot,
    tag,
)
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases
from msa_icp.cases import bits, poisoned

pytestmark = pytest.mark.exchange
worlds = pytest.mark.parametrize("world_size", [2, 4])
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])


def group_of(world_size, device, capacity=6):
    return msa_icp.ReceiveStorage.in_process(world_size, capacity=capacity, device=device)


def published(group, rank, slot, tagged):
    """The words that `rank` stored into slot set `slot`: by head, every token of the capacity."""
    hpr = group[0].heads_per_rank
    return [
        (group[h // hpr].tagged_recv if tagged else group[h // hpr].recv)[slot, rank, h % hpr].cpu().tolist()
        for h in range(HEADS)
    ]


def expect_published(before, group, rank, slot, tagged, rows, generation=1):
    """Exactly the rows `rows[h][t]` of one rank are new; every other word of all storages is old."""
    hpr = group[0].heads_per_rank
    for owner, storage in enumerate(before):
        for local in range(hpr):
            h = owner * hpr + local
            for t, words in enumerate(rows[h]):
                row = tag(generation, words) if tagged else [*words, 1]
                storage[1 if tagged else 0][slot, rank, local, t] = torch.tensor(row)
    if tagged:
        tokens = len(rows[0])
        before[rank][2][slot, :, :tokens] = signed(generation)
    assert_same(before, snapshot(group))


@forms
@worlds
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_rows_of_every_rank(backend, device, world_size, tagged, slot):
    group = group_of(world_size, device)
    for rank in range(world_size):
        scores = random_scores(5, 40, seed=rank)
        num_valid = [40, 17, 16, 3, 0]
        before = snapshot(group)
        publish(group[rank], scores.to(device), num_valid, backend=backend, slot=slot, tagged=tagged)
        rows = [[selected_words(scores[t, h], num_valid[t]) for t in range(5)] for h in range(HEADS)]
        expect_published(before, group, rank, slot, tagged, rows)


@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 31, 33, 64, 100, 257])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 0), (2, 1)])
def test_columns_scale_and_offset(backend, device, columns, scale, offset):
    num_valid = [scale * columns, scale * columns - 1, columns // 2, -5, 10**6, 2**31 - 1]
    for force in ((0, 0), (1, 2), (16, 0), (0, 16)):
        scores = random_scores(6, columns, seed=columns)
        group = group_of(2, device)
        before = snapshot(group)
        publish(
            group[1], scores.to(device), num_valid, backend=backend, force=force, scale=scale, offset=offset
        )
        rows = [
            [selected_words(scores[t, h], num_valid[t], force, scale, offset) for t in range(6)]
            for h in range(HEADS)
        ]
        expect_published(before, group, 1, 0, False, rows)


@forms
def test_a_row_by_hand(backend, device, tagged):
    """Eighteen blocks, the forced first one NaN: it is written with its own NaN bits."""
    row = torch.tensor([0.0] + [1.0] * 15 + [2.0, 1.0])
    row.view(torch.int32)[0] = 0x7FABCDEF  # a NaN with a payload
    row[5] = -0.0
    scores = row.expand(1, HEADS, 18).contiguous().to(device)
    group = group_of(4, device)
    publish(group[2], scores, [18], backend=backend, tagged=tagged, force=(1, 0))
    one = 0x3F800000
    words = [0x7FABCDEF, *[one] * 14, 0x40000000, 0, 1, 2, 3, 4, *range(6, 16), 16]
    row = tag(1, words) if tagged else [*words, 1]
    assert [published(group, 2, 0, tagged)[h][0] for h in range(HEADS)] == [row] * HEADS


def test_negative_zero_is_written_as_it_is(backend, device):
    """It ranks as zero; what is written is the raw score."""
    scores = torch.zeros(1, HEADS, 20, device=device)
    scores[:, :, 19] = -0.0
    scores[:, :, 2] = -0.0
    group = group_of(2, device)
    publish(group[0], scores, [20], backend=backend)
    words = published(group, 0, 0, False)[0][0]
    assert words == [0, 0, -(2**31), *[0] * 13, *range(16), 1]


def test_few_or_no_candidates(backend, device):
    scores = torch.full((4, HEADS, 3), float("nan"), device=device)
    scores[1] = float("-inf")
    group = group_of(2, device)
    publish(group[0], scores, [3, 2, 0, -1], backend=backend)
    nan = bits(scores)[0, 0, 0].item()
    rows = published(group, 0, 0, False)[0][:4]
    assert rows[0] == [nan] * 3 + [NEG_INF] * 13 + [0, 1, 2] + [-1] * 13 + [1]
    assert rows[1] == [NEG_INF] * 16 + [0, 1] + [-1] * 14 + [1]
    assert rows[2] == rows[3] == [NEG_INF] * 16 + [-1] * 16 + [1]


def test_ties_go_to_the_lower_id_at_any_width(backend, device):
    for columns in (17, 64, 200, 1000):
        scores = torch.zeros(1, HEADS, columns, device=device)
        scores[0, 1, 1::2] = -0.0
        scores[0, 2, columns - 2 :] = 1.0
        scores[0, 3] = float("-inf")
        group = group_of(2, device)
        publish(group[0], scores, [columns], backend=backend)
        rows = [published(group, 0, 0, False)[h][0][16:32] for h in range(HEADS)]
        assert rows[0] == rows[1] == rows[3] == list(range(16))
        assert rows[2] == [*range(14), columns - 2, columns - 1]


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 1)])
def test_ids_from_8192_on_are_no_candidates(backend, device, scale, offset):
    columns = 12287
    scores = torch.arange(columns, dtype=torch.float32, device=device).expand(1, HEADS, columns).contiguous()
    scores[0, 1].neg_()
    group = group_of(2, device)
    for num_valid in (8192, 8193, 20000, 2**31 - 1):
        publish(group[0], scores, [num_valid], backend=backend, scale=scale, offset=offset)
        for h in range(2):
            row = published(group, 0, 0, False)[h][0]
            last = (8191 - offset) // scale
            ids = range(last - 15, last + 1) if h == 0 else range(16)
            assert row[16:32] == [i * scale + offset for i in ids]
        for storage in group:
            storage.recv.zero_()


def test_forced_end_blocks_of_more_than_8192(backend, device):
    """Blocks are forced by the token's own count, not by the 8192 that can be candidates."""
    scores = torch.zeros(1, HEADS, 8192, device=device)
    scores[..., :16] = 1.0
    for num_valid, forced in ((8192, 4), (8194, 2), (8196, 0)):
        group = group_of(2, device)
        publish(group[0], scores, [num_valid], backend=backend, force=(0, 4))
        ids = published(group, 0, 0, False)[0][0][16:32]
        assert ids == [*range(16 - forced), *range(8192 - forced, 8192)]


CORNERS = {
    "ascending": lambda ids: ids,
    "descending": lambda ids: -ids,
    "one class of columns modulo 128": lambda ids: torch.where(ids % 128 == 77, -ids, -1e6 - ids),
    "one of modulo 1024": lambda ids: torch.where(ids % 1024 == 1001, -ids, -1e6 - ids),
    "neighbours": lambda ids: torch.where((ids >= 40) & (ids < 56), 1.0 * ids, -1.0 * ids),
    "one warp": lambda ids: torch.where(ids % 128 >= 96, ids + 1e6, 1.0 * ids),
    "fifteen lanes of every warp": lambda ids: torch.where(ids % 32 < 15, ids + 1e6, 1.0 * ids),
    "sixteen lanes of one warp": lambda ids: torch.where(
        (ids % 128 >= 48) & (ids % 128 < 64), ids + 1e6, -ids
    ),
    "four lanes of every warp": lambda ids: torch.where(ids % 32 >= 28, ids + 1e6, -1.0 * ids),
    "three lanes of a warp": lambda ids: torch.where((ids % 32 < 5) & (ids % 128 > 2), ids + 1e6, -1.0 * ids),
    "all equal": lambda ids: 0.0 * ids,
    "equal but for the last": lambda ids: (ids == ids.max()) * 1.0,
    "two scores": lambda ids: (ids % 3 == 1) * 1.0,
    "fifteen numbers": lambda ids: torch.where(ids % 17 + ids // 255 * 99 == 5, -ids, float("-inf")),
    "infinite": lambda ids: torch.where(ids % 2 == 0, float("inf"), float("-inf")),
    "NaN or a number": lambda ids: torch.where(ids % 5 == 0, float("nan"), -ids),
    "nothing but NaN": lambda ids: ids * float("nan"),
    "signalling NaN": lambda ids: (ids.int() * 977 + 0x7F800001).view(torch.float32),
}
"""Rows of scores by column, which a selection by classes of columns might get wrong."""
WIDTHS = (16, 113, 127, 128, 129, 256, 895, 1023, 1024, 1025, 1152, 2049)


@pytest.mark.parametrize("columns", WIDTHS)
def test_corners_of_a_selection_by_classes(backend, device, columns):
    if backend == "triton":
        interpreted_only_if(columns in (16, 129), backend, device)
    ids = torch.arange(columns, dtype=torch.float32)
    made = [make(ids).float() for make in CORNERS.values()]
    count = -(-len(made) // HEADS)
    scores = torch.stack(made + made[: count * HEADS - len(made)]).view(count, HEADS, columns)
    for force in ((0, 0), (1, 1), (9, 7)):
        for fewer in (0, 1, columns // 2):
            group = group_of(2, device)
            num_valid = [columns - fewer] * count
            publish(group[0], scores.to(device), num_valid, backend=backend, force=force)
            rows = [
                [selected_words(scores[t, h], columns - fewer, force) for t in range(count)]
                for h in range(HEADS)
            ]
            for h in range(HEADS):
                for t in range(count):
                    assert published(group, 0, 0, False)[h][t][:32] == rows[h][t], (t * HEADS + h, force)


def test_corners_of_the_widest_rows(backend, device):
    if backend == "triton":
        interpreted_only_if(False, backend, device)
    columns = 12287
    ids = torch.arange(columns, dtype=torch.float32)
    scores = torch.stack([CORNERS[name](ids).float() for name in WIDEST]).view(-1, HEADS, columns)
    for num_valid in (columns, 8192, 7169, 3073):
        group = group_of(2, device)
        publish(group[0], scores.to(device), [num_valid] * 2, backend=backend, force=(1, 2))
        for h in range(HEADS):
            for t in range(2):
                row = selected_words(scores[t, h], num_valid, (1, 2))
                assert published(group, 0, 0, False)[h][t][:32] == row, WIDEST[t * HEADS + h]


WIDEST = (
    "descending",
    "one class of columns modulo 128",
    "one of modulo 1024",
    "fifteen lanes of every warp",
    "all equal",
    "two scores",
    "fifteen numbers",
    "NaN or a number",
)


def test_score_rows_with_gaps(backend, device):
    scores = random_scores(4, 21, seed=5)
    wide = poisoned((5, 6, 50), torch.float32, device).fill_(1e30)
    view = wide[1:, :HEADS, 13:34]
    view.copy_(scores)
    group = group_of(4, device)
    before = snapshot(group)
    num_valid = cases.off_by_one(torch.tensor([21, 20, 5, 0], dtype=torch.int32), device)
    publish(group[3], view, num_valid, backend=backend, force=(1, 1))
    rows = [[selected_words(scores[t, h], int(num_valid[t]), (1, 1)) for t in range(4)] for h in range(HEADS)]
    expect_published(before, group, 3, 0, False, rows)


@forms
def test_no_tokens_and_full_capacity(backend, device, tagged):
    group = group_of(2, device, capacity=3)
    before = snapshot(group)
    publish(group[0], torch.empty((0, HEADS, 8), device=device), [], backend=backend, tagged=tagged)
    assert_same(before, snapshot(group))
    scores = random_scores(3, 8, seed=1)
    publish(group[0], scores.to(device), [8, 7, 6], backend=backend, tagged=tagged)
    rows = [[selected_words(scores[t, h], 8 - t) for t in range(3)] for h in range(HEADS)]
    expect_published(before, group, 0, 0, tagged, rows)


def test_every_row_is_written_on_every_call(backend, device):
    """A padding row is published too: the owner waits for all of them."""
    group = group_of(2, device)
    publish(group[0], random_scores(4, 9, seed=2).to(device), [9, 0, -3, 0], backend=backend)
    ready = group[0].recv[0, 0, :, :, 32].cpu()
    assert ready.tolist() == [[1, 1, 1, 1, 0, 0]] * 2


@pytest.mark.parametrize("start", [0, 1, 2**31 - 2, 2**31 - 1, 2**32 - 2, 2**32 - 1])
def test_generations_count_and_wrap(backend, device, start):
    group = group_of(2, device)
    group[1].publish_generations.fill_(signed(start))
    scores = random_scores(2, 20, seed=3)
    rows = [[selected_words(scores[t, h], 20) for t in range(2)] for h in range(HEADS)]
    for step in (1, 2, 3):
        before = snapshot(group)
        publish(group[1], scores.to(device), [20, 20], backend=backend, slot=2, tagged=True)
        expect_published(before, group, 1, 2, True, rows, generation=start + step)


def test_counters_differ_by_head_and_token(backend, device):
    group = group_of(4, device)
    counters = torch.arange(4 * 6, dtype=torch.int32).view(4, 6) * 7
    group[0].publish_generations[1] = counters.to(device)
    publish(group[0], random_scores(4, 20, seed=3).to(device), [20] * 4, backend=backend, slot=1, tagged=True)
    for h in range(HEADS):
        tags = group[h].tagged_recv[1, 0, 0].cpu() >> 32
        assert (tags[:4] == counters[h, :4, None] + 1).all()
        assert (tags[4:] == 0).all()
    counters[:, :4] += 1
    assert torch.equal(group[0].publish_generations[1].cpu(), counters)


def test_tagged_words_above_31_bits_keep_their_tag(backend, device):
    """Score bits of negative numbers and ids of -1 have their top bit set: it must not reach the tag."""
    group = group_of(2, device)
    scores = torch.full((1, HEADS, 4), -3.5, device=device)
    publish(group[0], scores, [4], backend=backend, tagged=True)
    words = [bits(scores)[0, 0, 0].item()] * 4 + [NEG_INF] * 12 + [0, 1, 2, 3] + [-1] * 12
    assert published(group, 0, 0, True)[0][0] == tag(1, words)


def test_legacy_does_not_touch_generations_nor_tagged_publish_the_ready_words(backend, device):
    group = group_of(2, device)
    scores = random_scores(2, 9, seed=0).to(device)
    publish(group[0], scores, [9, 9], backend=backend)
    assert not group[0].publish_generations.any()
    assert not any(s.tagged_recv.any() for s in group)
    publish(group[1], scores, [9, 9], backend=backend, tagged=True)
    assert not any(s.recv[:, 1].any() for s in group)


def test_only_the_errors_of_the_caller_are_read(backend, device):
    """One error word is enough, and a failure counted there makes the wait short, not the call void."""
    group = group_of(2, device)
    errors = torch.tensor([3], dtype=torch.int32, device=device)
    scores = random_scores(1, 9, seed=0).to(device)
    publish(group[0], scores, [9], backend=backend, errors=errors, spin_limit=SHORT_SPIN)
    assert errors.tolist() == [3]
    assert group[0].recv[0, 0, 0, 0, 32] == 1


@st.composite
def score_batches(draw):
    columns = draw(st.integers(1, 80))
    tokens = draw(st.integers(1, 4))
    scale = draw(st.sampled_from([1, 2]))
    begin = draw(st.integers(0, 16))
    return {
        "scores": random_scores(tokens, columns, draw(st.integers(0, 10**6))),
        "num_valid": draw(st.lists(st.integers(-2, 2 * columns + 3), min_size=tokens, max_size=tokens)),
        "force": (begin, draw(st.integers(0, 16 - begin))),
        "scale": scale,
        "offset": draw(st.integers(0, scale - 1)),
        "gaps": (draw(st.integers(0, 3)), draw(st.integers(0, 3))),
        "world_size": draw(st.sampled_from([2, 4])),
        "tagged": draw(st.booleans()),
    }


@given(drawn=score_batches())
def test_any_scores(backend, device, drawn):
    scores, num_valid = drawn["scores"], drawn["num_valid"]
    tokens, _, columns = scores.shape
    row = columns + drawn["gaps"][0]
    view = cases.strided(scores, (HEADS * row + drawn["gaps"][1], row, 1), device=device)
    group = group_of(drawn["world_size"], device)
    before = snapshot(group)
    shared = {"force": drawn["force"], "scale": drawn["scale"], "offset": drawn["offset"]}
    publish(group[1], view, num_valid, backend=backend, tagged=drawn["tagged"], **shared)
    rows = [
        [selected_words(scores[t, h], num_valid[t], *shared.values()) for t in range(tokens)]
        for h in range(HEADS)
    ]
    expect_published(before, group, 1, 0, drawn["tagged"], rows)
