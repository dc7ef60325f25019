"""A layer of one rank's decode, in four ways, over contexts and batches.

`chain` is this library (producer, score, publish, merge), `chain_fused` the same with the fused form,
`page_strided` the same chain over a replicated cache of which a rank reads every W-th page, and `replicated`
a producer, our scorer over all keys and a selection for the rank's own heads, without an exchange.

What is fair: all use the same kernels. Those of the replicated caches are the scorer's for a page of 128
rows, which it reads as it reads the shards, so nothing is lost to a layout that it was not made for. The
replicated indexer selects for its own heads only. It scores all four, as the scorer always does: at these
sizes it is bound by the keys, which it would read for one head as well. The rank measured is the last one,
which writes the newest keys where it alone has them. Requests are equally long; what the peers send is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_icp.geometry import HEAD_DIM, ShardLayout

from . import batch
from .batch import Batch
from .chain import FUSED, PUBLISHED, SELECTED, Chain, chain_layers
from .measure import chain_bytes

CONTEXTS = tuple(1 << power for power in (13, 15, 17, 19, 20))
BATCHES = (1, 8, 32, 128, 256)
_MOST_POOL_BYTES = 6_000_000_000
"""More K than this a launch reads twice, long after it has left the caches."""

Maker = Callable[[Tensor, Sequence[int], ShardLayout, int], Batch]
WAYS: dict[str, tuple[Maker, Sequence[str]]] = {
    "chain": (batch.sharded, PUBLISHED),
    "chain_fused": (batch.sharded, FUSED),
    "page_strided": (batch.page_strided, PUBLISHED),
    "replicated": (batch.replicated, SELECTED),
}
"""How the batch is made, and the launches of a layer."""


@dataclass(frozen=True)
class Row:
    """Microseconds of a layer."""

    what: str
    backend: str
    W: int
    page_size: int
    requests: int
    context: int
    us: float


def rows(
    device: torch.device,
    backends: Sequence[str],
    *,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = BATCHES,
    world_sizes: Sequence[int] = (4, 2),
    page_sizes: Sequence[int] = (128, 256),
    ways: Sequence[str] = tuple(WAYS),
) -> Iterator[Row]:
    """Measure every combination and yield its row as soon as it is there; the ways of a cell side by side."""
    largest = max(contexts) * max(batches) * HEAD_DIM
    most = _MOST_POOL_BYTES if device.type == "cuda" else 2 * chain_bytes(device)
    pool = batch.random_keys(min(largest + chain_bytes(device), most), device)
    cells = itertools.product(world_sizes, page_sizes, batches, contexts)
    for world_size, page_size, requests, context in cells:
        layout = ShardLayout(world_size, world_size - 1, page_size)
        made: dict[Maker, Batch] = {}
        for way in ways:
            maker, steps = WAYS[way]
            if maker not in made:
                lens = [context] * requests
                layers = chain_layers(requests * context * HEAD_DIM // world_size, device)
                made[maker] = maker(pool, lens, layout, layers)
            for backend in backends:
                us = Chain(made[maker], backend, steps).time()
                yield Row(way, backend, world_size, page_size, requests, context, round(us, 3))


def quickest(measured: Sequence[Row]) -> dict[tuple[int, int, int, int], dict[str, float]]:
    """(W, page size, requests, context) -> the fastest backend's microseconds of every way measured there."""
    cells: dict[tuple[int, int, int, int], dict[str, float]] = {}
    for row in measured:
        cell = cells.setdefault((row.W, row.page_size, row.requests, row.context), {})
        cell[row.what] = min(row.us, cell.get(row.what, float("inf")))
    return cells


def begins_to_pay(measured: Sequence[Row]) -> Iterator[tuple[str, int, int, int, int | None]]:
    """For each other way, W, page size and batch: the first context from which the chain stays ahead of it.

    The chain without the fused form, which the others could have as well. None: at the longest context it is
    not ahead.
    """
    cells = quickest(measured)
    for other in ("replicated", "page_strided"):
        for world, page, requests in dict.fromkeys(cell[:3] for cell in cells):
            first = None
            contexts = (cell[3] for cell in cells if cell[:3] == (world, page, requests))
            for context in sorted(contexts, reverse=True):
                times = cells[world, page, requests, context]
                if not {"chain", other} <= times.keys() or times["chain"] >= times[other]:
                    break
                first = context
            yield other, world, page, requests, first


def fused_ratios(measured: Sequence[Row]) -> dict[tuple[str, int, int, int], dict[int, float]]:
    """(backend, W, page size, context) -> fused / plain chain by batch; below one the fused is faster."""
    cells: dict[tuple[str, int, int, int, int], dict[str, float]] = {}
    for row in measured:
        key = (row.backend, row.W, row.page_size, row.context, row.requests)
        cells.setdefault(key, {})[row.what] = row.us
    ratios: dict[tuple[str, int, int, int], dict[int, float]] = {}
    for (backend, world, page, context, requests), times in cells.items():
        if {"chain", "chain_fused"} <= times.keys():
            by_batch = ratios.setdefault((backend, world, page, context), {})
            by_batch[requests] = times["chain_fused"] / times["chain"]
    return ratios
