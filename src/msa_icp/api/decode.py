"""The decode entry points and the writer of index keys.

Shapes use `B` requests, `T = B * decode_query_len` tokens, `H = 4` index heads, `W` ranks,
`hpr = H / W` heads a rank, `P` keys a page and `R = P / W` local rows of a page. "Section" refers to
docs/contract.md, the source of every rule here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import checks, dispatch, geometry, rows


def msa_icp_decode_score_columns(max_model_len: int, page_size: int) -> int:
    """Score columns for contexts of up to `max_model_len` tokens (section 4).

    Args:
        max_model_len: tokens of the longest context, at least 1.
        page_size: keys of a page over all ranks, 128 or 256.

    Returns:
        `min(8192, ceil(max_model_len / (4 * page_size)) * 4)`: a multiple of four, one column a page.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    return geometry.decode_score_columns(
        checks.integer("max_model_len", max_model_len, 1),
        checks.one_of("page_size", page_size, geometry.PAGE_SIZES),
    )


def msa_icp_decode_pool_bytes(*, max_decode_tokens: int, num_heads: int = 4) -> int:
    """Bytes of the `pool` that `msa_icp_decode_score_publish` takes (section 6).

    Args:
        max_decode_tokens: the most tokens of one call, at least 1.
        num_heads: index heads; 4.

    Returns:
        `max_decode_tokens * num_heads * 128 * 16 * 8` bytes.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    return geometry.decode_pool_bytes(
        checks.integer("max_decode_tokens", max_decode_tokens, 1),
        checks.one_of("num_heads", num_heads, (geometry.NUM_HEADS,)),
    )


def msa_icp_comm_layout(world_size: int, heads_per_rank: int, capacity: int) -> dict[str, Any]:
    """Layout of one rank's receive storage (section 6).

    Args:
        world_size: ranks of the group, 2 or 4.
        heads_per_rank: `4 / world_size`.
        capacity: the most tokens of one call, at least 1.

    Returns:
        A dict: `storage_words` (int32 words in all), `legacy_offset_bytes` (0), `legacy_shape`
        `(3, W, hpr, capacity, 33)` of int32, `tagged_offset_bytes` (right after the legacy rows),
        `tagged_shape` `(3, W, hpr, capacity, 32)` of int64, `generations_shape`
        `(3, W * hpr, capacity)` and `expected_shape` `(3, hpr, capacity)` of int32. The first dimension
        is the slot set. The storage and the counters start as zeros, on every rank.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """
    return geometry.comm_layout(*checks.group_shape(world_size, heads_per_rank, capacity))


def msa_icp_decode_index_score_sharded(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    max_decode_query_len: int,
    enable_pdl: bool = False,
    backend: str = "cake",
) -> None:
    """Score this rank's shard of every visible page for all four heads (sections 3 and 4).

    A score is the largest dot product, unscaled, of the query with this rank's rows of the page that
    the token may see, in FP32. NaN dot products are ignored; a page of which the token sees no row,
    or only NaN ones, scores -inf; -0.0 is written as +0.0. Token `j` of a request is at position
    `seq_len - decode_query_len + j` and sees keys up to its own position.

    Args:
        index_q: `float8_e4m3fn [T, 4, 128]`, contiguous, 16-byte aligned; `T = B * decode_query_len`,
            the tokens of a request side by side.
        index_k: K shard, `float8_e4m3fn [pages, R, 128]`, strides `(pitch, 128, 1)` with a pitch in
            bytes that is a multiple of 16 and at least `R * 128`, 16-byte aligned.
        block_table: `int32 [B, columns >= 1]`, unit last stride, any row stride: physical page of each
            page column. Entries past `ceil(seq_len / P)` are never looked at.
        seq_lens: `int32 [B]`, contiguous: keys of each request, the query tokens included.
        score_out: `float32 [T, 4, cols]`, `0 < cols <= 8192`, `cols % 4 == 0`, `stride(2) == 1`,
            `stride(1) >= cols`, `stride(0) >= 4 * stride(1)`; written.
        rank, world_size, page_size: which shard: `world_size` 2 or 4, `page_size` 128 or 256.
        decode_query_len, max_decode_query_len: query tokens of each request, and the most that the
            caller ever passes: `1 <= decode_query_len <= max_decode_query_len <= 8`.
        enable_pdl: programmatic dependent launch (section 11); changes nothing where a device has none.
        backend: "cake" or "auto" for the best of the device, or a backend's name (section 12).

    Written: `score_out[t, h, c]` for `c < min(cols, 4 * ceil(ceil(seq_len / P) / 4))`; of those, pages
    past the sequence, past the table or outside `[0, pages)` get -inf and are not read. Every other
    element keeps its bits, and a request with `seq_len <= 0` writes nothing.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.decode_index_score_sharded(
            index_q,
            index_k,
            block_table,
            seq_lens,
            score_out,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            decode_query_len=decode_query_len,
            max_decode_query_len=max_decode_query_len,
            enable_pdl=enable_pdl,
            backend=backend,
        )
        return
    shard = checks.decode_score(
        index_q,
        index_k,
        block_table,
        seq_lens,
        score_out,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=decode_query_len,
        max_decode_query_len=max_decode_query_len,
        enable_pdl=enable_pdl,
    )
    dispatch.implementation("decode_index_score_sharded", backend, index_q.device)(
        index_q,
        index_k,
        block_table,
        seq_lens,
        score_out,
        layout=shard,
        decode_query_len=decode_query_len,
        enable_pdl=enable_pdl,
    )


