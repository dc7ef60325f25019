"""The prefill entry points: plan, score, select, and the two in one.

A *window* is a ragged batch of `B` query segments. Segment `s` has `qo_segment_lens[s]` query tokens,
token `i` of which is at position `qo_offset[s] + i` over `kv_segment_lens[s]` keys; a segment may be empty.
`T` is the rows of the window's query, `W` the ranks (here `tp`), `P` the keys of a page, `R = P / W` the
local rows of a page. "Section" refers to docs/contract.md, the source of every rule here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import checks, dispatch, geometry
from ..prefill_plan import MSAIcpScorePlan, default_device, plan_words


def msa_icp_index_score_columns(max_seq_len: int, page_size: int) -> int:
    """Score columns that a window over up to `max_seq_len` keys needs, one a local page (section 7).

    Args:
        max_seq_len: keys of the longest segment, at least 1.
        page_size: keys of a page over all ranks, 128 or 256.

    Returns:
        `ceil(max_seq_len / 128)` for pages of 128 keys, half of it rounded up for pages of 256: the width
        of compact score rows. Score rows that are not compact have `ceil(max_seq_len / 128)` columns.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    columns = geometry.block_columns(checks.integer("max_seq_len", max_seq_len, 1))
    size = checks.one_of("page_size", page_size, geometry.PAGE_SIZES)
    return int(geometry.shard_columns(columns, size))


def msa_icp_index_score_plan_storage(
    *, num_qo_heads: int, total_q: int, batch: int, device: torch.device | str
) -> dict[str, int]:
    """Sizes of the storage that `msa_icp_index_score_sharded_plan_device` plans into (section 7).

    Args:
        num_qo_heads: index heads; 4.
        total_q: the most query tokens of a window, at least 1.
        batch: segments of the window, 1 to 65536.
        device: where the plan lies. On a CPU the sizes follow `torch.get_num_threads()`.

    Returns:
        A dict: `work_range_numel` (int64 words, exactly; one a multiprocessor, on a CPU one a torch thread),
        `work_info_numel` (int64 words, at least: `(ceil(total_q / 128) + batch - 1) * num_qo_heads`) and
        `workspace_bytes` (uint8, at least: 32 MiB).

    Raises:
        ValueError: an argument is out of range, or the window has more than 65535 items
            (`min(ceil(total_q / 64) + batch - 1, total_q)`); the message names it.
    """
    return checks.plan_storage(num_qo_heads, total_q, batch, device)


def msa_icp_prefill_pool_bytes(
    *, total_q: int, batch: int, device: torch.device | str, num_heads: int = 4
) -> int:
    """Bytes of the `pool` that `msa_icp_prefill_score_select` takes (section 7).

    Args:
        total_q: the most query tokens of a window, at least 1.
        batch: the most segments of a window, 1 to 65536.
        device: where the plan lies. On a CPU the size follows `torch.get_num_threads()`.
        num_heads: index heads; 4.

    Returns:
        `(ceil(total_q / 64) + batch - 1 + work_range_numel - 1) * 64 * num_heads * 16 * 8` bytes.

    Raises:
        ValueError: as for `msa_icp_index_score_plan_storage`.
    """
    return checks.pool_bytes(total_q, batch, device, num_heads)


