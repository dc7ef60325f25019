"""The calls of a layer: what the plan's methods launch, and the prepared steps keep.

Outside `torch.compile` they are recorded first (`launches.py`), so all of them are checked before the first
one is launched. In a function that is traced each is an op of its graph, which is checked when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import api, checks
from ..geometry import BLOCK, HEAD_DIM, LEGACY_WORDS, SLOT_SETS, TOP_K
from ..launches import Launch, recording
from ..prefill_plan import MSAIcpScorePlan
from .comm import Comm

if TYPE_CHECKING:
    from .plan import MSAIcpIndexerPlan


DECODE_NAMES = {
    "score_out": "scores",
    "recv_slot.shape[2]": "max_decode_tokens",
}
"""What a caller of `decode` calls an argument of the functions."""
PREFILL_NAMES = {
    "q": "query",
    "k": "index_k",
    "plan": "window_plan",
    "max_score": "score_scratch",
    "scores": "score_scratch",
    "carrier": "carrier_view",
    "recv_slot": "received",
}
"""Of the methods for prefill."""


def renamed(error: ValueError, names: dict[str, str]) -> ValueError:
    """A ValueError of an argument, which begins with the name that its caller knows it by."""
    text = str(error)
    name = re.match(r"\w+", text)
    if name is not None and name[0] in names:
        text = names[name[0]] + text[name.end() :]
    for part, theirs in names.items():
        text = text.replace(part, theirs) if "." in part else text
    return ValueError(text)


def recorded(
    calls: Callable[..., None], names: dict[str, str], *arguments: Any, **numbers: Any
) -> list[Launch]:
    """What the calls would launch; `names`: what their caller calls the arguments of the functions."""
    with recording() as launches:
        try:
            calls(*arguments, **numbers)
        except ValueError as error:
            raise renamed(error, names) from error.__cause__
    return launches


def decode(
    plan: MSAIcpIndexerPlan,
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_valid_pages: Tensor,
    scores: Tensor | None,
    output: Tensor,
    *,
    comm: Comm,
    slot: int,
    tagged: bool,
    decode_query_len: int,
    enable_pdl: bool = True,
    pool: Tensor | None = None,
    without_publish: bool = False,
    without_merge: bool = False,
) -> None:
    """The calls of `MSAIcpIndexerPlan.decode`, or of a half of it."""
    slot = _checked_slot(plan, slot, tagged, decode_query_len)
    if without_merge:  # which would find what is wrong with it when the rows are out
        check_output(plan, output)
    if not without_publish:
        _publish(
            plan,
            (index_q, index_k, block_table, seq_lens),
            num_valid_pages,
            scores,
            _pool_for(plan, pool, block_table),
            comm,
            slot=slot,
            tagged=tagged,
            decode_query_len=decode_query_len,
            enable_pdl=enable_pdl,
        )
    if not without_merge:
        api.merge_received(
            comm,
            num_valid_pages,
            output,
            slot=slot,
            tagged=tagged,
            init_blocks=plan.init_blocks,
            local_blocks=plan.local_blocks,
            spin_limit=plan.spin_limit,
            enable_pdl=enable_pdl,
            backend=plan.backend,
        )


def check_output(plan: MSAIcpIndexerPlan, output: Any) -> None:
    """What the merge of decode writes, before anything is published for it."""
    shape = ("T", plan.heads_per_rank, TOP_K)
    checks.separate_rows("output", checks.tensor("output", output, torch.int32, shape, device=plan.device))


def _checked_slot(plan: MSAIcpIndexerPlan, slot: int, tagged: bool, decode_query_len: int) -> int:
    """The slot set of a call whose numbers hold the rules that are the plan's own."""
    checks.flag("tagged", tagged)
    if tagged and plan.num_sparse_layers < 2:
        must_be = "False with fewer than 2 sparse layers: uses of a slot set would be too close"
        checks.refuse("tagged", must_be, f"True with num_sparse_layers={plan.num_sparse_layers}")
    checks.integer("decode_query_len", decode_query_len, 1, plan.max_decode_query_len)
    return checks.integer("slot", slot, 0, SLOT_SETS - 1)


def _pool_for(plan: MSAIcpIndexerPlan, pool: Tensor | None, block_table: Tensor) -> Tensor | None:
    """The caller's pool, or the plan's own from its number of requests on."""
    if pool is not None or plan.fused_decode_min_batch is None:
        return pool
    requests = checks.tensor("block_table", block_table, torch.int32, ("B", "columns")).shape[0]
    return plan.pool if requests >= plan.fused_decode_min_batch else None


