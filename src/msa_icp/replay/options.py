"""What a replay can be asked for, and which values make sense."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..geometry import BLOCK, MAX_BLOCKS, MAX_QUERY_ROWS, NUM_HEADS, PAGE_SIZES, TOP_K, WORLD_SIZES
from .errors import UsageError

BATCH_MULTIPLE = 4
"""Batches are padded with empty rows to a multiple of this, as batches of captured graphs are."""

DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]*))?")
"""The processor, GPUs by the choice of `plan.rank_devices`, or one GPU for all ranks."""

MAX_CONTEXT = MAX_BLOCKS * BLOCK

MAX_CHUNK = 8192
"""The most prompt tokens of a step."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay; the command line explains them. Raises UsageError."""

    world_size: int = 4
    page_size: int = 128
    query_len: int = 1
    sparse_layers: int = 4
    max_context: int = 131072
    decode_steps: int | None = None
    requests: int | None = None
    max_batch: int = 16
    cache_tokens: int | None = None
    chunk_tokens: int = 512
    prefill_tokens: int = 1024
    step_ms: float = 30.0
    backend: str = "auto"
    tagged: bool = True
    check_every: int = 16
    check_rows: int = 64
    init_blocks: int = 1
    local_blocks: int = 1
    seed: int = 0
    in_process: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        _one_of("--world-size", self.world_size, WORLD_SIZES)
        _one_of("--page-size", self.page_size, PAGE_SIZES)
        _within("--query-len", self.query_len, 1, MAX_QUERY_ROWS // NUM_HEADS)
        _within("--sparse-layers", self.sparse_layers, 1, 1024)
        _within("--max-context", self.max_context, 1, MAX_CONTEXT)
        _within("--max-batch", self.max_batch, 1, 1024)
        _within("--chunk-tokens", self.chunk_tokens, 1, MAX_CHUNK)
        _within("--prefill-tokens", self.prefill_tokens, 1, MAX_CONTEXT)
        _within("--check-every", self.check_every, 0, 2**31 - 1)
        _within("--check-rows", self.check_rows, NUM_HEADS, 2**31 - 1)
        _within("--seed", self.seed, 0, 2**31 - 1)
        if not DEVICE.fullmatch(self.device):
            raise UsageError(f"--device must be cpu, cuda or cuda:N, was {self.device}")
        for name, count in self._optional_counts():
            if count is not None:
                _within(name, count, 1, 2**31 - 1)
        if not 0 < self.step_ms <= 1e6:
            raise UsageError(f"--step-ms must be more than 0 and at most 1000000, was {self.step_ms:g}")
        _within("--init-blocks", self.init_blocks, 0, TOP_K)
        _within("--local-blocks", self.local_blocks, 0, TOP_K)
        _within("--init-blocks + --local-blocks", self.init_blocks + self.local_blocks, 0, TOP_K)

    def _optional_counts(self) -> list[tuple[str, int | None]]:
        return [
            ("--decode-steps", self.decode_steps),
            ("--requests", self.requests),
            ("--cache-tokens", self.cache_tokens),
        ]

    @property
    def heads_per_rank(self) -> int:
        """Index heads whose selection one rank makes."""
        return NUM_HEADS // self.world_size

    @property
    def batch_rows(self) -> int:
        """Rows of the largest batch, padding included."""
        return -(-self.max_batch // BATCH_MULTIPLE) * BATCH_MULTIPLE

    @property
    def capacity(self) -> int:
        """The most tokens of one decode step."""
        return self.batch_rows * self.query_len

    def final_context(self, prompt_tokens: int, output_tokens: int) -> int:
        """Context of a request at its end: every step adds `query_len` tokens, and there is at least one."""
        return prompt_tokens + max(1, -(-output_tokens // self.query_len)) * self.query_len


def _one_of(name: str, value: int, choices: tuple[int, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} must be {' or '.join(map(str, choices))}, was {value}")


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} must be from {low} to {high}, was {value}")
