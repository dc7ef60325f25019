"""One rank of the replay: its shards, and what it does in every step and layer.

This is the caller's side of the library: a rank holds queries of all four heads and its share of the
keys, and uses nothing but the public functions.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import msa_icp

from ..geometry import HEAD_DIM, NUM_HEADS, TOP_K, ShardLayout
from .checker import Checker, WrongRow
from .engine import Admission, Step
from .options import BATCH_MULTIPLE
from .plan import Plan
from .synth import Synth, mix

SPIN_LIMIT = 1 << 23
"""Polls that a wait for a peer takes at most: some seconds. Ranks start the layers of a step together, so
that a wait only covers the differences between equal pieces of work."""

PREFILL_CHUNK = 8192
"""Prompt tokens whose keys are written at once."""

_NAN_BYTE = 0x7F


@dataclass(frozen=True)
class Progress:
    """How far a replay has come."""

    steps: int
    tokens: int
    """Decoded tokens of the whole batch; every rank sees all of them."""
    k_bytes: int
    """Index-key bytes in the pages that each rank's scorer read; the same for all ranks."""


@dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    rank: int
    progress: Progress
    rows_checked: int
    rows_wrong: int
    first_wrong: WrongRow | None
    digest: int
    """Sum of a hash of every merged row, modulo 2**64: add the ranks' to compare two replays."""
    phases: dict[str, float]
    """Seconds by phase; 'exchange' contains the waits for the other ranks."""
    followed: list[tuple[int, list[list[int]]]]
    """For each token of the followed request its position and the ids of each head, layer 0."""


