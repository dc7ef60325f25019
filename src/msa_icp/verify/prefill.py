"""Prefill windows through the whole path of all ranks, against the reference.

Scores of every column layout, with and without `initialize`, the selection, the fused form, and the exchange
and merge of the ranks' carriers. Scores may differ from the canonical ones by the bound of section 3 of the
contract, and not at all where the sums are exact in FP32; what follows the scores is compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import api, cases, reference
from ..cases import poisoned
from ..prefill_cases import PrefillCase
from ..prefill_exchange import exchange_prefill
from ..prefill_plan import MSAIcpScorePlan
from .comparison import BITWISE, Result, Truth, differences, is_slow, no_exchange, no_prefill, padded

# ---------------------------------------------------------------- what is true


def score_truth(
    case: PrefillCase, rank: int, *, compact: bool, initialize: bool, cols: int, bounds: bool = True
) -> Truth:
    """The canonical scores of a rank, and, with `bounds`, between which scores a kernel's may lie."""
    metadata = case.metadata()
    del metadata["kv_segment_offsets"]
    canonical, written = reference.prefill_scores(
        case.index_q,
        case.shard(rank),
        case.block_table,
        **metadata,
        rank=rank,
        world_size=case.world_size,
        page_size=case.page_size,
        blocks=case.blocks,
        cols=cols,
        compact=compact,
        initialize=initialize,
    )
    low, high = canonical.double(), canonical.double()
    if bounds:
        _bounds(case, rank, compact, canonical, low, high)
    return Truth(canonical, written, low, high)


def _bounds(
    case: PrefillCase, rank: int, compact: bool, canonical: Tensor, low: Tensor, high: Tensor
) -> None:
    """Widen `low` and `high` where there is a score: see `decode.score_truth`."""
    shard = case.shard(rank).to(torch.float64)
    sharding = {"rank": rank, "world_size": case.world_size, "page_size": case.page_size}
    for t, segment, position in case.tokens():
        seen = min(position + 1, int(case.kv_lens[segment]))
        for column in (canonical[t] > reference.NEG_INF).any(0).nonzero().flatten().tolist():
            page = column if compact else column * 128 // case.page_size
            where = [reference.key_position(page, i, **sharding) for i in range(shard.shape[1])]
            keys = shard[int(case.block_table[segment, page]), [i for i, p in enumerate(where) if p < seen]]
            query = case.index_q[t].to(torch.float64)
            exact, bound = query @ keys.T, 2.0**-17 * (query.abs() @ keys.abs().T)
            low[t, :, column] = (exact - bound).nan_to_num(reference.NEG_INF).amax(-1)
            high[t, :, column] = (exact + bound).nan_to_num(reference.NEG_INF).amax(-1)


def score_differences(
    case: PrefillCase, rank: int, out: Tensor, *, compact: bool, initialize: bool, bitwise: bool
) -> Tensor:
    """Where a score buffer that was `cases.poisoned` differs from what it must hold: bool `[T, 4, cols]`."""
    cols = out.shape[2]
    truth = score_truth(case, rank, compact=compact, initialize=initialize, cols=cols, bounds=not bitwise)
    return differences(truth, out, bitwise=bitwise)


def carrier_truth(
    case: PrefillCase, rank: int, scores: Tensor, num_valid: Tensor, *, compact: bool
) -> Tensor:
    """The carrier, int32 `[4, T, 33]`, of score rows that have been checked."""
    scale, offset = (case.index_scale, case.index_offset(rank)) if compact else (1, 0)
    force = case.init_blocks, case.local_blocks
    scores = scores.detach().cpu()
    rows = [
        reference.carrier_row(scores[t, head], n, *force, scale, offset)
        for head in range(cases.HEADS)
        for t, n in enumerate(num_valid.tolist())
    ]
    return torch.stack(rows).view(cases.HEADS, -1, 33)


