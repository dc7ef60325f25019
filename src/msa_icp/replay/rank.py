"""One rank of the replay: its shards, and what it does in every step and layer.

This is the caller's side of the library: a rank holds queries of all four heads and its share of the
keys, and runs them through the indexer, as an engine does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import msa_icp

from ..geometry import HEAD_DIM, NUM_HEADS, TOP_K
from .checker import Checker, WrongRow
from .engine import Step
from .options import BATCH_MULTIPLE
from .plan import Plan
from .prefill import Prefill
from .shard import Shard, Stopwatch
from .synth import Synth, mix

SPIN_LIMIT = 1 << 23
"""Polls that a wait for a peer takes at most: some seconds. Ranks start the layers of a step together, so
that a wait only covers the differences between equal pieces of work."""

SHARED_CARD_SPIN_LIMIT = 1 << 24
"""The same where processes take turns on a card. A rank polls in its own turns only, so that the limit is
the longer the more of them share the card."""

FOLLOWED_PREFILL = 512
"""The most prefilled tokens whose selection is kept for the picture."""


@dataclass(frozen=True)
class Progress:
    """How far a replay has come. Tokens are those of the whole batch; every rank sees all of them."""

    steps: int
    """Steps of the engine, those without decoded tokens included."""
    decode_steps: int
    tokens: int
    """Decoded tokens."""
    k_bytes: int
    """Index-key bytes in the pages that each rank's decode scorer read; the same for all ranks."""
    prefill_windows: int
    prefill_tokens: int
    """Prompt tokens that went through the indexer."""
    prefill_k_bytes: int
    """As `k_bytes`, where each window reads the context of each of its segments once."""


@dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    rank: int
    progress: Progress
    rows_checked: int
    prefill_rows_checked: int
    """Those of `rows_checked` that belong to prompt tokens."""
    rows_wrong: int
    first_wrong: WrongRow | None
    digest: int
    """Sum of a hash of every merged row of decoded tokens, modulo 2**64: add that of all ranks."""
    prefill_digest: int
    """The same of prompt tokens."""
    phases: dict[str, dict[str, float]]
    """Seconds by part and phase; 'exchange' contains the waits for the other ranks (docs/replay.md)."""
    followed: list[tuple[int, list[list[int]]]]
    """For tokens of the followed request their positions and the ids of each head, layer 0."""


