"""The reference against answers worked out by hand: nothing here runs a backend."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from msa_icp import cases, reference
from msa_icp.cases import FP8, LAYOUTS, bits, bytes_of, fp8

NAN, INF = math.nan, math.inf


def one_hot(values: list[float]) -> torch.Tensor:
    """Rows that hold one number each, in dimension 0."""
    rows = torch.zeros(len(values), 128)
    rows[:, 0] = torch.tensor(values)
    return fp8(rows)


def test_every_e4m3_number():
    """The bytes by the formula of the format: sign, 4 exponent bits of bias 7, 3 digits; 0x7F is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    keys = torch.zeros(256, 128, dtype=torch.uint8)
    keys[:, 5] = codes
    query = torch.zeros(1, 128)
    query[0, 5] = 1.0
    got = reference.canonical_scores(fp8(query), keys.view(FP8))[0]
    for code in range(256):
        sign, exponent, digits = code >> 7, code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert math.isnan(got[code])
            continue
        value = (
            Fraction(digits, 8) * Fraction(2) ** -6
            if exponent == 0
            else ((1 + Fraction(digits, 8)) * Fraction(2) ** (exponent - 7))
        )
        assert Fraction(float(got[code])) == (-value if sign else value)


def test_a_sum_is_rounded_once():
    # 448 * 448 = 200704 has an FP32 spacing of 2**-6. Half of it more is a tie, to even: down. Another
    # 2**-18, far below what FP32 can add to 200704, decides upwards.
    query = torch.zeros(1, 128)
    query[0, :3] = torch.tensor([448.0, 2.0**-6, 2.0**-9])
    keys = torch.zeros(3, 128)
    keys[:, 0], keys[:, 1] = 448.0, 0.5
    keys[:, 2] = torch.tensor([0.0, 2.0**-9, -(2.0**-9)])
    got = reference.canonical_scores(fp8(query), fp8(keys))[0].tolist()
    assert got == [200704.0, 200704.0 + 2**-6, 200704.0]


def test_zeros_are_positive_and_nan_stays():
    q = fp8(torch.ones(1, 128))
    keys = torch.zeros(3, 128, dtype=torch.uint8)
    keys[0] = cases.NEGATIVE_ZERO_BYTE
    keys[2, 9] = 0xFF
    got = reference.canonical_scores(q, keys.view(FP8))[0]
    assert bits(got[:2]).tolist() == [0, 0]
    assert math.isnan(got[2])


def test_block_scores_are_causal_maxima():
    # Key p scores p, except that key 130 is NaN; block 0 is keys 0 ... 127, block 1 the rest.
    scores = torch.arange(140.0)
    keys = torch.zeros(140, 128)
    keys[:, 0], keys[:, 1] = scores // 16 * 16, scores % 16
    keys = fp8(keys).view(torch.uint8)
    keys[130, 7] = cases.NAN_BYTE
    q = torch.zeros(1, 1, 128)
    q[..., :2] = 1.0
    got = [
        reference.block_scores(fp8(q), keys.view(FP8), [position])[0, 0].tolist()
        for position in (-1, 0, 5, 127, 128, 129, 130, 131, 139, 500)
    ]
    assert got == [
        [-INF, -INF],
        [0, -INF],
        [5, -INF],
        [127, -INF],
        [127, 128],
        [127, 129],
        [127, 129],  # 130 is NaN
        [127, 131],
        [127, 139],
        [127, 139],
    ]