def msa_icp_index_score_sharded_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    *,
    qo_offset: Tensor,
    device: torch.device | str | None = None,
    backend: str = "cake",
) -> MSAIcpScorePlan:
    """Plan a window on the host and copy the plan to `device` (section 7).

    The plan depends on the segment metadata alone: it is the same for every layer and rank. It
    allocates and copies, so it cannot be captured in a CUDA graph;
    `msa_icp_index_score_sharded_plan_device` can.

    Args:
        qo_segment_lens: `int32 [B >= 1]` on the CPU: query tokens of each segment, 0 allowed.
        kv_segment_lens: `int32 [B]` on the CPU: keys of each segment, the query tokens' own included.
            A token also sees nothing at or past them.
        num_qo_heads: index heads; 4.
        qo_offset: `int32 [B]` on the CPU: position of each segment's first query token.
        device: where the plan's tensors are; None: the current CUDA device, the CPU where there is none.
        backend: "cake" or "auto" for the best of the device, or a backend's name (section 12). Every
            backend reads the same plan.

    Returns:
        An `MSAIcpScorePlan` with tensors of its own. `total_q` is the sum of the query tokens, 1 for an
        empty window; `max_query_len` and `columns` are those of the longest segment, at least 1.

    Raises:
        ValueError: an argument breaks a rule: a negative entry, no segment, unequal sizes, sums over
            2**31 - 1, more than 65536 segments, 65535 items or 65535 columns, or items * columns over
            2**31 - 1; or the backend does not serve the device.
    """
    total_q, max_query_len, max_seq_len = checks.segments(
        qo_segment_lens, kv_segment_lens, num_qo_heads, qo_offset
    )
    where = checks.plan_device("device", default_device() if device is None else device)
    dispatch.resolve(backend, where)
    sizes = checks.plan_storage(num_qo_heads, total_q, qo_segment_lens.shape[0], where)
    work_range, work_info = plan_words(
        qo_segment_lens,
        kv_segment_lens,
        qo_offset,
        total_q=total_q,
        max_seq_len=max_seq_len,
        workers=sizes["work_range_numel"],
    )
    info_words = torch.zeros(sizes["work_info_numel"], dtype=torch.int64, device="cpu")
    info_words[: work_info.shape[0]] = work_info

    def own(values: Tensor) -> Tensor:
        """A copy on the device: the caller may change its tensors afterwards."""
        return values.contiguous().to(where, copy=True)

    def prefix_sums(lens: Tensor) -> Tensor:
        return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)).to(where)

    return MSAIcpScorePlan(
        qo_segment_lens=own(qo_segment_lens),
        kv_segment_lens=own(kv_segment_lens),
        qo_segment_offsets=prefix_sums(qo_segment_lens),
        kv_segment_offsets=prefix_sums(kv_segment_lens),
        qo_offset=own(qo_offset),
        packed_work_range=work_range.to(where),
        packed_work_info=info_words.to(where),
        workspace=torch.empty(sizes["workspace_bytes"], dtype=torch.uint8, device=where),
        total_q=total_q,
        num_qo_heads=int(num_qo_heads),
        batch=qo_segment_lens.shape[0],
        max_query_len=max_query_len,
        columns=geometry.block_columns(max_seq_len),
    )


