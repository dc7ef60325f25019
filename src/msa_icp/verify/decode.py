"""Decode batches through the whole path of all ranks, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import api, cases, reference
from ..cases import DecodeCase, bits, poisoned
from ..storage import ReceiveStorage
from .comparison import BITWISE, Result, Truth, differences, is_slow, no_exchange, padded

FORMS = ((False, False), (False, True), (True, False), (True, True))
"""(tagged, fused)"""
FORMS_IF_SLOW = ((False, False), (True, True))
NEG_INF_BITS = -(2**23)
SPIN_LIMIT = 1 << 20

# ---------------------------------------------------------------- what is true


def score_truth(case: DecodeCase, rank: int, *, bounds: bool = True) -> Truth:
    """The canonical scores of a rank, and, with `bounds`, between which scores a kernel's may lie.

    A kernel's score is near the canonical score of the row that it picks (section 3), whichever that is:
    at least that of the best row less its bound, at most the largest row plus bound.
    """
    canonical, written = reference.shard_scores(
        case.index_q,
        case.shard(rank),
        case.block_table,
        case.seq_lens,
        rank=rank,
        world_size=case.world_size,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        cols=case.score_columns,
    )
    low, high = canonical.double(), canonical.double()
    if not bounds:
        return Truth(canonical, written, low, high)
    shard = case.shard(rank).to(torch.float64)
    for t, column in (canonical > reference.NEG_INF).any(1).nonzero().tolist():
        request, j = divmod(t, case.decode_query_len)
        position = int(case.seq_lens[request]) - case.decode_query_len + j
        rows = [
            i
            for i in range(shard.shape[1])
            if reference.key_position(
                column, i, rank=rank, world_size=case.world_size, page_size=case.page_size
            )
            <= position
        ]
        keys = shard[int(case.block_table[request, column]), rows]
        query = case.index_q[t].to(torch.float64)
        exact, bound = query @ keys.T, 2.0**-17 * (query.abs() @ keys.abs().T)
        low[t, :, column] = (exact - bound).nan_to_num(reference.NEG_INF).amax(-1)
        high[t, :, column] = (exact + bound).nan_to_num(reference.NEG_INF).amax(-1)
    return Truth(canonical, written, low, high)


def score_differences(case: DecodeCase, rank: int, out: Tensor, *, bitwise: bool) -> Tensor:
    """Where a score buffer that was `cases.poisoned` differs from what it must hold: bool `[T, 4, cols]`."""
    return differences(score_truth(case, rank, bounds=not bitwise), out, bitwise=bitwise)


def expected_row(score_row: Tensor, num_valid: int, case: DecodeCase, rank: int) -> list[int]:
    """The 32 words that a rank publishes for one float32 score row `[K]` on the CPU."""
    scale, offset = case.index_scale, case.index_offset(rank)
    ids = reference.select(score_row, num_valid, case.init_blocks, case.local_blocks, scale, offset)
    words = bits(score_row).tolist()
    pad = 16 - len(ids)
    chosen = [words[(block - offset) // scale] for block in ids]
    return chosen + [NEG_INF_BITS] * pad + ids + [-1] * pad


def exchange_truth(
    case: DecodeCase, scores: Sequence[Tensor], *, bitwise: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """What every owner must receive and merge, from scores that have been checked.

    Returns the words, int64 `[W, hpr, T, 32]`, and the merged ids, int32 `[T, hpr, 16]`, of every rank.
    """
    world, hpr = case.world_size, cases.HEADS // case.world_size
    num_valid = case.num_valid_pages().tolist()
    columns = case.block_table.shape[1]
    words = [
        [
            [
                expected_row(scores[rank][t, head, :columns], num_valid[t], case, rank)
                for t in range(case.tokens)
            ]
            for head in range(cases.HEADS)
        ]
        for rank in range(world)
    ]
    rows = torch.tensor(words, dtype=torch.int64).view(world, cases.HEADS, case.tokens, 32)
    merged = [
        [merged_row(rows[:, h, t], n, case) for h in range(cases.HEADS)] for t, n in enumerate(num_valid)
    ]
    ids = torch.tensor(merged, dtype=torch.int32).view(case.tokens, cases.HEADS, 16)
    if bitwise and case.whole:
        ids = torch.tensor(unsharded(case), dtype=torch.int32).view(case.tokens, cases.HEADS, 16)
    own = [slice(rank * hpr, (rank + 1) * hpr) for rank in range(world)]
    return [rows[:, heads] & 0xFFFFFFFF for heads in own], [ids[:, heads] for heads in own]


def merged_row(words: Tensor, num_valid: int, case: DecodeCase) -> list[int]:
    """The merge of the rows `[W, 32]` that an owner received."""
    scores = words[:, :16].to(torch.int32).view(torch.float32).flatten().tolist()
    candidates = zip(words[:, 16:].flatten().tolist(), scores, strict=True)
    return padded(reference.merge(list(candidates), num_valid, case.init_blocks, case.local_blocks))


def unsharded(case: DecodeCase) -> list[list[list[int]]]:
    """`[T][4]` padded ids: the selection of one rank with all keys, for `whole` cases."""
    selected: list[list[list[int]]] = []
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        tokens = slice(request * case.decode_query_len, (request + 1) * case.decode_query_len)
        positions = [
            seq_len - case.decode_query_len + j if seq_len > 0 else -1 for j in range(case.decode_query_len)
        ]
        keys = case.sequence_keys(request)
        chosen = reference.select_unsharded(
            case.index_q[tokens], keys, positions, case.init_blocks, case.local_blocks
        )
        selected += [[padded(ids) for ids in heads] for heads in chosen]
    return selected


# ---------------------------------------------------------------- a backend's answers


def run_scores(case: DecodeCase, rank: int, backend: str, device: str) -> Tensor:
    """The scores of one rank in a poisoned buffer."""
    table, lens, _ = case.metadata(device)
    out = poisoned((case.tokens, cases.HEADS, case.score_columns), torch.float32, device)
    api.msa_icp_decode_index_score_sharded(
        case.index_q.to(device),
        case.shard(rank, device),
        table,
        lens,
        out,
        rank=rank,
        world_size=case.world_size,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        max_decode_query_len=8,
        backend=backend,
    )
    return out


def exchange(
    case: DecodeCase, scores: list[Tensor] | None, *, tagged: bool, backend: str, device: str
) -> list[tuple[Tensor, Tensor]]:
    """All ranks publish (fused where `scores` is None), then all merge.

    Returns for every rank the words that it received, int64 `[W, hpr, T, 32]` without their tags, and
    its merged ids, int32 `[T, hpr, 16]`.
    """
    with ReceiveStorage.in_process(case.world_size, capacity=case.tokens + 1, device=device) as group:
        for storage in group:
            own = None if scores is None else scores[storage.rank]
            publish(case, storage, own, tagged=tagged, backend=backend)
        answers = []
        for storage in group:
            recv = storage.tagged_recv if tagged else storage.recv
            words = recv[0, :, :, : case.tokens, :32].to(torch.int64) & 0xFFFFFFFF
            answers.append((words.cpu(), merge(case, storage, tagged=tagged, backend=backend)))
            storage.check()
        return answers


def publish(
    case: DecodeCase, storage: ReceiveStorage, scores: Tensor | None, *, tagged: bool, backend: str
) -> None:
    """One rank's publish into slot set 0; the fused form where there are no scores."""
    rank, device = storage.rank, storage.device
    table, lens, num_valid = case.metadata(device)
    common: dict[str, Any] = {
        "slot": 0,
        "rank": rank,
        "world_size": case.world_size,
        "capacity": storage.capacity,
        "force_begin_blocks": case.init_blocks,
        "force_end_blocks": case.local_blocks,
        "spin_limit": SPIN_LIMIT,
        "generations": storage.publish_generations if tagged else None,
        "backend": backend,
    }
    bases = storage.tagged_recv_bases if tagged else storage.recv_bases
    if scores is not None:
        api.msa_icp_topk_select_publish(
            scores[..., : case.block_table.shape[1]],
            num_valid,
            bases,
            storage.errors,
            heads_per_rank=storage.heads_per_rank,
            index_scale=case.index_scale,
            index_offset=case.index_offset(rank),
            **common,
        )
        return
    pool_bytes = api.msa_icp_decode_pool_bytes(max_decode_tokens=max(1, case.tokens))
    api.msa_icp_decode_score_publish(
        case.index_q.to(device),
        case.shard(rank, device),
        table,
        lens,
        num_valid,
        torch.full((pool_bytes,), cases.NAN_BYTE, dtype=torch.uint8, device=device),
        bases,
        storage.errors,
        page_size=case.page_size,
        decode_query_len=case.decode_query_len,
        **common,
    )


