"""The decode scorer where block table and score rows have room for contexts far longer than the batch's.

An engine that replays CUDA graphs keeps them as wide as its longest context: no launch may follow a length.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from msa_icp.geometry import NUM_HEADS, decode_score_columns

from . import ruler
from .batch import random_keys
from .decode_score import LAYOUTS, SIZES, Size, Workload
from .measure import chain_bytes, time_chain

CONTEXTS = (131072, 1048576)
MORE_SIZES = (
    Size("256 x 256", (256,) * 256),
    Size("4 x 256K", (262144,) * 4),
    Size("1 x 256K, 7 x 2K", (262144, *(2048,) * 7)),
)


@dataclass(frozen=True)
class Row:
    """Microseconds of a launch; `room` is the context that tables are made for; 0: the batch's longest."""

    what: str
    backend: str
    layout: str
    batch: str
    room: int
    us: float
    plain_read_us: float | None


def rows(
    device: torch.device,
    backends: Sequence[str],
    *,
    sizes: Sequence[Size] = (*SIZES, *MORE_SIZES),
    layouts: Sequence[str] = ("P128W4", "P256W2"),
) -> Iterator[Row]:
    """Measure every combination and yield its row as soon as it is there; longer batches are left out."""
    largest = max(size.k_bytes(LAYOUTS[name]) for size in sizes for name in layouts)
    pool = random_keys(largest + chain_bytes(device), device)
    reader = ruler.Ruler(device) if ruler.unavailable(device) is None else None
    for size, name in itertools.product(sizes, layouts):
        layout = LAYOUTS[name]
        work = Workload(pool, size, layout, 1)
        plain = reader.time(work.buffers)[0] if reader else None
        for room in (0, *CONTEXTS):
            if room and not widened(work, decode_score_columns(room, layout.page_size)):
                continue
            for backend in backends:
                us = time_chain(functools.partial(work.score, backend=backend), len(work.layers), device)
                read = None if plain is None else round(plain, 3)
                yield Row("long table", backend, name, size.name, room, round(us, 3), read)


def widened(work: Workload, columns: int) -> bool:
    """Give the workload tables of so many columns; False where it needs more."""
    requests, needed = work.block_table.shape
    if needed > columns:
        return False
    table = torch.zeros((requests, columns), dtype=torch.int32, device=work.block_table.device)
    table[:, :needed] = work.block_table
    work.block_table = table
    work.score_out = torch.empty((requests, NUM_HEADS, columns), device=table.device)
    return True
