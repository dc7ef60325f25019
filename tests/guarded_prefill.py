"""The prefill ops with all their tensors between guard pages; see guarded.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import guards
import torch
from guards import guarded, run
from helpers import HEADS, random_scores
from torch import Tensor

import msa_icp
from msa_icp import cases, verify
from msa_icp.prefill_cases import PrefillCase, prefill_case


def calls(
    backend: str, where: str, world_size: int, page_size: int, rank: int
) -> Iterator[Callable[[], None]]:
    """The prefill ops of one rank over windows of one layout."""
    for window in windows(world_size, page_size):
        yield partial(plan_words, where, backend, window)
        for compact in window.layouts:
            yield partial(prefill_score, where, backend, window, rank, compact)
        yield partial(prefill_fused, where, backend, window, rank)
        for word in (-1, 2**63 - 1, 0x0003_0000_0002_0001):
            yield partial(stale_words, where, backend, window, rank, word)


def windows(world_size: int, page_size: int) -> Iterator[PrefillCase]:
    """Windows of one token, of items and a token more, of rows that are nobody's; tables just wide enough."""
    pitch = page_size // world_size * 128 + 16
    for name, qo_lens, kv_lens in (
        ("one token", (1,), (1,)),
        ("one page", (3,), (page_size,)),
        ("items", (65, 0, 2), (130, 7, 2 * page_size + 1)),
    ):
        lens = {"qo_lens": qo_lens, "kv_lens": kv_lens}
        case = prefill_case(name, world_size, page_size, **lens, spare_columns=0, pitch=pitch, local_blocks=2)
        yield case
        owned = sorted(set(case.block_table.flatten().tolist()) & set(range(case.cache.shape[0])))
        table = torch.full_like(case.block_table, 2**31 - 1)
        for new, old in enumerate(owned):
            table[case.block_table == old] = new
        tight = case.cache.view(torch.uint8)[owned].view(cases.FP8)
        yield replace(case, name=name + ", tight", cache=tight, block_table=table, pitch=None)
        offsets = torch.tensor([-3, *[10**6] * len(qo_lens)], dtype=torch.int32)
        yield replace(case, name=name + ", rows outside", qo_offsets=offsets)
        yield replace(case, name=name + ", any position", qo_offset=case.qo_offset * 0 + 2**31 - 7)


def window_reads(case: PrefillCase, rank: int) -> dict[str, Tensor]:
    return {"q": case.index_q, "k": case.shard(rank), "block_table": case.block_table}


def with_plan(function, plan: msa_icp.MSAIcpScorePlan):
    """The function with the plan's tensors as arguments, so that they can be guarded, and those tensors."""
    names = [name for name, t in vars(plan).items() if isinstance(t, Tensor) and name != "workspace"]

    def call(**arguments):
        own = {name: arguments.pop(name) for name in names}
        return function(plan=replace(plan, **own), **arguments)

    return call, {name: getattr(plan, name) for name in names}


def window_label(case: PrefillCase, rank: int) -> str:
    return f"W={case.world_size} P={case.page_size} rank {rank}, {case.name}"


def plan_words(where: str, backend: str, case: PrefillCase) -> None:
    plan = verify.prefill.plan_on_device(case, backend, guards.device)
    run(
        f"plan, {window_label(case, 0)}",
        where,
        msa_icp.msa_icp_index_score_sharded_plan_device,
        case.metadata(),
        {
            "packed_work_range": torch.full_like(plan.packed_work_range, 5),
            "packed_work_info": torch.full_like(plan.packed_work_info, 5),
        },
        num_qo_heads=HEADS,
        total_q=case.total_q,
        max_query_len=1,
        max_seq_len=case.max_seq_len,
        workspace=plan.workspace,
        backend=backend,
    )


