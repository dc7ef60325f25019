"""Inputs that broke kernels like these in the field, by their number (classes 1 to 12, 14, 15, 17, 18, 20).

Most of them are cases of `msa_icp.cases`, run here on every layout through the whole decode path: scores,
received rows and merged ids of every rank against the reference, in both row forms and fused. The others:
graph replay (13) in test_cuda.py, test_indexer_graphs.py and test_prefill_plan.py, 14 in test_storage.py,
15 in test_exchange.py and test_storage_processes.py too, lazy compilation (16) in test_warmup.py,
test_cuda.py and test_triton_compile.py, 17 in test_checks.py too, the recorded prefill shapes (19) in
test_prefill_windows.py, test_prefill_plan.py and test_topk_select_prefill.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import HEADS, SHORT_SPIN, interpreted_only_if, merge, publish, score, wide_record

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import FP8, LAYOUTS, bits, fp8, poisoned
from msa_icp.verify import Result, check_case, padded

layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)


def assert_case(case, backend, device):
    result = Result(case.name, backend)
    check_case(result, case, backend, device)
    assert not result.differences, result.differences


def names_of(makers):
    return [case.name for case in makers(2, 128)]


def case_named(makers, name, world_size, page_size):
    return next(case for case in makers(world_size, page_size) if case.name == name)


@layouts
@pytest.mark.parametrize("name", names_of(cases.nasty_cases))
def test_nasty(backend, device, world_size, page_size, name):
    case = case_named(cases.nasty_cases, name, world_size, page_size)
    if verify.is_slow(backend, device) and (case.large or world_size * page_size != 512):
        pytest.skip("too much for interpreted kernels")
    assert_case(case, backend, device)


@layouts
@pytest.mark.large
@pytest.mark.parametrize("name", names_of(cases.random_cases))
def test_random(backend, device, world_size, page_size, name):
    assert_case(case_named(cases.random_cases, name, world_size, page_size), backend, device)


def test_01_a_padding_row_keeps_every_bit(backend, device):
    case = cases.decode_case("", 4, 128, seq_lens=(0, 300, -1, 0), decode_query_len=2)
    out = bits(score(case, 1, backend, device))
    for b in (0, 2, 3):
        assert (out[2 * b : 2 * b + 2] == cases.POISON).all()
    assert (out[2:4, :, :4] != cases.POISON).all()


def test_02_less_work_than_processors(backend, device):
    """One request at the very end of an allocation: what lies behind it would be a length of billions."""
    case = cases.decode_case("", 2, 128, seq_lens=(1,), spare_columns=0)
    lens = torch.tensor([2**31 - 1, 1], dtype=torch.int32, device=device)[1:]
    table = torch.cat((torch.full((7,), -5, dtype=torch.int32), case.block_table[0])).to(device)[None, 7:]
    out = score(case, 0, backend, device, seq_lens=lens, block_table=table)
    assert not verify.score_differences(case, 0, out, bitwise=True).any()


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), 3, 10**6])
def test_03_garbage_behind_the_live_prefix(backend, device, garbage):
    case = cases.decode_case("", 4, 256, seq_lens=(1030, 256, 1), spare_columns=6)
    outs = []
    for fill in (0, garbage):
        table = case.block_table.clone()
        for b, seq_len in enumerate(case.seq_lens.tolist()):
            table[b, -(-seq_len // 256) :] = fill
        outs.append(bits(score(replace(case, block_table=table), 2, backend, device)))
    assert torch.equal(*outs)


def test_05_huge_values_past_the_end(backend, device):
    """Rows at or after the length hold 448, which would win every maximum, instead of NaN."""
    case = cases.decode_case("", 2, 128, seq_lens=(130, 65, 200), queries=_ones, decode_query_len=2)
    expected = [bits(score(case, rank, backend, device)) for rank in range(2)]
    raw = case.cache.view(torch.uint8).clone()
    raw[(raw & cases.NAN_BYTE) == cases.NAN_BYTE] = cases.LARGEST_BYTE
    huge = replace(case, cache=raw.view(FP8))
    for rank in range(2):
        assert torch.equal(bits(score(huge, rank, backend, device)), expected[rank])


def _ones(shape, _):
    return fp8(torch.ones(tuple(shape)))


@pytest.mark.exchange
def test_06_no_selected_id_is_made_of_nan_bits(backend, device):
    """Scores that are NaN with payloads, in every place: ids come from places, never from bits."""
    scores = torch.zeros(2, HEADS, 40)
    scores.view(torch.int32)[...] = torch.arange(40, dtype=torch.int32) * 977 + 0x7F800001
    scores[1, :, ::2] = 1.0
    with msa_icp.ReceiveStorage.in_process(2, capacity=2, device=device) as group:
        for rank in range(2):
            publish(group[rank], scores.to(device), [40, 40], backend=backend)
        for rank in range(2):
            got = merge(group[rank], [40, 40], backend=backend)
            assert got.tolist() == [[list(range(16))] * 2, [list(range(0, 32, 2))] * 2]


@pytest.mark.parametrize("pitch", [(1 << 20) + 16, 1 << 20], ids=["odd", "power of two"])
@layouts
def test_07_big_pitch_and_high_page_ids(backend, device, world_size, page_size, pitch):
    """A shard inside records of 1 MiB; pages whose byte offset passes 2**31 and 2**32."""
    interpreted_only_if(backend == "triton", backend, device)
    rows, pages = page_size // world_size, 4200
    record = wide_record(pages * pitch, device)
    shard = record.view(FP8).as_strided((pages, rows, 128), (pitch, 128, 1))
    ids = [4199, 0, 2047, 2048, 4095, 4096, 1, 4198]
    case = cases.decode_case("", world_size, page_size, seq_lens=(8 * page_size,), keys=cases.exact)
    case = replace(case, block_table=case.block_table[:, :8])
    rank = world_size - 1
    dense = case.shard(rank).view(torch.uint8)
    for offset in (2**31, 2**32):  # what a wrapped offset would read
        for page in ids:
            wrapped = page * pitch % offset
            record[wrapped : wrapped + rows * 128] = cases.LARGEST_BYTE
    for column, page in enumerate(ids):
        shard[page].view(torch.uint8).copy_(dense[int(case.block_table[0, column])])
    table = torch.tensor([ids], dtype=torch.int32, device=device)
    out = score(case, rank, backend, device, index_k=shard, block_table=table)
    assert not verify.score_differences(case, rank, out, bitwise=True).any()


@pytest.mark.exchange
def test_08_ties_are_the_same_run_after_run_and_for_any_split(backend, device):
    case = cases.decode_case("", 2, 128, seq_lens=(30 * 128, 17 * 128), keys=_ones, local_blocks=0)
    expected = [[list(range(16))] * HEADS] * 2
    for layout in LAYOUTS:
        wide = replace(
            cases.decode_case("", *layout, seq_lens=(30 * 128, 17 * 128), keys=_ones, local_blocks=0),
            index_q=case.index_q,
        )
        for _ in range(2):
            merged = verify.exchange(wide, None, tagged=True, backend=backend, device=device)
            assert torch.cat([ids for _, ids in merged], dim=1).tolist() == expected


@pytest.mark.exchange
@pytest.mark.parametrize("blocks", [0, 1, 15, 16, 17, 18])
@pytest.mark.parametrize("force", [(0, 0), (1, 1), (9, 7), (16, 0), (0, 16)])
def test_09_few_valid_blocks(backend, device, blocks, force):
    with msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device) as group:
        scores = torch.arange(20, dtype=torch.float32).flip(0).expand(1, HEADS, 20).contiguous()
        for rank in range(2):
            publish(group[rank], scores.to(device), [blocks], backend=backend, force=force)
        expected = padded(reference.select(scores[0, 0], blocks, *force))
        for rank in range(2):
            assert merge(group[rank], [blocks], backend=backend, force=force)[0].tolist() == [expected] * 2


@pytest.mark.parametrize("query_len", [1, 3, 5, 7])
def test_10_the_token_behind_an_odd_query_is_not_read(backend, device, query_len):
    """The last request's queries end the tensor; what comes after it in memory is NaN."""
    case = cases.decode_case("", 4, 128, seq_lens=(200, 140), decode_query_len=query_len)
    tokens = 2 * query_len
    longer = cases.bytes_of((tokens + 1, HEADS, 128), cases.NAN_BYTE).to(device)
    longer[:tokens] = case.index_q.to(device)
    for rank in (0, 3):
        out = score(case, rank, backend, device, index_q=longer[:tokens])
        assert not verify.score_differences(case, rank, out, bitwise=True).any()


