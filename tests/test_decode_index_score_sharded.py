"""The decode scorer of every backend (contract, sections 2 to 4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import score
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import FP8, LAYOUTS, bits, fp8, poisoned

layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)


def assert_scores(case, backend, device, *, ranks=None, **changes):
    """Every element of every rank's scores is right, or has its old bits where nothing is written."""
    bitwise = case.exact or backend in verify.BITWISE
    for rank in range(case.world_size) if ranks is None else ranks:
        out = score(case, rank, backend, device, **changes)
        wrong = verify.score_differences(case, rank, out, bitwise=bitwise)
        assert not wrong.any(), (
            f"{case.name}: rank {rank}, {int(wrong.sum())} differ at {wrong.nonzero()[:5]}"
        )


@layouts
@pytest.mark.parametrize("query_len", range(1, 9))
def test_exact_sums_are_equal_bit_for_bit(backend, device, world_size, page_size, query_len):
    lens = (page_size * 2 + 3, 1, 0, page_size)
    case = cases.decode_case("", world_size, page_size, seq_lens=lens, decode_query_len=query_len)
    assert_scores(case, backend, device)


@layouts
@pytest.mark.parametrize("query_len", [1, 2, 4, 7])
def test_every_byte_is_within_the_bound(backend, device, world_size, page_size, query_len):
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(page_size * 3 - 1, 130, page_size + 1),
        decode_query_len=query_len,
        keys=cases.full_range,
        queries=cases.full_range,
    )
    assert_scores(case, backend, device)


@layouts
def test_nan_bytes_anywhere(backend, device, world_size, page_size):
    def values(shape, seed):
        raw = cases.full_range(shape, seed).view(torch.uint8).clone()
        raw[torch.rand(raw.shape, generator=cases.generator(seed)) < 0.004] = 0xFF
        return raw.view(FP8)

    case = cases.decode_case("", world_size, page_size, seq_lens=(700, 300), keys=values, decode_query_len=2)
    case = replace(case, exact=False)
    assert_scores(case, backend, device)


def test_every_e4m3_byte_is_converted_exactly(backend, device):
    """Page `c` holds the byte `c` in one place of all its rows: its score is that byte's value."""
    raw = torch.zeros(256, 32, 128, dtype=torch.uint8)
    raw[:, :, 93] = torch.arange(256, dtype=torch.uint8)[:, None]
    q = torch.zeros(1, 4, 128)
    q[0, :, 93] = torch.tensor([1.0, -1.0, 448.0, 2.0**-9])
    out = poisoned((1, 4, 256), torch.float32, device)
    msa_icp.msa_icp_decode_index_score_sharded(
        fp8(q).to(device),
        raw.view(FP8).to(device),
        torch.arange(256, dtype=torch.int32, device=device)[None],
        torch.tensor([256 * 128], dtype=torch.int32, device=device),
        out,
        rank=0,
        world_size=4,
        page_size=128,
        decode_query_len=1,
        max_decode_query_len=1,
        backend=backend,
    )
    truth = reference.canonical_scores(fp8(q)[0], raw[:, 0].view(FP8))
    truth = torch.where(truth.isnan(), float("-inf"), truth)
    assert torch.equal(bits(out[0]), bits(truth))


