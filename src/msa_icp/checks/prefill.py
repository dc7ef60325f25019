"""What the prefill entry points take: one function each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..geometry import (
    BLOCK,
    HEAD_DIM,
    LEGACY_WORDS,
    MAX_COLUMNS,
    MAX_ITEM_COLUMNS,
    MAX_ITEMS,
    MAX_SEGMENTS,
    NUM_HEADS,
    PAGE_SIZES,
    PLAN_WORKSPACE_BYTES,
    WORLD_SIZES,
    ShardLayout,
    block_columns,
    prefill_items,
    prefill_pool_bytes,
    shard_columns,
    work_info_numel,
)
from ..prefill_plan import MSAIcpScorePlan
from ..prefill_plan import workers as plan_workers
from .arguments import (
    FP8,
    at_least,
    finite,
    flag,
    forced_blocks,
    integer,
    k_shard,
    one_of,
    refuse,
    score_rows,
    separate_rows,
    tensor,
    unit_last_stride,
    valid_pages_of,
)
from .arguments import device as any_device

_INT32_MAX = 2**31 - 1


def _window_limits(
    total_q: int, batch: int, max_seq_len: int, total_q_name: str, batch_name: str, max_seq_len_name: str
) -> None:
    """What a plan can hold (contract, section 7); the names are those of the caller's arguments."""
    if batch > MAX_SEGMENTS:
        refuse(batch_name, f"at most {MAX_SEGMENTS} segments", batch)
    items, columns = prefill_items(total_q, batch), block_columns(max_seq_len)
    if items > MAX_ITEMS:
        refuse(
            total_q_name,
            f"so few tokens that min(ceil(total_q / 64) + batch - 1, total_q) is at most {MAX_ITEMS} items",
            f"{total_q} in {batch} segments, {items} items",
        )
    if columns > MAX_COLUMNS:
        refuse(
            max_seq_len_name, f"at most {MAX_COLUMNS * BLOCK} keys, {MAX_COLUMNS} columns", f"{max_seq_len}"
        )
    if items * columns > MAX_ITEM_COLUMNS:
        refuse(
            f"{total_q_name} and {max_seq_len_name}",
            f"so few that items * columns is at most {MAX_ITEM_COLUMNS}",
            f"{items} * {columns}",
        )


def plan_device(name: str, value: Any) -> torch.device:
    """The device of a plan, with its index where it is a CUDA device."""
    where = any_device(name, value)
    if where.type not in ("cpu", "cuda"):
        refuse(name, "a CPU or a CUDA device", where)
    if where.type == "cuda":
        count = torch.cuda.device_count()
        if where.index is None and count:
            return torch.device("cuda", torch.cuda.current_device())
        if not count or where.index >= count:
            refuse(name, f"one of this machine's {count} CUDA devices, or a CPU", where)
    return where


def segments(
    qo_segment_lens: Any, kv_segment_lens: Any, num_qo_heads: Any, qo_offset: Any
) -> tuple[int, int, int]:
    """`msa_icp_index_score_sharded_plan`: total, and longest, query tokens and most keys, each at least 1."""
    one_of("num_qo_heads", num_qo_heads, (NUM_HEADS,))
    cpu = torch.device("cpu")
    lens = tensor("qo_segment_lens", qo_segment_lens, torch.int32, ("batch",), device=cpu)
    at_least("qo_segment_lens", lens, 0, 1)
    batch = lens.shape[0]
    keys = tensor("kv_segment_lens", kv_segment_lens, torch.int32, (batch,), device=cpu)
    first = tensor("qo_offset", qo_offset, torch.int32, (batch,), device=cpu)
    for name, values in (("qo_segment_lens", lens), ("kv_segment_lens", keys), ("qo_offset", first)):
        if int(values.min()) < 0:
            refuse(name, "non-negative everywhere", int(values.min()))
    for name, total in (
        ("qo_segment_lens", lens.sum(dtype=torch.int64)),
        ("kv_segment_lens", keys.sum(dtype=torch.int64)),
        ("qo_offset + qo_segment_lens", (first.to(torch.int64) + lens).max()),
    ):
        if int(total) > _INT32_MAX:
            what = "everywhere" if "+" in name else "in all"
            refuse(name, f"at most {_INT32_MAX} {what}", int(total))
    total_q, longest = max(1, int(lens.sum(dtype=torch.int64))), max(1, int(lens.max()))
    most_keys = max(1, int(keys.max()))
    _window_limits(
        total_q, batch, most_keys, "qo_segment_lens", "qo_segment_lens.shape[0]", "kv_segment_lens"
    )
    return total_q, longest, most_keys


