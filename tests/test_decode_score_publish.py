"""The fused form: score and publish without score rows (contract, section 6)."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from helpers import HEADS, SHORT_SPIN, assert_same, interpreted_only_if, publish, score, snapshot

import msa_icp
from msa_icp import cases
from msa_icp.cases import LAYOUTS

pytestmark = pytest.mark.exchange
forms = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])


def fused(
    case, storage, backend, *, slot=0, tagged=False, spin_limit=1 << 20, extra_pool=0, fill=0xFF, **changes
):
    """`msa_icp_decode_score_publish` of a case from one rank's storage."""
    device = storage.device
    table, lens, num_valid = case.metadata(device)
    size = msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=max(1, case.tokens)) + extra_pool
    arguments = {
        "index_q": case.index_q.to(device),
        "index_k": case.shard(storage.rank, device),
        "block_table": table,
        "seq_lens": lens,
        "num_valid_pages": num_valid,
        "pool": torch.full((size,), fill, dtype=torch.uint8, device=device),
        "recv_bases": storage.tagged_recv_bases if tagged else storage.recv_bases,
        "errors": storage.errors,
        "rank": storage.rank,
        "world_size": case.world_size,
        "page_size": case.page_size,
        "decode_query_len": case.decode_query_len,
        "slot": slot,
        "capacity": storage.capacity,
        "force_begin_blocks": case.init_blocks,
        "force_end_blocks": case.local_blocks,
        "spin_limit": spin_limit,
        "generations": storage.publish_generations if tagged else None,
        "backend": backend,
    }
    msa_icp.msa_icp_decode_score_publish(**{**arguments, **changes})


def unfused(case, storage, backend, *, slot=0, tagged=False):
    """Section 4 with one score column per block-table column, then publish."""
    width = case.block_table.shape[1]
    columns = 4 * -(-width // 4)
    scores = torch.full((case.tokens, HEADS, columns), float("-inf"), device=storage.device)
    score(case, storage.rank, backend, storage.device, out=scores)
    publish(
        storage,
        scores[..., :width],
        case.num_valid_pages(),
        backend=backend,
        slot=slot,
        tagged=tagged,
        force=(case.init_blocks, case.local_blocks),
        scale=case.index_scale,
        offset=case.index_offset(storage.rank),
    )


def assert_equal_rows(case, backend, device, *, slot=0, tagged=False, capacity=None, **changes):
    capacity = capacity or case.tokens + 1
    groups = [
        msa_icp.ReceiveStorage.in_process(case.world_size, capacity=capacity, device=device) for _ in range(2)
    ]
    for rank in range(case.world_size):
        fused(case, groups[0][rank], backend, slot=slot, tagged=tagged, **changes)
        unfused(case, groups[1][rank], backend, slot=slot, tagged=tagged)
    assert_same(snapshot(groups[0]), snapshot(groups[1]))
    return groups[0]


@forms
@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
def test_equals_score_and_publish(backend, device, world_size, page_size, values, tagged):
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(20 * 128 + 3, 0, 70),
        decode_query_len=2,
        keys=values,
        queries=values,
        init_blocks=1,
        local_blocks=2,
    )
    assert_equal_rows(case, backend, device, slot=1, tagged=tagged)


@pytest.mark.parametrize("query_len", [1, 3, 8])
def test_query_lengths(backend, device, query_len):
    case = cases.decode_case("", 4, 256, seq_lens=(1500, 2, 256), decode_query_len=query_len)
    assert_equal_rows(case, backend, device)


@pytest.mark.parametrize("nasty", [cases.unreadable_pages, cases.narrow_table, cases.nan_keys])
def test_nasty_tables_and_keys(backend, device, nasty):
    for world_size, page_size in ((4, 128), (2, 256)):
        case = nasty(cases.decode_case("", world_size, page_size, seq_lens=(2600, 900)))
        assert_equal_rows(case, backend, device)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_tables_of_any_width(backend, device, width):
    """A column that the table does not have is no candidate, whatever rounds up to a multiple of four."""
    case = cases.decode_case("", 2, 128, seq_lens=(700, 80), spare_columns=0, local_blocks=0)
    case = replace(case, block_table=case.block_table[:, :width])
    group = assert_equal_rows(case, backend, device)
    assert group[0].recv[0, 0, 0, 0, 16:32].tolist() == [*range(width), *[-1] * (16 - width)]


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_what_is_in_the_pool_means_nothing(backend, device, fill):
    case = cases.decode_case("", 2, 256, seq_lens=(2600, 1, 0))
    assert_equal_rows(case, backend, device, fill=fill, extra_pool=8 * fill)


