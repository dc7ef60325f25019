"""Select a rank's Top16 of every token of a window into the carrier (contract, sections 5 and 7).

One program a (token, head) row.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import Layouts
from .launch import FLOATS, I32, I64, INTS, Kernel, Target, kernel
from .ranking import PADDING_BITS, TOP, ascending_rows, block_of, top16
from .topk_select_publish import IS_READY, READY_AT


@triton.jit
def store_carrier_rows(row, best, bits):
    """Store legacy rows at `row` [n]: the keys `best` [n, 16] and their raw score bits, in any order."""
    ids, place = ascending_rows(best)
    tl.store(row[:, None] + place, tl.where(best < 0, PADDING_BITS, bits))
    tl.store(row[:, None] + TOP + place, ids)
    tl.store(row + READY_AT, IS_READY)


@kernel(threads=128)
def select_prefill_kernel(
    scores: FLOATS,
    num_valid_pages: INTS,
    carrier: INTS,
    columns: I32,
    token_stride: I64,
    head_stride: I64,
    carrier_head_stride: I64,
    carrier_row_stride: I64,
    force_begin: I32,
    force_end: I32,
    index_scale: I32,
    index_offset: I32,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    row = scores + token * token_stride + head * head_stride
    num_valid = tl.load(num_valid_pages + token)
    best = top16(row, columns, columns, num_valid, force_begin, force_end, index_scale, index_offset)
    column = (block_of(best) - index_offset) // index_scale
    bits = tl.load(row + column, mask=best >= 0, other=0.0).to(tl.int32, bitcast=True)
    address = carrier + head * carrier_head_stride + (token * carrier_row_stride + tl.arange(0, 1))
    store_carrier_rows(address, best[None, :], bits[None, :])


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
    """Write every row of `carrier`."""
    tokens, heads, columns = scores.shape
    if tokens == 0:
        return
    select_prefill_kernel(
        (tokens, heads),
        (
            scores,
            num_valid_pages,
            carrier,
            columns,
            scores.stride(0),
            scores.stride(1),
            carrier.stride(0),
            carrier.stride(1),
            force_begin_blocks,
            force_end_blocks,
            index_scale,
            index_offset,
        ),
        (),
        scores.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """The one variant."""
    yield select_prefill_kernel, ()