def _publish(
    plan: MSAIcpIndexerPlan,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    num_valid_pages: Tensor,
    scores: Tensor | None,
    pool: Tensor | None,
    comm: Comm,
    *,
    slot: int,
    tagged: bool,
    decode_query_len: int,
    enable_pdl: bool,
) -> None:
    shard: dict[str, Any] = {"rank": plan.rank, "world_size": plan.world_size, "page_size": plan.page_size}
    target: dict[str, Any] = {
        "slot": slot,
        "capacity": plan.max_decode_tokens,
        "force_begin_blocks": plan.init_blocks,
        "force_end_blocks": plan.local_blocks,
        "spin_limit": plan.spin_limit,
        "generations": comm.publish_generations if tagged else None,
        "enable_pdl": enable_pdl,
        "backend": plan.backend,
    }
    bases = comm.tagged_recv_bases if tagged else comm.recv_bases
    index_q, index_k, block_table, seq_lens = inputs
    if pool is not None:
        api.msa_icp_decode_score_publish(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            pool,
            bases,
            comm.errors,
            decode_query_len=decode_query_len,
            **shard,
            **target,
        )
        return
    own = _first_rows("scores", scores, index_q)
    api.msa_icp_decode_index_score_sharded(
        index_q,
        index_k,
        block_table,
        seq_lens,
        own,
        decode_query_len=decode_query_len,
        max_decode_query_len=plan.max_decode_query_len,
        enable_pdl=enable_pdl,
        backend=plan.backend,
        **shard,
    )
    api.msa_icp_topk_select_publish(
        own,
        num_valid_pages,
        bases,
        comm.errors,
        rank=plan.rank,
        world_size=plan.world_size,
        heads_per_rank=plan.heads_per_rank,
        index_scale=plan.index_scale,
        index_offset=plan.index_offset,
        **target,
    )


def prefill_local(
    plan: MSAIcpIndexerPlan,
    query: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    window_plan: MSAIcpScorePlan,
    score_scratch: Tensor | None,
    num_valid_pages: Tensor,
    carrier_view: Tensor,
    *,
    pool: Tensor | None = None,
) -> None:
    """The calls of `MSAIcpIndexerPlan.prefill_local`."""
    # The functions take the page size from the shard.
    shape = ("pages", plan.page_size // plan.world_size, HEAD_DIM)
    checks.tensor("index_k", index_k, checks.FP8, shape, device=plan.device)
    shard: dict[str, Any] = {
        "rank": plan.rank,
        "tp": plan.world_size,
        "compact": plan.page_size != BLOCK,
        "backend": plan.backend,
    }
    forced: dict[str, Any] = {
        "force_begin_blocks": plan.init_blocks,
        "force_end_blocks": plan.local_blocks,
    }
    if pool is not None:
        api.msa_icp_prefill_score_select(
            query,
            index_k,
            block_table,
            window_plan,
            num_valid_pages,
            pool,
            carrier_view,
            **shard,
            **forced,
        )
        return
    if score_scratch is None:
        checks.refuse("score_scratch", "score rows where there is no pool", None)
    scores = _first_rows("score_scratch", score_scratch, query)
    api.msa_icp_index_score_sharded(
        query, index_k, block_table, window_plan, max_score=scores, initialize=False, **shard
    )
    api.msa_icp_topk_select_prefill(
        scores,
        num_valid_pages,
        carrier_view,
        index_scale=plan.index_scale,
        index_offset=plan.index_offset,
        backend=plan.backend,
        **forced,
    )


def prefill_merge(plan: MSAIcpIndexerPlan, received: Tensor, num_valid_pages: Tensor, output: Tensor) -> None:
    """The calls of `MSAIcpIndexerPlan.prefill_merge`."""
    shape = (plan.world_size, plan.heads_per_rank, "tokens", LEGACY_WORDS)
    checks.tensor("received", received, torch.int32, shape, device=plan.device)
    api.msa_icp_merge_candidates(
        received,
        num_valid_pages,
        output,
        plan.prefill_errors,
        init_blocks=plan.init_blocks,
        local_blocks=plan.local_blocks,
        prefill=True,
        backend=plan.backend,
    )


def _first_rows(name: str, rows: Any, query: Any) -> Tensor:
    """As many score rows as there are query tokens."""
    found = checks.score_rows(name, rows, "at least T")
    tokens = query.shape[0] if isinstance(query, Tensor) and query.dim() else 0
    checks.at_least(name, found, 0, tokens)
    return found[:tokens]
