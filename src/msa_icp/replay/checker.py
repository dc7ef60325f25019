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
from .engine import Step, Window
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
    """Checks some rows of every `--check-every`-th decode step and window, those of `heads` only."""

    def __init__(self, options: ReplayOptions, synth: Synth, heads: range) -> None:
        self._options = options
        self._synth = synth
        self._heads = heads
        self.rows_checked = 0
        """(token, head, layer) rows compared."""
        self.prefill_rows_checked = 0
        """Those of them that belong to prompt tokens."""
        self.rows_wrong = 0
        self.first_wrong: WrongRow | None = None

    def check(self, number: int, step: Step, outputs: Sequence[Tensor]) -> None:
        """Compare rows of the tokens of the `number`-th step that decodes; `outputs[layer]` is the merged
        int32 `[T, heads, 16]`."""
        query_len, layers = self._options.query_len, self._options.sparse_layers
        chosen: dict[tuple[int, int], list[int]] = defaultdict(list)
        for pair in self._chosen(number, len(step.rows) * query_len * layers):
            token, layer = divmod(pair, layers)
            place, j = divmod(token, query_len)
            chosen[place, layer].append(j)
        for (place, layer), tokens in chosen.items():
            row = step.rows[place]
            first = row.seq_len - query_len
            merged = outputs[layer][row.row * query_len :]
            self._compare(step.number, row.request, first, row.seq_len, layer, tokens, merged)

    def check_window(self, step_number: int, window: Window, outputs: Sequence[Tensor]) -> None:
        """Compare rows of a window's prompt tokens; `outputs` as in `check`, over the window's tokens."""
        before, layers = self.rows_checked, self._options.sparse_layers
        pairs = set(self._chosen(window.number, window.tokens * layers, spread=True))
        first = 0
        for segment in window.segments:
            for layer in range(layers):
                tokens = [i for i in range(segment.tokens) if (first + i) * layers + layer in pairs]
                if tokens:
                    self._compare(
                        step_number, segment.request, segment.start, segment.stop, layer, tokens,
                        outputs[layer][first:],
                    )  # fmt: skip
            first += segment.tokens
        self.prefill_rows_checked += self.rows_checked - before

    def _chosen(self, number: int, pairs: int, spread: bool = False) -> list[int]:
        """Which (token, layer) pairs of decode step or window `number` are checked, `--check-rows` allowing.

        All ranks choose the same. One after the other, the choice moves on from checked step to checked step
        and so reaches all of a small batch; spread out, it samples all of a long window.
        """
        every = self._options.check_every
        if every == 0 or number % every != 0:
            return []
        count = min(pairs, self._options.check_rows // NUM_HEADS)
        if spread:
            return [(i * pairs // count + number // every) % pairs for i in range(count)]
        first = number // every * count
        return [pair % pairs for pair in range(first, first + count)]

    def _compare(
        self, step: int, request: int, first: int, context: int, layer: int, tokens: list[int], merged: Tensor
    ) -> None:
        """Compare tokens of a request: token `j` is at position `first + j`, and its rows are `merged[j]`."""
        positions = torch.tensor([first + j for j in tokens])
        queries = self._synth.queries(torch.full_like(positions, request), positions, layer)
        keys = self._synth.context(request, context, layer)
        expected = reference.select_unsharded(
            queries[:, self._heads.start : self._heads.stop],
            keys,
            positions,
            self._options.init_blocks,
            self._options.local_blocks,
        )
        for j, position, of_token in zip(tokens, positions.tolist(), expected, strict=True):
            for place, (head, ids) in enumerate(zip(self._heads, of_token, strict=True)):
                want = tuple(ids + [-1] * (TOP_K - len(ids)))
                got = tuple(merged[j, place].tolist())
                self.rows_checked += 1
                if want != got:
                    self.rows_wrong += 1
                    wrong = WrongRow(step, layer, self._synth.trace_index(request), position, head, want, got)
                    self.first_wrong = min(wrong, self.first_wrong or wrong)
