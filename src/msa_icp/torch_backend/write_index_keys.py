"""Write new index keys into this rank's rows of the shard."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import launches
from ..geometry import ShardLayout


@launches.tensor_code(takes_query=False)
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
    requests, width = block_table.shape
    if keys.shape[0] == 0 or requests == 0 or width == 0:
        return
    position = positions.to(torch.int64)
    request = request_index.to(torch.int64)
    column = position // layout.page_size
    owner, row = layout.owner_and_row(position)
    mine = (
        ((owner == layout.rank) & (position >= 0) & (column < width) & (request >= 0) & (request < requests))
        .nonzero()
        .squeeze(1)
    )
    page = block_table[request[mine], column[mine]].to(torch.int64)
    there = (page >= 0) & (page < index_k.shape[0])
    chosen = mine[there]
    index_k.view(torch.uint8)[page[there], row[chosen]] = keys.view(torch.uint8)[chosen]