def merged_truth(case: PrefillCase, carriers: Sequence[Tensor], *, bitwise: bool) -> Tensor:
    """The final ids, int32 `[T, 4, 16]`: the merge of the ranks' carriers, for whole cases of canonical
    scores the selection of one rank with all keys."""
    num_valid = case.num_valid_pages().tolist()
    force = case.init_blocks, case.local_blocks
    ids = [
        [
            reference.merge_carrier_rows([carrier[head, t] for carrier in carriers], n, *force)
            for head in range(cases.HEADS)
        ]
        for t, n in enumerate(num_valid)
    ]
    if bitwise and case.whole:
        for t, segment, position in case.tokens():
            keys = case.keys_of(segment, int(case.kv_lens[segment]))
            seen = min(position, keys.shape[0] - 1)
            chosen = reference.select_unsharded(case.index_q[t : t + 1], keys, [seen], *force)[0]
            ids[t] = [padded(row) for row in chosen]
    return torch.tensor(ids, dtype=torch.int32)


# ---------------------------------------------------------------- a backend's answers


def plan_on_device(case: PrefillCase, backend: str, device: str) -> MSAIcpScorePlan:
    """The device plan in storage that is full of garbage; of another backend where this one has none."""
    batch = case.qo_lens.shape[0]
    sizes = api.msa_icp_index_score_plan_storage(
        num_qo_heads=cases.HEADS, total_q=case.total_q, batch=batch, device=device
    )
    return api.msa_icp_index_score_sharded_plan_device(
        **case.metadata(device),
        num_qo_heads=cases.HEADS,
        total_q=case.total_q,
        max_query_len=case.total_q,
        max_seq_len=case.max_seq_len,
        packed_work_range=torch.full((sizes["work_range_numel"],), -7, dtype=torch.int64, device=device),
        packed_work_info=torch.full((sizes["work_info_numel"],), -9, dtype=torch.int64, device=device),
        workspace=torch.empty(sizes["workspace_bytes"], dtype=torch.uint8, device=device),
        backend="auto" if no_prefill(backend, ["index_score_sharded_plan_device"]) else backend,
    )


def plan_on_host(case: PrefillCase, backend: str, device: str) -> MSAIcpScorePlan:
    """The host's plan, for cases that it takes."""
    return api.msa_icp_index_score_sharded_plan(
        case.qo_lens, case.kv_lens, cases.HEADS, qo_offset=case.qo_offset, device=device, backend=backend
    )