def msa_icp_topk_select_publish(
    scores: Tensor,
    num_valid_pages: Tensor,
    recv_bases: Tensor,
    errors: Tensor,
    *,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int = 1 << 26,
    enable_pdl: bool = False,
    generations: Tensor | None = None,
    index_scale: int = 1,
    index_offset: int = 0,
    backend: str = "cake",
) -> None:
    """Select each row's local Top16 and store it into the head owner's receive storage (sections 5, 6).

    Column `c` of a score row is B128 block `c * index_scale + index_offset`. Candidates are the
    blocks below `min(num_valid_pages[t], 8192)`; forced blocks come first, then the larger score, then
    the lower id. Head `h` goes to rank `h // hpr`, row
    `((slot * W + rank) * hpr + h % hpr) * capacity + t`.

    Args:
        scores: `float32 [T, 4, K]` score rows as the scorer writes them, `0 < K < 12288`,
            `stride(2) == 1`, `stride(1) >= K`, `stride(0) >= 4 * stride(1)`.
        num_valid_pages: `int32 [T]`, contiguous: the token's block count over all ranks, 0 for padding.
        recv_bases: `int64 [W]`, contiguous: address, in this process, of every rank's legacy rows, or
            of its tagged rows when `generations` is given. Taken on trust: `ReceiveStorage` makes them.
        errors: `int32 [>= 1]`, contiguous: failed waits, counted; with four words or more the first
            failure also leaves `slot + 1`, a bit mask of the destination ranks, and the token.
        slot: slot set, 0 to 2.
        rank, world_size, heads_per_rank, capacity: the receive storage's; `T <= capacity`.
        force_begin_blocks, force_end_blocks: blocks forced at the begin and the end; sum <= 16.
        spin_limit: polls after which a wait fails, `0 < spin_limit < 2**31`.
        enable_pdl: section 11.
        generations: None for legacy rows; for tagged rows this rank's counters, contiguous
            `int32 (3, W * hpr, capacity)`: those of the slot and of `t < T` are advanced by one.
        index_scale, index_offset: block of a column; 1 or 2, and below that.
        backend: section 12. The torch backend publishes from CPU tensors only.

    Written: rows `t < T` of the four destinations, padding rows included. Legacy rows wait until the
    owner has taken the row before (ready word 0); one that is not taken within `spin_limit` polls is
    not stored and counts in `errors[0]`. Tagged rows do not wait.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.topk_select_publish(
            scores,
            num_valid_pages,
            recv_bases,
            errors,
            slot=slot,
            rank=rank,
            world_size=world_size,
            heads_per_rank=heads_per_rank,
            capacity=capacity,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            spin_limit=spin_limit,
            enable_pdl=enable_pdl,
            generations=generations,
            index_scale=index_scale,
            index_offset=index_offset,
            backend=backend,
        )
        return
    checks.publish(
        scores,
        num_valid_pages,
        recv_bases,
        errors,
        generations,
        slot=slot,
        rank=rank,
        world_size=world_size,
        heads_per_rank=heads_per_rank,
        capacity=capacity,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        index_scale=index_scale,
        index_offset=index_offset,
    )
    dispatch.implementation("topk_select_publish", backend, scores.device)(
        scores,
        num_valid_pages,
        recv_bases,
        errors,
        slot=slot,
        rank=rank,
        world_size=world_size,
        heads_per_rank=heads_per_rank,
        capacity=capacity,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        generations=generations,
        index_scale=index_scale,
        index_offset=index_offset,
    )


def msa_icp_merge_candidates(
    recv_slot: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int = 1 << 26,
    enable_pdl: bool = False,
    expected_generations: Tensor | None = None,
    prefill: bool = False,
    backend: str = "cake",
) -> None:
    """Merge the ranks' candidates of every owned head into the final Top16 (sections 5 and 6).

    Ids outside `[0, min(num_valid_pages[t], 8192))` are dropped, a block that several ranks sent keeps
    its largest score, and the ranking is that of the whole selection, so the result equals the one
    of a rank that has all the keys.

    Args:
        recv_slot: one slot set of the receive storage, unit last stride: `int32 [W, hpr, capacity, 33]`
            or, with `expected_generations`, `int64 [W, hpr, capacity, 32]`. In a function that
            `torch.compile` traces only with `prefill`; `merge_received` is for the others.
        num_valid_pages: `int32 [T]`, contiguous: the token's block count, 0 for padding.
        output: `int32 [T, hpr, 16]`, unit last stride, rows apart from each other, `T <= capacity`;
            written.
        errors: as for `msa_icp_topk_select_publish`; the mask is that of the source ranks.
        init_blocks, local_blocks: blocks forced at the begin and the end; sum <= 16.
        spin_limit: polls after which a wait fails, `0 < spin_limit < 2**31`.
        enable_pdl: section 11; not with `prefill`.
        expected_generations: for tagged rows, contiguous `int32 [hpr, capacity]`: the slot set's
            counters, advanced by one for `t < T`; not with `prefill`.
        prefill: the rows came by an all-to-all: nothing is waited for and nothing is cleared.
        backend: section 12. The torch backend merges CPU tensors only.

    Written: `output[t, h]`: the ids ascending, then a tail of -1. `num_valid_pages[t] <= 0` writes all
    -1 in decode and `[0, -1, ...]` in prefill. Legacy ready words are cleared once read. A row that
    does not come within `spin_limit` polls is written as all -1, clears nothing, and counts once in
    `errors[0]`; after a failure every wait gives up after one poll until the storage is reset.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        if prefill and expected_generations is None:
            torch.ops.msa_icp.merge_prefill(
                recv_slot,
                num_valid_pages,
                output,
                errors,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
                spin_limit=spin_limit,
                enable_pdl=enable_pdl,
                backend=backend,
            )
            return
        torch._dynamo.graph_break(  # an error with fullgraph; without, what follows runs eagerly
            msg="msa_icp_merge_candidates: torch.compile may copy recv_slot, and peers would write into what "
            "is left behind; call merge_received(comm, ...) in the compiled function. prefill=True is fine"
        )
    merge_rows(
        recv_slot,
        num_valid_pages,
        output,
        errors,
        slot=None,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        expected_generations=expected_generations,
        prefill=prefill,
        backend=backend,
    )


