"""Select a rank's Top16 of every token of a window into the carrier (contract, sections 5 and 7)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor

from ..geometry import NUM_HEADS, Layouts
from .loader import Kernel, Variant

_THREADS = 32 * NUM_HEADS
_WORDS = 12


@functools.cache
def kernel() -> Kernel:
    """The one kernel."""
    return Kernel(Variant("topk_select_prefill", ()), _THREADS, _WORDS)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    yield kernel()


def topk_select_prefill(
    scores: Tensor,
    num_valid_pages: Tensor,
    carrier: Tensor,
    *,
    force_begin_blocks: int,
    force_end_blocks: int,
    index_scale: int,
    index_offset: int,
) -> None:
    """Write every row of `carrier`: a CTA a token."""
    tokens, _, columns = scores.shape
    if tokens == 0:
        return
    token_stride, head_stride, _ = scores.stride()
    carrier_head_stride, carrier_row_stride, _ = carrier.stride()
    kernel()(
        (tokens, 1, 1),
        (
            scores.data_ptr(),
            num_valid_pages.data_ptr(),
            carrier.data_ptr(),
            columns,
            token_stride,
            head_stride,
            carrier_head_stride,
            carrier_row_stride,
            force_begin_blocks,
            force_end_blocks,
            index_scale,
            index_offset,
        ),
        scores.device,
        dependent=False,
    )
