"""The prefill scorer (contract, section 7)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import Layouts, ShardLayout, prefill_items
from ..prefill_plan import MSAIcpScorePlan
from .loader import Kernel, Variant

_THREADS = 512
_WORDS = 22
_STAGES = 4
_SHARED_BYTES = _STAGES * 128 * 128 * 2
"""A ring of tiles of 128 keys in fp16."""
_NEG_INF = float("-inf")


@functools.cache
def kernel_for(page_size: int, world_size: int) -> Kernel:
    """The kernel of a layout."""
    variant = Variant(
        "index_score_sharded", (("PAGE", page_size), ("WORLD", world_size), ("STAGES", _STAGES))
    )
    return Kernel(variant, _THREADS, _WORDS, shared_bytes=_SHARED_BYTES, takes_query=True)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    for page_size, world_size in layouts:
        yield kernel_for(page_size, world_size)


def index_score_sharded(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan: MSAIcpScorePlan,
    *,
    layout: ShardLayout,
    max_score: Tensor,
    initialize: bool,
    compact: bool,
    enable_pdl: bool,
) -> None:
    """Write `max_score`: the plan's workers are the CTAs."""
    if initialize:
        with torch.inference_mode():  # the only one in which PyTorch writes into a tensor that was made in it
            max_score.fill_(_NEG_INF)
    token_stride, head_stride, _ = max_score.stride()
    kernel_for(layout.page_size, layout.world_size)(
        (plan.packed_work_range.shape[0], 1, 1),
        (
            q.data_ptr(),
            k.data_ptr(),
            block_table.data_ptr(),
            plan.qo_segment_lens.data_ptr(),
            plan.kv_segment_lens.data_ptr(),
            plan.qo_segment_offsets.data_ptr(),
            plan.qo_offset.data_ptr(),
            plan.packed_work_range.data_ptr(),
            plan.packed_work_info.data_ptr(),
            max_score.data_ptr(),
            k.shape[0],
            k.stride()[0],
            block_table.shape[1],
            block_table.stride()[0],
            plan.batch,
            plan.total_q,
            plan.columns,
            prefill_items(plan.total_q, plan.batch),
            token_stride,
            head_stride,
            layout.rank,
            int(compact),
        ),
        q.device,
        dependent=enable_pdl,
    )