def merge_rows(
    recv_slot: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    slot: int | None,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    expected_generations: Tensor | None,
    prefill: bool,
    backend: str,
) -> None:
    """`msa_icp_merge_candidates` of slot set `slot`; None: of the one in whose place the rows lie."""
    checks.merge(
        recv_slot,
        num_valid_pages,
        output,
        errors,
        expected_generations,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        prefill=prefill,
    )
    dispatch.implementation("merge_candidates", backend, recv_slot.device)(
        recv_slot,
        num_valid_pages,
        output,
        errors,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        expected_generations=expected_generations,
        prefill=prefill,
        slot=rows.slot_of(recv_slot) if slot is None else slot,
    )


def msa_icp_decode_score_publish(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_valid_pages: Tensor,
    pool: Tensor,
    recv_bases: Tensor,
    errors: Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    slot: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int = 1 << 26,
    generations: Tensor | None = None,
    enable_pdl: bool = True,
    backend: str = "cake",
) -> None:
    """Score and publish in one call, without score rows (section 6).

    The receive rows equal those of `msa_icp_decode_index_score_sharded` into one score column per
    block-table column (-inf where it writes none) followed by `msa_icp_topk_select_publish` with the
    layout's scale and offset. Columns past the 8192nd hold no candidate.

    Args:
        index_q, index_k, block_table, seq_lens, rank, world_size, page_size, decode_query_len: as for
            `msa_icp_decode_index_score_sharded`.
        num_valid_pages, recv_bases, errors, slot, capacity, force_begin_blocks, force_end_blocks,
            spin_limit, generations: as for `msa_icp_topk_select_publish`; `heads_per_rank` is
            `4 / world_size`.
        pool: scratch, contiguous 16-byte aligned `uint8`, a multiple of 8 and at least
            `msa_icp_decode_pool_bytes(max_decode_tokens=T)` bytes; its contents mean nothing before or
            after.
        enable_pdl: section 11.
        backend: section 12. The torch backend publishes from CPU tensors only.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.decode_score_publish(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            pool,
            recv_bases,
            errors,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            decode_query_len=decode_query_len,
            slot=slot,
            capacity=capacity,
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            spin_limit=spin_limit,
            generations=generations,
            enable_pdl=enable_pdl,
            backend=backend,
        )
        return
    shard = checks.score_publish(
        index_q,
        index_k,
        block_table,
        seq_lens,
        num_valid_pages,
        pool,
        recv_bases,
        errors,
        generations,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=decode_query_len,
        slot=slot,
        capacity=capacity,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
    )
    dispatch.implementation("decode_score_publish", backend, index_q.device)(
        index_q,
        index_k,
        block_table,
        seq_lens,
        num_valid_pages,
        pool,
        recv_bases,
        errors,
        layout=shard,
        decode_query_len=decode_query_len,
        slot=slot,
        capacity=capacity,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        spin_limit=spin_limit,
        generations=generations,
        enable_pdl=enable_pdl,
    )


def write_index_keys(
    keys: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    index_k: Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    backend: str = "cake",
) -> None:
    """Write new index keys into this rank's rows of the shard, in place (section 2; ours).

    Every rank calls it with the same keys and keeps its own share of them.

    Args:
        keys: `float8_e4m3fn [n, 128]`, contiguous, 16-byte aligned: the new keys.
        positions: `int32 [n]`, contiguous: position of each key in its sequence.
        request_index: `int32 [n]`, contiguous: row of `block_table` of each key's request. For a
            decode batch, key `t` belongs to request `t // decode_query_len`.
        block_table: `int32 [B, columns]`, unit last stride.
        index_k: the K shard, as for `msa_icp_decode_index_score_sharded`; written. Under `torch.compile`,
            shards of several layers in one record must be cut out of one `float8_e4m3fn` view of it.
        rank, world_size, page_size: which shard.
        backend: section 12.

    Written: the rows of `index_k` that this rank holds of the given positions. A key whose position,
    request, column or page id is out of range is skipped. Two keys for one row: either may stay.

    Raises:
        ValueError: an argument breaks a rule, or the backend does not serve the device; nothing has
            been written.
    """
    if is_dynamo_compiling():
        torch.ops.msa_icp.write_index_keys(
            keys,
            positions,
            request_index,
            block_table,
            index_k,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            backend=backend,
        )
        return
    shard = checks.write_keys(
        keys,
        positions,
        request_index,
        block_table,
        index_k,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
    )
    dispatch.implementation("write_index_keys", backend, keys.device)(
        keys, positions, request_index, block_table, index_k, layout=shard
    )