def test_counts_that_do_not_fit_the_lengths(backend, device):
    """`num_valid_pages` alone says what is a candidate: more than there are pages, fewer, none."""
    case = cases.decode_case("", 2, 128, seq_lens=(300, 2560, 300), spare_columns=2)
    counts = torch.tensor([10**6, 5, -3], dtype=torch.int32, device=device)
    groups = [msa_icp.ReceiveStorage.in_process(2, capacity=3, device=device) for _ in range(2)]
    fused(case, groups[0][0], backend, num_valid_pages=counts)
    width = case.block_table.shape[1]
    scores = torch.full((3, HEADS, 4 * -(-width // 4)), float("-inf"), device=device)
    score(case, 0, backend, device, out=scores)
    publish(groups[1][0], scores[..., :width], counts, backend=backend, force=(0, 1))
    assert_same(snapshot(groups[0]), snapshot(groups[1]))


def test_no_tokens(backend, device):
    case = cases.decode_case("", 2, 128, seq_lens=(5,))
    group = msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)
    before = snapshot(group)
    empty = {
        "index_q": case.index_q[:0].to(device),
        "block_table": case.block_table[:0].to(device),
        "seq_lens": case.seq_lens[:0].to(device),
        "num_valid_pages": torch.empty(0, dtype=torch.int32, device=device),
        "pool": torch.empty(0, dtype=torch.uint8, device=device),
    }
    fused(case, group[0], backend, **empty)
    assert_same(before, snapshot(group))


def test_a_late_publish_stores_nothing(backend, device):
    """The owner of heads 2 and 3 has not taken token 1: those two rows stay, all others are stored."""
    case = cases.decode_case("", 2, 128, seq_lens=(300, 200))
    group = msa_icp.ReceiveStorage.in_process(2, capacity=2, device=device)
    group[1].recv[0, 0, :, 1, :] = 7
    fused(case, group[0], backend, spin_limit=SHORT_SPIN)
    assert group[0].errors.tolist() == [2, 1, 2, 1]
    assert (group[1].recv[0, 0, :, 1].cpu() == 7).all()
    assert group[0].recv[0, 0, :, :, 32].tolist() == [[1, 1]] * 2
    assert group[1].recv[0, 0, :, 0, 32].tolist() == [1, 1]


def in_rounds(monkeypatch, backend, step):
    """Make the fused form score `step` columns at a time."""
    if backend == "torch":
        pytest.skip("the torch backend has no rounds")
    monkeypatch.setattr(
        importlib.import_module(f"msa_icp.{backend}_backend.decode_score_publish"),
        "pool_rounds",
        lambda columns: [(first, min(step, columns - first)) for first in range(0, columns, step)],
    )


@forms
@pytest.mark.parametrize("step", [4, 8, 20])
def test_rounds_of_any_size(backend, device, monkeypatch, step, tagged):
    """The best so far goes from round to round, also where a round has no candidate."""
    if backend == "triton":
        interpreted_only_if(step == 8 and not tagged, backend, device)
    in_rounds(monkeypatch, backend, step)
    case = cases.decode_case(
        "",
        2,
        128,
        seq_lens=(25 * 128 + 3, 0, 70, 17 * 128),
        keys=cases.full_range,
        queries=cases.full_range,
        init_blocks=1,
        local_blocks=2,
    )
    assert_equal_rows(case, backend, device, tagged=tagged)


@forms
def test_rounds_of_equal_scores(backend, device, monkeypatch, tagged):
    """The best 16 are all of the first round, and every column of every later one is as good as the last."""
    if backend == "triton":
        interpreted_only_if(False, backend, device)
    in_rounds(monkeypatch, backend, 32)
    lens = (70 * 128, 41 * 128 + 3)
    case = cases.decode_case("", 2, 128, seq_lens=lens, queries=cases.zeros, local_blocks=0)
    group = assert_equal_rows(case, backend, device, tagged=tagged)
    row = (group[0].tagged_recv if tagged else group[0].recv)[0, 0, 0, 0]
    assert row[16:32].int().tolist() == list(range(16))


@pytest.mark.large
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 256)])
def test_tables_past_8192_columns(backend, device, world_size, page_size):
    """A table as wide as 12500 columns: blocks from 8192 on are no candidates."""
    width = 12500
    case = cases.decode_case("", world_size, page_size, seq_lens=(40 * 128,), spare_columns=0)
    pages = case.block_table[0, torch.arange(width) % case.block_table.shape[1]]
    case = replace(
        case,
        block_table=pages[None].contiguous(),
        seq_lens=torch.tensor([width * page_size], dtype=torch.int32),
        local_blocks=0,
        whole=False,
    )
    group = msa_icp.ReceiveStorage.in_process(world_size, capacity=1, device=device)
    fused(case, group[1], backend)
    other = msa_icp.ReceiveStorage.in_process(world_size, capacity=1, device=device)
    scores = torch.full((1, HEADS, 8192), float("-inf"), device=device)
    score(case, 1, backend, device, out=scores)
    scale, offset = case.index_scale, case.index_offset(1)
    publish(other[1], scores, case.num_valid_pages(), backend=backend, scale=scale, offset=offset)
    assert_same(snapshot(group), snapshot(other))