def test_shard_scores_by_hand():
    # W = 2, P = 128, two query tokens, sequence of 130 keys: tokens at positions 128 and 129. Local row i of
    # rank r in column c is position 128 c + 2 i + r and scores its row number plus 1, or 100 + it on page 4.
    keys = torch.zeros(5, 64, 128)
    keys[..., 0] = torch.arange(1.0, 65.0) // 8 * 8
    keys[..., 1] = torch.arange(1.0, 65.0) % 8
    keys[4, :, 2] = 96.0
    keys[4, :, 3] = 4.0
    q = torch.zeros(2, 4, 128)
    q[..., :4] = 1.0
    q[:, 3] *= 2  # head 3 scores twice as much
    table = torch.tensor([[4, 2, 3, 77]], dtype=torch.int32)
    common = {"world_size": 2, "page_size": 128, "decode_query_len": 2, "cols": 8}
    lens = torch.tensor([130], dtype=torch.int32)
    for rank, second in ((0, [1.0, 1.0]), (1, [-INF, 1.0])):
        scores, written = reference.shard_scores(fp8(q), fp8(keys), table, lens, rank=rank, **common)
        assert scores[:, 0, :2].tolist() == [[164.0, second[0]], [164.0, second[1]]]
        assert scores[:, 3, :2].tolist() == [[328.0, 2 * second[0]], [328.0, 2 * second[1]]]
        assert (scores[:, :, 2:] == -INF).all()
        assert written[0, 0].tolist() == [True] * 4 + [False] * 4
    # Out of range page ids, a table narrower than the sequence, a padding row, a row shorter than the query.
    lens = torch.tensor([130, 300, 0, 1], dtype=torch.int32)
    table = torch.tensor([[4, 5], [0, -1], [9, 9], [1, -7]], dtype=torch.int32)
    q = q[:1].expand(8, 4, 128)
    scores, written = reference.shard_scores(fp8(q), fp8(keys), table, lens, rank=0, **common)
    assert scores[:, 0, :3].tolist() == [
        [164, -INF, -INF],
        [164, -INF, -INF],
        [64, -INF, -INF],
        [64, -INF, -INF],
        [-INF] * 3,
        [-INF] * 3,
        [-INF] * 3,
        [1, -INF, -INF],
    ]
    assert written.any(-1).any(-1).tolist() == [True] * 4 + [False] * 2 + [True] * 2


def test_shard_positions_of_a_256_page():
    # Rank 3 of 4 holds positions 192 ... 255 of column 0: block 1. A token at 200 sees nine of its rows.
    keys = torch.zeros(1, 64, 128)
    keys[0, :, 0] = torch.arange(64.0) // 8 * 8
    keys[0, :, 1] = torch.arange(64.0) % 8
    q = torch.zeros(1, 4, 128)
    q[..., :2] = 1.0
    common = {"world_size": 4, "page_size": 256, "decode_query_len": 1, "cols": 4}
    for seq_len, expected in ((192, -INF), (193, 0.0), (201, 8.0), (256, 63.0), (300, 63.0)):
        scores, _ = reference.shard_scores(
            fp8(q),
            fp8(keys),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([seq_len], dtype=torch.int32),
            rank=3,
            **common,
        )
        assert scores[0, 0, 0] == expected
    assert [reference.column_block(5, rank=r, world_size=4, page_size=256) for r in range(4)] == [
        10,
        10,
        11,
        11,
    ]


def test_select_orders_by_score_then_by_id():
    row = [1.0, 5.0, NAN, 5.0, -0.0, 0.0, -INF, 3.0]
    assert reference.select(row, 8, 0, 0) == list(range(8))
    row = [0.0] * 9 + [1.0] + [-0.0] * 10 + [NAN, INF]
    # 9 and 21 lead; fourteen of the zeros follow, the lower ids first, whatever their sign.
    assert reference.select(row, 22, 0, 0) == [*range(15), 21]
    assert reference.select([*[-INF] * 16, NAN, -INF], 18, 0, 0) == list(range(16))
    assert reference.select([NAN] * 3 + [-INF] * 13 + [-1.0], 17, 0, 0) == [*range(15), 16]


def test_select_forces_first_and_last_blocks():
    row = [float(b) for b in range(40)]
    assert reference.select(row, 40, 0, 0) == list(range(24, 40))
    assert reference.select(row, 40, 2, 1) == [0, 1, *range(26, 40)]
    assert reference.select(row[::-1], 30, 1, 3) == [*range(13), 27, 28, 29]
    assert reference.select(row, 40, 8, 8) == [*range(8), *range(32, 40)]
    assert reference.select([NAN, *row], 41, 1, 0) == [0, *range(26, 41)]
    assert reference.select(row, 3, 9, 7) == [0, 1, 2]
    assert reference.select(row, 0, 1, 1) == []
    assert reference.select(row, -4, 1, 1) == []
    assert reference.select(row[:5], 100, 0, 0) == [0, 1, 2, 3, 4]


