"""A layer of decode on all ranks at once, against a replicated indexer on the same cards.

The ways are those of `decode_chain.py`, but here the peers are there: `chain` and `chain_fused` wait for
their rows over NVLink. Of the replicated indexer, which needs no exchange, the slowest rank counts all the
same. The two forms of the chain must select the same blocks. `plain_read_us` is that of a rank's shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import msa_icp
from msa_icp.geometry import HEAD_DIM, SLOT_SETS, ShardLayout

from .. import batch, ruler
from ..batch import Batch
from ..chain import Chain, chain_layers
from ..decode_chain import WAYS, Maker
from ..measure import chain_bytes
from .team import Rank
from .together import Gate

MEASURED = ("chain", "chain_fused", "replicated")
_MOST_POOL_BYTES = 6_000_000_000
"""More K than this a launch reads twice, long after it has left the caches."""


def part(
    rank: Rank,
    contexts: Sequence[int],
    batches: Sequence[int],
    page_sizes: Sequence[int],
    until: float,
) -> None:
    """Task: every page size, batch and context, and each way of them, `until` that time."""
    largest = max(contexts) * max(batches) * HEAD_DIM
    most = _MOST_POOL_BYTES if rank.device.type == "cuda" else SLOT_SETS * largest
    pool = batch.random_keys(min(largest + chain_bytes(rank.device), most), rank.device)
    storage = msa_icp.ReceiveStorage.create(capacity=max(batches), device=rank.device)
    gates = {backend: Gate(rank, backend) for backend in rank.setting.backends}
    reader = ruler.Ruler(rank.device) if ruler.unavailable(rank.device) is None else None
    for page_size, requests, context in itertools.product(page_sizes, batches, contexts):
        if not rank.go_on(until):
            return
        layout = ShardLayout(rank.world_size, rank.number, page_size)
        layers = chain_layers(requests * context * HEAD_DIM // rank.world_size, rank.device)
        made: dict[Maker, Batch] = {}
        read = None
        outputs: dict[str, Tensor] = {}
        for way in MEASURED:
            maker, steps = WAYS[way]
            if maker not in made:
                work = made[maker] = maker(pool, [context] * requests, layout, layers)
                if maker is batch.sharded:
                    read = _plain_read(rank, reader, work)
            for backend, gate in gates.items():
                exchanged = storage if maker is batch.sharded else None
                how: dict[str, Any] = {"storage": exchanged, "spin_limit": gate.spin_limit}
                chain = Chain(made[maker], backend, steps, **how)
                us = gate.time(chain.layer, layers)
                chain.storage.check()
                row = _row(way, backend, page_size, requests, context, us, read)
                if exchanged is not None:  # over the same keys, so the last layer's blocks are the same
                    same = torch.equal(outputs.setdefault(backend, chain.output), chain.output)
                    row["ok"] = all(rank.gather(same))
                rank.row(row)
    for gate in gates.values():
        gate.close()
    storage.close()


def _plain_read(rank: Rank, reader: ruler.Ruler | None, work: Batch) -> float | None:
    """Microseconds of the plain read of as many bytes on the slowest rank, all reading at once.

    None where the pool is smaller than what a launch reads: the read would be of fewer bytes.
    """
    buffers = [keys.view(torch.uint8).flatten() for keys in work.layers]
    if reader is None or buffers[0].numel() < work.k_bytes:
        return None
    slowest: float = max(rank.gather(reader.time(buffers)[0]))
    return slowest


def _row(
    way: str, backend: str, page_size: int, requests: int, context: int, us: float, read: float | None
) -> dict[str, Any]:
    return {
        "what": way,
        "backend": backend,
        "page_size": page_size,
        "requests": requests,
        "context": context,
        "us": round(us, 3),
        "plain_read_us": None if read is None else round(read, 3),
        "of_plain_read": None if read is None or way == "replicated" else round(read / us, 3),
    }