@pytest.mark.exchange
@layouts
def test_11_each_head_selects_for_itself(backend, device, world_size, page_size):
    case = cases.heads_disagree(
        cases.decode_case("", world_size, page_size, seq_lens=(64 * 128,), local_blocks=0)
    )
    merged = verify.exchange(case, None, tagged=False, backend=backend, device=device)
    ids = torch.cat([owned for _, owned in merged], dim=1)[0].tolist()
    assert ids == [[b for b in range(64) if b % 4 == h] for h in range(HEADS)]


def test_12_a_slice_of_everything(backend, device):
    case = cases.decode_case("", 2, 128, seq_lens=(99, 300, 0, 128), sliced=True)
    table, lens, _ = case.metadata(device)
    memory = poisoned((3, 5, 21), torch.float32, device)
    out = memory[:, 1:, 5 : 5 + case.score_columns]
    tail = replace(case, seq_lens=case.seq_lens[1:], block_table=case.block_table[1:])
    tail = replace(tail, index_q=case.index_q[1:])
    score(tail, 1, backend, device, out=out, seq_lens=lens[1:], block_table=table[1:])
    assert not verify.score_differences(tail, 1, out, bitwise=True).any()
    memory[:, 1:, 5 : 5 + case.score_columns] = poisoned(out.shape, torch.float32, device)
    assert (bits(memory) == cases.POISON).all()


