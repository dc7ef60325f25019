"""Prefill windows: scorer, selection and fused form, beside the matrix rate and the plain read.

A window's useful operations are 2 * 128 for each (token, head, key that the token sees and this rank holds).
Its limit is the larger of two times: those operations at the rate of a large bf16 matrix product, and the
plain read of the keys, both measured in the same run.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import msa_icp
from msa_icp import dispatch
from msa_icp.geometry import HEAD_DIM, ITEM_TOKENS, NUM_HEADS, START_COST, ShardLayout, ceil_div
from msa_icp.prefill_cases import RECORDED_SHAPES
from msa_icp.prefill_plan import cost_of_unit

from . import ruler
from .batch import random_keys
from .decode_score import LAYOUTS
from .measure import time_chain

OPS = {"score": "index_score_sharded", "select": "topk_select_prefill", "fused": "prefill_score_select"}
"""What is measured, and the op that it is; a backend without that op has no row of it."""
WHATS = tuple(OPS)
CONTEXT = 131072
"""Keys of the context, over all ranks, of the windows of one segment."""


@dataclass(frozen=True)
class Window:
    """Segments as (query tokens, cached prefix): the tokens are the last of their context."""

    name: str
    segments: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.segments)

    @property
    def keys(self) -> int | str:
        """Keys of the context over all ranks; the name of a window of several."""
        lens = {tokens + prefix for tokens, prefix in self.segments if tokens}
        return lens.pop() if len(lens) == 1 else self.name

    def operations(self, layout: ShardLayout) -> int:
        """Useful operations on a rank that holds its part of every context."""
        pairs = sum(tokens * prefix + tokens * (tokens + 1) // 2 for tokens, prefix in self.segments)
        return 2 * HEAD_DIM * NUM_HEADS * pairs // layout.world_size


def _mixed(shapes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Shapes with an empty segment between any two."""
    return tuple(segment for shape in shapes for segment in (shape, (0, shape[1])))


SIZES = tuple(Window(f"{tokens}", ((tokens, CONTEXT - tokens),)) for tokens in (8192, 2048, 512, 48))
"""The sizes of the goals: one segment whose queries see (nearly) all of 128K keys."""
_SHORT = tuple(shape for shape in RECORDED_SHAPES if shape[0] < 100)
RECORDED = (
    *(Window(f"{tokens}/{prefix}", ((tokens, prefix),)) for tokens, prefix in RECORDED_SHAPES),
    Window("short ones mixed", _mixed(_SHORT)),
    Window("all mixed", _mixed(RECORDED_SHAPES)),
)
"""The recorded shapes one by one, and in one window each with empty segments between them."""


@dataclass(frozen=True)
class Row:
    """One figure; times in microseconds a launch, `keys` over all ranks or the name of a mixed window.

    `units` are those of the multiprocessor with the fewest, their mean, and those of the one with the most;
    `costs` the same of what the plan says that they cost, in units of 64 tokens. The selection alone has no
    operations and no keys to read, so no limit.
    """

    what: str
    backend: str
    layout: str
    window: str
    query_tokens: int
    keys: int | str
    us: float
    tflops: float
    bf16_tflops: float
    accumulate: str
    operations_us: float
    plain_read_us: float | None
    units: tuple[int, float, int]
    costs: tuple[float, float, float]

    @property
    def limit_us(self) -> float:
        """The larger of the two limits."""
        return max(self.operations_us, self.plain_read_us or 0.0)


