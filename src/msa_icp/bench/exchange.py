"""What publish alone and merge alone add to a chain of dependent launches, the peers' rows already there.

The chain is that of a decode layer without its scorer: the producer, then publish, then merge. Each figure is
the difference that a launch makes: (producer, publish) - (producer), and the whole - (producer, publish).
Scores are normal numbers that lie in the cache, where a scorer has just left them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from msa_icp.geometry import BLOCK, ShardLayout

from . import batch
from .chain import Chain
from .producer import FORMS

TOKENS = 64
COLUMNS = (64, 256, 1024, 8192)
_POOL_BYTES = 1 << 20
"""Keys are only written here."""


@dataclass(frozen=True)
class Row:
    """Microseconds at pages of 128 keys: `us` of both together, `publish_us` and `merge_us` of each."""

    what: str
    backend: str
    W: int
    page_size: int
    tokens: int
    context: int
    form: str
    columns: int
    publish_us: float
    merge_us: float
    us: float


def rows(
    device: torch.device,
    backends: Sequence[str],
    *,
    world_sizes: Sequence[int] = (4, 2),
    columns: Sequence[int] = COLUMNS,
    forms: Sequence[str] = FORMS,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """Measure every combination and yield its row as soon as it is there."""
    launches = 300 if device.type == "cuda" else 3
    pool = batch.random_keys(_POOL_BYTES, device)
    for world_size, width in itertools.product(world_sizes, columns):
        layout = ShardLayout(world_size, world_size - 1, BLOCK)
        work = batch.sharded(pool, [width * BLOCK] * tokens, layout, launches)
        work.score_out.normal_()
        for form, backend in itertools.product(forms, backends):
            steps = ("produce", "publish", "merge")
            without, published, merged = (
                Chain(work, backend, steps[:count], form=form).time() for count in (1, 2, 3)
            )
            yield Row(
                what="publish+merge",
                backend=backend,
                W=world_size,
                page_size=BLOCK,
                tokens=tokens,
                context=width * BLOCK,
                form=form,
                columns=width,
                publish_us=round(published - without, 3),
                merge_us=round(merged - published, 3),
                us=round(merged - without, 3),
            )