@pytest.mark.exchange
def test_15_a_peer_that_never_comes_is_named(backend, device):
    with msa_icp.ReceiveStorage.in_process(4, capacity=1, device=device) as group:
        for rank in (0, 1, 3):
            publish(group[rank], torch.zeros(1, HEADS, 4, device=device), [4], backend=backend)
        merge(group[0], [4], backend=backend, spin_limit=SHORT_SPIN)
        with pytest.raises(msa_icp.IcpTimeoutError, match="rank 2"):
            group[0].check()


def test_17_head_major_buffers_are_refused(backend, device):
    case = cases.decode_case("", 2, 128, seq_lens=(300, 40, 20, 10))
    columns = case.score_columns
    head_major = poisoned((HEADS, 4, columns), torch.float32, device).transpose(0, 1)
    with pytest.raises(ValueError, match=r"score_out\.stride\(0\): must be at least"):
        score(case, 0, backend, device, out=head_major)
    assert (bits(head_major) == cases.POISON).all()


@pytest.mark.exchange
@pytest.mark.large
@layouts
def test_18_one_million_tokens(backend, device, world_size, page_size):
    """8192 blocks through the whole path; the winners lie at both ends and around 4096."""
    winners = [0, 1, 127, 255, 256, 2047, 4094, 4095, 4096, 4097, 6143, 8064, 8188, 8189, 8190, 8191]
    pages = (1 << 20) // page_size
    cache = fp8(torch.tensor([1.0, 2.0])).view(torch.uint8)[:, None, None].expand(2, page_size, 128).clone()
    per_page = page_size // 128
    if per_page == 2:  # pages whose first, second or both blocks win
        cache = torch.cat((cache, cache[1:], cache[1:]))
        cache[2, 128:] = cache[0, 0]
        cache[3, :128] = cache[0, 0]
    table = torch.zeros(1, pages, dtype=torch.int32)
    for page in {b // per_page for b in winners}:
        mine = [b for b in winners if b // per_page == page]
        table[0, page] = 1 if len(mine) == per_page else 2 + mine[0] % 2
    tokens = 2  # the second last token does not change which blocks win
    case = cases.DecodeCase(
        name="1M",
        world_size=world_size,
        page_size=page_size,
        decode_query_len=tokens,
        index_q=_ones((tokens, HEADS, 128), 0),
        cache=cache.view(FP8),
        block_table=table,
        seq_lens=torch.tensor([1 << 20], dtype=torch.int32),
        local_blocks=0,
    )
    merged = verify.exchange(case, None, tagged=True, backend=backend, device=device)
    assert torch.cat([ids for _, ids in merged], dim=1).tolist() == [[winners] * HEADS] * tokens


@pytest.mark.exchange
@pytest.mark.large
def test_18_beyond_one_million_tokens(backend, device):
    """Blocks at and past 8192 are no candidates, though they score best and their tokens are there."""
    pages = 8300
    cache = fp8(torch.tensor([1.0, 2.0])).view(torch.uint8)[:, None, None].expand(2, 128, 128).contiguous()
    table = torch.zeros(1, pages, dtype=torch.int32)
    table[0, 8192:] = 1
    case = cases.DecodeCase(
        name="",
        world_size=2,
        page_size=128,
        decode_query_len=1,
        index_q=_ones((1, HEADS, 128), 0),
        cache=cache.view(FP8),
        block_table=table,
        seq_lens=torch.tensor([pages * 128], dtype=torch.int32),
        local_blocks=4,
    )
    merged = verify.exchange(case, None, tagged=False, backend=backend, device=device)
    assert torch.cat([ids for _, ids in merged], dim=1)[0].tolist() == [list(range(16))] * HEADS


@pytest.mark.exchange
@pytest.mark.large
@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
def test_20_production_decode_mix(backend, device, query_len):
    """The lengths of a serving engine: against another layout of the same backend, not the slow reference."""
    lens = (1000, 4000, 5003, 10_240, 50_001, 100_000, 200_013, 100_100)
    results = []
    for world_size in (2, 4):
        case = cases.decode_case(
            "", world_size, 128, seq_lens=lens, decode_query_len=query_len, init_blocks=1, local_blocks=2
        )
        case = cases.shared_prefix(case, 20)
        merged = verify.exchange(case, None, tagged=False, backend=backend, device=device)
        results.append(torch.cat([ids for _, ids in merged], dim=1))
    assert torch.equal(*results)
    assert (results[0][..., 0] == 0).all()  # the init block
    num_valid = case.num_valid_pages()[:, None].expand(-1, HEADS)
    filled = results[0].clone()
    filled[filled < 0] = 0
    assert torch.equal(filled.amax(-1), num_valid - 1)  # a local block
    counts = (results[0] >= 0).sum(-1)
    assert torch.equal(counts, num_valid.clamp(max=16).long())


@pytest.mark.large
@pytest.mark.parametrize("batch", [128, 512])
def test_20_large_batches_of_short_requests(backend, device, batch):
    lens = [1 + 37 * b % 900 for b in range(batch)]
    case = cases.decode_case("", 4, 128, seq_lens=lens)
    out = score(case, 1, backend, device)
    assert not verify.score_differences(case, 1, out, bitwise=True).any()
