"""The decode scorer (contract, section 4).

The kernels are in `decode_index_score_sharded.cu` (short CTAs) and `decode_index_score_packed.cu` (CTAs
that stay).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..geometry import MAX_QUERY_ROWS, NUM_HEADS, PAGE_SIZES, WORLD_SIZES, ShardLayout, ceil_div
from .loader import Kernel, Variant

_THREADS = 128
_TILE_ROWS = 128
_WORDS = 16
_GROUP_ROWS = 8
_MOST_GRID_ROWS = 65535
_MOST_PACKED_REQUESTS = 1024


@dataclass(frozen=True)
class Schedule:
    """How the work is cut. Any values are right; these are to be measured."""

    two_pieces_from: int = 8192
    """Tiles of 128 key rows, from which on a warp of a short CTA scores two pieces."""
    packed_from: int = 16384
    """Tiles from which on CTAs stay and share one list."""
    short_resident: tuple[tuple[int, tuple[int, int]], ...] = ((1, (8, 6)), (2, (5, 5)), (4, (4, 4)))
    """For each number of query groups: short CTAs that are to share a multiprocessor, with one and two
    pieces a warp."""
    together: tuple[int, ...] = (4,)
    """Numbers of query groups for which the warps of a short CTA multiply as one warp group."""
    together_resident: tuple[tuple[int, tuple[int, int]], ...] = ((1, (8, 6)), (2, (7, 6)), (4, (6, 5)))
    """The same as `short_resident` for those."""
    packed_resident: tuple[tuple[int, int], ...] = ((1, 6), (2, 5), (4, 3))
    """For each number of query groups: staying CTAs of a multiprocessor."""
    packed_stages: int = 2
    """Pieces that a warp of a staying CTA has in flight."""
    packed_waves: int = 1
    """Staying CTAs of a launch, in multiples of what the device holds at once."""


SCHEDULE = Schedule()


def _groups(query_len: int) -> int:
    """Groups of eight query rows that a kernel takes: 1, 2 or 4."""
    needed = int(ceil_div(query_len * NUM_HEADS, _GROUP_ROWS))
    return needed if needed < 3 else MAX_QUERY_ROWS // _GROUP_ROWS


def _kernel(source: str, layout: tuple[int, int], groups: int, **constants: int) -> Kernel:
    page_size, world_size = layout
    all_constants = {"PAGE": page_size, "WORLD": world_size, "GROUPS": groups, **constants}
    return Kernel(Variant(source, tuple(all_constants.items())), _THREADS, _WORDS, takes_query=True)


@functools.cache
def short_kernel(layout: tuple[int, int], groups: int, pieces: int) -> Kernel:
    """The short CTAs for a layout (page size, world size), query groups, and pieces a warp."""
    together = groups in SCHEDULE.together
    residents = SCHEDULE.together_resident if together else SCHEDULE.short_resident
    return _kernel(
        "decode_index_score_sharded",
        layout,
        groups,
        PIECES=pieces,
        TOGETHER=int(together),
        RESIDENT=dict(residents)[groups][pieces - 1],
    )


@functools.cache
def packed_kernel(layout: tuple[int, int], groups: int) -> Kernel:
    """The staying CTAs for a layout (page size, world size) and query groups."""
    resident = dict(SCHEDULE.packed_resident)[groups]
    stages = SCHEDULE.packed_stages
    return _kernel("decode_index_score_packed", layout, groups, STAGES=stages, RESIDENT=resident)


def kernels() -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    groups = [count for count, _ in SCHEDULE.short_resident]
    for layout, count in product(product(PAGE_SIZES, WORLD_SIZES), groups):
        yield short_kernel(layout, count, 1)
        yield short_kernel(layout, count, 2)
        yield packed_kernel(layout, count)


def _launch(
    requests: int, columns: int, layout: ShardLayout, groups: int, device: torch.device
) -> tuple[Kernel, tuple[int, int, int]]:
    """The kernel for a batch, and its grid. Looks at sizes alone, never at a length."""
    key = (layout.page_size, layout.world_size)
    tiles = int(ceil_div(columns * layout.rows, _TILE_ROWS))
    if tiles * requests >= SCHEDULE.packed_from and requests <= _MOST_PACKED_REQUESTS:
        resident = dict(SCHEDULE.packed_resident)[groups] * Kernel.multiprocessors(device)
        return packed_kernel(key, groups), (resident * SCHEDULE.packed_waves, 1, 1)
    pieces = 2 if tiles * requests >= SCHEDULE.two_pieces_from else 1
    rows = min(requests, _MOST_GRID_ROWS)
    return short_kernel(key, groups, pieces), (
        int(ceil_div(tiles, pieces)),
        rows,
        int(ceil_div(requests, rows)),
    )


def launch_scores(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    columns: int,
    token_stride: int,
    head_stride: int,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
    first_column: int = 0,
) -> None:
    """Score `columns` columns from `first_column` on, a multiple of four, into rows of these strides."""
    requests, table_columns = block_table.shape
    if requests == 0:
        return
    kernel, grid = _launch(requests, columns, layout, _groups(decode_query_len), index_q.device)
    kernel(
        grid,
        (
            index_q.data_ptr(),
            index_k.data_ptr(),
            block_table.data_ptr() + first_column * block_table.element_size(),
            seq_lens.data_ptr(),
            score_out.data_ptr(),
            requests,
            index_k.shape[0],
            index_k.stride()[0],
            table_columns - first_column,
            block_table.stride()[0],
            columns,
            token_stride,
            head_stride,
            decode_query_len,
            layout.rank,
            first_column * layout.page_size,
        ),
        index_q.device,
        dependent=enable_pdl,
    )


def decode_index_score_sharded(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
) -> None:
    """Write the scores of this rank's shard; every other element of `score_out` keeps its bits."""
    token_stride, head_stride, _ = score_out.stride()
    launch_scores(
        index_q,
        index_k,
        block_table,
        seq_lens,
        score_out,
        columns=score_out.shape[2],
        token_stride=token_stride,
        head_stride=head_stride,
        layout=layout,
        decode_query_len=decode_query_len,
        enable_pdl=enable_pdl,
    )
