"""What publish and merge add to a chain of dependent launches, with the peers' rows coming over NVLink.

The chain is that of `exchange.py`: the producer, then publish, then merge, of every rank at once. Each figure
is the difference that a launch makes. A merge has to wait for the rows, so its figure contains their way.
Publishes of legacy rows wait for merges, so there is a figure for both together only.

`alone_us` is the same in a process of its own, the peers' rows already there: what is more comes from the way
and from the ranks' waiting for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msa_icp
from msa_icp.geometry import BLOCK, ShardLayout

from .. import batch
from ..chain import Chain
from ..producer import FORMS
from .team import OWN_CARDS, Rank
from .together import Gate

GOAL_US = 6.0
"""Publish and merge together, at GOAL_TOKENS tokens."""
GOAL_TOKENS = 64
_POOL_BYTES = 1 << 20
"""Keys are only written here."""


def part(rank: Rank, tokens: Sequence[int], columns: Sequence[int], until: float) -> None:
    """Task: every backend, row form, number of tokens and of score columns, `until` that time."""
    storage = msa_icp.ReceiveStorage.create(capacity=max(tokens), device=rank.device)
    for backend in rank.setting.backends:
        gate = Gate(rank, backend)
        for count, width in itertools.product(tokens, columns):
            if not rank.go_on(until):
                return
            for form in FORMS:
                rank.row(_row(rank, gate, storage, backend, count, width, form))
        gate.close()
    storage.close()


def _row(
    rank: Rank,
    gate: Gate,
    storage: msa_icp.ReceiveStorage,
    backend: str,
    tokens: int,
    columns: int,
    form: str,
) -> dict[str, Any]:
    layers = 300 if rank.device.type == "cuda" else 3
    layout = ShardLayout(rank.world_size, rank.number, BLOCK)
    pool = batch.random_keys(_POOL_BYTES, rank.device)
    work = batch.sharded(pool, [columns * BLOCK] * tokens, layout, layers)
    work.score_out.normal_()
    steps = ("produce", "publish", "merge")
    counts = (1, 2, 3) if form == "tagged" else (1, 3)
    shared, alone = {}, {}
    for count in counts:
        chain = Chain(work, backend, steps[:count], form=form, storage=storage, spin_limit=gate.spin_limit)
        shared[count] = gate.time(chain.layer, layers)
        storage.check()
        storage.reset()  # nobody has merged what was only published
        if count != 2:
            alone[count] = max(rank.gather(Chain(work, backend, steps[:count], form=form).time()))
    us = round(shared[3] - shared[1], 3)
    goal = GOAL_US if rank.place == OWN_CARDS and tokens == GOAL_TOKENS else None
    return {
        "what": "publish+merge",
        "backend": backend,
        "form": form,
        "tokens": tokens,
        "columns": columns,
        "producer_us": round(shared[1], 3),
        "publish_us": round(shared[2] - shared[1], 3) if 2 in shared else None,
        "merge_us": round(shared[3] - shared[2], 3) if 2 in shared else None,
        "us": us,
        "alone_us": round(alone[3] - alone[1], 3),
        "goal_us": goal,
        "met": None if goal is None else us <= goal,
    }