@layouts
def test_causal_limit_at_every_row(backend, device, world_size, page_size):
    """Key `p` scores `p`, so the maximum tells which rows a token saw, to the row."""
    positions = torch.arange(2 * page_size)
    keys = torch.zeros(2 * page_size, 128)
    keys[:, 0], keys[:, 1] = positions // 16, positions % 16
    keys[:, 2] = positions // 256  # 16 * 16 is the largest digit that e4m3 holds exactly
    keys[:, 0] %= 16
    q = torch.zeros(16, 4, 128)
    q[..., :3] = torch.tensor([16.0, 1.0, 256.0])
    lens = torch.tensor([page_size - 1, page_size + world_size + 1], dtype=torch.int32)
    case = cases.DecodeCase(
        name="causal",
        world_size=world_size,
        page_size=page_size,
        decode_query_len=8,
        index_q=fp8(q),
        cache=fp8(keys).view(2, page_size, 128),
        block_table=torch.tensor([[0, 1], [0, 1]], dtype=torch.int32),
        seq_lens=lens,
    )
    for rank in range(world_size):
        out = score(case, rank, backend, device).cpu()
        for t in range(16):
            position = int(lens[t // 8]) - 8 + t % 8
            for column in range(2):
                mine = [
                    reference.key_position(column, i, rank=rank, world_size=world_size, page_size=page_size)
                    for i in range(page_size // world_size)
                ]
                seen = [p for p in mine if p <= position]
                assert out[t, 0, column] == (max(seen) if seen else float("-inf"))


def test_negative_zero_becomes_zero(backend, device):
    for keys, queries in ((0x80, 0x38), (0x38, 0x80), (0x80, 0xB8), (0x00, 0xB8)):
        case = cases.decode_case(
            "",
            2,
            128,
            seq_lens=(128,),
            keys=lambda shape, _, byte=keys: cases.bytes_of(shape, byte),
            queries=lambda shape, _, byte=queries: cases.bytes_of(shape, byte),
        )
        assert (bits(score(case, 0, backend, device))[:, :, 0] == 0).all()


@pytest.mark.parametrize("columns", [4, 8, 12])
def test_columns_bound_what_is_written(backend, device, columns):
    """Nine pages: a buffer of 4 or 8 columns holds the first ones, of 12 also three -inf."""
    case = cases.decode_case("", 4, 128, seq_lens=(9 * 128 - 5, 200), spare_columns=0)
    whole = score(case, 1, backend, device).cpu()
    out = poisoned((2, 4, columns), torch.float32, device)
    score(case, 1, backend, device, out=out)
    assert torch.equal(bits(out), bits(whole[..., :columns]))
    assert (bits(out)[1, :, 4:] == cases.POISON).all()
    if columns == 12:
        assert (out[0, :, 9:] == float("-inf")).all()


def test_score_rows_with_gaps_keep_what_lies_between(backend, device):
    case = cases.decode_case("", 2, 256, seq_lens=(1200, 0, 300), decode_query_len=2)
    dense = score(case, 1, backend, device)
    memory = poisoned((6, 4, 40), torch.float32, device)
    out = memory[:, :, 3 : 3 + case.score_columns]
    score(case, 1, backend, device, out=out)
    assert torch.equal(bits(out), bits(dense))
    memory[:, :, 3 : 3 + case.score_columns] = poisoned(out.shape, torch.float32, device)
    assert (bits(memory) == cases.POISON).all()


@pytest.mark.parametrize("offset", range(4))
def test_metadata_at_any_alignment(backend, device, offset):
    case = cases.decode_case("", 4, 256, seq_lens=(700, 40, 513))
    table, lens, _ = case.metadata(device)
    wide = torch.full((3, table.shape[1] + 7), -1, dtype=torch.int32, device=device)
    wide[:, offset : offset + table.shape[1]] = table
    long = torch.full((8,), 999, dtype=torch.int32, device=device)
    long[offset : offset + 3] = lens
    out = poisoned((3, 4, case.score_columns + 8), torch.float32, device)
    assert_scores(
        case,
        backend,
        device,
        ranks=[2],
        block_table=wide[:, offset : offset + table.shape[1]],
        seq_lens=long[offset : offset + 3],
        out=out[..., offset : offset + case.score_columns],
    )


def test_empty_batches(backend, device):
    case = cases.decode_case("", 2, 128, seq_lens=(5,))
    empty = {
        "index_q": case.index_q[:0].to(device),
        "block_table": case.block_table[:0].to(device),
        "seq_lens": case.seq_lens[:0].to(device),
    }
    score(case, 0, backend, device, out=torch.empty((0, 4, 8), device=device), **empty)
    no_pages = case.shard(0, device)[:0]
    out = score(case, 0, backend, device, index_k=no_pages)
    assert (out[..., :4].cpu() == float("-inf")).all()


def test_one_page_of_many_requests(backend, device):
    """A shared page is read by every request that names it, each at its own column and length."""
    case = cases.decode_case("", 2, 128, seq_lens=(300, 256, 129), spare_columns=1)
    table = case.block_table.clone()
    table[1, 0] = table[0, 1]
    table[2, 0] = table[0, 1]
    assert_scores(replace(case, block_table=table), backend, device)


def test_enable_pdl_changes_no_bit(backend, device):
    case = cases.decode_case("", 4, 128, seq_lens=(700, 40), keys=cases.full_range, decode_query_len=2)
    first = score(case, 3, backend, device, enable_pdl=True)
    assert torch.equal(bits(first), bits(score(case, 3, backend, device, enable_pdl=False)))


def test_nothing_is_written_but_the_scores(backend, device):
    case = cases.decode_case("", 2, 256, seq_lens=(700, 0, 90), decode_query_len=3)
    table, lens, _ = case.metadata(device)
    inputs = {
        "index_q": case.index_q.to(device),
        "index_k": case.shard(0, device),
        "block_table": table,
        "seq_lens": lens,
    }
    before = {name: tensor.cpu().view(torch.uint8).clone() for name, tensor in inputs.items()}
    score(case, 0, backend, device, **inputs)
    for name, tensor in inputs.items():
        assert torch.equal(tensor.cpu().view(torch.uint8), before[name]), name


@st.composite
def batches(draw):
    world_size, page_size = draw(st.sampled_from(LAYOUTS))
    near = st.sampled_from([-1, 0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513])
    lens = draw(st.lists(near | st.integers(0, 900), min_size=1, max_size=4))
    pitch = draw(st.none() | st.integers(0, 9))
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=lens,
        decode_query_len=draw(st.integers(1, 8)),
        keys=draw(st.sampled_from([cases.exact, cases.full_range])),
        spare_columns=draw(st.integers(0, 5)),
        pitch=None if pitch is None else page_size // world_size * 128 + 16 * pitch,
        sliced=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    width = draw(st.integers(1, case.block_table.shape[1]))
    case = replace(case, block_table=case.block_table[:, :width])
    columns = draw(st.integers(1, 6)) * 4
    gaps = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    return case, draw(st.integers(0, world_size - 1)), columns, gaps


@given(drawn=batches())
def test_any_layout_stride_and_length(backend, device, drawn):
    case, rank, columns, gaps = drawn
    stride = 4 * (columns + gaps[0]) + gaps[1], columns + gaps[0], 1
    poison = poisoned((case.tokens, 4, columns), torch.float32)
    out = cases.strided(poison, stride, device=device)
    score(case, rank, backend, device, out=out)
    whole = poisoned((case.tokens, 4, max(columns, case.score_columns)), torch.float32)
    whole[..., :columns] = out.cpu()
    truth = verify.score_truth(case, rank, bounds=False)
    for t in range(case.tokens):
        seq_len = int(case.seq_lens[t // case.decode_query_len])
        pages = -(-max(seq_len, 0) // case.page_size)
        count = min(columns, 4 * -(-pages // 4))
        assert (bits(out[t])[:, count:] == cases.POISON).all()
    if case.exact or backend in verify.BITWISE:
        both = min(columns, case.score_columns)
        expected = torch.where(truth.written, bits(truth.canonical), cases.POISON)
        assert torch.equal(bits(out)[..., :both], expected[..., :both])


@pytest.mark.large
def test_one_million_tokens(backend, device):
    """8192 blocks of one sequence: every column is there, and the last one is as right as the first."""
    case = cases.decode_case("", 4, 128, seq_lens=(1 << 20,), spare_columns=0)
    out = score(case, 3, backend, device).cpu()
    assert out.shape == (1, 4, 8192)
    keys = case.sequence_keys(0).view(-1, 32, 4, 128)[:, :, 3].reshape(-1, 128)
    for first in range(0, 8192, 1024):
        some = keys[first * 32 : (first + 1024) * 32]
        truth = reference.canonical_scores(case.index_q[0], some).view(4, 1024, 32).amax(-1)
        assert torch.equal(bits(out[0, :, first : first + 1024]), bits(truth))
