"""Decode layers and a prefill window of all ranks of one process, as functions to be compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers import HEADS
from torch import Tensor

import msa_icp
from msa_icp import cases, prefill_cases
from msa_icp.cases import poisoned

CAPACITY = 6
SPIN_LIMIT = 200
"""Few polls: what is merged before it is published must fail, and soon."""


@dataclass
class Ranks:
    """What the ranks keep from step to step."""

    group: tuple[msa_icp.ReceiveStorage, ...]
    backend: str
    tagged: bool
    fused: bool
    scores: list[Tensor]
    outputs: list[Tensor]
    pool: Tensor

    @classmethod
    def of(cls, world_size: int, device: str, backend: str, *, tagged: bool, fused: bool) -> Ranks:
        group = msa_icp.ReceiveStorage.in_process(world_size, capacity=CAPACITY, device=device)
        pool = msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=CAPACITY)
        return cls(
            group,
            backend,
            tagged,
            fused,
            [poisoned((CAPACITY, HEADS, 16), torch.float32, device) for _ in group],
            [poisoned((CAPACITY, s.heads_per_rank, 16), torch.int32, device) for s in group],
            torch.zeros(pool, dtype=torch.uint8, device=device),
        )


@dataclass
class Batch:
    """One step's input. `new_keys` are written to the last position of every request."""

    index_q: Tensor
    shards: list[Tensor]
    block_table: Tensor
    seq_lens: Tensor
    new_keys: Tensor
    positions: Tensor
    requests: Tensor

    @classmethod
    def of(cls, requests: int, world_size: int, device: str) -> Batch:
        lens = [300 + 411 * i for i in range(requests)]
        case = cases.decode_case("", world_size, 128, seq_lens=lens, seed=requests)
        table, seq_lens, _ = case.metadata(device)
        return cls(
            case.index_q.to(device),
            [case.shard(rank, device) for rank in range(world_size)],
            table,
            seq_lens,
            cases.exact((requests, 128), 7).to(device),
            seq_lens - 1,
            torch.arange(requests, dtype=torch.int32, device=device),
        )


def decode_step(ranks: Ranks, batch: Batch, slot: int) -> Tensor:
    """A layer between tensor code, which the compiler sees through: rank 0's ids, each one more."""
    decode_layers(ranks, batch, msa_icp.num_valid_pages(batch.seq_lens, 1), (slot,))
    return ranks.outputs[0][: batch.index_q.shape[0]] + 1


def decode_layers(ranks: Ranks, batch: Batch, num_valid: Tensor, slots: tuple[int, ...]) -> None:
    """Write keys, score, publish and merge, once for every slot set: ops alone, no code to generate."""
    tokens = batch.index_q.shape[0]
    for slot in slots:
        for storage, shard, scores in zip(ranks.group, batch.shards, ranks.scores, strict=True):
            publish(ranks, batch, storage, shard, scores[:tokens], num_valid, slot)
        for storage, output in zip(ranks.group, ranks.outputs, strict=True):
            msa_icp.merge_received(
                storage,
                num_valid,
                output[:tokens],
                slot=slot,
                tagged=ranks.tagged,
                init_blocks=1,
                local_blocks=2,
                spin_limit=SPIN_LIMIT,
                backend=ranks.backend,
            )


def publish(
    ranks: Ranks,
    batch: Batch,
    storage: msa_icp.ReceiveStorage,
    shard: Tensor,
    scores: Tensor,
    num_valid: Tensor,
    slot: int,
) -> None:
    layout: dict[str, Any] = {"rank": storage.rank, "world_size": storage.world_size}
    target: dict[str, Any] = {
        "slot": slot,
        "capacity": storage.capacity,
        "force_begin_blocks": 1,
        "force_end_blocks": 2,
        "spin_limit": SPIN_LIMIT,
        "generations": storage.publish_generations if ranks.tagged else None,
        "backend": ranks.backend,
        **layout,
    }
    bases = storage.tagged_recv_bases if ranks.tagged else storage.recv_bases
    table, lens = batch.block_table, batch.seq_lens
    msa_icp.write_index_keys(
        *(batch.new_keys, batch.positions, batch.requests, table, shard),
        page_size=128,
        backend=ranks.backend,
        **layout,
    )
    if ranks.fused:
        msa_icp.msa_icp_decode_score_publish(
            *(batch.index_q, shard, table, lens, num_valid, ranks.pool, bases, storage.errors),
            page_size=128,
            decode_query_len=1,
            **target,
        )
        return
    msa_icp.msa_icp_decode_index_score_sharded(
        *(batch.index_q, shard, table, lens, scores),
        page_size=128,
        decode_query_len=1,
        max_decode_query_len=1,
        backend=ranks.backend,
        **layout,
    )
    msa_icp.msa_icp_topk_select_publish(
        *(scores, num_valid, bases, storage.errors), heads_per_rank=storage.heads_per_rank, **target
    )


