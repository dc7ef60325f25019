"""Select a rank's Top16 and store it into the owners' receive storage (contract, sections 5 and 6)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product

from torch import Tensor

from ..geometry import Layouts
from .loader import Kernel, Variant

_THREADS = 128
_WORDS = 25
_NOT_FUSED = (0, 1, 1, 0, 1, 0)
"""The words of the fused form, in a launch of the other one."""


@functools.cache
def kernel_for(*, tagged: bool, fused: bool) -> Kernel:
    """The kernel for a row format, and for scores of a caller or of the fused form's pool."""
    variant = Variant("topk_select_publish", (("TAGGED", int(tagged)), ("FUSED", int(fused))))
    return Kernel(variant, _THREADS, _WORDS, spread=True)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    for tagged, fused in product((False, True), (False, True)):
        yield kernel_for(tagged=tagged, fused=fused)


def topk_select_publish(
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
    spin_limit: int,
    enable_pdl: bool,
    generations: Tensor | None,
    index_scale: int,
    index_offset: int,
) -> None:
    """Publish every row `t < T`."""
    tokens, heads, columns = scores.shape
    if tokens == 0:
        return
    token_stride, head_stride, _ = scores.stride()
    kernel_for(tagged=generations is not None, fused=False)(
        (tokens, heads, 1),
        (
            scores.data_ptr(),
            num_valid_pages.data_ptr(),
            recv_bases.data_ptr(),
            errors.data_ptr(),
            0 if generations is None else generations.data_ptr(),
            columns,
            token_stride,
            head_stride,
            errors.shape[0],
            slot,
            rank,
            world_size,
            heads_per_rank,
            capacity,
            force_begin_blocks,
            force_end_blocks,
            spin_limit,
            index_scale,
            index_offset,
            *_NOT_FUSED,
        ),
        scores.device,
        dependent=enable_pdl,
    )