def test_select_ranks_global_ids():
    # Rank 3 of 4 at P = 256: columns are the odd blocks. 7 valid blocks: columns 0, 1, 2.
    assert reference.select([9.0, 1.0, 2.0, 50.0], 7, 0, 0, 2, 1) == [1, 3, 5]
    assert reference.select([9.0] * 4100, 20000, 0, 0, 2, 0) == [2 * c for c in range(16)]
    late = [0.0] * 4100
    late[4095] = late[4096] = 1.0  # block 8190, and 8192, which is no candidate
    assert reference.select(late, 20000, 0, 0, 2, 0) == [*(2 * c for c in range(15)), 8190]
    assert reference.select([0.0] * 20, 40, 0, 4, 2, 1) == [*(2 * c + 1 for c in range(14)), 37, 39]


def test_merge_by_hand():
    pairs = [(7, 1.0), (3, NAN), (7, 4.0), (3, -2.0), (-1, 9.0), (12, 9.0), (9000, 9.0), (5, -INF)]
    assert reference.merge(pairs, 10, 0, 0) == [3, 5, 7]
    # The larger of two scores of one block counts: 20 beats fifteen others only with its second score.
    many = [(b, 1.0) for b in range(16)] + [(20, 0.0), (20, 2.0), (21, 0.0)]
    assert reference.merge(many, 30, 0, 0) == [*range(15), 20]
    assert reference.merge(many, 22, 0, 1) == [*range(14), 20, 21]
    assert reference.merge(many, 0, 1, 1) == []
    assert reference.merge([(8191, 1.0), (8192, 2.0)], 9000, 0, 0) == [8191]


@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
def test_sharded_equals_unsharded(world_size, page_size, values):
    """Section 1: what the owners merge is what one rank with all the keys selects."""
    case = cases.decode_case(
        "", world_size, page_size, seq_lens=(3077, 40, 0), decode_query_len=2, keys=values, queries=values
    )
    num_valid = case.num_valid_pages().tolist()
    per_rank = [
        reference.shard_scores(
            case.index_q,
            case.shard(rank),
            case.block_table,
            case.seq_lens,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            decode_query_len=2,
            cols=case.score_columns,
        )[0]
        for rank in range(world_size)
    ]
    for t in range(case.tokens):
        seq_len = int(case.seq_lens[t // 2])
        truth = reference.select_unsharded(
            case.index_q[t : t + 1], case.sequence_keys(t // 2), [seq_len - 2 + t % 2], 1, 2
        )[0]
        for h in range(4):
            candidates = []
            for rank in range(world_size):
                row = per_rank[rank][t, h]
                scale, offset = case.index_scale, case.index_offset(rank)
                ids = reference.select(row, num_valid[t], 1, 2, scale, offset)
                candidates += [(b, float(row[(b - offset) // scale])) for b in ids]
            assert reference.merge(candidates, num_valid[t], 1, 2) == truth[h]


def test_select_unsharded_by_hand():
    # 20 blocks; every key of block b scores b % 7: blocks of score 6, 5, 4 ... fill the 16 places.
    keys = one_hot([float(p // 128 % 7) for p in range(20 * 128)])
    q = one_hot([1.0, 0.0, -1.0, 2.0]).view(1, 4, 128)
    got = reference.select_unsharded(q, keys, [20 * 128 - 1], 0, 0)[0]
    assert got[0] == got[3] == sorted([6, 13, 5, 12, 19, 4, 11, 18, 3, 10, 17, 2, 9, 16, 1, 8])
    assert got[1] == list(range(16))
    assert got[2] == sorted([0, 7, 14, 1, 8, 15, 2, 9, 16, 3, 10, 17, 4, 11, 18, 5])
    assert reference.select_unsharded(q, keys, [128], 0, 0) == [[[0, 1]] * 4]
    assert reference.select_unsharded(q, keys, [-1], 0, 0) == [[[]] * 4]


def test_nan_query_sees_nothing():
    q = bytes_of((1, 1, 128), cases.NAN_BYTE)
    assert reference.block_scores(q, bytes_of((130, 128), 0x38), [129])[0, 0].tolist() == [-INF, -INF]