def segments_on_device(
    qo_segment_lens: Any,
    kv_segment_lens: Any,
    qo_segment_offsets: Any,
    kv_segment_offsets: Any,
    qo_offset: Any,
    num_qo_heads: Any,
    *,
    total_q: Any,
    max_query_len: Any,
    max_seq_len: Any,
    packed_work_range: Any,
    packed_work_info: Any,
    workspace: Any,
) -> None:
    """`msa_icp_index_score_sharded_plan_device`."""
    heads = one_of("num_qo_heads", num_qo_heads, (NUM_HEADS,))
    tokens = integer("total_q", total_q, 1, _INT32_MAX)
    integer("max_query_len", max_query_len, 1, tokens)
    keys = integer("max_seq_len", max_seq_len, 1, _INT32_MAX)
    lens = tensor("qo_segment_lens", qo_segment_lens, torch.int32, ("batch",), contiguous=True)
    at_least("qo_segment_lens", lens, 0, 1)
    batch = lens.shape[0]
    _segment_tensors(lens, kv_segment_lens, qo_segment_offsets, kv_segment_offsets, qo_offset, "")
    _window_limits(tokens, batch, keys, "total_q", "qo_segment_lens.shape[0]", "max_seq_len")
    shares = plan_workers(lens.device)
    tensor(
        "packed_work_range", packed_work_range, torch.int64, (shares,), device=lens.device, contiguous=True
    )
    info = tensor(
        "packed_work_info", packed_work_info, torch.int64, ("words",), device=lens.device, contiguous=True
    )
    at_least("packed_work_info", info, 0, work_info_numel(tokens, batch, heads))
    space = tensor("workspace", workspace, torch.uint8, ("bytes",), device=lens.device, contiguous=True)
    at_least("workspace", space, 0, PLAN_WORKSPACE_BYTES)


def _segment_tensors(
    lens: Tensor,
    kv_segment_lens: Any,
    qo_segment_offsets: Any,
    kv_segment_offsets: Any,
    qo_offset: Any,
    prefix: str,
) -> None:
    batch = lens.shape[0]
    for name, value, size in (
        ("kv_segment_lens", kv_segment_lens, batch),
        ("qo_segment_offsets", qo_segment_offsets, batch + 1),
        ("kv_segment_offsets", kv_segment_offsets, batch + 1),
        ("qo_offset", qo_offset, batch),
    ):
        tensor(prefix + name, value, torch.int32, (size,), device=lens.device, contiguous=True)


def plan_storage(num_qo_heads: Any, total_q: Any, batch: Any, device: Any) -> dict[str, int]:
    """`msa_icp_index_score_plan_storage`: the sizes, for arguments within the limits."""
    heads = one_of("num_qo_heads", num_qo_heads, (NUM_HEADS,))
    tokens = integer("total_q", total_q, 1, _INT32_MAX)
    segments_ = integer("batch", batch, 1)
    where = plan_device("device", device)
    _window_limits(tokens, segments_, 1, "total_q", "batch", "max_seq_len")
    return {
        "work_range_numel": plan_workers(where),
        "work_info_numel": work_info_numel(tokens, segments_, heads),
        "workspace_bytes": PLAN_WORKSPACE_BYTES,
    }


