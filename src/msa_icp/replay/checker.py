"""Compares what a rank merged with the selection that one rank with all keys would make.

The other side is `msa_icp.reference`, over keys made anew from the request and its positions: no page,
table, shard or score of the run takes part in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference
from ..geometry import NUM_HEADS, TOP_K
from .engine import Step
from .options import ReplayOptions
from .synth import Synth


@dataclass(frozen=True, order=True)
class WrongRow:
    """A merged row that differs from the reference."""

    step: int
    layer: int
    request: int
    """Place of the request in the trace, from 0."""
    position: int
    head: int
    expected: tuple[int, ...]
    got: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"step {self.step}, request {self.request}, position {self.position}, layer {self.layer}, "
            f"head {self.head}: expected {list(self.expected)}, got {list(self.got)}"
        )


class Checker:
    """Checks some rows of every `--check-every`-th step, those of `heads` only."""

    def __init__(self, options: ReplayOptions, synth: Synth, heads: range) -> None:
        self._options = options
        self._synth = synth
        self._heads = heads
        self.rows_checked = 0
        """(token, head, layer) rows compared."""
        self.rows_wrong = 0
        self.first_wrong: WrongRow | None = None

    def check(self, step: Step, outputs: Sequence[Tensor]) -> None:
        """Compare rows of a step; `outputs[layer]` is the merged int32 `[T, heads, 16]`."""
        every = self._options.check_every
        if every == 0 or step.number % every != 0:
            return
        for (row, layer), tokens in self._chosen(step).items():
            self._check(step, row, layer, tokens, outputs[layer])

    def _chosen(self, step: Step) -> dict[tuple[int, int], list[int]]:
        """Tokens to check, for each (place in `step.rows`, layer): as many as `--check-rows` allows.

        All ranks choose the same, and the choice moves on from checked step to checked step.
        """
        options = self._options
        tokens = len(step.rows) * options.query_len
        pairs = tokens * options.sparse_layers
        count = min(pairs, options.check_rows // NUM_HEADS)
        first = step.number // options.check_every * count
        chosen = defaultdict(list)
        for pair in range(first, first + count):
            token, layer = divmod(pair % pairs, options.sparse_layers)
            row, j = divmod(token, options.query_len)
            chosen[row, layer].append(j)
        return chosen

    def _check(self, step: Step, place: int, layer: int, tokens: list[int], merged: Tensor) -> None:
        row, q = step.rows[place], self._options.query_len
        positions = torch.tensor([row.seq_len - q + j for j in tokens])
        request = torch.full_like(positions, row.request)
        queries = self._synth.queries(request, positions, layer)[:, self._heads.start : self._heads.stop]
        keys = self._synth.context(row.request, row.seq_len, layer)
        expected = reference.select_unsharded(
            queries, keys, positions, self._options.init_blocks, self._options.local_blocks
        )
        for j, position, of_token in zip(tokens, positions.tolist(), expected, strict=True):
            for head, ids in zip(self._heads, of_token, strict=True):
                want = tuple(ids + [-1] * (TOP_K - len(ids)))
                got = tuple(merged[row.row * q + j, head - self._heads.start].tolist())
                self.rows_checked += 1
                if want != got:
                    self.rows_wrong += 1
                    wrong = WrongRow(
                        step.number, layer, self._synth.trace_index(row.request), position, head, want, got
                    )
                    self.first_wrong = min(wrong, self.first_wrong or wrong)
