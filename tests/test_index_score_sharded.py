"""The prefill scorer of every backend (contract, sections 2, 3 and 7)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import HEADS
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import FP8, LAYOUTS, bits, fp8, poisoned
from msa_icp.geometry import ShardLayout
from msa_icp.prefill_cases import PrefillCase, prefill_case, rows_apart

pytestmark = pytest.mark.prefill(["index_score_sharded"])
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
NEG_INF = float("-inf")


def score(
    case: PrefillCase,
    rank: int,
    backend: str,
    device: str,
    *,
    compact: bool = False,
    initialize: bool = False,
    out: torch.Tensor | None = None,
    plan: msa_icp.MSAIcpScorePlan | None = None,
    **changes: object,
) -> torch.Tensor:
    """`msa_icp_index_score_sharded` of a case into `out`, by default a poisoned buffer of the least width."""
    if out is None:
        out = poisoned((case.total_q, HEADS, case.score_columns(compact)), torch.float32, device)
    arguments = {
        "q": case.index_q.to(device),
        "k": case.shard(rank, device),
        "block_table": case.table(device),
        "plan": plan or verify.prefill.plan_on_device(case, backend, device),
        "rank": rank,
        "max_score": out,
        "initialize": initialize,
        "tp": case.world_size,
        "compact": compact,
        "backend": backend,
    }
    msa_icp.msa_icp_index_score_sharded(**{**arguments, **changes})
    return out


def assert_scores(case, backend, device, *, ranks=None, spare=0, **changes):
    """Every element of the ranks' scores is right, or has its old bits where nothing is written."""
    bitwise = case.exact or backend in verify.BITWISE
    for rank in range(case.world_size) if ranks is None else ranks:
        for compact in case.layouts:
            for initialize in (False, True):
                shape = {"compact": compact, "initialize": initialize}
                columns = case.score_columns(compact) + spare
                out = poisoned((case.total_q, HEADS, columns), torch.float32, device)
                score(case, rank, backend, device, out=out, **shape, **changes)
                wrong = verify.prefill.score_differences(case, rank, out, **shape, bitwise=bitwise)
                assert not wrong.any(), (rank, shape, int(wrong.sum()), wrong.nonzero()[:5].tolist())


@layouts
def test_exact_sums_are_equal_bit_for_bit(backend, device, world_size, page_size):
    case = prefill_case("", world_size, page_size, qo_lens=(66, 0, 1, 5), kv_lens=(130, 9, 129, 5))
    assert_scores(case, backend, device, ranks=(0, world_size - 1))


@layouts
def test_every_byte_is_within_the_bound(backend, device, world_size, page_size):
    case = prefill_case(
        "",
        world_size,
        page_size,
        qo_lens=(9, 3),
        kv_lens=(9, 600),
        keys=cases.full_range,
        queries=cases.full_range,
    )
    assert_scores(case, backend, device, ranks=(world_size - 1,))


@layouts
def test_nan_bytes_anywhere(backend, device, world_size, page_size):
    def values(shape, seed):
        raw = cases.full_range(shape, seed).view(torch.uint8).clone()
        raw[torch.rand(raw.shape, generator=cases.generator(seed)) < 0.004] = 0xFF
        return raw.view(FP8)

    case = prefill_case(
        "", world_size, page_size, qo_lens=(7, 2), kv_lens=(300, 40), keys=values, queries=values
    )
    case = replace(case, exact=False)
    assert_scores(case, backend, device, ranks=(0,))


def test_every_e4m3_byte_is_converted_exactly(backend, device):
    """Page `c` holds the byte `c` in one place of all its rows: its score is that byte's value."""
    raw = torch.zeros(256, 128, 128, dtype=torch.uint8)
    raw[:, :, 93] = torch.arange(256, dtype=torch.uint8)[:, None]
    q = torch.zeros(1, HEADS, 128)
    q[0, :, 93] = torch.tensor([1.0, -1.0, 448.0, 2.0**-9])
    case = prefill_case("", 4, 128, qo_lens=(1,), kv_lens=(256 * 128,), spare_columns=0)
    table = torch.arange(256, dtype=torch.int32)[None]
    case = replace(case, index_q=fp8(q), cache=raw.view(FP8), block_table=table)
    out = score(case, 0, backend, device)
    truth = reference.canonical_scores(fp8(q)[0], raw[:, 0].view(FP8))
    truth = torch.where(truth.isnan(), NEG_INF, truth)
    assert torch.equal(bits(out[0]), bits(truth))


