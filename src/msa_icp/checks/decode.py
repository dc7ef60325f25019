"""What the decode entry points and the cache functions take: one function each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..geometry import (
    HEAD_DIM,
    LEGACY_WORDS,
    MAX_BLOCKS,
    MAX_QUERY_ROWS,
    MAX_SELECT_COLUMNS,
    NUM_HEADS,
    PAGE_SIZES,
    SLOT_SETS,
    TAGGED_WORDS,
    TOP_K,
    WORLD_SIZES,
    ShardLayout,
    comm_layout,
    decode_pool_bytes,
)
from .arguments import (
    FP8,
    at_least,
    flag,
    forced_blocks,
    group_shape,
    integer,
    k_shard,
    layout,
    one_of,
    refuse,
    score_rows,
    separate_rows,
    tensor,
    unit_last_stride,
    valid_pages_of,
)
from .remember import remember

_REQUESTS = "seq_lens.shape[0]"
_TOKENS = "seq_lens.shape[0] * decode_query_len"


def _same_device(index_q: Any) -> torch.device:
    if not isinstance(index_q, Tensor):
        refuse("index_q", "a torch.Tensor", type(index_q).__name__)
    return index_q.device


def decode_inputs(
    index_q: Any,
    index_k: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    rank: Any,
    world_size: Any,
    page_size: Any,
    decode_query_len: Any,
) -> ShardLayout:
    """What both decode scorers read."""
    shard = layout(rank, world_size, page_size)
    query_len = integer("decode_query_len", decode_query_len, 1, MAX_QUERY_ROWS // NUM_HEADS)
    device = _same_device(index_q)
    lens = tensor("seq_lens", seq_lens, torch.int32, ("requests",), device=device, contiguous=True)
    requests = lens.shape[0]
    of_tokens = (requests * query_len, NUM_HEADS, HEAD_DIM)
    tensor("index_q", index_q, FP8, of_tokens, contiguous=True, aligned=16, first=_TOKENS)
    k_shard(index_k, shard, device)
    of_requests = (requests, "columns")
    table = tensor("block_table", block_table, torch.int32, of_requests, device=device, first=_REQUESTS)
    at_least("block_table", table, 1, 1)
    unit_last_stride("block_table", table)
    return shard


@remember
def decode_score(
    index_q: Any,
    index_k: Any,
    block_table: Any,
    seq_lens: Any,
    score_out: Any,
    *,
    rank: Any,
    world_size: Any,
    page_size: Any,
    decode_query_len: Any,
    max_decode_query_len: Any,
    enable_pdl: Any,
) -> ShardLayout:
    """`msa_icp_decode_index_score_sharded`."""
    longest = integer("max_decode_query_len", max_decode_query_len, 1, MAX_QUERY_ROWS // NUM_HEADS)
    query_len = integer("decode_query_len", decode_query_len, 1, longest)
    shard = decode_inputs(
        index_q,
        index_k,
        block_table,
        seq_lens,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=query_len,
    )
    rows = score_rows("score_out", score_out, seq_lens.shape[0] * query_len, index_q.device, _TOKENS)
    columns = rows.shape[2]
    if rows.requires_grad:
        refuse("score_out.requires_grad", "False: it is written in place", True)
    if not 0 < columns <= MAX_BLOCKS or columns % 4:
        refuse("score_out.shape[2]", f"a multiple of 4 from 4 to {MAX_BLOCKS}", columns)
    flag("enable_pdl", enable_pdl)
    return shard


def _exchange_words(errors: Any, spin_limit: Any, device: torch.device) -> None:
    words = tensor("errors", errors, torch.int32, ("words",), device=device, contiguous=True)
    at_least("errors", words, 0, 1)
    integer("spin_limit", spin_limit, 1, 2**31 - 1)


def _publish_target(
    recv_bases: Any,
    errors: Any,
    generations: Any,
    *,
    slot: Any,
    rank: Any,
    world_size: Any,
    heads_per_rank: Any,
    capacity: Any,
    spin_limit: Any,
    device: torch.device,
) -> None:
    world, heads, rows = group_shape(world_size, heads_per_rank, capacity)
    integer("slot", slot, 0, SLOT_SETS - 1)
    integer("rank", rank, 0, world - 1)
    tensor("recv_bases", recv_bases, torch.int64, (world,), device=device, contiguous=True)
    _exchange_words(errors, spin_limit, device)
    if generations is not None:
        shape = comm_layout(world, heads, rows)["generations_shape"]
        tensor("generations", generations, torch.int32, shape, device=device, contiguous=True)


@remember
def publish(
    scores: Any,
    num_valid_pages: Any,
    recv_bases: Any,
    errors: Any,
    generations: Any,
    *,
    slot: Any,
    rank: Any,
    world_size: Any,
    heads_per_rank: Any,
    capacity: Any,
    force_begin_blocks: Any,
    force_end_blocks: Any,
    spin_limit: Any,
    enable_pdl: Any,
    index_scale: Any,
    index_offset: Any,
) -> None:
    """`msa_icp_topk_select_publish`."""
    rows = score_rows("scores", scores, "tokens")
    tokens, _, columns = rows.shape
    if not 0 < columns < MAX_SELECT_COLUMNS:
        refuse("scores.shape[2]", f"from 1 to {MAX_SELECT_COLUMNS - 1}", columns)
    valid_pages_of(num_valid_pages, tokens, rows.device)
    _publish_target(
        recv_bases,
        errors,
        generations,
        slot=slot,
        rank=rank,
        world_size=world_size,
        heads_per_rank=heads_per_rank,
        capacity=capacity,
        spin_limit=spin_limit,
        device=rows.device,
    )
    if tokens > capacity:
        refuse("scores.shape[0]", f"at most capacity = {capacity} tokens", tokens)
    forced_blocks("force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks)
    scale = one_of("index_scale", index_scale, (1, 2))
    integer("index_offset", index_offset, 0, scale - 1)
    flag("enable_pdl", enable_pdl)


def comm_rows(comm: Any) -> None:
    """`register_comm`: the receive rows of a communicator."""
    slots = (SLOT_SETS, "world_size", "heads_per_rank", "capacity")
    fields = (("recv", torch.int32, LEGACY_WORDS), ("tagged_recv", torch.int64, TAGGED_WORDS))
    found = [
        tensor(f"comm.{name}", getattr(comm, name, None), dtype, (*slots, words), contiguous=True)
        for name, dtype, words in fields
    ]
    world, heads, capacity = found[0].shape[1:4]
    group_shape(world, heads, capacity)
    shape = comm_layout(world, heads, capacity)["tagged_shape"]
    tensor("comm.tagged_recv", found[1], torch.int64, shape, device=found[0].device)


@remember
def merge(
    recv_slot: Any,
    num_valid_pages: Any,
    output: Any,
    errors: Any,
    expected_generations: Any,
    *,
    init_blocks: Any,
    local_blocks: Any,
    spin_limit: Any,
    enable_pdl: Any,
    prefill: Any,
) -> None:
    """`msa_icp_merge_candidates`."""
    flag("enable_pdl", enable_pdl)
    flag("prefill", prefill)
    if prefill and expected_generations is not None:
        refuse("expected_generations", "None for prefill=True, whose rows carry no generation", "a tensor")
    if prefill and enable_pdl:
        refuse("enable_pdl", "False for prefill=True", True)
    tagged = expected_generations is not None
    words, dtype = (TAGGED_WORDS, torch.int64) if tagged else (LEGACY_WORDS, torch.int32)
    if (
        isinstance(recv_slot, Tensor)
        and recv_slot.dtype in (torch.int32, torch.int64)
        and recv_slot.dtype != dtype
    ):
        refuse(
            "recv_slot",
            "int64 (tagged rows) with expected_generations, int32 (legacy rows) without",
            f"{recv_slot.dtype} {'with' if tagged else 'without'} expected_generations",
        )
    rows = tensor("recv_slot", recv_slot, dtype, ("world_size", "heads_per_rank", "capacity", words))
    world, heads, capacity, _ = rows.shape
    one_of("recv_slot.shape[0]", world, WORLD_SIZES)
    one_of("recv_slot.shape[1]", heads, (NUM_HEADS // world,))
    separate_rows("recv_slot", rows)
    out = tensor("output", output, torch.int32, ("tokens", heads, TOP_K), device=rows.device)
    separate_rows("output", out)
    tokens = out.shape[0]
    if tokens > capacity:
        refuse("output.shape[0]", f"at most recv_slot.shape[2] = {capacity} tokens", tokens)
    valid_pages_of(num_valid_pages, tokens, rows.device)
    if tagged:
        tensor(
            "expected_generations",
            expected_generations,
            torch.int32,
            (heads, capacity),
            device=rows.device,
            contiguous=True,
        )
    _exchange_words(errors, spin_limit, rows.device)
    forced_blocks("init_blocks", init_blocks, "local_blocks", local_blocks)


@remember
def score_publish(
    index_q: Any,
    index_k: Any,
    block_table: Any,
    seq_lens: Any,
    num_valid_pages: Any,
    pool: Any,
    recv_bases: Any,
    errors: Any,
    generations: Any,
    *,
    rank: Any,
    world_size: Any,
    page_size: Any,
    decode_query_len: Any,
    slot: Any,
    capacity: Any,
    force_begin_blocks: Any,
    force_end_blocks: Any,
    spin_limit: Any,
    enable_pdl: Any,
) -> ShardLayout:
    """`msa_icp_decode_score_publish`."""
    shard = decode_inputs(
        index_q,
        index_k,
        block_table,
        seq_lens,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=decode_query_len,
    )
    tokens = index_q.shape[0]
    device = index_q.device
    valid_pages_of(num_valid_pages, tokens, device)
    bytes_ = tensor("pool", pool, torch.uint8, ("bytes",), device=device, contiguous=True, aligned=16)
    need = decode_pool_bytes(tokens, NUM_HEADS)
    if bytes_.shape[0] % 8 or bytes_.shape[0] < need:
        refuse(
            "pool.shape[0]", f"a multiple of 8 of at least {need} bytes for {tokens} tokens", bytes_.shape[0]
        )
    _publish_target(
        recv_bases,
        errors,
        generations,
        slot=slot,
        rank=rank,
        world_size=world_size,
        heads_per_rank=NUM_HEADS // shard.world_size,
        capacity=capacity,
        spin_limit=spin_limit,
        device=device,
    )
    if tokens > capacity:
        refuse("index_q.shape[0]", f"at most capacity = {capacity} tokens", tokens)
    forced_blocks("force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks)
    flag("enable_pdl", enable_pdl)
    return shard


@remember
def write_keys(
    keys: Any,
    positions: Any,
    request_index: Any,
    block_table: Any,
    index_k: Any,
    *,
    rank: Any,
    world_size: Any,
    page_size: Any,
) -> ShardLayout:
    """`write_index_keys`."""
    shard = layout(rank, world_size, page_size)
    new = tensor("keys", keys, FP8, ("n", HEAD_DIM), contiguous=True, aligned=16)
    count = new.shape[0]
    tensor("positions", positions, torch.int32, (count,), device=new.device, contiguous=True)
    tensor("request_index", request_index, torch.int32, (count,), device=new.device, contiguous=True)
    table = tensor("block_table", block_table, torch.int32, ("requests", "columns"), device=new.device)
    unit_last_stride("block_table", table)
    k_shard(index_k, shard, new.device)
    return shard


def shard_cache(cache: Any, rank: Any, world_size: Any) -> ShardLayout:
    """`shard_index_keys`."""
    whole = tensor("cache", cache, FP8, ("pages", "page_size", HEAD_DIM))
    one_of("cache.shape[1]", whole.shape[1], PAGE_SIZES)
    return layout(rank, world_size, whole.shape[1])


def valid_pages(seq_lens: Any, decode_query_len: Any, out: Any) -> None:
    """`num_valid_pages`."""
    query_len = integer("decode_query_len", decode_query_len, 1, MAX_QUERY_ROWS // NUM_HEADS)
    lens = tensor("seq_lens", seq_lens, torch.int32, ("requests",), contiguous=True)
    if out is not None:
        tensor("out", out, torch.int32, (lens.shape[0] * query_len,), device=lens.device, contiguous=True)
