"""Selection of a window's Top16 rows into the carrier (contract, sections 5 and 7)."""

from __future__ import annotations

import pytest
import torch
from helpers import HEADS, NEG_INF, interpreted_only_if, publish, random_scores
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import bits, poisoned

pytestmark = pytest.mark.prefill(["topk_select_prefill"])


def select(scores, num_valid, backend, *, force=(0, 0), scale=1, offset=0, carrier=None):
    """`msa_icp_topk_select_prefill` into `carrier`, by default a poisoned one; int32 `[4, T, 33]`."""
    if carrier is None:
        carrier = poisoned((HEADS, scores.shape[0], 33), torch.int32, scores.device)
    msa_icp.msa_icp_topk_select_prefill(
        scores,
        torch.as_tensor(num_valid, dtype=torch.int32, device=scores.device),
        carrier,
        force_begin_blocks=force[0],
        force_end_blocks=force[1],
        index_scale=scale,
        index_offset=offset,
        backend=backend,
    )
    return carrier


def expected(scores, num_valid, force=(0, 0), scale=1, offset=0):
    """The carrier that the reference makes of score rows."""
    scores = scores.cpu()
    rows = [
        reference.carrier_row(scores[t, h], int(num_valid[t]), *force, scale, offset)
        for h in range(HEADS)
        for t in range(scores.shape[0])
    ]
    return torch.stack(rows).view(HEADS, -1, 33)


