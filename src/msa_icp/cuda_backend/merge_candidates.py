"""Merge the ranks' candidates into the final Top16 (contract, section 6)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product

from torch import Tensor

from ..geometry import Layouts
from .loader import Kernel, Variant

_RANK_THREADS = 32
_WORDS = 16
LEGACY, TAGGED, PREFILL = range(3)
"""The forms of the kernel, as its source numbers them."""


@functools.cache
def kernel_for(form: int, world_size: int) -> Kernel:
    """The kernel for a form and a number of ranks."""
    variant = Variant("merge_candidates", (("FORM", form), ("WORLD", world_size)))
    return Kernel(variant, _RANK_THREADS * world_size, _WORDS)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    world_sizes = sorted({world_size for _, world_size in layouts})
    for form, world_size in product((LEGACY, TAGGED, PREFILL), world_sizes):
        yield kernel_for(form, world_size)


def merge_candidates(
    recv_slot: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    expected_generations: Tensor | None,
    prefill: bool,
    slot: int,
) -> None:
    """Write `output` for every token."""
    world_size, heads, capacity, _ = recv_slot.shape
    tokens = output.shape[0]
    if tokens == 0:
        return
    rank_stride, head_stride, row_stride, _ = recv_slot.stride()
    token_stride, out_head_stride, _ = output.stride()
    tagged = expected_generations is not None
    form = PREFILL if prefill else TAGGED if tagged else LEGACY
    kernel_for(form, world_size)(
        (tokens, heads, 1),
        (
            recv_slot.data_ptr(),
            num_valid_pages.data_ptr(),
            output.data_ptr(),
            errors.data_ptr(),
            0 if expected_generations is None else expected_generations.data_ptr(),
            rank_stride,
            head_stride,
            row_stride,
            token_stride,
            out_head_stride,
            capacity,
            errors.shape[0],
            slot,
            init_blocks,
            local_blocks,
            spin_limit,
        ),
        recv_slot.device,
        dependent=enable_pdl,
    )
