"""The fused prefill form: score and select without score rows (contract, section 7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import HEADS, NEG_INF, interpreted_only_if
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, verify
from msa_icp.cases import LAYOUTS, bits, poisoned
from msa_icp.prefill_cases import beyond_bounds, hostile_segments, prefill_case, rows_apart
from msa_icp.verify.prefill import plan_on_device, plan_on_host, run_fused, run_scores, run_select

pytestmark = pytest.mark.prefill
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)


def two_steps(case, plan, rank, backend, num_valid):
    """The carrier of score and select, with the columns that the fused form has.

    Beside interpreted kernels tensor code selects: test_topk_select_prefill.py says that it is the same.
    """
    compact = case.fused_compact
    scores = run_scores(case, plan, rank, backend, compact=compact, initialize=True)
    selects = "torch" if verify.is_slow(backend, scores.device.type) else backend
    return run_select(case, rank, scores, selects, num_valid, compact=compact)


def assert_equals_two_steps(case, backend, device, num_valid=None, ranks=None):
    num_valid = case.num_valid_pages() if num_valid is None else num_valid
    plan = plan_on_device(case, backend, device)
    for rank in range(case.world_size) if ranks is None else ranks:
        one = run_fused(case, plan, rank, backend, num_valid).cpu()
        two = two_steps(case, plan, rank, backend, num_valid).cpu()
        wrong = (one != two).any(-1)
        assert not wrong.any(), (rank, wrong.nonzero()[:5].tolist())


@layouts
@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
def test_equals_score_and_select(backend, device, world_size, page_size, values):
    interpreted_only_if(values is cases.full_range, backend, device)
    case = prefill_case(
        "",
        world_size,
        page_size,
        qo_lens=(66, 0, 3, 1),
        kv_lens=(150, 70, 2400, 2049),
        keys=values,
        queries=values,
        init_blocks=1,
        local_blocks=2,
    )
    assert_equals_two_steps(case, backend, device, ranks=(0, world_size - 1))


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("force", [(0, 0), (1, 2), (16, 0), (0, 16)])
def test_valid_blocks_that_are_not_those_of_the_position(backend, device, page_size, force):
    """`num_valid_pages` below, at and above the causal prefix: blocks between them are candidates at -inf."""
    interpreted_only_if(page_size == 256 and force in ((1, 2), (0, 16)), backend, device)
    case = prefill_case(
        "",
        2,
        page_size,
        qo_lens=(9, 2),
        kv_lens=(700, 2300),
        spare_keys=700,
        init_blocks=force[0],
        local_blocks=force[1],
    )
    counts = [0, 1, 5, 6, 7, 12, 24, 100, 2**31 - 1, 18, 19]
    assert_equals_two_steps(case, backend, device, torch.tensor(counts, dtype=torch.int32))


@pytest.mark.parametrize("page_size", [128, 256])
def test_rows_of_no_segment_are_written(backend, device, page_size):
    """Padding where they have no valid blocks; else the lowest ids, or the forced ones, all of them -inf."""
    interpreted_only_if(page_size == 256, backend, device)
    case = prefill_case("", 2, page_size, qo_lens=(3, 0, 2), kv_lens=(300, 9, 2600), spare_tokens=70)
    case = replace(rows_apart(case), local_blocks=2)
    owned = {row for row, _, _ in case.tokens()}
    num_valid = torch.full((case.total_q,), 20, dtype=torch.int32)
    num_valid[::3] = 0
    assert_equals_two_steps(case, backend, device, num_valid)
    rank = 1
    carrier = run_fused(case, plan_on_device(case, backend, device), rank, backend, num_valid).cpu()
    scale, offset = case.index_scale, case.index_offset(rank)
    mine = [b for b in range(20) if b % scale == offset]
    forced = [b for b in mine if b >= 18]
    wanted = sorted([b for b in mine if b < 18][: 16 - len(forced)] + forced)
    for t in range(case.total_q):
        if t not in owned:
            ids = wanted if num_valid[t] else []
            row = [NEG_INF] * 16 + ids + [-1] * (16 - len(ids)) + [1]
            assert carrier[:, t].tolist() == [row] * HEADS, t


def test_a_window_without_tokens(backend, device):
    for spare in (0, 70):
        case = prefill_case("", 4, 256, qo_lens=(0, 0), kv_lens=(0, 300), spare_tokens=spare)
        num_valid = torch.zeros(case.total_q, dtype=torch.int32)
        carrier = run_fused(case, plan_on_device(case, backend, device), 1, backend, num_valid)
        padding = torch.tensor([NEG_INF] * 16 + [-1] * 16 + [1], dtype=torch.int32)
        assert torch.equal(carrier.cpu(), padding.expand(HEADS, case.total_q, 33))


@pytest.mark.parametrize("change", [hostile_segments, beyond_bounds])
@pytest.mark.parametrize("page_size", [128, 256])
def test_hostile_metadata(backend, device, change, page_size):
    interpreted_only_if(page_size == 128, backend, device)
    case = change(prefill_case("", 2, page_size, qo_lens=(3, 67, 2, 5), kv_lens=(700, 300, 40, 900)))
    counts = torch.arange(case.total_q, dtype=torch.int32) % 11
    assert_equals_two_steps(case, backend, device, counts)


@pytest.mark.large
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_the_pool_needs_no_zeroing(backend, device, fill):
    case = prefill_case("", 4, 128, qo_lens=(66, 1), kv_lens=(300, 2600))
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
    need = msa_icp.msa_icp_prefill_pool_bytes(total_q=case.total_q, batch=2, device=device)
    first = run_fused(case, plan, 2, backend, num_valid)
    memory = torch.full((need + 64,), fill, dtype=torch.uint8, device=device)
    assert torch.equal(first, run_fused(case, plan, 2, backend, num_valid, pool=memory[16 : need + 16]))
    assert (memory[:16] == fill).all()
    assert (memory[need + 16 :] == fill).all()
    other = prefill_case("", 4, 128, qo_lens=(3,), kv_lens=(90,), seed=4)
    other_plan = plan_on_device(other, backend, device)
    run_fused(other, other_plan, 0, backend, other.num_valid_pages(), pool=memory)
    assert torch.equal(first, run_fused(case, plan, 2, backend, num_valid, pool=memory))


def test_the_pool_is_as_large_as_the_plan_needs(backend, device):
    case = prefill_case("", 4, 128, qo_lens=(66, 1), kv_lens=(300, 2600))
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
    need = msa_icp.msa_icp_prefill_pool_bytes(total_q=case.total_q, batch=2, device=device)
    small = torch.zeros(need - 8, dtype=torch.uint8, device=device)
    with pytest.raises(
        ValueError, match=rf"^pool\.shape\[0\]: must be .* at least {need} bytes .*{need - 8}$"
    ):
        run_fused(case, plan, 2, backend, num_valid, pool=small)


@pytest.mark.large
def test_a_token_slice_of_a_larger_carrier(backend, device):
    """The windows of one step write their slices of one head-major buffer, and nothing else."""
    memory = poisoned((HEADS, 90, 40), torch.int32, device)
    start = 3
    for qo_lens, kv_lens in (((9, 0, 1), (300, 7, 640)), ((66,), (66,))):
        case = prefill_case("", 2, 256, qo_lens=qo_lens, kv_lens=kv_lens, sliced=True)
        plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
        num_valid = cases.off_by_one(num_valid, device)
        dense = run_fused(case, plan, 1, backend, num_valid)
        view = memory[:, start : start + case.total_q, 2:35]
        run_fused(case, plan, 1, backend, num_valid, carrier=view)
        assert torch.equal(view, dense)
        view.copy_(poisoned(view.shape, torch.int32, device))
        assert (bits(memory) == cases.POISON).all()
        start += case.total_q


@pytest.mark.parametrize("page_size", [128, 256])
def test_compact_exactly_for_pages_of_two_blocks(backend, device, page_size):
    case = prefill_case("", 2, page_size, qo_lens=(3,), kv_lens=(300,))
    plan = plan_on_device(case, backend, device)
    wrong = not case.fused_compact
    message = rf"^compact: must be {not wrong} for pages of {page_size} keys, was {wrong}$"
    with pytest.raises(ValueError, match=message):
        run_fused(case, plan, 0, backend, case.num_valid_pages(), compact=wrong)


@pytest.mark.large
def test_plans_and_flags_change_no_bit(backend, device):
    case = prefill_case("", 4, 256, qo_lens=(66, 0, 3), kv_lens=(200, 9, 2600), keys=cases.full_range)
    num_valid = case.num_valid_pages()
    first = run_fused(case, plan_on_device(case, backend, device), 3, backend, num_valid)
    on_host = plan_on_host(case, backend, device)
    for changes in ({}, {"enable_pdl": True}):
        assert torch.equal(first, run_fused(case, on_host, 3, backend, num_valid, **changes))


@pytest.mark.large
@layouts
def test_a_segment_selects_the_same_in_any_window(backend, device, world_size, page_size):
    case = prefill_case(
        "", world_size, page_size, qo_lens=(66, 3), kv_lens=(300, 2600), keys=cases.full_range
    )
    rank, num_valid = world_size - 1, case.num_valid_pages()
    together = run_fused(case, plan_on_device(case, backend, device), rank, backend, num_valid)
    for s in range(2):
        rows = slice(int(case.qo_offsets[s]), int(case.qo_offsets[s + 1]))
        alone = replace(
            case,
            index_q=case.index_q[rows],
            block_table=case.block_table[s : s + 1],
            qo_lens=case.qo_lens[s : s + 1],
            kv_lens=case.kv_lens[s : s + 1],
            qo_offset=case.qo_offset[s : s + 1],
            qo_offsets=torch.tensor([0, int(case.qo_lens[s])], dtype=torch.int32),
        )
        plan = plan_on_device(alone, backend, device)
        assert torch.equal(run_fused(alone, plan, rank, backend, num_valid[rows]), together[:, rows])


@pytest.mark.exchange
@layouts
def test_a_token_selects_as_in_decode(backend, device, world_size, page_size):
    """The decode scorer and selection give the same ids and scores for a query at the same position."""
    interpreted_only_if(page_size == 128, backend, device)
    case = prefill_case(
        "",
        world_size,
        page_size,
        qo_lens=(66, 5),
        kv_lens=(300, 2600),
        keys=cases.full_range,
        queries=cases.full_range,
        init_blocks=1,
        local_blocks=2,
    )
    rank = world_size - 1
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
    carrier = run_fused(case, plan, rank, backend, num_valid).cpu()
    tokens = case.tokens()[::7]
    decode = cases.DecodeCase(
        name="",
        world_size=world_size,
        page_size=page_size,
        decode_query_len=1,
        index_q=case.index_q.view(torch.uint8)[[t for t, _, _ in tokens]].view(cases.FP8),
        cache=case.cache,
        block_table=case.block_table[[s for _, s, _ in tokens]],
        seq_lens=torch.tensor([position + 1 for *_, position in tokens], dtype=torch.int32),
        init_blocks=1,
        local_blocks=2,
    )
    scores = [verify.decode.run_scores(decode, r, backend, device) for r in range(world_size)]
    received = verify.exchange(decode, scores, tagged=False, backend=backend, device=device)
    hpr = HEADS // world_size
    for h in range(HEADS):
        words = received[h // hpr][0][rank, h % hpr]
        mine = carrier[h, [t for t, _, _ in tokens], :32].to(torch.int64) & 0xFFFFFFFF
        assert torch.equal(words, mine), h


@st.composite
def windows(draw):
    world_size, page_size = draw(st.sampled_from(LAYOUTS))
    count = draw(st.integers(1, 3))
    few = st.sampled_from([0, 1, 2, 7, 63, 64, 65])
    near = st.sampled_from([0, 1, 127, 128, 129, 256, 257, 513, 2048, 2049]) | st.integers(0, 3000)
    begin = draw(st.integers(0, 16))
    case = prefill_case(
        "",
        world_size,
        page_size,
        qo_lens=draw(st.lists(few, min_size=count, max_size=count)),
        kv_lens=draw(st.lists(near, min_size=count, max_size=count)),
        qo_offset=draw(st.lists(near, min_size=count, max_size=count)),
        keys=draw(st.sampled_from([cases.exact, cases.full_range, cases.ones])),
        spare_tokens=draw(st.integers(0, 3)),
        spare_keys=draw(st.integers(0, 900)),
        init_blocks=begin,
        local_blocks=draw(st.integers(0, 16 - begin)),
        sliced=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )
    counts = draw(st.lists(st.integers(-2, 40), min_size=1, max_size=9))
    return case, draw(st.integers(0, world_size - 1)), counts


@pytest.mark.large
@given(drawn=windows())
def test_any_window(backend, device, drawn):
    case, rank, counts = drawn
    num_valid = torch.tensor(counts, dtype=torch.int32).repeat(case.total_q)[: case.total_q]
    for valid in (num_valid, case.num_valid_pages()):
        assert_equals_two_steps(case, backend, device, valid, ranks=(rank,))
