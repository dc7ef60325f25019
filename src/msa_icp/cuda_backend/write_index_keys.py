"""Store new keys into this rank's rows of the shard."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor

from ..geometry import Layouts, ShardLayout, ceil_div
from .loader import Kernel, Variant

_THREADS = 256
_CTA_KEYS = 32
_WORDS = 12


@functools.cache
def kernel_for(page_size: int, world_size: int) -> Kernel:
    """The kernel of a layout."""
    variant = Variant("write_index_keys", (("PAGE", page_size), ("WORLD", world_size)))
    return Kernel(variant, _THREADS, _WORDS)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    for page_size, world_size in layouts:
        yield kernel_for(page_size, world_size)


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
    kernel_for(layout.page_size, layout.world_size)(
        (int(ceil_div(count, _CTA_KEYS)), 1, 1),
        (
            keys.data_ptr(),
            positions.data_ptr(),
            request_index.data_ptr(),
            block_table.data_ptr(),
            index_k.data_ptr(),
            count,
            requests,
            columns,
            block_table.stride()[0],
            index_k.shape[0],
            index_k.stride()[0],
            layout.rank,
        ),
        keys.device,
        dependent=False,
    )