@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 31, 33, 64, 100, 257])
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 0), (2, 1)])
def test_columns_scale_and_offset(backend, device, columns, scale, offset):
    interpreted_only_if((columns, scale) in ((17, 1), (100, 2), (257, 1)), backend, device)
    num_valid = [scale * columns, scale * columns - 1, columns // 2, -5, 10**6, 2**31 - 1, -(2**31)]
    scores = random_scores(7, columns, seed=columns)
    for force in ((0, 0), (1, 2), (16, 0), (0, 16)):
        got = select(scores.to(device), num_valid, backend, force=force, scale=scale, offset=offset)
        assert torch.equal(got.cpu(), expected(scores, num_valid, force, scale, offset)), force


def test_a_row_by_hand(backend, device):
    """Eighteen blocks, the forced first one NaN: it is written with its own NaN bits."""
    row = torch.tensor([0.0] + [1.0] * 15 + [2.0, 1.0])
    row.view(torch.int32)[0] = 0x7FABCDEF  # a NaN with a payload
    row[5] = -0.0
    scores = row.expand(1, HEADS, 18).contiguous().to(device)
    one = 0x3F800000
    words = [0x7FABCDEF, *[one] * 14, 0x40000000, 0, 1, 2, 3, 4, *range(6, 16), 16, 1]
    assert select(scores, [18], backend, force=(1, 0)).tolist() == [[words]] * HEADS


def test_padding_rows(backend, device):
    """A token without valid blocks gets a row of padding, with its ready word."""
    scores = random_scores(3, 20, seed=1).to(device)
    carrier = select(scores, [0, -1, 1], backend, force=(3, 4))
    for h in range(HEADS):
        rows = carrier[h].tolist()
        assert rows[0] == rows[1] == [NEG_INF] * 16 + [-1] * 16 + [1]
        assert rows[2] == [int(bits(scores)[2, h, 0])] + [NEG_INF] * 15 + [0] + [-1] * 15 + [1]


def test_blocks_that_score_minus_infinity_are_candidates(backend, device):
    scores = torch.full((1, HEADS, 24), float("-inf"), device=device)
    scores[0, 1, 20] = -5.0
    scores[0, 2] = float("nan")
    scores[0, 3, ::2] = -0.0
    carrier = select(scores, [24], backend)
    assert carrier[0, 0, 16:32].tolist() == carrier[2, 0, 16:32].tolist() == list(range(16))
    assert carrier[1, 0, 16:32].tolist() == [*range(15), 20]
    assert carrier[3, 0, 16:32].tolist() == [*range(8), *range(8, 24, 2)]


def test_ties_go_to_the_lower_id_at_any_width(backend, device):
    for columns in (17, 64, 200, 1000):
        scores = torch.zeros(1, HEADS, columns, device=device)
        scores[0, 1, 1::2] = -0.0
        scores[0, 2, columns - 2 :] = 1.0
        rows = select(scores, [columns], backend)[:, 0, 16:32].tolist()
        assert rows[0] == rows[1] == rows[3] == list(range(16))
        assert rows[2] == [*range(14), columns - 2, columns - 1]


def uneven_rows(columns: int) -> torch.Tensor:
    """Score rows of every shape that a selection by classes or parts may trip over: `[T, 4, columns]`."""
    gen = cases.generator(columns)
    column = torch.arange(columns)
    noise = torch.randn(4, columns, generator=gen)
    few = torch.randint(-3, 4, (4, columns), generator=gen).float()
    hole = torch.rand(4, columns, generator=gen) < 0.99
    nan, inf = float("nan"), float("inf")
    rows = [
        noise,
        few,
        torch.where(few == 0, -0.0, few.clamp(max=0.0)),
        column.float().expand(4, -1) * torch.tensor([[1.0], [-1.0], [0.0], [0.25]]),
        torch.where((column // 40) % 23 == 7, noise + 9, noise),  # neighbours
        torch.where(column % 32 == 5, noise + 9, noise),  # every 32nd
        torch.where(column % 32 < 15, few.clamp(min=0), -1.0),
        torch.where(hole, -inf, noise),
        torch.where(hole, nan, few),
        torch.where(column % 3 == 1, nan, torch.where(column % 3 == 2, -inf, few)),
        torch.full((4, columns), nan),
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("columns", [33, 1000, 1025, 2100])
@pytest.mark.parametrize("force", [(0, 0), (3, 13)])
def test_uneven_rows(backend, device, columns, force):
    """Of fewer and of more columns than a backend looks at together."""
    scores = uneven_rows(columns)
    num_valid = [columns] * len(scores)
    got = select(scores.to(device), num_valid, backend, force=force)
    assert torch.equal(got.cpu(), expected(scores, num_valid, force))


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 0), (2, 1)])
def test_18_ids_from_8192_on_are_no_candidates(backend, device, scale, offset):
    """Also in score rows wider than the decode selection takes, where no 16-bit field may wrap."""
    columns = 65600
    scores = torch.arange(columns, dtype=torch.float32, device=device).expand(1, HEADS, columns).contiguous()
    scores[0, 1].neg_()
    last = (8191 - offset) // scale
    for num_valid in (8192, 8193, 70000, 2**31 - 1):
        ids = select(scores, [num_valid], backend, scale=scale, offset=offset)[:, 0, 16:32].tolist()
        assert ids[0] == [c * scale + offset for c in range(last - 15, last + 1)]
        assert ids[1] == [c * scale + offset for c in range(16)]


@pytest.mark.parametrize("num_valid", [8192, 8194, 8196])
def test_forced_end_blocks_of_more_than_8192(backend, device, num_valid):
    """Blocks are forced by the token's own count, not by the 8192 that can be candidates."""
    scores = torch.zeros(1, HEADS, 8200, device=device)
    scores[..., :16] = 1.0
    forced = max(0, 8192 - (num_valid - 4))
    ids = select(scores, [num_valid], backend, force=(0, 4))[0, 0, 16:32].tolist()
    assert ids == [*range(16 - forced), *range(8192 - forced, 8192)]


def test_a_token_slice_of_a_larger_carrier(backend, device):
    """Rows further apart than 33 words, heads further apart than the slice: nothing between is touched."""
    scores = random_scores(5, 30, seed=2)
    num_valid = [30, 16, 3, 0, 31]
    memory = poisoned((HEADS, 12, 40), torch.int32, device)
    view = memory[:, 4:9, 5:38]
    select(scores.to(device), num_valid, backend, force=(1, 1), carrier=view)
    assert torch.equal(view.cpu(), expected(scores, num_valid, (1, 1)))
    view.copy_(poisoned(view.shape, torch.int32, device))
    assert (bits(memory) == cases.POISON).all()


def test_score_rows_with_gaps(backend, device):
    scores = random_scores(4, 21, seed=5)
    wide = poisoned((5, 6, 50), torch.float32, device).fill_(1e30)
    view = wide[1:, :HEADS, 13:34]
    view.copy_(scores)
    num_valid = cases.off_by_one(torch.tensor([21, 20, 5, 0], dtype=torch.int32), device)
    assert torch.equal(
        select(view, num_valid, backend, force=(1, 1)).cpu(), expected(scores, num_valid, (1, 1))
    )


def test_no_tokens(backend, device):
    scores = torch.empty((0, HEADS, 8), device=device)
    assert select(scores, [], backend).shape == (HEADS, 0, 33)


@pytest.mark.exchange
@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (2, 1)])
def test_rows_equal_those_of_the_decode_selection(backend, device, scale, offset):
    """What publish stores for the same score rows, word for word, the ready word included."""
    scores = random_scores(6, 57, seed=9).to(device)
    num_valid = [57 * scale, 40, 17, 16, 1, 0]
    carrier = select(scores, num_valid, backend, force=(2, 3), scale=scale, offset=offset)
    with msa_icp.ReceiveStorage.in_process(4, capacity=6, device=device) as group:
        publish(group[1], scores, num_valid, backend=backend, force=(2, 3), scale=scale, offset=offset)
        for h in range(HEADS):
            assert torch.equal(group[h].recv[0, 1, 0], carrier[h])