def msa_icp_index_score_sharded_plan_device(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    qo_offset: Tensor,
    num_qo_heads: int,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    packed_work_range: Tensor,
    packed_work_info: Tensor,
    workspace: Tensor,
    backend: str = "cake",
) -> MSAIcpScorePlan:
    """Plan a window on its device, into the caller's storage (section 7).

    Nothing is read on the host, so the call can be captured in a CUDA graph; a replay plans the new
    metadata within the same bounds. The words equal those of `msa_icp_index_score_sharded_plan` for the
    same metadata and `max_seq_len`.

    Args:
        qo_segment_lens: `int32 [B >= 1]`, contiguous: query tokens of each segment.
        kv_segment_lens: `int32 [B]`, contiguous: keys of each segment.
        qo_segment_offsets: `int32 [B + 1]`, contiguous: prefix sums of the query tokens; the first row of
            each segment in the query, the scores and the carrier.
        kv_segment_offsets: `int32 [B + 1]`, contiguous: prefix sums of the keys; kept in the plan, not
            read.
        qo_offset: `int32 [B]`, contiguous: position of each segment's first query token.
        num_qo_heads: index heads; 4.
        total_q: rows of the query, at least the query tokens of the window.
        max_query_len: at least the tokens of the longest segment, `1 <= max_query_len <= total_q`.
        max_seq_len: at least the keys of the longest segment, at least 1; gives the score columns.
        packed_work_range: `int64`, contiguous, exactly `work_range_numel` words of
            `msa_icp_index_score_plan_storage`; written.
        packed_work_info: `int64`, contiguous, at least `work_info_numel` words: one an item is written, and
            words past those may be.
        workspace: `uint8`, contiguous, at least `workspace_bytes`; not needed.
        backend: section 12.

    Returns:
        An `MSAIcpScorePlan` of the given tensors and bounds.

    Metadata beyond the bounds is cut off at them and never becomes an address: rows outside
    `[0, total_q)` and columns from `ceil(max_seq_len / 128)` on are left out, negative lengths count as 0.

    Raises:
        ValueError: an argument breaks a rule, or a limit of section 7 is exceeded, or the backend does not
            serve the device; nothing has been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.index_score_sharded_plan_device(
            qo_segment_lens,
            kv_segment_lens,
            qo_segment_offsets,
            kv_segment_offsets,
            qo_offset,
            num_qo_heads,
            total_q=total_q,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            packed_work_range=packed_work_range,
            packed_work_info=packed_work_info,
            workspace=workspace,
            backend=backend,
        )
    else:
        checks.segments_on_device(
            qo_segment_lens,
            kv_segment_lens,
            qo_segment_offsets,
            kv_segment_offsets,
            qo_offset,
            num_qo_heads,
            total_q=total_q,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            packed_work_range=packed_work_range,
            packed_work_info=packed_work_info,
            workspace=workspace,
        )
        dispatch.implementation("index_score_sharded_plan_device", backend, qo_segment_lens.device)(
            qo_segment_lens,
            kv_segment_lens,
            qo_segment_offsets,
            kv_segment_offsets,
            qo_offset,
            total_q=int(total_q),
            max_query_len=int(max_query_len),
            max_seq_len=int(max_seq_len),
            packed_work_range=packed_work_range,
            packed_work_info=packed_work_info,
            workspace=workspace,
        )
    return MSAIcpScorePlan(
        qo_segment_lens=qo_segment_lens,
        kv_segment_lens=kv_segment_lens,
        qo_segment_offsets=qo_segment_offsets,
        kv_segment_offsets=kv_segment_offsets,
        qo_offset=qo_offset,
        packed_work_range=packed_work_range,
        packed_work_info=packed_work_info,
        workspace=workspace,
        total_q=int(total_q),
        num_qo_heads=int(num_qo_heads),
        batch=qo_segment_lens.shape[0],
        max_query_len=int(max_query_len),
        columns=geometry.block_columns(int(max_seq_len)),
    )


def msa_icp_index_score_sharded(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan: MSAIcpScorePlan,
    *,
    rank: int,
    max_score: Tensor,
    sm_scale: float = 1.0,
    initialize: bool = True,
    tp: int = 2,
    compact: bool = False,
    enable_pdl: bool = False,
    backend: str = "cake",
) -> None:
    """Score this rank's shard for the query tokens of a window (sections 3 and 7).

    A token at position `p` of a segment with `n` keys sees the keys at positions up to `p` and below `n`.
    Its *causal prefix* is the blocks that hold them, `ceil(min(p + 1, n) / 128)`. A plan knows no keys from
    `128 * plan.columns` on.
    Scores are those of the decode scorer: the largest dot product, unscaled, in FP32; NaN dot products are
    ignored; a block of which the token sees no row of this rank scores -inf; -0.0 is written as +0.0.

    Args:
        q: `float8_e4m3fn [T, 4, 128]`, contiguous, 16-byte aligned, `T == plan.total_q`. Token `i` of
            segment `s` is row `qo_segment_offsets[s] + i`.
        k: K shard, `float8_e4m3fn [pages, R, 128]`, strides `(pitch, 128, 1)` with a pitch in bytes that
            is a multiple of 16 and at least `R * 128`, 16-byte aligned. `R` says what the page size is.
        block_table: `int32 [B, columns]`, unit last stride, any row stride: physical page of each page of a
            segment; at least `ceil(plan.columns / (P / 128))` columns. Entries past the pages that hold
            the causal prefix are never looked at.
        plan: the window's plan.
        rank: whose shard, `0 <= rank < tp`.
        max_score: `float32 [T, 4, K]`, `stride(2) == 1`, `stride(1) >= K`, `stride(0) >= 4 * stride(1)`;
            written. `K >= plan.columns`, where compact half of that rounded up.
        sm_scale: finite; changes nothing, scores are raw.
        initialize: write -inf everywhere first.
        tp: ranks of the group, 2 or 4.
        compact: one column a page of 256 keys; else one column a B128 block. Only for P = 256.
        enable_pdl: programmatic dependent launch (section 11); changes nothing where a device has none.
        backend: section 12.

    Written: for every token of a segment, the columns of its causal prefix: blocks, or where compact
    the pages that hold them. A block of which this rank holds no row, or whose page id is outside
    `[0, pages)`, gets -inf and is not read. Everything else of `max_score`, rows of no segment included,
    gets -inf with `initialize` and keeps its bits without.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.index_score_sharded(
            q,
            k,
            block_table,
            plan.tensors(),
            plan.numbers(),
            rank=rank,
            max_score=max_score,
            sm_scale=sm_scale,
            initialize=initialize,
            tp=tp,
            compact=compact,
            enable_pdl=enable_pdl,
            backend=backend,
        )
        return
    shard = checks.prefill_score(
        q,
        k,
        block_table,
        plan,
        rank=rank,
        max_score=max_score,
        sm_scale=sm_scale,
        initialize=initialize,
        tp=tp,
        compact=compact,
        enable_pdl=enable_pdl,
    )
    dispatch.implementation("index_score_sharded", backend, q.device)(
        q,
        k,
        block_table,
        plan,
        layout=shard,
        max_score=max_score,
        initialize=initialize,
        compact=compact,
        enable_pdl=enable_pdl,
    )