class Rank:
    """A rank. For each step `begin`; for each layer, where somebody decodes, `publish` and `merge`, and where
    prompts enter what `prefill` does; then `finish`."""

    _batch: _Batch
    """Of the step that has begun."""

    def __init__(self, plan: Plan, synth: Synth, storage: msa_icp.ReceiveStorage) -> None:
        options = plan.options
        self._plan = plan
        self._options = options
        self._synth = synth
        self.storage = storage
        self.watch = Stopwatch()
        self._shard = Shard(plan, synth, storage.rank, storage.device, self.watch)
        indexer = self._indexer = self._prepared(plan.backend)
        # The backend of decode may have no prefill.
        prompts = indexer if plan.prefill_backend == plan.backend else self._prepared(plan.prefill_backend)
        self.prefill = Prefill(prompts, options.sparse_layers, synth, self._shard, self.watch)
        self._first_head = storage.rank * storage.heads_per_rank
        heads = range(self._first_head, self._first_head + storage.heads_per_rank)
        self._checker = Checker(options, synth, heads)
        self._device = storage.device
        self._scores = torch.empty(indexer.decode_scores_shape(), device=self._device)
        output = (options.capacity, storage.heads_per_rank, TOP_K)
        self._output = torch.empty(output, dtype=torch.int32, device=self._device)
        self._merged = torch.empty((options.sparse_layers, *output), dtype=torch.int32, device=self._device)
        self._steps = self._decode_steps = self._tokens = self._k_bytes = self._digest = 0
        self._windows = self._prefill_tokens = self._prefill_k_bytes = self._prefill_digest = 0
        self._followed: list[tuple[int, list[list[int]]]] = []

    def _prepared(self, backend: str) -> msa_icp.MSAIcpIndexerPlan:
        """An indexer for the limits of the replay, with every kernel loaded."""
        options, storage = self._options, self.storage
        indexer = msa_icp.prepare_msa_icp_indexer(
            world_size=storage.world_size,
            rank=storage.rank,
            num_index_heads=NUM_HEADS,
            page_size=options.page_size,
            init_blocks=options.init_blocks,
            local_blocks=options.local_blocks,
            max_decode_tokens=options.capacity,
            max_decode_query_len=options.query_len,
            max_num_batched_tokens=options.chunk_tokens,
            max_num_seqs=options.max_batch,
            max_model_len=self._plan.longest,
            # One layer a step is right for tagged rows too, as the rotation of `slot_set` never restarts.
            num_sparse_layers=max(2, options.sparse_layers),
            device=storage.device,
            backend=backend,
            spin_limit=SHARED_CARD_SPIN_LIMIT if self._plan.share_a_card else SPIN_LIMIT,
        )
        indexer.warmup()
        return indexer

    # ------------------------------------------------------------ a step

    def begin(self, step: Step) -> None:
        """Follow the schedule: the block table, cached prompts, and what the layers share."""
        self._shard.follow(step)
        batch = self._batch = _Batch(step, self._options.query_len, self._device)
        if step.rows:
            self._step = self._indexer.prepare_decode_step(
                self._shard.table[: batch.size],
                batch.seq_lens,
                batch.num_valid,
                self._scores,
                self._output[: batch.tokens],
                comm=self.storage,
                tagged=self._options.tagged,
                decode_query_len=self._options.query_len,
                # A scorer that waits for the merge before it may fill the card that a peer needs.
                enable_pdl=not self._plan.share_a_card,
            )
        if step.window is not None:
            self.prefill.begin(step.window)

    def publish(self, layer: int, slot: int) -> None:
        """Write the new tokens' keys, score this rank's shard, send its Top16 rows to their owners."""
        batch = self._batch
        self._shard.write("decode", batch.request, batch.position, batch.row, layer)
        with self.watch("decode", "synthesis"):
            made = torch.zeros(batch.tokens, NUM_HEADS, HEAD_DIM, dtype=torch.uint8)
            made[batch.token] = self._synth.queries(batch.request, batch.position, layer).view(torch.uint8)
            queries = made.view(torch.float8_e4m3fn).to(self._device)
        with self.watch("decode", "scoring"):
            self._step.publish(queries, self._shard.index_k[layer], slot=slot)

    def merge(self, layer: int, slot: int) -> None:
        """Merge what all ranks sent for this rank's heads."""
        with self.watch("decode", "exchange"):
            self._step.merge(slot=slot)
            # The next layer's come to the same place.
            self._merged[layer, : self._batch.tokens].copy_(self._step.output)

    def finish(self) -> None:
        """Raise if a peer did not come; otherwise count and check what was merged."""
        self.storage.check()
        step = self._batch.step
        self._steps += 1
        if step.rows:
            self._finish_decode(step)
        if step.window is not None:
            self._finish_prefill(step)

    def _finish_decode(self, step: Step) -> None:
        batch, query_len = self._batch, self._options.query_len
        number = self._decode_steps
        self._decode_steps += 1
        self._tokens += len(step.rows) * query_len
        self._k_bytes += self._bytes_of([row.seq_len for row in step.rows])
        outputs = self._merged.cpu()
        self._digest += self._hash(outputs[:, batch.token], batch.request, batch.position)
        followed = (batch.request == self._plan.walk.followed).nonzero().flatten().tolist()
        for place in followed:
            self._follow(int(batch.position[place]), outputs[0, batch.token[place]])
        with self.watch("decode", "checking"):
            self._checker.check(number, step, list(outputs))

    def _finish_prefill(self, step: Step) -> None:
        tokens, outputs = self.prefill.tokens, self.prefill.merged.cpu()
        self._windows += 1
        self._prefill_tokens += tokens.count
        self._prefill_k_bytes += self._bytes_of([segment.stop for segment in tokens.window.segments])
        self._prefill_digest += self._hash(outputs, tokens.request, tokens.position)
        followed = self._plan.walk.followed
        prompt = min(self._plan.requests[followed].prompt_tokens, self._options.prefill_tokens)
        every = -(-prompt // FOLLOWED_PREFILL)
        shown = (tokens.request == followed) & (tokens.position % every == 0)
        for place in shown.nonzero().flatten().tolist():
            self._follow(int(tokens.position[place]), outputs[0, place])
        with self.watch("prefill", "checking"):
            self._checker.check_window(step.number, tokens.window, list(outputs))

    @property
    def progress(self) -> Progress:
        """How far this rank has come."""
        return Progress(
            steps=self._steps,
            decode_steps=self._decode_steps,
            tokens=self._tokens,
            k_bytes=self._k_bytes,
            prefill_windows=self._windows,
            prefill_tokens=self._prefill_tokens,
            prefill_k_bytes=self._prefill_k_bytes,
        )

    def result(self) -> RankResult:
        """What was done so far."""
        return RankResult(
            rank=self.storage.rank,
            progress=self.progress,
            rows_checked=self._checker.rows_checked,
            prefill_rows_checked=self._checker.prefill_rows_checked,
            rows_wrong=self._checker.rows_wrong,
            first_wrong=self._checker.first_wrong,
            digest=self._digest % 2**64,
            prefill_digest=self._prefill_digest % 2**64,
            phases={part: dict(phases) for part, phases in self.watch.seconds.items()},
            followed=self._followed,
        )

    # ------------------------------------------------------------ parts of it

    def _bytes_of(self, contexts: list[int]) -> int:
        """Index-key bytes in this rank's share of the pages of these contexts, over all layers."""
        layout = self._shard.layout
        pages: int = sum(map(layout.columns, contexts))
        return pages * layout.page_bytes * self._options.sparse_layers

    def _follow(self, position: int, ids: Tensor) -> None:
        self._followed.append((position, ids.tolist()))

    def _hash(self, merged: Tensor, request: Tensor, position: Tensor) -> int:
        """Stands for the merged rows `[layers, n, hpr, 16]` of `n` tokens, in any order."""
        ids = merged.to(torch.int64)
        layers, _, heads, _ = ids.shape
        head = torch.arange(heads) + self._first_head
        place = mix(request * 2**32 + position)[:, None] + head
        name = mix(place + (torch.arange(layers) * NUM_HEADS)[:, None, None])
        row = mix(ids + torch.arange(TOP_K) * 2**32).sum(-1)
        return int(mix(row ^ name).sum())


class _Batch:
    """The tensors of a step's batch: `size` rows, padding included; the rest is for the live tokens."""

    def __init__(self, step: Step, query_len: int, device: torch.device) -> None:
        self.step = step
        rows = [row.row for row in step.rows]
        self.size = -(-(max(rows, default=-1) + 1) // BATCH_MULTIPLE) * BATCH_MULTIPLE
        self.tokens = self.size * query_len
        seq_lens = torch.zeros(self.size, dtype=torch.int32)  # 0: padding
        lens = torch.tensor([row.seq_len for row in step.rows], dtype=torch.int64)
        seq_lens[rows] = lens.to(torch.int32)
        self.seq_lens = seq_lens.to(device)
        self.num_valid = msa_icp.num_valid_pages(self.seq_lens, query_len)
        self.request = torch.tensor([row.request for row in step.rows]).repeat_interleave(query_len)
        self.row = torch.tensor(rows, dtype=torch.int64).repeat_interleave(query_len)
        offset = torch.arange(query_len).repeat(len(rows))
        self.position = lens.repeat_interleave(query_len) - query_len + offset
        self.token = self.row * query_len + offset