@pytest.mark.large
def test_19_a_window_of_8192_tokens(backend, device):
    """Token by token the same as alone, wherever a backend cuts the window."""
    gen = cases.generator(4)
    scores = torch.randint(-40, 40, (8192, HEADS, 70), generator=gen).float()
    num_valid = torch.randint(0, 75, (8192,), generator=gen, dtype=torch.int32)
    carrier = select(scores.to(device), num_valid, backend, force=(1, 2)).cpu()
    assert (carrier[..., 32] == 1).all()
    for t in (0, 1, 3743, 3744, 3745, 4095, 4096, 8191):
        part = slice(t, t + 1)
        assert torch.equal(carrier[:, part], expected(scores[part], num_valid[part], (1, 2))), t
    padding = carrier[:, num_valid == 0]
    assert (padding[..., 16:32] == -1).all()
    counts = (carrier[..., 16:32] >= 0).sum(-1)
    assert torch.equal(counts, num_valid.clamp(max=16).long().expand(HEADS, -1))


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
    }


@given(drawn=score_batches())
def test_any_scores(backend, device, drawn):
    gaps = drawn.pop("gaps")
    scores = drawn.pop("scores")
    columns = scores.shape[2]
    row = columns + gaps[0]
    view = cases.strided(scores, (HEADS * row + gaps[1], row, 1), device=device)
    got = select(view, drawn["num_valid"], backend, **{k: drawn[k] for k in ("force", "scale", "offset")})
    assert torch.equal(got.cpu(), expected(scores, **drawn))


def test_17_token_major_carriers_are_refused(backend, device):
    scores = random_scores(5, 9, seed=0).to(device)
    for carrier in (
        poisoned((5, HEADS, 33), torch.int32, device),
        poisoned((5, HEADS, 33), torch.int32, device).transpose(0, 1),
    ):
        with pytest.raises(ValueError, match=r"^carrier[:.]"):
            select(scores, [9] * 5, backend, carrier=carrier)
        assert (bits(carrier) == cases.POISON).all()


def test_the_reference_row_is_the_documented_one():
    """`reference.carrier_row`, which all of this rests on, against words written by hand."""
    scores = torch.tensor([1.0, float("-inf"), 3.0])
    row = reference.carrier_row(scores, 7, 0, 0, 2, 1)
    assert row.tolist() == [*bits(scores).tolist(), *[NEG_INF] * 13, 1, 3, 5, *[-1] * 13, 1]
    assert reference.merge_carrier_rows([row], 4, 0, 0) == [1, 3, *[-1] * 14]
    assert reference.merge_carrier_rows([row], 0, 0, 0) == [0, *[-1] * 15]
    assert verify.padded([1, 3]) == [1, 3, *[-1] * 14]
