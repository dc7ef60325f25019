"""The prefill of one rank: the windows of prompt tokens, on their way from queries to merged blocks.

Everything that a window needs is allocated once, for `--chunk-tokens` tokens of as many requests as the
batch has rows; a window takes slices of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import msa_icp

from ..geometry import BLOCK, LEGACY_WORDS, NUM_HEADS, TOP_K
from .engine import Window
from .plan import Plan
from .shard import Shard, Stopwatch
from .synth import Synth


class Prefill:
    """For each window `begin`; then for each layer `local`, the exchange of the ranks, and `merge`."""

    tokens: WindowTokens
    """Of the window that has begun."""

    def __init__(self, plan: Plan, synth: Synth, shard: Shard, errors: Tensor, watch: Stopwatch) -> None:
        options = plan.options
        self._options = options
        self._plan = plan
        self._synth = synth
        self._shard = shard
        self._errors = errors
        self._watch = watch
        most, segments, device = options.chunk_tokens, options.max_batch, shard.device
        sizes = msa_icp.msa_icp_index_score_plan_storage(
            num_qo_heads=NUM_HEADS, total_q=most, batch=segments, device=device
        )
        self._plan_storage: dict[str, Any] = {
            "packed_work_range": torch.zeros(sizes["work_range_numel"], dtype=torch.int64, device=device),
            "packed_work_info": torch.zeros(sizes["work_info_numel"], dtype=torch.int64, device=device),
            "workspace": torch.empty(sizes["workspace_bytes"], dtype=torch.uint8, device=device),
        }
        pool = msa_icp.msa_icp_prefill_pool_bytes(total_q=most, batch=segments, device=device)
        self._pool = torch.empty(pool, dtype=torch.uint8, device=device)
        heads = options.heads_per_rank
        self._carrier = torch.zeros(NUM_HEADS, most, LEGACY_WORDS, dtype=torch.int32, device=device)
        self._received = torch.zeros(
            options.world_size, heads, most, LEGACY_WORDS, dtype=torch.int32, device=device
        )
        self._merged = torch.empty(
            options.sparse_layers, most, heads, TOP_K, dtype=torch.int32, device=device
        )

    @property
    def carrier(self) -> Tensor:
        """What this rank sends: its Top16 rows of all heads, a token slice of its buffer."""
        return self._carrier[:, : self.tokens.count]

    @property
    def received(self) -> Tensor:
        """What it gets: all ranks' rows of its own heads."""
        return self._received[:, :, : self.tokens.count]

    @property
    def merged(self) -> Tensor:
        """Block ids of the window, `[layers, T, hpr, 16]`, complete after the last layer."""
        return self._merged[:, : self.tokens.count]

    def begin(self, window: Window) -> None:
        """Plan the window: once, for all layers."""
        self.tokens = WindowTokens(window)
        self._num_valid = (self.tokens.position // BLOCK + 1).to(torch.int32).to(self._shard.device)
        with self._watch("prefill", "planning"):
            segments = window.segments
            rows = torch.tensor([segment.row for segment in segments], device=self._shard.device)
            self._table = self._shard.table[rows]
            query_lens = [segment.tokens for segment in segments]
            contexts = [segment.stop for segment in segments]
            self._score_plan = msa_icp.msa_icp_index_score_sharded_plan_device(
                self._numbers(query_lens),
                self._numbers(contexts),
                self._numbers(_prefix_sums(query_lens)),
                self._numbers(_prefix_sums(contexts)),
                self._numbers([segment.start for segment in segments]),
                NUM_HEADS,
                total_q=self.tokens.count,
                max_query_len=max(query_lens),
                max_seq_len=max(contexts),
                **self._plan_storage,
            )

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._shard.device)

    def local(self, layer: int) -> None:
        """Write the keys of the window, score this rank's shard and select its Top16 into the carrier."""
        tokens, options, shard = self.tokens, self._options, self._shard
        shard.write("prefill", tokens.request, tokens.position, tokens.row, layer)
        with self._watch("prefill", "synthesis"):
            queries = self._synth.queries(tokens.request, tokens.position, layer).to(shard.device)
        with self._watch("prefill", "scoring"):
            msa_icp.msa_icp_prefill_score_select(
                queries,
                shard.index_k[layer],
                self._table,
                self._score_plan,
                self._num_valid,
                self._pool,
                self.carrier,
                rank=shard.layout.rank,
                tp=options.world_size,
                compact=options.page_size != BLOCK,
                force_begin_blocks=options.init_blocks,
                force_end_blocks=options.local_blocks,
                backend=self._plan.prefill_backend,
            )

    def merge(self, layer: int) -> None:
        """Merge what all ranks sent for this rank's heads."""
        with self._watch("prefill", "merging"):
            msa_icp.msa_icp_merge_candidates(
                self.received,
                self._num_valid,
                self.merged[layer],
                self._errors,
                init_blocks=self._options.init_blocks,
                local_blocks=self._options.local_blocks,
                prefill=True,
                backend=self._plan.backend,
            )


class WindowTokens:
    """The tokens of a window, int64 `[T]` each: of which request, where, and in which batch row."""

    def __init__(self, window: Window) -> None:
        segments = window.segments
        lens = torch.tensor([segment.tokens for segment in segments])
        self.window = window
        self.count = window.tokens
        self.request = torch.tensor([segment.request for segment in segments]).repeat_interleave(lens)
        self.row = torch.tensor([segment.row for segment in segments]).repeat_interleave(lens)
        self.position = torch.cat([torch.arange(segment.start, segment.stop) for segment in segments])


def _prefix_sums(values: list[int]) -> list[int]:
    return [sum(values[:count]) for count in range(len(values) + 1)]
