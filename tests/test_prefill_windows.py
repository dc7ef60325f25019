"""Whole windows: scores, selection, fused form, carriers and merge of all ranks (contract, section 7).

The inputs that broke kernels like these in the field, by their number, as far as they are windows; the
decode batches among them are in test_field_cases.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import HEADS, interpreted_only_if

import msa_icp
from msa_icp import cases, prefill_cases, reference, verify
from msa_icp.cases import FP8, LAYOUTS, bits, fp8, ones, poisoned
from msa_icp.prefill_cases import RECORDED_SHAPES, prefill_case, recorded_window
from msa_icp.verify.comparison import PREFILL_STEPS, padded
from msa_icp.verify.prefill import plan_on_device, run_fused, run_merge, run_scores, run_select

pytestmark = pytest.mark.prefill(PREFILL_STEPS)
layouts = pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)


def assert_case(case, backend, device):
    result = verify.Result(case.name, backend)
    verify.prefill.check_case(result, case, backend, device)
    assert not result.differences, result.differences


def names_of(makers):
    return [case.name for case in makers(2, 128)]


@layouts
@pytest.mark.parametrize("name", names_of(prefill_cases.nasty_cases))
def test_nasty(backend, device, world_size, page_size, name):
    cases_ = prefill_cases.nasty_cases(world_size, page_size)
    case = next(case for case in cases_ if case.name == name)
    interpreted_only_if(case.total_q <= 4 and (world_size, page_size) == (2, 256), backend, device)
    assert_case(case, backend, device)


@layouts
@pytest.mark.large
@pytest.mark.parametrize("name", names_of(prefill_cases.random_cases))
def test_random(backend, device, world_size, page_size, name):
    cases_ = prefill_cases.random_cases(world_size, page_size)
    assert_case(next(case for case in cases_ if case.name == name), backend, device)


def no_fused(backend):
    return verify.no_prefill(backend, ["prefill_score_select"])


def carriers_of(case, backend, device, *, fused=None, extra_valid=0):
    """The carriers of all ranks, for tokens with `extra_valid` blocks more than their causal prefix has.

    `fused` None: by the fused form where the backend has it.
    """
    if fused and no_fused(backend):
        pytest.skip(no_fused(backend))
    fused = not no_fused(backend) if fused is None else fused
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages() + extra_valid
    if fused:
        return [run_fused(case, plan, rank, backend, num_valid) for rank in range(case.world_size)]
    compact, found = case.fused_compact, []
    for rank in range(case.world_size):
        scores = run_scores(case, plan, rank, backend, compact=compact, initialize=True)
        found.append(run_select(case, rank, scores, backend, num_valid, compact=compact))
    return found


# ---------------------------------------------------------------- 11, 17


@pytest.mark.exchange
@layouts
def test_11_each_head_selects_for_itself(backend, device, world_size, page_size):
    case = prefill_case("", world_size, page_size, qo_lens=(2,), kv_lens=(64 * 128,), local_blocks=0)
    case = prefill_cases.heads_disagree(case)
    merged = run_merge(case, carriers_of(case, backend, device), backend)
    assert merged[1].tolist() == [[b for b in range(64) if b % 4 == h] for h in range(HEADS)]


def test_17_head_major_scores_and_token_major_carriers_are_refused(backend, device):
    case = prefill_case("", 2, 128, qo_lens=(5, 2), kv_lens=(300, 40))
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
    head_major = poisoned((HEADS, 7, 3), torch.float32, device).transpose(0, 1)
    with pytest.raises(ValueError, match=r"^max_score\.stride\(0\): must be at least"):
        msa_icp.msa_icp_index_score_sharded(
            case.index_q.to(device),
            case.shard(0, device),
            case.table(device),
            plan,
            rank=0,
            max_score=head_major,
            backend=backend,
        )
    assert (bits(head_major) == cases.POISON).all()
    if no_fused(backend):
        return
    token_major = poisoned((7, HEADS, 33), torch.int32, device).transpose(0, 1)
    with pytest.raises(ValueError, match=r"^carrier\.stride\(0\): must be at least"):
        run_fused(case, plan, 0, backend, num_valid, carrier=token_major)
    assert (bits(token_major) == cases.POISON).all()


# ---------------------------------------------------------------- 18


def long_context(world_size, page_size, blocks, winners, **rest):
    """One segment of three tokens whose keys are few pages over and over: the winners score 2, others 1."""
    per_page = page_size // 128
    cache = fp8(torch.tensor([1.0, 2.0])).view(torch.uint8)[:, None, None].expand(2, page_size, 128).clone()
    if per_page == 2:  # pages whose first, second or both blocks win
        cache = torch.cat((cache, cache[1:], cache[1:]))
        cache[2, 128:] = cache[0, 0]
        cache[3, :128] = cache[0, 0]
    table = torch.zeros(1, blocks // per_page, dtype=torch.int32)
    for page in {b // per_page for b in winners}:
        mine = [b for b in winners if b // per_page == page]
        table[0, page] = 1 if len(mine) == per_page else 2 + mine[0] % 2
    case = prefill_case("18", world_size, page_size, qo_lens=(3,), kv_lens=(3,), queries=ones, **rest)
    kv = torch.tensor([blocks * 128], dtype=torch.int32)
    return replace(
        case,
        cache=cache.view(FP8),
        block_table=table,
        kv_lens=kv,
        qo_offset=kv - 3,
        max_seq_len=blocks * 128,
    )


@pytest.mark.exchange
@pytest.mark.large
@layouts
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "two steps"])
def test_18_one_million_tokens(backend, device, world_size, page_size, fused):
    """8192 blocks through the whole path; the winners lie at both ends and around 4096."""
    winners = [0, 1, 127, 255, 256, 2047, 4094, 4095, 4096, 4097, 6143, 8064, 8188, 8189, 8190, 8191]
    case = long_context(world_size, page_size, 8192, winners, local_blocks=0)
    merged = run_merge(case, carriers_of(case, backend, device, fused=fused), backend)
    assert merged.tolist() == [[winners] * HEADS] * 3


@pytest.mark.exchange
@pytest.mark.large
@pytest.mark.parametrize("page_size", [128, 256])
def test_18_beyond_one_million_tokens(backend, device, page_size):
    """Blocks at and past 8192 are no candidates, though they score best and their tokens are there."""
    case = long_context(2, page_size, 8300, list(range(8192, 8300)), local_blocks=4)
    for fused in (None, False):
        merged = run_merge(case, carriers_of(case, backend, device, fused=fused), backend)
        assert merged.tolist() == [[list(range(16))] * HEADS] * 3


# ---------------------------------------------------------------- 19


@pytest.mark.exchange
@pytest.mark.large
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 256)])
@pytest.mark.parametrize("shape", RECORDED_SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def test_19_recorded_shapes(backend, device, world_size, page_size, shape):
    """Short queries over long cached prefixes, merged: what one rank with all keys, and decode, select.

    Of each some tokens are compared: as they are on a GPU, on a CPU a few over a quarter of the prefix,
    in which nothing changes but the time.
    """
    tokens, prefix = shape if device != "cpu" else (min(shape[0], 7), shape[1] // 4)
    case = recorded_window(world_size, page_size, [(tokens, prefix)], local_blocks=2, init_blocks=1)
    merged = run_merge(case, carriers_of(case, backend, device), backend)
    some = sorted({0, tokens // 2, tokens - 1})
    keys = case.keys_of(0, tokens + prefix)
    for t in some:
        wanted = reference.select_unsharded(case.index_q[t : t + 1], keys, [prefix + t], 1, 2)[0]
        assert merged[t].tolist() == [padded(row) for row in wanted], t
    decode = cases.DecodeCase(
        name="",
        world_size=world_size,
        page_size=page_size,
        decode_query_len=1,
        index_q=case.index_q.view(torch.uint8)[some].view(FP8),
        cache=case.cache,
        block_table=case.block_table[[0] * len(some)],
        seq_lens=torch.tensor([prefix + t + 1 for t in some], dtype=torch.int32),
        init_blocks=1,
        local_blocks=2,
    )
    exchanged = verify.exchange(decode, None, tagged=True, backend=backend, device=device)
    assert torch.equal(merged[some], torch.cat([ids for _, ids in exchanged], dim=1))


@pytest.mark.exchange
@pytest.mark.large
def test_19_recorded_shapes_in_one_window(backend, device):
    """Two layouts select the same; between any two segments is an empty one."""
    shapes = [(min(q, 90), p // 16) for q, p in RECORDED_SHAPES]
    first = recorded_window(2, 128, shapes, local_blocks=2, queries=cases.full_range)
    other = repaged(recorded_window(4, 256, shapes, local_blocks=2), first)
    results = [run_merge(case, carriers_of(case, backend, device), backend) for case in (first, other)]
    assert torch.equal(*results)
    counts = (results[0] >= 0).sum(-1)
    num_valid = first.num_valid_pages()
    assert torch.equal(counts, num_valid.clamp(max=16).long()[:, None].expand(-1, HEADS))
    last = results[0].amax(-1)
    assert torch.equal(last, (num_valid - 1)[:, None].expand(-1, HEADS))  # a local block


def repaged(case, other):
    """`case` with the keys and queries of `other`, whose pages have another size."""
    raw = torch.full_like(case.cache.view(torch.uint8), cases.NAN_BYTE)
    for s, count in enumerate(case.kv_lens.tolist()):
        keys = other.keys_of(s, count).view(torch.uint8)
        for c in range(-(-count // case.page_size)):
            part = keys[c * case.page_size : (c + 1) * case.page_size]
            raw[int(case.block_table[s, c]), : part.shape[0]] = part
    return replace(case, cache=raw.view(FP8), index_q=other.index_q)


@pytest.mark.large
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 256)])
def test_19_a_prompt_of_more_than_a_thousand_tokens(backend, device, world_size, page_size):
    """Whole and in chunks: the same scores, wherever a backend cuts the window."""
    case = prefill_case("", world_size, page_size, qo_lens=(3, 1100), queries=cases.full_range)
    plan = plan_on_device(case, backend, device)
    whole = run_scores(case, plan, 1, backend, compact=False, initialize=False)
    for begin, end in ((0, 64), (1000, 1100)):
        chunk = replace(
            case,
            index_q=case.index_q[3 + begin : 3 + end],
            block_table=case.block_table[1:],
            qo_lens=torch.tensor([end - begin], dtype=torch.int32),
            kv_lens=torch.tensor([end], dtype=torch.int32),
            qo_offset=torch.tensor([begin], dtype=torch.int32),
            qo_offsets=torch.tensor([0, end - begin], dtype=torch.int32),
        )
        own = plan_on_device(chunk, backend, device)
        scores = run_scores(chunk, own, 1, backend, compact=False, initialize=False)
        assert torch.equal(bits(whole[3 + begin : 3 + end]), bits(scores))


@pytest.mark.large
@pytest.mark.parametrize("page_size", [128, 256])
def test_19_many_tokens_below_many_columns(backend, device, page_size):
    """A fused window whose score rows would not be kept at once equals score and select."""
    case = prefill_case("", 2, page_size, qo_lens=(260, 3), spare_keys=(1 << 20) - 260, init_blocks=1)
    one, two = (carriers_of(case, backend, device, fused=fused, extra_valid=9) for fused in (True, False))
    for left, right in zip(one, two, strict=True):
        assert torch.equal(left, right)


# ---------------------------------------------------------------- memory

BOUNDED = """
import resource, sys
import torch
from msa_icp import cases, prefill_cases, verify
from msa_icp.verify.prefill import plan_on_device, run_fused

torch.set_num_threads(1)
case = prefill_cases.prefill_case("", 4, 128, qo_lens=(1000,), kv_lens=(1000,))
keys = 1 << 20
case = prefill_cases.replace(
    case,
    kv_lens=torch.tensor([keys], dtype=torch.int32),
    block_table=torch.zeros((1, keys // 128), dtype=torch.int32),
    max_seq_len=keys,
)
plan, valid = plan_on_device(case, "torch", "cpu"), case.num_valid_pages()
few = prefill_cases.prefill_case("", 4, 128, qo_lens=(3,), kv_lens=(3,))
run_fused(few, plan_on_device(few, "torch", "cpu"), 0, "torch", few.num_valid_pages())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_fused(case, plan, 0, "torch", valid)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_the_fused_form_keeps_no_score_rows():
    """1000 tokens with 8192 columns: score rows of 131 MB, of which no more than 33 MB are there at once."""
    ended = subprocess.run(
        [sys.executable, "-c", BOUNDED], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ended.stdout) < 90 * 1024, ended.stdout