def prefill_score(where: str, backend: str, case: PrefillCase, rank: int, compact: bool) -> None:
    plan = verify.prefill.plan_on_device(case, backend, guards.device)
    function, tensors = with_plan(msa_icp.msa_icp_index_score_sharded, plan)
    shape = (case.total_q, HEADS, case.score_columns(compact))
    for initialize in (False, True):
        run(
            f"prefill score, {window_label(case, rank)}{', compact' * compact}{', initialize' * initialize}",
            where,
            function,
            window_reads(case, rank) | tensors,
            {"max_score": cases.poisoned(shape, torch.float32)},
            rank=rank,
            tp=case.world_size,
            initialize=initialize,
            compact=compact,
            backend=backend,
        )


def fused_arguments(case: PrefillCase, rank: int, backend: str) -> dict:
    return {
        "rank": rank,
        "tp": case.world_size,
        "compact": case.fused_compact,
        "force_begin_blocks": 1,
        "force_end_blocks": case.local_blocks,
        "backend": backend,
    }


def pool_of(case: PrefillCase) -> Tensor:
    batch = case.qo_lens.shape[0]
    size = msa_icp.msa_icp_prefill_pool_bytes(total_q=case.total_q, batch=batch, device=guards.device)
    return torch.zeros(size, dtype=torch.uint8)


def prefill_fused(where: str, backend: str, case: PrefillCase, rank: int) -> None:
    plan = verify.prefill.plan_on_device(case, backend, guards.device)
    function, tensors = with_plan(msa_icp.msa_icp_prefill_score_select, plan)
    pool = guarded(pool_of(case), where, read_only=False)
    run(
        f"prefill fused, {window_label(case, rank)}",
        where,
        function,
        window_reads(case, rank) | tensors | {"num_valid_pages": case.num_valid_pages() + 1},
        {"carrier": cases.poisoned((HEADS, case.total_q, 33), torch.int32)},
        pool=pool,
        **fused_arguments(case, rank, backend),
    )


def stale_words(where: str, backend: str, case: PrefillCase, rank: int, word: int) -> None:
    """A plan whose words are those of another window, or of nothing: whatever comes out, nothing crashes."""
    print(f"prefill, words {word:#x}, {window_label(case, rank)}", flush=True)
    plan = verify.prefill.plan_on_device(case, backend, guards.device)
    tensors = {name: t for name, t in vars(plan).items() if isinstance(t, Tensor) and name != "workspace"}
    for name in ("packed_work_range", "packed_work_info"):
        tensors[name] = torch.full_like(tensors[name], word)
    plan = replace(plan, **{k: guarded(t, where, read_only=True) for k, t in tensors.items()})
    reads = {k: guarded(t, where, read_only=True) for k, t in window_reads(case, rank).items()}
    msa_icp.msa_icp_index_score_sharded(
        **reads,
        plan=plan,
        rank=rank,
        max_score=guarded(
            cases.poisoned((case.total_q, HEADS, case.score_columns(False)), torch.float32),
            where,
            read_only=False,
        ),
        tp=case.world_size,
        backend=backend,
    )
    msa_icp.msa_icp_prefill_score_select(
        **reads,
        plan=plan,
        num_valid_pages=guarded(case.num_valid_pages(), where, read_only=True),
        pool=guarded(pool_of(case), where, read_only=False),
        carrier=guarded(cases.poisoned((HEADS, case.total_q, 33), torch.int32), where, read_only=False),
        **fused_arguments(case, rank, backend),
    )


def prefill_select(where: str, backend: str, tokens: int, columns: int) -> None:
    run(
        f"prefill select, {tokens} x {columns}",
        where,
        msa_icp.msa_icp_topk_select_prefill,
        {
            "scores": random_scores(tokens, columns, 3),
            "num_valid_pages": torch.tensor([10**6, 5, 0][:tokens], dtype=torch.int32),
        },
        {"carrier": cases.poisoned((HEADS, tokens, 33), torch.int32)},
        force_begin_blocks=1,
        force_end_blocks=1,
        index_scale=2,
        index_offset=1,
        backend=backend,
    )