def pool_bytes(total_q: Any, batch: Any, device: Any, num_heads: Any) -> int:
    """`msa_icp_prefill_pool_bytes`."""
    heads = one_of("num_heads", num_heads, (NUM_HEADS,))
    shares = plan_storage(heads, total_q, batch, device)["work_range_numel"]
    return prefill_pool_bytes(int(total_q), int(batch), shares, heads)


def score_plan(plan: Any) -> MSAIcpScorePlan:
    """A plan whose numbers and tensors agree: a kernel takes its bounds from them."""
    if not isinstance(plan, MSAIcpScorePlan):
        refuse("plan", "an MSAIcpScorePlan", type(plan).__name__)
    lens = tensor("plan.qo_segment_lens", plan.qo_segment_lens, torch.int32, ("batch",), contiguous=True)
    batch = integer("plan.batch", plan.batch, 1)
    if lens.shape[0] != batch:
        refuse("plan.batch", f"the {lens.shape[0]} segments of plan.qo_segment_lens", batch)
    _segment_tensors(
        lens,
        plan.kv_segment_lens,
        plan.qo_segment_offsets,
        plan.kv_segment_offsets,
        plan.qo_offset,
        "plan.",
    )
    heads = one_of("plan.num_qo_heads", plan.num_qo_heads, (NUM_HEADS,))
    total_q = integer("plan.total_q", plan.total_q, 1, _INT32_MAX)
    integer("plan.max_query_len", plan.max_query_len, 1, total_q)
    columns = integer("plan.columns", plan.columns, 1, MAX_COLUMNS)
    _window_limits(total_q, batch, columns * BLOCK, "plan.total_q", "plan.batch", "plan.columns")
    device = lens.device
    shares = tensor(
        "plan.packed_work_range",
        plan.packed_work_range,
        torch.int64,
        ("workers",),
        device=device,
        contiguous=True,
    )
    at_least("plan.packed_work_range", shares, 0, 1)
    info = tensor(
        "plan.packed_work_info",
        plan.packed_work_info,
        torch.int64,
        ("words",),
        device=device,
        contiguous=True,
    )
    at_least("plan.packed_work_info", info, 0, work_info_numel(total_q, batch, heads))
    return plan