class Workload:
    """A window over randomly permuted pages, and random keys for every layer of a chain."""

    def __init__(self, window: Window, layout: ShardLayout, backend: str, device: torch.device) -> None:
        self.layout, self.backend = layout, backend
        self.compact = layout.index_scale > 1
        lens = torch.tensor([tokens for tokens, _ in window.segments], dtype=torch.int32)
        prefixes = torch.tensor([prefix for _, prefix in window.segments], dtype=torch.int32)
        keys = lens + prefixes
        self.plan = msa_icp.msa_icp_index_score_sharded_plan(
            lens, keys, NUM_HEADS, qo_offset=prefixes, device=device, backend=backend
        )
        columns = (layout.columns(keys) * (lens > 0)).tolist()
        pages, most = sum(columns), int(keys.max())
        table = torch.zeros((len(columns), int(layout.columns(most))), dtype=torch.int32)
        order = torch.randperm(pages).to(torch.int32)
        for row, own in enumerate(order.split(columns)):
            table[row, : len(own)] = own
        self.block_table = table.to(device)
        k_bytes = pages * layout.page_bytes
        launches = max(4, min(_LAUNCHES, int(ceil_div(_chain_bytes(device), k_bytes))))
        self.buffers = list(random_keys(launches * k_bytes, device).split(k_bytes))
        self.layers = [
            buffer.view(torch.float8_e4m3fn).view(pages, layout.rows, HEAD_DIM) for buffer in self.buffers
        ]
        tokens = self.plan.total_q
        self.q = random_keys(tokens * NUM_HEADS * HEAD_DIM, device).view(torch.float8_e4m3fn)
        self.q = self.q.view(tokens, NUM_HEADS, HEAD_DIM)
        width = msa_icp.msa_icp_index_score_columns(most, layout.page_size)
        # Where only the selection is measured nothing else writes them.
        self.scores = torch.randn((tokens, NUM_HEADS, width), device=device)
        positions = [torch.arange(p, p + n) for n, p in window.segments]
        self.num_valid = (torch.cat(positions) // 128 + 1).to(torch.int32).to(device)
        self.carrier = torch.empty((NUM_HEADS, tokens, 33), dtype=torch.int32, device=device)
        size = msa_icp.msa_icp_prefill_pool_bytes(total_q=tokens, batch=self.plan.batch, device=device)
        self.pool = torch.empty(size, dtype=torch.uint8, device=device)

    def launch(self, layer: int, what: str) -> None:
        """One launch, or the two of the fused form."""
        getattr(self, what)(self.layers[layer])

    def _shared(self) -> dict[str, Any]:
        return {
            "rank": self.layout.rank,
            "tp": self.layout.world_size,
            "compact": self.compact,
            "enable_pdl": True,
        }

    def score(self, k: Tensor) -> None:
        msa_icp.msa_icp_index_score_sharded(
            self.q,
            k,
            self.block_table,
            self.plan,
            max_score=self.scores,
            initialize=False,
            backend=self.backend,
            **self._shared(),
        )

    def select(self, k: Tensor) -> None:
        msa_icp.msa_icp_topk_select_prefill(
            self.scores,
            self.num_valid,
            self.carrier,
            force_begin_blocks=1,
            force_end_blocks=1,
            index_scale=self.layout.index_scale,
            index_offset=self.layout.index_offset,
            backend=self.backend,
        )

    def fused(self, k: Tensor) -> None:
        msa_icp.msa_icp_prefill_score_select(
            self.q,
            k,
            self.block_table,
            self.plan,
            self.num_valid,
            self.pool,
            self.carrier,
            force_begin_blocks=1,
            force_end_blocks=1,
            backend=self.backend,
            **self._shared(),
        )


_LAUNCHES = 64
"""The most launches of a chain: even the shortest then takes longer than a look at the clock."""


def _chain_bytes(device: torch.device) -> int:
    """Keys of a chain together, at least: several times the largest cache of a GPU."""
    return 400_000_000 if device.type == "cuda" else 1


def spread(plan: msa_icp.MSAIcpScorePlan) -> dict[str, tuple[Any, float, Any]]:
    """`units` and `costs` of a row: the least of all workers, the mean, the most."""
    info, lens = plan.packed_work_info.tolist(), plan.qo_segment_lens.tolist()
    units, costs = [], []
    for word in plan.packed_work_range.tolist():
        first_item, first, last_item, end = (word >> shift & 0xFFFF for shift in (0, 16, 32, 48))
        pieces = [(item, info[item] >> 32) for item in range(first_item, last_item)]
        pieces += [(last_item, end)] if end else []
        own, cost = 0, 0
        for item, up_to in pieces:
            segment, index = info[item] & 0xFFFF, info[item] >> 16 & 0xFFFF
            tokens = min(ITEM_TOKENS, lens[segment] - index * ITEM_TOKENS)
            own += up_to - first
            cost += (up_to - first) * cost_of_unit(tokens) + (START_COST if item and not first else 0)
            first = 0
        units.append(own)
        costs.append(cost / cost_of_unit(ITEM_TOKENS))
    return {
        "units": (min(units), statistics.mean(units), max(units)),
        "costs": (min(costs), round(statistics.mean(costs), 3), max(costs)),
    }


def bf16_tflops(device: torch.device) -> float:
    """TFLOP/s of a large bf16 matrix product."""
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn((n, n), device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def product(_: int) -> None:
        torch.mm(a, b, out=out)

    return 2 * n**3 / time_chain(product, 8, device) / 1e6


def rows(
    device: torch.device,
    backends: Sequence[str],
    *,
    windows: Sequence[Window] = SIZES,
    layouts: Sequence[str] = tuple(LAYOUTS),
    whats: Sequence[str] = WHATS,
) -> Iterator[Row]:
    """Measure every combination and yield its row as soon as it is there."""
    matrix_rate = bf16_tflops(device)
    reader = ruler.Ruler(device) if ruler.unavailable(device) is None else None
    for window in windows:
        for name in layouts:
            layout = LAYOUTS[name]
            for backend in backends:
                work = Workload(window, layout, backend, device)
                plain = round(reader.time(work.buffers)[0], 3) if reader else None
                has = dispatch.package(backend).__all__
                for what in (what for what in whats if OPS[what] in has):
                    launch: Callable[[int], None] = functools.partial(work.launch, what=what)
                    us = time_chain(launch, len(work.layers), device)
                    operations = 0 if what == "select" else window.operations(layout)
                    yield Row(
                        what=what,
                        backend=backend,
                        layout=name,
                        window=window.name,
                        query_tokens=window.tokens,
                        keys=window.keys,
                        us=round(us, 3),
                        tflops=round(operations / us / 1e6, 2),
                        bf16_tflops=round(matrix_rate, 3),
                        accumulate="fp32",
                        operations_us=round(operations / matrix_rate / 1e6, 3),
                        plain_read_us=None if what == "select" else plain,
                        **spread(work.plan),
                    )