class Rank:
    """A rank; for each step `begin`, then `publish` and `merge` for each layer, then `finish`."""

    _batch: _Batch
    """Of the step that has begun."""

    def __init__(self, plan: Plan, synth: Synth, storage: msa_icp.ReceiveStorage) -> None:
        options = plan.options
        self._plan = plan
        self._options = options
        self._synth = synth
        self.storage = storage
        self._layout = ShardLayout(options.world_size, storage.rank, options.page_size)
        # What the functions that touch the shard have to know.
        self._shard: dict[str, Any] = {
            "rank": storage.rank,
            "world_size": options.world_size,
            "page_size": options.page_size,
            "backend": plan.backend,
        }
        first_head = storage.rank * storage.heads_per_rank
        self._checker = Checker(options, synth, range(first_head, first_head + storage.heads_per_rank))
        columns = msa_icp.msa_icp_decode_score_columns(plan.longest, options.page_size)
        self._device = storage.device
        # A page holds NaN until it is written, and a table row anything behind its last page: neither may
        # reach a score.
        self._index_k = [
            torch.full(
                (plan.pages, self._layout.rows, HEAD_DIM), _NAN_BYTE, dtype=torch.uint8, device=self._device
            ).view(torch.float8_e4m3fn)
            for _ in range(options.sparse_layers)
        ]
        self._table = torch.full(
            (options.batch_rows, columns), 2**31 - 1, dtype=torch.int32, device=self._device
        )
        self._scores = torch.empty(options.capacity, NUM_HEADS, columns, device=self._device)
        self._merged = torch.empty(
            (options.sparse_layers, options.capacity, storage.heads_per_rank, TOP_K),
            dtype=torch.int32,
            device=self._device,
        )
        self._steps = self._tokens = self._k_bytes = self._digest = 0
        self._phases: dict[str, float] = defaultdict(float)
        self._followed: list[tuple[int, list[list[int]]]] = []

    # ------------------------------------------------------------ a step

    def begin(self, step: Step) -> None:
        """Follow the schedule: update the block table, write the keys of admitted prompts."""
        for admission in step.admitted:
            self._table[admission.row, : len(admission.pages)] = torch.tensor(
                admission.pages, dtype=torch.int32, device=self._device
            )
        for row, column, page in step.grown:
            self._table[row, column] = page
        for admission in step.admitted:
            self._prefill(admission)
        self._batch = _Batch(step, self._options.query_len, self._device)

    def publish(self, layer: int, slot: int) -> None:
        """Write the new tokens' keys, score this rank's shard, send its Top16 rows to their owners."""
        batch, options, storage = self._batch, self._options, self.storage
        with self._phase("synthesis"):
            keys = self._synth.keys(batch.request, batch.position, layer)
            queries = torch.zeros(batch.tokens, NUM_HEADS, HEAD_DIM, dtype=torch.uint8)
            queries[batch.token] = self._synth.queries(batch.request, batch.position, layer).view(torch.uint8)
        with self._phase("writing"):
            self._write(keys, batch.position, batch.row, layer)
        table = self._table[: batch.size]
        scores = self._scores[: batch.tokens]
        with self._phase("scoring"):
            msa_icp.msa_icp_decode_index_score_sharded(
                queries.view(torch.float8_e4m3fn).to(self._device),
                self._index_k[layer],
                table,
                batch.seq_lens,
                scores,
                decode_query_len=options.query_len,
                max_decode_query_len=options.query_len,
                **self._shard,
            )
        with self._phase("exchange"):
            msa_icp.msa_icp_topk_select_publish(
                scores,
                batch.num_valid,
                storage.tagged_recv_bases if options.tagged else storage.recv_bases,
                storage.errors,
                slot=slot,
                rank=storage.rank,
                world_size=storage.world_size,
                heads_per_rank=storage.heads_per_rank,
                capacity=storage.capacity,
                force_begin_blocks=options.init_blocks,
                force_end_blocks=options.local_blocks,
                spin_limit=SPIN_LIMIT,
                generations=storage.publish_generations if options.tagged else None,
                index_scale=self._layout.index_scale,
                index_offset=self._layout.index_offset,
                backend=self._plan.backend,
            )

    def merge(self, layer: int, slot: int) -> None:
        """Merge what all ranks sent for this rank's heads."""
        storage, options = self.storage, self._options
        with self._phase("exchange"):
            msa_icp.msa_icp_merge_candidates(
                (storage.tagged_recv if options.tagged else storage.recv)[slot],
                self._batch.num_valid,
                self._merged[layer, : self._batch.tokens],
                storage.errors,
                init_blocks=options.init_blocks,
                local_blocks=options.local_blocks,
                spin_limit=SPIN_LIMIT,
                expected_generations=storage.expected_generations[slot] if options.tagged else None,
                backend=self._plan.backend,
            )

    def finish(self) -> None:
        """Raise if a peer did not come; otherwise count and check what was merged."""
        self.storage.check()
        options, step = self._options, self._batch.step
        self._steps += 1
        self._tokens += len(step.rows) * options.query_len
        columns = sum(self._layout.columns(row.seq_len) for row in step.rows)
        self._k_bytes += columns * self._layout.page_bytes * options.sparse_layers
        outputs = self._merged.cpu()
        self._add_to_digest(outputs)
        for row in step.rows:
            if row.request == self._plan.walk.followed:
                for j in range(options.query_len):
                    ids = outputs[0, row.row * options.query_len + j].tolist()
                    self._followed.append((row.seq_len - options.query_len + j, ids))
        with self._phase("checking"):
            self._checker.check(step, list(outputs))

    @property
    def progress(self) -> Progress:
        """How far this rank has come."""
        return Progress(self._steps, self._tokens, self._k_bytes)

    def result(self) -> RankResult:
        """What was done so far."""
        return RankResult(
            rank=self.storage.rank,
            progress=self.progress,
            rows_checked=self._checker.rows_checked,
            rows_wrong=self._checker.rows_wrong,
            first_wrong=self._checker.first_wrong,
            digest=self._digest,
            phases=dict(self._phases),
            followed=self._followed,
        )

    # ------------------------------------------------------------ parts of it

    def _prefill(self, admission: Admission) -> None:
        for start, stop in admission.spans:
            for position in torch.arange(start, stop).split(PREFILL_CHUNK):
                request = torch.full_like(position, admission.request)
                row = torch.full_like(position, admission.row)
                for layer in range(self._options.sparse_layers):
                    with self._phase("synthesis"):
                        keys = self._synth.keys(request, position, layer)
                    with self._phase("writing"):
                        self._write(keys, position, row, layer)

    def _write(self, keys: Tensor, position: Tensor, row: Tensor, layer: int) -> None:
        msa_icp.write_index_keys(
            keys.to(self._device),
            position.to(self._device, torch.int32),
            row.to(self._device, torch.int32),
            self._table,
            self._index_k[layer],
            **self._shard,
        )

    def _add_to_digest(self, outputs: Tensor) -> None:
        batch, storage = self._batch, self.storage
        ids = outputs[:, batch.token].to(torch.int64)  # [layers, tokens, hpr, 16]
        layers, _, heads, _ = ids.shape
        head = torch.arange(heads) + storage.rank * heads
        place = mix(batch.request * 2**32 + batch.position)[:, None] + head
        name = mix(place + (torch.arange(layers) * NUM_HEADS)[:, None, None])
        row = mix(ids + torch.arange(TOP_K) * 2**32).sum(-1)
        self._digest = (self._digest + int(mix(row ^ name).sum())) % 2**64

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._phases[name] += time.perf_counter() - start


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