def _score_inputs(
    q: Any, k: Any, block_table: Any, plan: Any, *, rank: Any, tp: Any, compact: Any
) -> tuple[MSAIcpScorePlan, ShardLayout]:
    """What both prefill scorers read. The page size is that of the K shard."""
    planned = score_plan(plan)
    device = planned.qo_segment_lens.device
    world = one_of("tp", tp, WORLD_SIZES)
    own = integer("rank", rank, 0, world - 1)
    flag("compact", compact)
    tensor("q", q, FP8, (planned.total_q, NUM_HEADS, HEAD_DIM), device=device, contiguous=True, aligned=16)
    keys = tensor("k", k, FP8, ("pages", "rows", HEAD_DIM), device=device)
    rows = tuple(size // world for size in PAGE_SIZES)
    shard = ShardLayout(world, own, one_of("k.shape[1]", keys.shape[1], rows) * world)
    k_shard(keys, shard, device, name="k")
    table = tensor("block_table", block_table, torch.int32, (planned.batch, "columns"), device=device)
    at_least("block_table", table, 1, shard_columns(planned.columns, shard.page_size))
    unit_last_stride("block_table", table)
    return planned, shard


def prefill_score(
    q: Any,
    k: Any,
    block_table: Any,
    plan: Any,
    *,
    rank: Any,
    max_score: Any,
    sm_scale: Any,
    initialize: Any,
    tp: Any,
    compact: Any,
    enable_pdl: Any,
) -> ShardLayout:
    """`msa_icp_index_score_sharded`."""
    planned, shard = _score_inputs(q, k, block_table, plan, rank=rank, tp=tp, compact=compact)
    if compact and shard.page_size == BLOCK:
        refuse("compact", f"False for pages of {BLOCK} keys, one block each", True)
    rows = score_rows("max_score", max_score, planned.total_q, planned.qo_segment_lens.device)
    if rows.requires_grad:
        refuse("max_score.requires_grad", "False: it is written in place", True)
    columns = shard_columns(planned.columns, shard.page_size) if compact else planned.columns
    at_least("max_score", rows, 2, columns)
    finite("sm_scale", sm_scale)
    flag("initialize", initialize)
    flag("enable_pdl", enable_pdl)
    return shard


def _carrier(carrier: Any, tokens: int, device: torch.device) -> Tensor:
    rows = tensor("carrier", carrier, torch.int32, (NUM_HEADS, tokens, LEGACY_WORDS), device=device)
    unit_last_stride("carrier", rows)
    if rows.stride(1) < LEGACY_WORDS:
        refuse("carrier.stride(1)", f"at least the {LEGACY_WORDS} words of a row", rows.stride(1))
    if rows.stride(0) < tokens * rows.stride(1):
        refuse(
            "carrier.stride(0)",
            f"at least {tokens} * stride(1) = {tokens * rows.stride(1)}",
            rows.stride(0),
        )
    return rows


def prefill_select(
    scores: Any,
    num_valid_pages: Any,
    carrier: Any,
    *,
    force_begin_blocks: Any,
    force_end_blocks: Any,
    index_scale: Any,
    index_offset: Any,
) -> None:
    """`msa_icp_topk_select_prefill`."""
    rows = score_rows("scores", scores, "tokens")
    at_least("scores", rows, 2, 1)
    valid_pages_of(num_valid_pages, rows.shape[0], rows.device)
    _carrier(carrier, rows.shape[0], rows.device)
    forced_blocks("force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks)
    scale = one_of("index_scale", index_scale, (1, 2))
    integer("index_offset", index_offset, 0, scale - 1)


def prefill_fused(
    q: Any,
    k: Any,
    block_table: Any,
    plan: Any,
    num_valid_pages: Any,
    pool: Any,
    carrier: Any,
    *,
    rank: Any,
    tp: Any,
    compact: Any,
    force_begin_blocks: Any,
    force_end_blocks: Any,
    enable_pdl: Any,
) -> ShardLayout:
    """`msa_icp_prefill_score_select`."""
    planned, shard = _score_inputs(q, k, block_table, plan, rank=rank, tp=tp, compact=compact)
    if compact != (shard.page_size != BLOCK):
        refuse("compact", f"{not compact} for pages of {shard.page_size} keys", compact)
    device = planned.qo_segment_lens.device
    valid_pages_of(num_valid_pages, planned.total_q, device)
    space = tensor("pool", pool, torch.uint8, ("bytes",), device=device, contiguous=True, aligned=16)
    workers = planned.packed_work_range.shape[0]
    need = prefill_pool_bytes(planned.total_q, planned.batch, workers, planned.num_qo_heads)
    if space.shape[0] % 8 or space.shape[0] < need:
        must = f"a multiple of 8 of at least {need} bytes for the plan and its {workers} workers"
        refuse("pool.shape[0]", must, space.shape[0])
    _carrier(carrier, planned.total_q, device)
    forced_blocks("force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks)
    flag("enable_pdl", enable_pdl)
    return shard


# ---------------------------------------------------------------- the exchange


def _sent_rows(name: str, carrier: Any) -> Tensor:
    """A carrier whose heads can be sent from where they lie."""
    rows = tensor(name, carrier, torch.int32, (NUM_HEADS, "tokens", LEGACY_WORDS))
    tokens = rows.shape[1]
    unit_last_stride(name, rows)
    if tokens > 1 and rows.stride(1) != LEGACY_WORDS:
        refuse(f"{name}.stride(1)", f"the {LEGACY_WORDS} words of a row", rows.stride(1))
    if rows.stride(0) < tokens * LEGACY_WORDS:
        refuse(
            f"{name}.stride(0)",
            f"at least {tokens} * {LEGACY_WORDS} = {tokens * LEGACY_WORDS}",
            rows.stride(0),
        )
    return rows


def _received_rows(name: str, received: Any, world_size: int, carrier: Tensor) -> Tensor:
    """A receive buffer for the carriers of `world_size` ranks like `carrier`."""
    shape = (world_size, NUM_HEADS // world_size, carrier.shape[1], LEGACY_WORDS)
    rows = tensor(name, received, torch.int32, shape, device=carrier.device)
    separate_rows(name, rows)
    if shape[2] > 1 and rows.stride(2) != LEGACY_WORDS:
        refuse(f"{name}.stride(2)", f"the {LEGACY_WORDS} words of a row", rows.stride(2))
    return rows


def _memory_of_their_own(sent: dict[str, Tensor], received: dict[str, Tensor]) -> None:
    """What is received lies on nothing that is sent, and on nothing else that is received."""
    pieces = sorted(
        (begin, begin + rows.shape[-2] * LEGACY_WORDS * rows.element_size(), name in received, name)
        for name, rows in (*sent.items(), *received.items())
        for begin in _heads_at(rows)
    )
    ends = {False: (0, ""), True: (0, "")}  # the furthest end so far of what is sent, and of what is received
    for begin, end, written, name in pieces:
        for other_written, (other_end, other) in ends.items():
            if begin < min(end, other_end) and (written or other_written):
                mine, theirs = (name, other) if written else (other, name)
                refuse(mine, "in memory of its own", f"on rows of {theirs}")
        ends[written] = max(ends[written], (end, name))


def _heads_at(rows: Tensor) -> list[int]:
    """Addresses of the heads' rows `[T, 33]`; none where there are none, or no memory."""
    base = rows.data_ptr()
    if not base or not rows.numel():
        return []
    offsets = [0]
    for size, stride in zip(rows.shape[:-2], rows.stride()[:-2], strict=True):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return [base + offset * rows.element_size() for offset in offsets]


def exchange(carrier: Any, received: Any, *, world_size: int) -> Tensor:
    """`exchange_prefill` of one rank of a group of `world_size`; returns `received`."""
    if world_size not in WORLD_SIZES:
        refuse("group", f"one of {' or '.join(map(str, WORLD_SIZES))} ranks", f"one of {world_size}")
    sent = _sent_rows("carrier", carrier)
    rows = _received_rows("received", received, world_size, sent)
    _memory_of_their_own({"carrier": sent}, {"received": rows})
    return rows


def local_exchange(carrier: Any, received: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """`exchange_prefill` of ranks that share this process; returns both."""
    if not isinstance(carrier, Sequence):
        refuse("carrier", "a torch.Tensor, or a sequence of one for each rank", type(carrier).__name__)
    if len(carrier) not in WORLD_SIZES:
        refuse(
            "carrier", f"those of {' or '.join(map(str, WORLD_SIZES))} ranks", f"a sequence of {len(carrier)}"
        )
    if not isinstance(received, Sequence) or len(received) != len(carrier):
        was = f"one of {len(received)}" if isinstance(received, Sequence) else type(received).__name__
        refuse("received", f"a sequence of {len(carrier)} tensors, as carrier is", was)
    first = _sent_rows("carrier[0]", carrier[0])
    for rank, (sent, rows) in enumerate(zip(carrier, received, strict=True)):
        tensor(f"carrier[{rank}]", sent, torch.int32, tuple(first.shape), device=first.device)
        _sent_rows(f"carrier[{rank}]", sent)
        _received_rows(f"received[{rank}]", rows, len(carrier), first)
    _memory_of_their_own(
        {f"carrier[{rank}]": rows for rank, rows in enumerate(carrier)},
        {f"received[{rank}]": rows for rank, rows in enumerate(received)},
    )
    return carrier, received