def msa_icp_topk_select_prefill(
    scores: Tensor,
    num_valid_pages: Tensor,
    carrier: Tensor,
    *,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    index_scale: int = 1,
    index_offset: int = 0,
    backend: str = "cake",
) -> None:
    """Select each score row's local Top16 into the carrier of the all-to-all (sections 5 and 7).

    Column `c` is B128 block `c * index_scale + index_offset`. The ranking is that of
    `msa_icp_topk_select_publish`: candidates below `min(num_valid_pages[t], 8192)`, forced blocks first,
    then the larger score, then the lower id.

    Args:
        scores: `float32 [T, 4, K]` score rows, `K >= 1`, `stride(2) == 1`, `stride(1) >= K`,
            `stride(0) >= 4 * stride(1)`.
        num_valid_pages: `int32 [T]`, contiguous: the token's block count over all ranks, 0 for padding.
        carrier: `int32 [4, T, 33]`, `stride(2) == 1`, `stride(1) >= 33`,
            `stride(0) >= T * stride(1)`, as a token slice of a larger head-major buffer has; written.
        force_begin_blocks, force_end_blocks: blocks forced at the begin and the end; sum <= 16.
        index_scale, index_offset: block of a column; 1 or 2, and below that.
        backend: section 12.

    Written: the legacy row `carrier[h, t]` for every token and head: 16 raw score bits, their ids
    ascending, padding (-inf, -1) last, the ready word 1.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.topk_select_prefill(
            scores,
            num_valid_pages,
            carrier,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            index_scale=index_scale,
            index_offset=index_offset,
            backend=backend,
        )
        return
    checks.prefill_select(
        scores,
        num_valid_pages,
        carrier,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        index_scale=index_scale,
        index_offset=index_offset,
    )
    dispatch.implementation("topk_select_prefill", backend, scores.device)(
        scores,
        num_valid_pages,
        carrier,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        index_scale=index_scale,
        index_offset=index_offset,
    )


def msa_icp_prefill_score_select(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan: MSAIcpScorePlan,
    num_valid_pages: Tensor,
    pool: Tensor,
    carrier: Tensor,
    *,
    rank: int,
    tp: int = 2,
    compact: bool = False,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    enable_pdl: bool = False,
    backend: str = "cake",
) -> None:
    """Score and select in one call, without score rows (section 7).

    The carrier rows equal, bit for bit, those of `msa_icp_index_score_sharded` with `initialize`, one
    column a local page and no column more than the plan has, followed by
    `msa_icp_topk_select_prefill` with the layout's scale and offset. So a block between a token's causal
    prefix and `num_valid_pages[t]` is a candidate that scores -inf, and so is every block of a row that
    belongs to no segment.

    Args:
        q, k, block_table, plan, rank, tp: as for `msa_icp_index_score_sharded`.
        num_valid_pages: `int32 [T]`, contiguous: the token's block count over all ranks, 0 for padding.
        pool: `uint8`, contiguous, 16-byte aligned, a multiple of 8 and at least
            `msa_icp_prefill_pool_bytes` bytes for the plan's `total_q`, segments and workers. Its contents
            mean nothing before and after the call.
        carrier: as for `msa_icp_topk_select_prefill`; every row `t < T` is written.
        compact: True exactly when P = 256.
        force_begin_blocks, force_end_blocks: blocks forced at the begin and the end; sum <= 16.
        enable_pdl: section 11.
        backend: section 12.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.prefill_score_select(
            q,
            k,
            block_table,
            plan.tensors(),
            plan.numbers(),
            num_valid_pages,
            pool,
            carrier,
            rank=rank,
            tp=tp,
            compact=compact,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            enable_pdl=enable_pdl,
            backend=backend,
        )
        return
    shard = checks.prefill_fused(
        q,
        k,
        block_table,
        plan,
        num_valid_pages,
        pool,
        carrier,
        rank=rank,
        tp=tp,
        compact=compact,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        enable_pdl=enable_pdl,
    )
    dispatch.implementation("prefill_score_select", backend, q.device)(
        q,
        k,
        block_table,
        plan,
        num_valid_pages,
        pool,
        carrier,
        layout=shard,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        enable_pdl=enable_pdl,
    )