def _inputs(case: PrefillCase, rank: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    return case.index_q.to(device), case.shard(rank, device), case.table(device)


def run_scores(
    case: PrefillCase,
    plan: MSAIcpScorePlan,
    rank: int,
    backend: str,
    *,
    compact: bool,
    initialize: bool,
    spare: int = 0,
) -> Tensor:
    """The scores of one rank in a poisoned buffer with `spare` columns more than needed."""
    device = plan.qo_segment_lens.device
    out = poisoned((case.total_q, cases.HEADS, case.score_columns(compact) + spare), torch.float32, device)
    api.msa_icp_index_score_sharded(
        *_inputs(case, rank, device),
        plan,
        rank=rank,
        max_score=out,
        tp=case.world_size,
        initialize=initialize,
        compact=compact,
        backend=backend,
    )
    return out


def run_select(
    case: PrefillCase, rank: int, scores: Tensor, backend: str, num_valid: Tensor, *, compact: bool
) -> Tensor:
    """The carrier of score rows, int32 `[4, T, 33]`."""
    carrier = poisoned((cases.HEADS, case.total_q, 33), torch.int32, scores.device)
    api.msa_icp_topk_select_prefill(
        scores,
        num_valid.to(scores.device),
        carrier,
        force_begin_blocks=case.init_blocks,
        force_end_blocks=case.local_blocks,
        index_scale=case.index_scale if compact else 1,
        index_offset=case.index_offset(rank) if compact else 0,
        backend=backend,
    )
    return carrier


def run_fused(
    case: PrefillCase,
    plan: MSAIcpScorePlan,
    rank: int,
    backend: str,
    num_valid: Tensor,
    **changes: Any,
) -> Tensor:
    """The carrier of the fused form, int32 `[4, T, 33]`, with a pool that is full of garbage."""
    device = plan.qo_segment_lens.device
    pool_bytes = api.msa_icp_prefill_pool_bytes(total_q=case.total_q, batch=plan.batch, device=device)
    arguments = {
        "pool": torch.full((pool_bytes,), cases.NAN_BYTE, dtype=torch.uint8, device=device),
        "carrier": poisoned((cases.HEADS, case.total_q, 33), torch.int32, device),
        "rank": rank,
        "tp": case.world_size,
        "compact": case.fused_compact,
        "force_begin_blocks": case.init_blocks,
        "force_end_blocks": case.local_blocks,
        "backend": backend,
        **changes,
    }
    api.msa_icp_prefill_score_select(*_inputs(case, rank, device), plan, num_valid.to(device), **arguments)
    carrier: Tensor = arguments["carrier"]
    return carrier


def run_merge(case: PrefillCase, carriers: Sequence[Tensor], backend: str) -> Tensor:
    """All owners' merges of the ranks' carriers: int32 `[T, 4, 16]` on the CPU."""
    device, hpr = carriers[0].device, cases.HEADS // case.world_size
    shape = (case.world_size, hpr, case.total_q, 33)
    received = [poisoned(shape, torch.int32, device) for _ in range(case.world_size)]
    exchange_prefill(carriers, received)
    merged = []
    for of_owner in received:
        out = poisoned((case.total_q, hpr, 16), torch.int32, device)
        api.msa_icp_merge_candidates(
            of_owner,
            case.num_valid_pages().to(device),
            out,
            torch.zeros(1, dtype=torch.int32, device=device),
            init_blocks=case.init_blocks,
            local_blocks=case.local_blocks,
            prefill=True,
            backend=backend,
        )
        merged.append(out.cpu())
    return torch.cat(merged, dim=1)


def check_case(result: Result, case: PrefillCase, backend: str, device: str) -> None:
    """Compare one window with the reference and add to `result`."""
    bitwise = case.exact or backend in BITWISE
    plan, num_valid = plan_on_device(case, backend, device), case.num_valid_pages()
    result.layouts += 1
    carriers = []
    for rank in range(case.world_size):
        where = f"W={case.world_size} P={case.page_size} rank {rank}"
        for compact in case.layouts:
            for initialize in (False, True) if not is_slow(backend, device) else (rank % 2 == 0,):
                how = f"{where}{', compact' * compact}{', initialize' * initialize}"
                shape = {"compact": compact, "initialize": initialize}
                scores = run_scores(case, plan, rank, backend, **shape, spare=2)
                wrong = score_differences(case, rank, scores, **shape, bitwise=bitwise)
                result.scores += result.compare(f"scores, {how}", wrong)
            if compact != case.fused_compact:
                continue
            scores = run_scores(case, plan, rank, backend, compact=compact, initialize=True)
            truth = carrier_truth(case, rank, scores, num_valid, compact=compact)
            carrier = run_select(case, rank, scores, backend, num_valid, compact=compact)
            result.rows += result.compare(f"carrier, {where}", (carrier.cpu() != truth).any(-1))
            carriers.append(carrier)
            result.skipped = no_prefill(backend, ["prefill_score_select"]) or ""
            if not result.skipped:
                fused = run_fused(case, plan, rank, backend, num_valid)
                result.rows += result.compare(f"carrier, fused, {where}", (fused.cpu() != truth).any(-1))
    reason = no_exchange(backend, device)
    if reason is not None:
        result.skipped = f"no exchange: {reason}"
        return
    wanted = merged_truth(case, [carrier.cpu() for carrier in carriers], bitwise=bitwise)
    got = run_merge(case, carriers, backend)
    layout = f"W={case.world_size} P={case.page_size}"
    result.merged += result.compare(f"merged, {layout}", (got != wanted).any(-1))