def counting(world_size, page_size, *, qo_lens, kv_lens, qo_offset=None):
    """A window in which key `p` scores `p`, so the maximum tells which keys a token saw, to the row."""
    case = prefill_case("", world_size, page_size, qo_lens=qo_lens, kv_lens=kv_lens, qo_offset=qo_offset)
    raw = case.cache.to(torch.float32)
    for s, count in enumerate(kv_lens):
        positions = torch.arange(-(-count // page_size) * page_size)
        keys = torch.zeros(len(positions), 128)
        digits = positions // 256, positions // 16 % 16, positions % 16
        for place, digit in enumerate(digits):
            keys[:, place] = digit
        for c in range(len(positions) // page_size):
            raw[int(case.block_table[s, c])] = keys[c * page_size : (c + 1) * page_size]
    q = torch.zeros(case.index_q.shape)
    q[..., :3] = torch.tensor([256.0, 16.0, 1.0])
    return replace(case, cache=fp8(raw), index_q=fp8(q))


@layouts
def test_causal_limit_at_every_row(backend, device, world_size, page_size):
    """Every token sees the keys up to its own position and of its sequence, in every tile and column."""
    case = counting(
        world_size,
        page_size,
        qo_lens=(70, 9, 6, 40),
        kv_lens=(page_size + 40, 130, 300, 1050),
        qo_offset=(page_size - 30, 125, 250, 1010),
    )
    for rank in range(world_size):
        shape = {"rank": rank, "world_size": world_size, "page_size": page_size}
        for compact in case.layouts:
            out = score(case, rank, backend, device, compact=compact).cpu()
            for t, segment, position in case.tokens():
                last = min(position, int(case.kv_lens[segment]) - 1)
                for column in range(out.shape[2]):
                    page = column if compact else column * 128 // page_size
                    mine = [reference.key_position(page, i, **shape) for i in range(page_size // world_size)]
                    seen = [p for p in mine if p <= last and (compact or p // 128 == column)]
                    begin = column * (page_size if compact else 128)
                    if begin > last:
                        assert (bits(out[t, :, column]) == cases.POISON).all(), (t, column)
                    else:
                        assert (out[t, :, column] == (max(seen) if seen else NEG_INF)).all(), (t, column)


@layouts
@pytest.mark.parametrize("tokens", [16, 40])
def test_causal_limit_at_the_end_of_what_kernels_take_at_once(backend, device, world_size, page_size, tokens):
    """A first token one key before, at and behind the end of 256, 512 and 1024 keys.

    A kernel leaves its mask out where all tokens of a group see all keys of a tile: up to its last one.
    """
    ends = 256, 512, 1024
    offsets = [end + first for end in ends for first in (-2, -1, 0)]
    case = counting(
        world_size,
        page_size,
        qo_lens=[tokens] * len(offsets),
        kv_lens=[offset + tokens for offset in offsets],
        qo_offset=offsets,
    )
    plan = replace(verify.prefill.plan_on_device(case, backend, device), max_query_len=tokens)
    last = torch.tensor([position for *_, position in case.tokens()])[:, None]
    pages = torch.arange(case.score_columns(compact=case.fused_compact))
    rows = torch.arange(page_size // world_size)
    for rank in range(world_size):
        layout = ShardLayout(world_size, rank, page_size)
        held = layout.key_position(pages[:, None], rows).flatten()
        seen = torch.where(held <= last, held.float(), NEG_INF).view(len(last), len(pages), -1).amax(-1)
        wanted = torch.where(pages * page_size <= last, seen, poisoned((1,), torch.float32))
        out = score(case, rank, backend, device, plan=plan, compact=case.fused_compact).cpu()
        wrong = (bits(out) != bits(wanted)[:, None]).any(1)
        assert not wrong.any(), (rank, wrong.nonzero()[:5].tolist())


def test_negative_zero_becomes_zero(backend, device):
    for keys, queries in ((0x80, 0x38), (0x38, 0x80), (0x80, 0xB8), (0x00, 0xB8)):
        case = prefill_case(
            "",
            2,
            128,
            qo_lens=(2,),
            kv_lens=(128,),
            keys=lambda shape, _, byte=keys: cases.bytes_of(shape, byte),
            queries=lambda shape, _, byte=queries: cases.bytes_of(shape, byte),
        )
        assert (bits(score(case, 0, backend, device)) == 0).all()


# ---------------------------------------------------------------- what is written


def test_initialize_writes_every_column_of_every_row(backend, device):
    case = rows_apart(prefill_case("", 2, 256, qo_lens=(3, 0, 2), kv_lens=(300, 9, 600), spare_tokens=9))
    case = replace(case, max_seq_len=700)
    owned = {row for row, _, _ in case.tokens()}
    memory = poisoned((case.total_q, HEADS + 1, 20), torch.float32, device)
    for initialize in (False, True):
        out = memory[:, :HEADS, 5:16]
        score(case, 1, backend, device, out=out, initialize=initialize)
        got = bits(out)
        for t in range(case.total_q):
            assert (t in owned) == bool((bits(out[t]) != bits(torch.tensor(NEG_INF))).any()) or not initialize
            if t not in owned:
                filled = bits(torch.tensor(NEG_INF)) if initialize else cases.POISON
                assert (got[t] == filled).all()
        assert ((got == cases.POISON).any()) == (not initialize)
    memory[:, :HEADS, 5:16] = poisoned(out.shape, torch.float32, device)
    assert (bits(memory) == cases.POISON).all()


@layouts
def test_wider_score_rows(backend, device, world_size, page_size):
    case = prefill_case("", world_size, page_size, qo_lens=(5, 3), kv_lens=(700, 90), spare_keys=300)
    assert_scores(case, backend, device, ranks=(world_size - 1,), spare=5)


@pytest.mark.parametrize("compact", [False, True])
def test_score_rows_with_gaps_keep_what_lies_between(backend, device, compact):
    case = prefill_case("", 2, 256, qo_lens=(2, 70, 1), kv_lens=(500, 300, 70))
    dense = score(case, 1, backend, device, compact=compact)
    columns = dense.shape[2]
    memory = poisoned((case.total_q, 6, columns + 9), torch.float32, device)
    out = memory[:, 1:5, 3 : 3 + columns]
    score(case, 1, backend, device, out=out, compact=compact)
    assert torch.equal(bits(out), bits(dense))
    out.copy_(poisoned(out.shape, torch.float32, device))
    assert (bits(memory) == cases.POISON).all()


def test_nothing_is_written_but_the_scores(backend, device):
    case = prefill_case("", 2, 256, qo_lens=(3, 0, 66), kv_lens=(700, 4, 90), sliced=True)
    plan = verify.prefill.plan_on_device(case, backend, device)
    inputs = {
        "q": case.index_q.to(device),
        "k": case.shard(0, device),
        "block_table": case.table(device),
    }
    tensors = {**inputs, **{k: t for k, t in vars(plan).items() if isinstance(t, torch.Tensor)}}
    del tensors["workspace"]
    before = {name: t.cpu().contiguous().view(torch.uint8).clone() for name, t in tensors.items()}
    score(case, 0, backend, device, plan=plan, **inputs)
    for name, t in tensors.items():
        assert torch.equal(t.cpu().contiguous().view(torch.uint8), before[name]), name


# ---------------------------------------------------------------- the table and the plan


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), 3])
def test_03_garbage_behind_the_causal_prefix(backend, device, page_size, garbage):
    """Table entries past the pages of the causal prefix are never looked at, nor are keys of no token."""
    case = prefill_case(
        "", 4, page_size, qo_lens=(3, 66), kv_lens=(1030, 700), qo_offset=(300, 200), spare_columns=2
    )
    outs = []
    for fill in (0, garbage):
        table = case.block_table.clone()
        for s, last in enumerate((302, 265)):
            table[s, last // page_size + 1 :] = fill
        outs.append(bits(score(replace(case, block_table=table), 2, backend, device)))
    assert torch.equal(*outs)


def test_a_cache_without_pages(backend, device):
    case = prefill_case("", 2, 128, qo_lens=(3, 1), kv_lens=(300, 1))
    out = score(case, 0, backend, device, k=case.shard(0, device)[:0])
    seen = bits(out) != cases.POISON
    assert seen.any()
    assert (out.cpu()[seen] == NEG_INF).all()


@pytest.mark.large
@pytest.mark.parametrize("pitch", [(1 << 20) + 16, 1 << 20], ids=["odd", "power of two"])
@layouts
def test_07_big_pitch_and_high_page_ids(backend, device, world_size, page_size, pitch):
    """A shard inside records of 1 MiB; pages whose byte offset passes 2**31 and 2**32."""
    rows, pages = page_size // world_size, 4200
    record = cases.sparse_bytes(pages * pitch, device)
    shard = record.view(FP8).as_strided((pages, rows, 128), (pitch, 128, 1))
    ids = [4199, 0, 2047, 2048, 4095, 4096, 1, 4198]
    case = prefill_case("", world_size, page_size, qo_lens=(3,), kv_lens=(8 * page_size,), spare_columns=0)
    rank = world_size - 1
    dense = case.shard(rank).view(torch.uint8)
    for offset in (2**31, 2**32):  # what a wrapped offset would read
        for page in ids:
            wrapped = page * pitch % offset
            record[wrapped : wrapped + rows * 128] = cases.LARGEST_BYTE
    for column, page in enumerate(ids):
        shard[page].view(torch.uint8).copy_(dense[int(case.block_table[0, column])])
    table = torch.tensor([ids], dtype=torch.int32, device=device)
    out = score(case, rank, backend, device, k=shard, block_table=table)
    shape = {"compact": False, "initialize": False}
    assert not verify.prefill.score_differences(case, rank, out, **shape, bitwise=True).any()


@layouts
def test_host_and_device_plans_give_the_same_bits(backend, device, world_size, page_size):
    case = prefill_case("", world_size, page_size, qo_lens=(66, 0, 3), kv_lens=(200, 9, 600))
    on_host = verify.prefill.plan_on_host(case, backend, device)
    first = score(case, 1, backend, device)
    assert torch.equal(bits(first), bits(score(case, 1, backend, device, plan=on_host)))


@pytest.mark.parametrize("spare", [(1, 0), (0, 1), (130, 5000)])
def test_bounds_larger_than_the_metadata(backend, device, spare):
    tokens, keys = spare
    case = prefill_case("", 4, 256, qo_lens=(66, 0, 3), kv_lens=(200, 9, 600))
    tight = bits(score(case, 3, backend, device))
    columns = tight.shape[2]
    wide = prefill_case(
        "", 4, 256, qo_lens=(66, 0, 3), kv_lens=(200, 9, 600), spare_tokens=tokens, spare_keys=keys
    )
    queries = wide.index_q.view(torch.uint8).clone()
    queries[: case.total_q] = case.index_q.view(torch.uint8)
    wide = replace(wide, index_q=queries.view(FP8))
    out = bits(score(wide, 3, backend, device))
    assert torch.equal(out[: case.total_q, :, :columns], tight)
    assert (out[case.total_q :] == cases.POISON).all()
    assert (out[:, :, columns:] == cases.POISON).all()


def test_flags_that_change_no_bit(backend, device):
    case = prefill_case(
        "", 4, 128, qo_lens=(66, 3), kv_lens=(200, 300), keys=cases.full_range, queries=cases.full_range
    )
    first = bits(score(case, 3, backend, device))
    for change in ({"enable_pdl": True}, {"sm_scale": 0.0}, {"sm_scale": -3}):
        assert torch.equal(first, bits(score(case, 3, backend, device, **change))), change


@pytest.mark.parametrize("page_size", [128, 256])
def test_only_pages_of_two_blocks_are_compact(backend, device, page_size):
    case = prefill_case("", 2, page_size, qo_lens=(3,), kv_lens=(300,))
    if page_size == 256:
        score(case, 0, backend, device, compact=True)
        return
    with pytest.raises(ValueError, match=r"^compact: must be False for pages of 128 keys.*, was True$"):
        score(case, 0, backend, device, compact=True)


# ---------------------------------------------------------------- the same bits


@layouts
@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
def test_a_token_scores_as_in_decode(backend, device, world_size, page_size, values):
    """The decode scorer gives the same bits for a query at the same position over the same keys."""
    case = prefill_case(
        "", world_size, page_size, qo_lens=(9, 70), kv_lens=(600, 70), keys=values, queries=values
    )
    rank = world_size - 1
    compact = case.fused_compact
    out = score(case, rank, backend, device, compact=compact)
    for t, segment, position in case.tokens()[::13]:
        pages = position // page_size + 1
        alone = poisoned((1, HEADS, -(-pages // 4) * 4), torch.float32, device)
        msa_icp.msa_icp_decode_index_score_sharded(
            case.index_q[t : t + 1].to(device),
            case.shard(rank, device),
            case.block_table[segment : segment + 1, :pages].to(device),
            torch.tensor([position + 1], dtype=torch.int32, device=device),
            alone,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            decode_query_len=1,
            max_decode_query_len=1,
            backend=backend,
        )
        assert torch.equal(bits(out[t, :, :pages]), bits(alone[0, :, :pages])), t


@pytest.mark.large
def test_compact_and_block_columns_are_the_same_scores(backend, device):
    for world_size in (2, 4):
        case = prefill_case("", world_size, 256, qo_lens=(4, 66), kv_lens=(700, 90), keys=cases.full_range)
        for rank in range(world_size):
            compact = score(case, rank, backend, device, compact=True, initialize=True).cpu()
            blocks = score(case, rank, backend, device, compact=False, initialize=True).cpu()
            offset = case.index_offset(rank)
            held = blocks[..., offset::2]
            assert torch.equal(bits(compact[..., : held.shape[2]]), bits(held))
            assert (blocks[..., 1 - offset :: 2] == NEG_INF).all()


@pytest.mark.large
def test_a_segment_scores_the_same_in_any_window(backend, device):
    case = prefill_case(
        "",
        2,
        128,
        qo_lens=(66, 0, 5, 1),
        kv_lens=(300, 9, 700, 64),
        keys=cases.full_range,
        queries=cases.full_range,
    )
    together = bits(score(case, 1, backend, device))
    for s in (0, 2, 3):
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
        assert torch.equal(bits(score(alone, 1, backend, device)), together[rows]), s


@pytest.mark.large
def test_a_prompt_in_chunks_scores_the_same(backend, device):
    """Chunked prefill: the tokens of a chunk at its offset, over the keys so far."""
    case = prefill_case("", 4, 256, qo_lens=(150,), keys=cases.full_range, queries=cases.full_range)
    whole = bits(score(case, 2, backend, device))
    for begin, end in ((0, 1), (1, 70), (70, 150)):
        chunk = replace(
            case,
            index_q=case.index_q[begin:end],
            qo_lens=torch.tensor([end - begin], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            qo_offset=torch.tensor([begin], dtype=torch.int32),
            qo_offsets=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        assert torch.equal(bits(score(chunk, 2, backend, device)), whole[begin:end])


@pytest.mark.large
def test_run_after_run(backend, device):
    case = prefill_case("", 2, 256, qo_lens=(66, 3), kv_lens=(300, 900), keys=cases.full_range)
    first = bits(score(case, 1, backend, device))
    dirty = cases.nan_keys(prefill_case("", 2, 128, qo_lens=(70,), kv_lens=(1200,)))
    score(dirty, 0, backend, device)
    assert torch.equal(first, bits(score(case, 1, backend, device)))


# ---------------------------------------------------------------- anything


@st.composite
def windows(draw):
    world_size, page_size = draw(st.sampled_from(LAYOUTS))
    count = draw(st.integers(1, 4))
    few = st.sampled_from([0, 1, 2, 7, 63, 64, 65])
    near = st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]) | st.integers(
        0, 700
    )
    pitch = draw(st.none() | st.integers(0, 9))
    return (
        prefill_case(
            "",
            world_size,
            page_size,
            qo_lens=draw(st.lists(few, min_size=count, max_size=count)),
            kv_lens=draw(st.lists(near, min_size=count, max_size=count)),
            qo_offset=draw(st.lists(near, min_size=count, max_size=count)),
            keys=draw(st.sampled_from([cases.exact, cases.full_range])),
            spare_tokens=draw(st.integers(0, 3)),
            spare_keys=draw(st.integers(0, 300)),
            spare_columns=draw(st.integers(0, 2)),
            pitch=None if pitch is None else page_size // world_size * 128 + 16 * pitch,
            sliced=draw(st.booleans()),
            seed=draw(st.integers(0, 1000)),
        ),
        draw(st.integers(0, world_size - 1)),
        draw(st.booleans()) and page_size == 256,
        draw(st.booleans()),
        (draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 3))),
    )


@pytest.mark.large
@given(drawn=windows())
def test_any_window(backend, device, drawn):
    case, rank, compact, initialize, (spare, row_gap, token_gap) = drawn
    columns = case.score_columns(compact) + spare
    strides = HEADS * (columns + row_gap) + token_gap, columns + row_gap, 1
    out = cases.strided(poisoned((case.total_q, HEADS, columns), torch.float32), strides, device=device)
    score(case, rank, backend, device, out=out, compact=compact, initialize=initialize)
    shape = {"compact": compact, "initialize": initialize}
    bitwise = case.exact or backend in verify.BITWISE
    assert not verify.prefill.score_differences(case, rank, out, **shape, bitwise=bitwise).any()
