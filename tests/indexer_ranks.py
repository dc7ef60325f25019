"""Ranks in processes of their own that decode through the facade; see rank_processes.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from facade import Decode
from graph_stand_in import StandIn
from rank_processes import create, here
from test_indexer import batch

from msa_icp import cases
from msa_icp.indexer import graphs

LAYERS, STEPS = 4, 12


def eager_and_replayed(rank: int, world_size: int, folder: Path, tagged: bool) -> dict[str, Any]:
    """Rank 0 runs every layer eagerly, rank 1 captures it at once and replays it when its slot set comes
    again.

    48 layers rotate through three slot sets: each of four layers meets each of them, twelve graphs.
    """
    if here.device.type == "cpu":
        for name, ours in StandIn().replaced().items():
            setattr(graphs, name, ours)
    ranks = Decode(batch(), here.backend, str(here.device), spin_limit=here.long)
    plan = ranks.plans[rank]
    plan.warmup()
    cache = plan.layer_graphs(capture_after=10**6 if rank == 0 else 0)
    wrong = 0
    with create(capacity=12) as storage:
        ranks.group = [storage] * world_size
        for number in range(STEPS):
            prepared = ranks.steps(tagged=tagged)[rank]
            step = cache.begin_step(decode=prepared, decode_tokens=ranks.case.tokens)
            for layer in range(LAYERS):
                queries = cases.exact(ranks.queries.shape, seed=8 * number + layer).to(here.device)
                with storage.slot_set() as slot:
                    step.run(layer, queries, ranks.keys[rank], slot=slot)
                wrong += not torch.equal(ranks.outputs[rank].cpu(), truth(ranks, queries, rank))
        storage.check()
    counts = [cache.stats[name] for name in graphs.STATS]
    return {"wrong": wrong, "numbers": counts}


def truth(ranks: Decode, queries: torch.Tensor, rank: int) -> torch.Tensor:
    """This rank's heads, of all ranks in this process."""
    own = Decode(ranks.case, here.backend, str(here.device))
    own.queries = queries
    heads = own.plans[rank].heads_per_rank
    return own.call(tagged=True, slot=0)[:, rank * heads : (rank + 1) * heads]


def warm_at_once(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Every rank warms up at the same time, from one cold cache, and then decodes."""
    if here.backend == "cuda":
        from msa_icp.cuda_backend import loader

        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        loader.kernel_cache.cache_clear()
    ranks = Decode(batch(), here.backend, str(here.device), spin_limit=here.long)
    plan, wrong = ranks.plans[rank], 0
    dist.barrier()
    plan.warmup()
    dist.barrier()
    with create(capacity=12) as storage:
        ranks.group = [storage] * world_size
        step = ranks.steps(tagged=True)[rank]
        for _ in range(6):
            with storage.slot_set() as slot:
                step.run(ranks.queries, ranks.keys[rank], slot=slot)
            wrong += not torch.equal(ranks.outputs[rank].cpu(), truth(ranks, ranks.queries, rank))
        storage.check()
    return {"wrong": wrong, "kept": sum(1 for _ in folder.glob("cache/**/*") if _.is_file())}
