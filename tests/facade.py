"""All ranks of a facade in one process, for the tests of `msa_icp.indexer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers import HEADS, SPIN_LIMIT
from torch import Tensor

import msa_icp
from msa_icp import cases, verify
from msa_icp.cases import poisoned
from msa_icp.prefill_cases import PrefillCase

LIMITS: dict[str, Any] = {
    "num_index_heads": HEADS,
    "init_blocks": 1,
    "local_blocks": 2,
    "max_decode_tokens": 12,
    "max_decode_query_len": 4,
    "max_num_batched_tokens": 300,
    "max_num_seqs": 8,
    "max_model_len": 8192,
    "num_sparse_layers": 57,
}


def plan_of(rank: int = 0, world_size: int = 2, page_size: int = 128, **changes: Any):
    """A rank's plan."""
    where = {"rank": rank, "world_size": world_size, "page_size": page_size, "device": "cpu"}
    return msa_icp.prepare_msa_icp_indexer(**{**LIMITS, "spin_limit": SPIN_LIMIT, **where, **changes})


class Decode:
    """A decode batch, and what every rank has for it."""

    def __init__(self, case: cases.DecodeCase, backend: str, device: str, **changes: Any) -> None:
        world = case.world_size
        self.case = case
        self.device = device
        self.plans = [
            plan_of(
                rank,
                world,
                case.page_size,
                backend=backend,
                device=device,
                init_blocks=case.init_blocks,
                local_blocks=case.local_blocks,
                **changes,
            )
            for rank in range(world)
        ]
        self.group = msa_icp.ReceiveStorage.in_process(world, capacity=12, device=device)
        self.table, self.lens, self.num_valid = case.metadata(device)
        self.keys = [case.shard(rank, device) for rank in range(world)]
        self.queries = case.index_q.to(device)
        self.scores = [poisoned(plan.decode_scores_shape(), torch.float32, device) for plan in self.plans]
        self.outputs = [
            poisoned((case.tokens, HEADS // world, 16), torch.int32, device) for _ in range(world)
        ]

    def buffers(self, rank: int) -> tuple[Tensor, ...]:
        """What a step takes besides query and keys."""
        return self.table, self.lens, self.num_valid, self.scores[rank], self.outputs[rank]

    def arguments(self, rank: int, *, tagged: bool, **changes: Any) -> dict[str, Any]:
        """The keyword arguments of a step."""
        return {
            "comm": self.group[rank],
            "tagged": tagged,
            "decode_query_len": self.case.decode_query_len,
            **changes,
        }

    def steps(self, *, tagged: bool, **changes: Any) -> list[Any]:
        """A prepared step of every rank."""
        return [
            plan.prepare_decode_step(*self.buffers(rank), **self.arguments(rank, tagged=tagged, **changes))
            for rank, plan in enumerate(self.plans)
        ]

    def call(self, *, tagged: bool, slot: int, **changes: Any) -> Tensor:
        """A layer through the two halves, as every rank in turn; int32 `[T, 4, 16]` on the CPU."""
        for output in self.outputs:
            output.copy_(poisoned(output.shape, torch.int32, self.device))
        for half in ("decode_publish", "decode_merge"):
            for rank, plan in enumerate(self.plans):
                arguments = self.arguments(rank, tagged=tagged, slot=slot, **changes)
                getattr(plan, half)(self.queries, self.keys[rank], *self.buffers(rank), **arguments)
        return self.merged()

    def merged(self) -> Tensor:
        """What the ranks merged, int32 `[T, 4, 16]` on the CPU; and no wait failed."""
        for storage in self.group:
            storage.check()
        return torch.cat([output.cpu() for output in self.outputs], 1)

    def truth(self) -> Tensor:
        """The selection of one rank with all keys."""
        ids = torch.tensor(verify.unsharded(self.case), dtype=torch.int32)
        return ids.view(self.case.tokens, HEADS, 16)


def run_in_turn(launches: Sequence[Sequence[Any]]) -> None:
    """Every rank's launches of a decode layer, the merges after all publishes."""
    for own in launches:
        for one in own[:-1]:
            one()
    for own in launches:
        own[-1]()


class Prefill:
    """A prefill window of every rank, and what each has for it."""

    def __init__(self, case: PrefillCase, backend: str, device: str, **changes: Any) -> None:
        world = case.world_size
        self.case = case
        self._window_plan: Any = None
        self.plans = [
            plan_of(
                rank,
                world,
                case.page_size,
                backend=backend,
                device=device,
                init_blocks=case.init_blocks,
                local_blocks=case.local_blocks,
                **changes,
            )
            for rank in range(world)
        ]
        self.num_valid = case.num_valid_pages().to(device)
        self.table = case.table(device)
        self.keys = [case.shard(rank, device) for rank in range(world)]
        self.queries = case.index_q.to(device)
        tokens = case.total_q
        self.carriers = [poisoned((HEADS, tokens, 33), torch.int32, device) for _ in range(world)]
        self.received = [
            poisoned((world, HEADS // world, tokens, 33), torch.int32, device) for _ in range(world)
        ]
        self.outputs = [poisoned((tokens, HEADS // world, 16), torch.int32, device) for _ in range(world)]
        self.scratch = poisoned(self.plans[0].prefill_scratch_shape(case.max_seq_len), torch.float32, device)
        self.pool = torch.full(
            self.plans[0].prefill_pool_shape(), cases.NAN_BYTE, dtype=torch.uint8, device=device
        )

    def window_plans(self, window: int = 0) -> list[Any]:
        """Every rank's plan of the window."""
        case = self.case
        return [
            plan.prefill_window_plan(
                window,
                **case.metadata(self.queries.device),
                total_q=case.total_q,
                max_query_len=case.total_q,
                max_seq_len=case.max_seq_len,
            )
            for plan in self.plans
        ]

    def window_plan(self) -> Any:
        """Rank 0's plan, made once: an engine's metadata stay where they are, too."""
        if self._window_plan is None:
            self._window_plan = self.window_plans()[0]
        return self._window_plan

    def merged(self) -> Tensor:
        """What the ranks merged, int32 `[T, 4, 16]` on the CPU."""
        return torch.cat([output.cpu() for output in self.outputs], 1)

    def truth(self) -> Tensor:
        """The selection of one rank with all keys."""
        return verify.prefill.merged_truth(self.case, [c.cpu() for c in self.carriers], bitwise=True)
