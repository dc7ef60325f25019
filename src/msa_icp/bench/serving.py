"""What a serving engine would see of the decode scorer.

- `production mix`: the scorer alone over batches drawn from a production mix of lengths, beside the plain
  read of as many bytes.
- `serving chain`: a small kernel, the scorer, a small kernel that needs its scores, with programmatic
  dependent launch and without it; beside it the two small kernels alone.
- `layer replay`: host time of replaying the CUDA graph of one layer, and of launching that layer eagerly
  through the backend's ops.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from msa_icp.geometry import ShardLayout

from . import ruler
from .batch import PAGE_ORDERS, Batch, random_keys, sharded
from .chain import CONSUMED, FUSED, PUBLISHED, Chain, chain_layers
from .decode_score import LAYOUTS, SIZES, Size
from .measure import capture, chain_bytes, chain_length, time_chain, time_host

MIX = ((1, 6), (4, 8), (5, 10), (10, 14), (50, 20), (100, 28), (200, 14))
"""Thousands (1024) of keys of a request, and percent of the requests."""
SEED = 20


def production_lens(requests: int) -> list[int]:
    """Lengths drawn from the mix, the same ones every time; the newest page of each is filled at random."""
    generator = torch.Generator().manual_seed(SEED)
    thousands, percent = torch.tensor(MIX).T
    drawn = thousands[torch.multinomial(percent.float(), requests, replacement=True, generator=generator)]
    unfilled = torch.randint(0, 128, (requests,), generator=generator)
    lens: list[int] = (drawn * 1024 - unfilled).tolist()
    return lens


@dataclass(frozen=True)
class MixRow:
    """Microseconds of a launch over the production mix; `order` is that of the pages."""

    what: str
    backend: str
    layout: str
    query_len: int
    requests: int
    order: str
    bytes: int
    us: float
    plain_read_us: float | None
    chained_read_us: float | None


def production_mix(
    device: torch.device,
    backends: Sequence[str],
    *,
    requests: Sequence[int] = (32, 256),
    layouts: Sequence[str] = ("P128W4", "P256W2"),
    query_lens: Sequence[int] = (1, 2, 4, 8),
    orders: Sequence[str] = PAGE_ORDERS,
    lens_of: functools.partial[list[int]] | None = None,
) -> Iterator[MixRow]:
    """Measure every combination and yield its row as soon as it is there; `lens_of` draws other lengths."""
    draw = lens_of or production_lens
    reader = ruler.Ruler(device) if ruler.unavailable(device) is None else None
    most = max(_k_bytes(draw(count), LAYOUTS[name]) for count in requests for name in layouts)
    pool = random_keys(most + chain_bytes(device), device)
    for count, name in itertools.product(requests, layouts):
        layout, lens = LAYOUTS[name], draw(count)
        k_bytes = _k_bytes(lens, layout)
        layers = chain_length(k_bytes, device)
        reads = None
        for order, query_len in itertools.product(orders, query_lens):
            work = sharded(pool, lens, layout, layers, query_len=query_len, order=order)
            if reads is None:
                buffers = [keys.view(torch.uint8).flatten() for keys in work.layers]
                reads = reader.time(buffers) if reader else (None, None)
            for backend in backends:
                us = _time_scorer(work, backend)
                yield MixRow(
                    "production mix",
                    *(backend, name, query_len, count, order, k_bytes, round(us, 3)),
                    *(None if read is None else round(read, 3) for read in reads),
                )


def _k_bytes(lens: Sequence[int], layout: ShardLayout) -> int:
    return sum(int(layout.columns(keys)) for keys in lens) * layout.page_bytes


def _time_scorer(work: Batch, backend: str) -> float:
    chain = Chain(work, backend, ("score",), form=None)
    return time_chain(chain.layer, len(work.layers), chain.device)


@dataclass(frozen=True)
class ChainRow:
    """Microseconds of producer, scorer and consumer, and of producer and consumer alone."""

    what: str
    backend: str
    layout: str
    batch: str
    enable_pdl: bool
    us: float
    without_scorer_us: float


def serving_chain(
    device: torch.device,
    backends: Sequence[str],
    *,
    sizes: Sequence[Size] = SIZES,
    layouts: Sequence[str] = ("P128W4", "P256W2"),
) -> Iterator[ChainRow]:
    """Measure every combination and yield its row as soon as it is there."""
    largest = max(size.k_bytes(LAYOUTS[name]) for size in sizes for name in layouts)
    pool = random_keys(largest + chain_bytes(device), device)
    for size, name in itertools.product(sizes, layouts):
        layout = LAYOUTS[name]
        lens = [keys * layout.world_size for keys in size.keys]
        work = sharded(pool, lens, layout, chain_layers(size.k_bytes(layout), device))
        for enable_pdl in (True, False):
            alone = _time_steps(work, backends[0], ("produce", "consume"), enable_pdl)
            for backend in backends:
                us = _time_steps(work, backend, CONSUMED, enable_pdl)
                yield ChainRow(
                    *("serving chain", backend, name, size.name, enable_pdl, round(us, 3), round(alone, 3))
                )


def _time_steps(work: Batch, backend: str, steps: Sequence[str], enable_pdl: bool) -> float:
    return Chain(work, backend, steps, form=None, enable_pdl=enable_pdl).time()


@dataclass(frozen=True)
class ReplayRow:
    """Microseconds of the host for one layer of so many requests: a graph's replay, and eager launches."""

    what: str
    backend: str
    steps: str
    requests: int
    replay_us: float
    eager_us: float


def layer_replay(device: torch.device, backends: Sequence[str], requests: int = 4) -> Iterator[ReplayRow]:
    """The plain and the fused layer of a small batch, so that the device is done before the host."""
    pool = random_keys(1 << 22, device)
    work = sharded(pool, [1024] * requests, LAYOUTS["P128W4"], 1)
    for backend, steps in itertools.product(backends, (PUBLISHED, FUSED)):
        chain = Chain(work, backend, steps)

        def layer(chain: Chain = chain) -> None:
            chain.layer(0)

        eager = time_host(layer, device)
        replay = time_host(capture(layer, device), device)
        chain.storage.check()
        yield ReplayRow(
            *("layer replay", backend, " ".join(steps), requests, round(replay, 2), round(eager, 2))
        )
