"""What a rank keeps between steps: its share of the index keys, and the block table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import msa_icp

from ..geometry import HEAD_DIM, ShardLayout
from .engine import Step
from .plan import Plan
from .synth import Synth

WRITE_CHUNK = 8192
"""Keys of cached prompts that are written at once."""

_NAN_BYTE = 0x7F


@dataclass
class Stopwatch:
    """Seconds by part of the work ('admission', 'prefill', 'decode') and phase of it."""

    seconds: dict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    @contextmanager
    def __call__(self, part: str, phase: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[part][phase] += perf_counter() - start


class Shard:
    """A rank's shard of every layer's cache."""

    def __init__(self, plan: Plan, synth: Synth, rank: int, device: torch.device, watch: Stopwatch) -> None:
        options = plan.options
        self.layout = ShardLayout(options.world_size, rank, options.page_size)
        self.device = device
        self.layers = options.sparse_layers
        self._synth = synth
        self._watch = watch
        self.arguments: dict[str, Any] = {
            "rank": rank,
            "world_size": options.world_size,
            "page_size": options.page_size,
            "backend": plan.backend,
        }
        """What the functions that touch the shard have to know."""
        # A page holds NaN until it is written, and a table row anything behind its last page: neither may
        # reach a score.
        shape = (plan.pages, self.layout.rows, HEAD_DIM)
        self.index_k = [
            torch.full(shape, _NAN_BYTE, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            for _ in range(options.sparse_layers)
        ]
        columns = msa_icp.msa_icp_decode_score_columns(plan.longest, options.page_size)
        self.table = torch.full((options.batch_rows, columns), 2**31 - 1, dtype=torch.int32, device=device)

    def follow(self, step: Step) -> None:
        """Update the block table, and write the keys of prompts that are cached but not in their pages."""
        for admission in step.admitted:
            self.table[admission.row, : len(admission.pages)] = torch.tensor(
                admission.pages, dtype=torch.int32, device=self.device
            )
        for row, column, page in step.grown:
            self.table[row, column] = page
        for admission in step.admitted:
            for start, stop in admission.spans:
                for position in torch.arange(start, stop).split(WRITE_CHUNK):
                    request = torch.full_like(position, admission.request)
                    batch_row = torch.full_like(position, admission.row)
                    for layer in range(self.layers):
                        self.write("admission", request, position, batch_row, layer)

    def write(self, part: str, request: Tensor, position: Tensor, row: Tensor, layer: int) -> None:
        """Make and write the keys of tokens: of which request, where, and in which batch row."""
        with self._watch(part, "synthesis"):
            keys = self._synth.keys(request, position, layer)
        with self._watch(part, "writing"):
            msa_icp.write_index_keys(
                keys.to(self.device),
                position.to(self.device, torch.int32),
                row.to(self.device, torch.int32),
                self.table,
                self.index_k[layer],
                **self.arguments,
            )
