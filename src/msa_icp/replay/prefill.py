"""The prefill of one rank: the windows of prompt tokens, on their way from queries to merged blocks.

Everything that a window needs is allocated once, in the sizes that the indexer tells; a window takes slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import msa_icp

from ..geometry import BLOCK, LEGACY_WORDS, TOP_K
from .engine import Segment, Window
from .shard import Shard, Stopwatch
from .synth import Synth


class Prefill:
    """For each window `begin`; then for each layer `local`, the exchange of the ranks, and `merge`."""

    tokens: WindowTokens
    """Of the window that has begun."""

    def __init__(
        self,
        indexer: msa_icp.MSAIcpIndexerPlan,
        layers: int,
        synth: Synth,
        shard: Shard,
        watch: Stopwatch,
    ) -> None:
        self._indexer = indexer
        self._synth = synth
        self._shard = shard
        self._watch = watch
        device, heads, most = indexer.device, indexer.heads_per_rank, indexer.max_num_batched_tokens
        self._pool: Tensor | None = None
        self._scratch: Tensor | None = None
        if indexer.fused_prefill:
            self._most = indexer.prefill_window_tokens()
            self._pool = torch.empty(indexer.prefill_pool_shape(), dtype=torch.uint8, device=device)
        else:
            self._most = indexer.prefill_scratch_shape()[0]
            self._scratch = torch.empty(indexer.prefill_scratch_shape(), device=device)
        carriers = torch.zeros(indexer.prefill_carrier_shape(), dtype=torch.int32, device=device)
        self._carrier = carriers[0]
        self._received = carriers[1].view(indexer.world_size, heads, most, LEGACY_WORDS)
        self._output = torch.empty(most, heads, TOP_K, dtype=torch.int32, device=device)
        self._merged = torch.empty(layers, most, heads, TOP_K, dtype=torch.int32, device=device)

    @property
    def rooms(self) -> tuple[int, int]:
        """Words of the carrier and of the received rows of the largest window."""
        return self._carrier.numel(), self._received.numel()

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
        """Plan the window, in as many as score rows take at once, and prepare the step: for all layers."""
        tokens = self.tokens = WindowTokens(window)
        scratch = self._scratch
        with self._watch("prefill", "planning"):
            num_valid = (tokens.position // BLOCK + 1).to(torch.int32).to(self._shard.device)
            if scratch is not None:  # no more columns than there are to select from
                longest = max(segment.stop for segment in window.segments)
                columns = msa_icp.msa_icp_index_score_columns(longest, self._indexer.page_size)
                scratch = scratch[..., :columns]
            self._step = self._indexer.prepare_prefill_step(
                self._planned(window),
                scratch,
                num_valid,
                self.carrier,
                self.received,
                self._output[: tokens.count],
                pool=self._pool,
            )

    def _planned(self, window: Window) -> list[tuple[int, int, Tensor, msa_icp.MSAIcpScorePlan]]:
        windows, begin = [], 0
        for number, segments in enumerate(cut(window.segments, self._most)):
            end = begin + sum(segment.tokens for segment in segments)
            rows = torch.tensor([segment.row for segment in segments], device=self._shard.device)
            windows.append((begin, end, self._shard.table[rows], self._plan(number, segments)))
            begin = end
        return windows

    def _plan(self, number: int, segments: Sequence[Segment]) -> msa_icp.MSAIcpScorePlan:
        query_lens = [segment.tokens for segment in segments]
        contexts = [segment.stop for segment in segments]
        return self._indexer.prefill_window_plan(
            number,
            self._numbers(query_lens),
            self._numbers(contexts),
            self._numbers(_prefix_sums(query_lens)),
            self._numbers(_prefix_sums(contexts)),
            self._numbers([segment.start for segment in segments]),
            total_q=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(contexts),
        )

    def _numbers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._shard.device)

    def local(self, layer: int) -> None:
        """Write the keys of the window, score this rank's shard and select its Top16 into the carrier."""
        tokens, shard = self.tokens, self._shard
        shard.write("prefill", tokens.request, tokens.position, tokens.row, layer)
        with self._watch("prefill", "synthesis"):
            queries = self._synth.queries(tokens.request, tokens.position, layer).to(shard.device)
        with self._watch("prefill", "scoring"):
            self._step.local(queries, shard.index_k[layer])

    def merge(self, layer: int) -> None:
        """Merge what all ranks sent for this rank's heads."""
        with self._watch("prefill", "merging"):
            self._step.merge()
            self.merged[layer].copy_(self._step.output)  # the next layer's come to the same place


def cut(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """The segments in order, `most` tokens after `most` tokens: one may end in the next part, or later."""
    part: list[Segment] = []
    left = most
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(segment.stop, start + left)
            part.append(replace(segment, start=start, stop=stop))
            start, left = stop, left - (stop - start)
            if left == 0:
                yield part
                part, left = [], most
    if part:
        yield part


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
