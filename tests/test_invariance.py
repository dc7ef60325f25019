"""The same bits whatever the world size, the page size, the batch and the run (contract, section 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import HEADS, score

from msa_icp import cases, reference, verify
from msa_icp.cases import LAYOUTS, bits

LENGTHS = (20 * 128 + 77, 300, 128, 0, 1)


def sequences(page_size: int, world_size: int, values) -> cases.DecodeCase:
    """The same sequences and queries for every layout: only the paging differs."""
    order = torch.randperm(64, generator=cases.generator(page_size)).tolist()
    keys = [values((max(1, n), 128), seed) for seed, n in enumerate(LENGTHS)]
    columns = -(-LENGTHS[0] // page_size)
    cache = cases.bytes_of((64, page_size, 128), cases.NAN_BYTE).view(torch.uint8)
    table = torch.full((len(LENGTHS), columns), -1, dtype=torch.int32)
    for b, (length, mine) in enumerate(zip(LENGTHS, keys, strict=True)):
        for c in range(-(-length // page_size)):
            page = order.pop()
            table[b, c] = page
            part = mine.view(torch.uint8)[c * page_size : min(length, (c + 1) * page_size)]
            cache[page, : part.shape[0]] = part
    return cases.DecodeCase(
        name="",
        world_size=world_size,
        page_size=page_size,
        decode_query_len=2,
        index_q=values((2 * len(LENGTHS), HEADS, 128), 99),
        cache=cache.view(cases.FP8),
        block_table=table,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        init_blocks=1,
        local_blocks=2,
        exact=values is not cases.full_range,
    )


def block_maxima(case, backend, device):
    """float32 `[T, 4, 21]`: the score of every block over all ranks, -inf where nobody scored it."""
    blocks = -(-LENGTHS[0] // 128)
    best = torch.full((case.tokens, HEADS, blocks + 8), float("-inf"))
    for rank in range(case.world_size):
        out = score(case, rank, backend, device).cpu()
        out = torch.where(bits(out) == cases.POISON, float("-inf"), out)
        for c in range(out.shape[2]):
            block = c * case.index_scale + case.index_offset(rank)
            if block < best.shape[2]:
                best[..., block] = torch.maximum(best[..., block], out[..., c])
    return best[..., :blocks]


@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
def test_scores_of_all_layouts_are_the_same_bits(backend, device, values):
    first = block_maxima(sequences(128, 2, values), backend, device)
    assert torch.isfinite(first).any()
    for world_size, page_size in LAYOUTS[1:]:
        other = block_maxima(sequences(page_size, world_size, values), backend, device)
        assert torch.equal(bits(first), bits(other)), (world_size, page_size)
    if values is cases.exact or backend in verify.BITWISE:
        case = sequences(128, 2, values)
        for b, length in enumerate(LENGTHS):
            if length == 0:
                continue
            truth = reference.block_scores(
                case.index_q[2 * b : 2 * b + 2], case.sequence_keys(b), [length - 2, length - 1]
            )
            assert torch.equal(bits(first[2 * b : 2 * b + 2, :, : truth.shape[2]]), bits(truth))


@pytest.mark.exchange
@pytest.mark.parametrize("values", [cases.exact, cases.full_range], ids=["exact", "full"])
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_merged_results_of_all_layouts_are_equal(backend, device, values, tagged):
    results = []
    for world_size, page_size in LAYOUTS:
        case = sequences(page_size, world_size, values)
        merged = verify.exchange(case, None, tagged=tagged, backend=backend, device=device)
        results.append(torch.cat([ids for _, ids in merged], dim=1).tolist())
        if values is cases.exact or backend in verify.BITWISE:
            assert results[-1] == verify.unsharded(case), (world_size, page_size)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
def test_a_request_scores_the_same_in_any_batch(backend, device, world_size, page_size):
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(2600, 130, 0, 700),
        decode_query_len=2,
        keys=cases.full_range,
        queries=cases.full_range,
    )
    rank = world_size - 1
    together = bits(score(case, rank, backend, device))
    for b in range(4):
        alone = replace(
            case,
            seq_lens=case.seq_lens[b : b + 1],
            block_table=case.block_table[b : b + 1],
            index_q=case.index_q[2 * b : 2 * b + 2],
        )
        out = cases.poisoned((2, HEADS, case.score_columns), torch.float32, device)
        score(alone, rank, backend, device, out=out)
        assert torch.equal(bits(out), together[2 * b : 2 * b + 2]), b
    order = [3, 1, 0, 3, 2]
    tokens = [2 * b + j for b in order for j in range(2)]
    mixed = replace(
        case,
        seq_lens=case.seq_lens[order],
        block_table=case.block_table[order],
        index_q=case.index_q.view(torch.uint8)[tokens].view(cases.FP8),
    )
    assert torch.equal(bits(score(mixed, rank, backend, device)), together[tokens])


def test_query_tokens_score_the_same_alone(backend, device):
    """Token `j` of a query of eight is a query of one at a sequence cut behind it."""
    case = cases.decode_case(
        "", 4, 128, seq_lens=(900,), decode_query_len=8, keys=cases.full_range, queries=cases.full_range
    )
    together = bits(score(case, 2, backend, device))
    for j in (0, 3, 7):
        alone = replace(
            case,
            decode_query_len=1,
            seq_lens=torch.tensor([900 - 7 + j], dtype=torch.int32),
            index_q=case.index_q[j : j + 1],
        )
        out = cases.poisoned((1, HEADS, case.score_columns), torch.float32, device)
        score(alone, 2, backend, device, out=out)
        assert torch.equal(bits(out)[0], together[j])


def test_run_after_run(backend, device):
    case = cases.decode_case(
        "", 2, 256, seq_lens=(2600, 77), decode_query_len=4, keys=cases.full_range, queries=cases.full_range
    )
    first = bits(score(case, 1, backend, device))
    for _ in range(3):
        assert torch.equal(first, bits(score(case, 1, backend, device)))


@pytest.mark.large
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit(backend, device, threads):
    if device != "cpu":
        pytest.skip("threads of a CPU")
    case = cases.decode_case(
        "",
        4,
        128,
        seq_lens=(40_000, 9000),
        decode_query_len=3,
        keys=cases.full_range,
        queries=cases.full_range,
    )
    torch.set_num_threads(1)
    first = bits(score(case, 1, backend, device))
    torch.set_num_threads(threads)
    assert torch.equal(first, bits(score(case, 1, backend, device)))


def test_a_poisoned_scratch_changes_no_bit(backend, device):
    """Whatever a backend keeps between calls, the last call's contents mean nothing to the next."""
    clean = cases.decode_case("", 2, 128, seq_lens=(700, 300), decode_query_len=2)
    first = bits(score(clean, 0, backend, device))
    dirty = cases.nan_keys(cases.decode_case("", 2, 128, seq_lens=(3000, 2000), decode_query_len=8))
    score(dirty, 0, backend, device)
    assert torch.equal(first, bits(score(clean, 0, backend, device)))
