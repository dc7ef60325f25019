"""The plan of a prefill window: its work, cut into items and dealt to the workers (contract, section 7).

The plan is a function of the segment metadata alone, the same for every layer, rank and backend. Here is
what its packed words mean, and how tensor code computes them.

An *item* is up to 64 consecutive query tokens of one segment, all four heads. Items are ordered by
segment, then token, and cut into *units* of 4 B128 blocks: as many as hold the blocks that the item's last
token sees, and at least one, because an item that sees nothing is visited all the same. The units of all
items, in order, are dealt to the workers in contiguous shares of equal cost, but for less than a unit and a
start at either end: a worker is a multiprocessor, or a thread of a CPU. What one worker does of one item is a
*piece*.

A unit of an item with `t` tokens costs `4 + ceil(t / 16)`, and every item but the first costs 8 before its
first unit, because a worker that goes on to it starts again: queries and pages to look up, keys to wait for.
These are what units took the CUDA scorer on an H200 (docs/performance-prefill.md), in eighths of a unit of 64
tokens. A bound of a share that falls into a unit, or into what comes before the first one, is moved back to
where that begins.

`packed_work_info[i]`, int64, for every item `i`; words past the last item mean nothing:

    bits  0 ... 15   segment
    bits 16 ... 31   which item of its segment: its first token is 64 times that
    bits 32 ... 63   its units

`packed_work_range[s]`, int64, for every worker `s`; its share is from the begin to before the end:

    bits  0 ... 15   item where the share begins
    bits 16 ... 31   unit of that item where it begins
    bits 32 ... 47   item where it ends
    bits 48 ... 63   unit of that item where it ends

The end of the last share is (items, 0). A share without work ends where it begins. From one piece to the
next neither the item `i` nor the worker `s` goes back and at least one goes on, so `i + s` is a number of its
own for every piece, below items + workers - 1.

Metadata is never trusted: negative lengths count as 0, items past the capacity are dropped, and a
segment has no keys from `128 * columns` on: `kv_segment_lens[s]` counts as the smaller of the two. Token `i`
of a segment is row `qo_segment_offsets[s] + i`; whoever follows a plan leaves out the rows outside
`[0, total_q)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .geometry import (
    BLOCK,
    COST_TOKENS,
    ITEM_TOKENS,
    START_COST,
    UNIT_BLOCKS,
    UNIT_COST,
    block_columns,
    ceil_div,
    prefill_items,
)


@dataclass(frozen=True)
class MSAIcpScorePlan:
    """How the work of one prefill window is cut; made by `msa_icp_index_score_sharded_plan`, or by
    `msa_icp_index_score_sharded_plan_device` into the caller's storage.

    Section 7 of docs/contract.md. Every layer of a step takes the same plan. All tensors are contiguous
    and on one device; `B` is `batch`, the segments of the window.

    Attributes:
        qo_segment_lens: int32 `[B]`, query tokens of each segment.
        kv_segment_lens: int32 `[B]`, keys of each segment.
        qo_segment_offsets: int32 `[B + 1]`, prefix sums of the query tokens: a segment's first row.
        kv_segment_offsets: int32 `[B + 1]`, prefix sums of the keys.
        qo_offset: int32 `[B]`, position of each segment's first query token.
        packed_work_range: int64 `[workers]`, each worker's share.
        packed_work_info: int64, one word an item.
        workspace: uint8; nothing is kept there.
        total_q: rows of the window's query, at least the tokens of its segments.
        num_qo_heads: 4.
        batch: segments.
        max_query_len: at least the tokens of the longest segment.
        columns: B128 blocks of the longest context that the window may have.
    """

    qo_segment_lens: Tensor
    kv_segment_lens: Tensor
    qo_segment_offsets: Tensor
    kv_segment_offsets: Tensor
    qo_offset: Tensor
    packed_work_range: Tensor
    packed_work_info: Tensor
    workspace: Tensor
    total_q: int
    num_qo_heads: int
    batch: int
    max_query_len: int
    columns: int

    def tensors(self) -> list[Tensor]:
        """The tensors, in the order of the fields."""
        return [
            self.qo_segment_lens,
            self.kv_segment_lens,
            self.qo_segment_offsets,
            self.kv_segment_offsets,
            self.qo_offset,
            self.packed_work_range,
            self.packed_work_info,
            self.workspace,
        ]

    def numbers(self) -> list[int]:
        """The numbers, in the order of the fields, behind the tensors."""
        return [self.total_q, self.num_qo_heads, self.batch, self.max_query_len, self.columns]


def default_device() -> torch.device:
    """Where a host's plan goes if nobody says: the current CUDA device, the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def workers(device: torch.device) -> int:
    """Shares that the work is dealt into: one a multiprocessor, on a CPU one a torch thread."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads()


def cost_of_unit(tokens: Any) -> Any:
    """What a unit of an item with so many tokens costs, for integers and integer tensors."""
    return UNIT_COST + ceil_div(tokens, COST_TOKENS)


def plan_words(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_offset: Tensor,
    *,
    total_q: int,
    max_seq_len: int,
    workers: int,
) -> tuple[Tensor, Tensor]:
    """The packed words of a window: int64 `[workers]` and int64 `[prefill_items(total_q, B)]`.

    The metadata is int32 `[B]` on any device. No value is read on the host, so this can be captured in a
    CUDA graph. The second tensor is 0 past the last item.
    """
    batch, device = qo_segment_lens.shape[0], qo_segment_lens.device
    capacity = prefill_items(total_q, batch)
    lens = qo_segment_lens.to(torch.int64).clamp(min=0)
    counts = ceil_div(lens, ITEM_TOKENS)
    ends = counts.cumsum(0)
    items = ends[-1].clamp(max=capacity)

    item = torch.arange(capacity, device=device)
    live = item < items
    segment = torch.searchsorted(ends, item, right=True).clamp(max=batch - 1)
    index = item - (ends - counts)[segment]
    tokens_up_to = torch.minimum((index + 1) * ITEM_TOKENS, lens[segment])
    seen = torch.minimum(kv_segment_lens[segment].to(torch.int64), qo_offset[segment] + tokens_up_to)
    blocks = ceil_div(seen, BLOCK).clamp(min=1, max=block_columns(max_seq_len))
    units = torch.where(live, ceil_div(blocks, UNIT_BLOCKS), 0)
    info = torch.where(live, segment | index << 16 | units << 32, 0)

    tokens = (tokens_up_to - index * ITEM_TOKENS).clamp(min=1)  # no item has fewer; words past them may
    unit_cost = cost_of_unit(tokens)
    start_cost = torch.where(live & (item > 0), START_COST, 0)
    cost = units * unit_cost
    cost_up_to = (start_cost + cost).cumsum(0)
    first_unit_at = cost_up_to - cost
    share = torch.arange(workers + 1, device=device)
    bounds = share * cost_up_to[-1] // workers
    bound_item = torch.minimum(torch.searchsorted(cost_up_to, bounds, right=True), items)
    at = bound_item.clamp(max=capacity - 1)
    spent = (bounds - first_unit_at[at]).clamp(min=0)
    bound_unit = torch.where(bound_item < items, spent // unit_cost[at], 0)
    place = bound_item | bound_unit << 16
    return place[:-1] | place[1:] << 32, info
