"""The facade on every rank, over shards of one cache: all must select what one rank with all keys would.

The sums are exact, so every backend has to select the same blocks. Decode runs with each backend, row form
and form of scoring; prefill through the all-to-all, with the best backend of each op.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import msa_icp
from msa_icp import cases, reference, verify
from msa_icp.cases import DecodeCase, poisoned
from msa_icp.geometry import NUM_HEADS, PAGE_SIZES, TOP_K
from msa_icp.prefill_cases import PrefillCase, prefill_case

from ..producer import FORMS
from . import together
from .team import ONE_CARD, Rank

LAYERS = 4
"""Of a decode case: every slot set, and the first one again."""
_LENS = (3077, 640, 129, 128, 1)
_QUERY_LEN = 2
_PROMPTS, _CONTEXTS = (70, 0, 1, 33, 3), (70, 300, 2177, 500, 3)


def rows(rank: Rank, *, plant: bool, until: float) -> Iterator[dict[str, Any]]:
    """Collective: a row of the document for every form. `plant`: the last rank scores other queries."""
    for page_size in PAGE_SIZES:
        yield from _decode_rows(rank, page_size, plant, until)
    if rank.place == ONE_CARD:
        return
    for page_size, fused in itertools.product(PAGE_SIZES, (False, True)):
        if not rank.go_on(until):
            return
        yield _prefill_row(rank, page_size, fused, plant)


def _decode_rows(rank: Rank, page_size: int, plant: bool, until: float) -> Iterator[dict[str, Any]]:
    case = cases.decode_case(
        "decode",
        rank.world_size,
        page_size,
        seq_lens=_LENS,
        decode_query_len=_QUERY_LEN,
        init_blocks=1,
        local_blocks=1,
    )
    truth = torch.tensor(verify.unsharded(case), dtype=torch.int32).view(case.tokens, NUM_HEADS, TOP_K)
    for backend in rank.setting.backends:
        spin_limit = together.limit(together.polls_per_second(rank, backend), together.LONG_S)
        plan = _plan(rank, page_size, backend, spin_limit)
        for form, fused in itertools.product(FORMS, (False, True)):
            if not rank.go_on(until):
                return
            wrong = _decode(rank, plan, case, truth, form, fused, plant)
            yield _row(rank, "decode", backend, page_size, form, fused, wrong)


def _plan(rank: Rank, page_size: int, backend: str, spin_limit: int) -> msa_icp.MSAIcpIndexerPlan:
    return msa_icp.prepare_msa_icp_indexer(
        world_size=rank.world_size,
        rank=rank.number,
        num_index_heads=NUM_HEADS,
        page_size=page_size,
        init_blocks=1,
        local_blocks=1,
        max_decode_tokens=_QUERY_LEN * len(_LENS),
        max_decode_query_len=_QUERY_LEN,
        max_num_batched_tokens=sum(_PROMPTS),
        max_num_seqs=len(_LENS),
        max_model_len=8192,
        num_sparse_layers=LAYERS,
        device=rank.device,
        backend=backend,
        spin_limit=spin_limit,
    )


def _queries(rank: Rank, case: DecodeCase | PrefillCase, plant: bool) -> Tensor:
    raw = case.index_q.view(torch.uint8)
    if plant and rank.number == rank.world_size - 1:
        raw = raw ^ 0x80
    return raw.view(case.index_q.dtype).to(rank.device)


def _decode(
    rank: Rank,
    plan: msa_icp.MSAIcpIndexerPlan,
    case: DecodeCase,
    truth: Tensor,
    form: str,
    fused: bool,
    plant: bool,
) -> int:
    """Wrong (layer, token, head) rows of this rank."""
    table, lens, num_valid = case.metadata(rank.device)
    keys, queries = case.shard(rank.number, rank.device), _queries(rank, case, plant)
    scores = pool = None
    if fused:
        size = msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=plan.max_decode_tokens)
        pool = torch.empty(size, dtype=torch.uint8, device=rank.device)
    else:
        scores = torch.empty(plan.decode_scores_shape(), device=rank.device)
    heads, wrong = plan.heads_per_rank, 0
    mine = truth[:, rank.number * heads :][:, :heads]
    with msa_icp.ReceiveStorage.create(capacity=plan.max_decode_tokens, device=rank.device) as storage:
        for _ in range(LAYERS):
            output = poisoned(mine.shape, torch.int32, rank.device)
            with storage.slot_set() as slot:
                plan.decode(
                    *(queries, keys, table, lens, num_valid, scores, output),
                    comm=storage,
                    slot=slot,
                    tagged=form == "tagged",
                    decode_query_len=case.decode_query_len,
                    pool=pool,
                )
            storage.check()
            wrong += int((output.cpu() != mine).any(-1).sum())
    return wrong


def _prefill_row(rank: Rank, page_size: int, fused: bool, plant: bool) -> dict[str, Any]:
    case = prefill_case(
        "prefill",
        rank.world_size,
        page_size,
        qo_lens=_PROMPTS,
        kv_lens=_CONTEXTS,
        init_blocks=1,
        local_blocks=1,
    )
    plan = _plan(rank, page_size, "cake", 1)
    window = plan.prefill_window_plan(
        0,
        **case.metadata(rank.device),
        total_q=case.total_q,
        max_query_len=case.total_q,
        max_seq_len=case.max_seq_len,
    )
    tokens, heads, num_valid = case.total_q, plan.heads_per_rank, case.num_valid_pages().to(rank.device)
    carrier = poisoned((NUM_HEADS, tokens, 33), torch.int32, rank.device)
    received = poisoned((rank.world_size, heads, tokens, 33), torch.int32, rank.device)
    output = poisoned((tokens, heads, TOP_K), torch.int32, rank.device)
    scratch = pool = None
    if fused:
        pool = torch.empty(plan.prefill_pool_shape(), dtype=torch.uint8, device=rank.device)
    else:
        scratch = torch.empty(plan.prefill_scratch_shape(case.max_seq_len), device=rank.device)
    keys, queries = case.shard(rank.number, rank.device), _queries(rank, case, plant)
    table = case.table(rank.device)
    plan.prefill_local(queries, keys, table, window, scratch, num_valid, carrier, pool=pool)
    msa_icp.exchange_prefill(carrier, received, rank.prefill_group())
    plan.prefill_merge(received, num_valid, output)
    mine = _prefill_truth(case, range(rank.number * heads, (rank.number + 1) * heads))
    wrong = int((output.cpu() != mine).any(-1).sum())
    return _row(rank, "prefill", "best", page_size, "legacy", fused, wrong)


def _prefill_truth(case: PrefillCase, heads: range) -> Tensor:
    """int32 `[T, heads, 16]` on the CPU."""
    ids = torch.full((case.total_q, len(heads), TOP_K), -1, dtype=torch.int32)
    for row, segment, position in case.tokens():
        keys = case.keys_of(segment, int(case.kv_lens[segment]))
        forced = case.init_blocks, case.local_blocks
        chosen = reference.select_unsharded(case.index_q[row : row + 1], keys, [position], *forced)[0]
        for place, head in enumerate(heads):
            ids[row, place, : len(chosen[head])] = torch.tensor(chosen[head], dtype=torch.int32)
    return ids


def _row(
    rank: Rank, part: str, backend: str, page_size: int, form: str, fused: bool, wrong: int
) -> dict[str, Any]:
    found = rank.gather(wrong)
    return {
        "what": "selection",
        "part": part,
        "backend": backend,
        "page_size": page_size,
        "form": form,
        "run": "fused" if fused else "plain",
        "wrong_rows": found,
        "ok": not any(found),
    }