def merge(case: DecodeCase, storage: ReceiveStorage, *, tagged: bool, backend: str) -> Tensor:
    """One rank's merge of slot set 0, on the CPU."""
    out = poisoned((case.tokens, storage.heads_per_rank, 16), torch.int32, storage.device)
    api.msa_icp_merge_candidates(
        (storage.tagged_recv if tagged else storage.recv)[0],
        case.metadata(storage.device)[2],
        out,
        storage.errors,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        spin_limit=SPIN_LIMIT,
        expected_generations=storage.expected_generations[0] if tagged else None,
        backend=backend,
    )
    return out.cpu()


def check_case(result: Result, case: DecodeCase, backend: str, device: str) -> None:
    """Compare one case with the reference and add to `result`."""
    world, layout = case.world_size, f"W={case.world_size} P={case.page_size}"
    bitwise = case.exact or backend in BITWISE
    result.layouts += 1
    scores = []
    for rank in range(world):
        out = run_scores(case, rank, backend, device)
        scores.append(out)
        wrong = score_differences(case, rank, out, bitwise=bitwise)
        result.scores += result.compare(f"scores, {layout} rank {rank}", wrong)
    reason = no_exchange(backend, device)
    if reason is not None:
        result.skipped = f"no exchange: {reason}"
        return
    rows, merged = exchange_truth(case, [out.detach().cpu() for out in scores], bitwise=bitwise)
    for tagged, fused in FORMS_IF_SLOW if is_slow(backend, device) else FORMS:
        form = f"{'tagged' if tagged else 'legacy'}{', fused' if fused else ''}, {layout}"
        received = exchange(case, None if fused else scores, tagged=tagged, backend=backend, device=device)
        for owner, (got_rows, got_merged) in enumerate(received):
            where = f"{form} rank {owner}"
            result.rows += result.compare(f"received rows, {where}", (got_rows != rows[owner]).any(-1))
            result.merged += result.compare(f"merged, {where}", (got_merged != merged[owner]).any(-1))
