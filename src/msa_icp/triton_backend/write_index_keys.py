"""Write new index keys into this rank's rows of the shard (contract, section 2)."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from typing import Any

import triton.language as tl
from torch import Tensor

from ..geometry import BLOCK, HEAD_DIM, Layouts, ShardLayout, ceil_div
from .launch import BYTES, I32, I64, INTS, Kernel, Target, kernel

DIM = tl.constexpr(HEAD_DIM)
KEYS_PER_PROGRAM = 16
KEYS = tl.constexpr(KEYS_PER_PROGRAM)


@kernel(aligned=("keys", "index_k"), threads=128)
def write_keys_kernel(
    keys: BYTES,
    positions: INTS,
    request_index: INTS,
    block_table: INTS,
    index_k: BYTES,
    count: I32,
    requests: I32,
    table_columns: I32,
    table_stride: I64,
    pages: I32,
    page_pitch: I64,
    page_size: I32,
    rank: I32,
    key_step: I32,
    rank_step: I32,
    rows: I32,
):
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    position = tl.load(positions + key, mask=key < count, other=-1)
    request = tl.load(request_index + key, mask=key < count, other=-1)
    column = position // page_size
    # Row `i` of a page is position `rank * rank_step + i * key_step` in it: one of the steps is 1.
    within = position % page_size - rank * rank_step
    row = within // key_step
    mine = (within >= 0) & (within % key_step == 0) & (row < rows)
    mine &= (position >= 0) & (column < table_columns) & (request >= 0) & (request < requests)
    page = tl.load(block_table + request.to(tl.int64) * table_stride + column, mask=mine, other=-1)
    mine &= (page >= 0) & (page < pages)
    dim = tl.arange(0, DIM)
    data = tl.load(keys + key.to(tl.int64)[:, None] * DIM + dim[None, :], mask=mine[:, None])
    offset = tl.multiple_of(page.to(tl.int64) * page_pitch, 16) + row * DIM
    address = tl.multiple_of(index_k + offset[:, None] + dim[None, :], (1, 16))
    tl.store(address, data, mask=mine[:, None])


def write_index_keys(
    keys: Tensor,
    positions: Tensor,
    request_index: Tensor,
    block_table: Tensor,
    index_k: Tensor,
    *,
    layout: ShardLayout,
) -> None:
    """Store the keys that this rank holds; the others and those without a place are skipped."""
    count = keys.shape[0]
    requests, columns = block_table.shape
    if count == 0 or requests == 0:
        return
    interleaved = layout.page_size == BLOCK
    write_keys_kernel(
        (ceil_div(count, KEYS_PER_PROGRAM),),
        (
            keys,
            positions,
            request_index,
            block_table,
            index_k,
            count,
            requests,
            columns,
            block_table.stride()[0],
            index_k.shape[0],
            index_k.stride()[0],
            layout.page_size,
            layout.rank,
            layout.world_size if interleaved else 1,
            1 if interleaved else layout.rows,
            layout.rows,
        ),
        (),
        keys.device,
    )


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """The one variant."""
    yield write_keys_kernel, ()