class Window:
    """A prefill window of two ranks over pages of 256 keys: its input and its buffers."""

    def __init__(self, tokens: int, device: str, backend: str) -> None:
        case = prefill_cases.prefill_case("", 2, 256, qo_lens=(tokens, 0, 2), kv_lens=(tokens + 300, 40, 130))
        total = case.total_q
        sizes = {"total_q": total, "batch": 3, "device": device}
        storage = msa_icp.msa_icp_index_score_plan_storage(num_qo_heads=HEADS, **sizes)
        pool = msa_icp.msa_icp_prefill_pool_bytes(**sizes)
        self.backend = backend
        self.index_q = case.index_q.to(device)
        self.shards = [case.shard(rank, device) for rank in range(2)]
        self.block_table = case.table(device)
        self.metadata = case.metadata(device)
        self.bounds = {"total_q": total, "max_query_len": tokens, "max_seq_len": tokens + 300}
        self.num_valid = case.num_valid_pages().to(device)
        self.plan_storage = {
            "packed_work_range": torch.zeros(storage["work_range_numel"], dtype=torch.int64, device=device),
            "packed_work_info": torch.zeros(storage["work_info_numel"], dtype=torch.int64, device=device),
            "workspace": torch.zeros(storage["workspace_bytes"], dtype=torch.uint8, device=device),
        }
        self.pool = torch.zeros(pool, dtype=torch.uint8, device=device)
        self.scores = [poisoned((total, HEADS, 4), torch.float32, device) for _ in range(2)]
        self.carriers = [poisoned((HEADS, total, 33), torch.int32, device) for _ in range(4)]
        self.received = [poisoned((2, 2, total, 33), torch.int32, device) for _ in range(2)]
        self.outputs = [poisoned((total, 2, 16), torch.int32, device) for _ in range(2)]
        self.errors = torch.zeros(4, dtype=torch.int32, device=device)

    def written(self) -> list[Tensor]:
        """Everything that the window's ops write, but for the scratch."""
        plan = [self.plan_storage["packed_work_range"], self.plan_storage["packed_work_info"]]
        return [*plan, *self.scores, *self.carriers, *self.received, *self.outputs, self.errors]


def prefill_layer(window: Window) -> None:
    """Plan, score, select and the two in one for both ranks, exchange and merge."""
    plan = msa_icp.msa_icp_index_score_sharded_plan_device(
        **window.metadata,
        num_qo_heads=HEADS,
        **window.bounds,
        **window.plan_storage,
        backend=window.backend,
    )
    forced = {"force_begin_blocks": 1, "force_end_blocks": 2, "backend": window.backend}
    for rank, shard in enumerate(window.shards):
        msa_icp.msa_icp_index_score_sharded(
            *(window.index_q, shard, window.block_table, plan),
            rank=rank,
            max_score=window.scores[rank],
            compact=True,
            backend=window.backend,
        )
        msa_icp.msa_icp_topk_select_prefill(
            *(window.scores[rank], window.num_valid, window.carriers[rank]),
            index_scale=2,
            index_offset=rank,
            **forced,
        )
        msa_icp.msa_icp_prefill_score_select(
            *(window.index_q, shard, window.block_table, plan),
            *(window.num_valid, window.pool, window.carriers[2 + rank]),
            rank=rank,
            compact=True,
            **forced,
        )
    for rank, received in enumerate(window.received):  # what exchange_prefill does, which is not for a graph
        received.copy_(torch.stack([carrier.view(2, 2, -1, 33)[rank] for carrier in window.carriers[:2]]))
    for received, output in zip(window.received, window.outputs, strict=True):
        msa_icp.msa_icp_merge_candidates(
            *(received, window.num_valid, output, window.errors),
            init_blocks=1,
            local_blocks=2,
            prefill=True,
            backend=window.backend,
        )
