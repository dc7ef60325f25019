"""The decode scorer over sizes, layouts and query lengths, beside the plain read of the same bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import msa_icp
from msa_icp.geometry import HEAD_DIM, NUM_HEADS, ShardLayout, ceil_div

from . import ruler
from .batch import block_table, layers_of, random_keys
from .measure import chain_bytes, chain_length, time_chain

_RAGGED_THOUSANDS = (11, 15, 22, 30, 41, 52, 66, 66, 70, 85, 99, 120, 150, 180, 210, 236)
RAGGED = tuple(1000 * thousands for thousands in _RAGGED_THOUSANDS) * 2
"""Key rows of the ragged batch's requests."""

LAYOUTS = {
    "P128W2": ShardLayout(world_size=2, rank=1, page_size=128),
    "P128W4": ShardLayout(world_size=4, rank=1, page_size=128),
    "P256W2": ShardLayout(world_size=2, rank=1, page_size=256),
    "P256W4": ShardLayout(world_size=4, rank=1, page_size=256),
}
QUERY_LENS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Size:
    """Key rows of each request of a batch, on this rank."""

    name: str
    keys: tuple[int, ...]

    def columns(self, layout: ShardLayout) -> list[int]:
        """Page columns of each request."""
        return [ceil_div(keys, layout.rows) for keys in self.keys]

    def k_bytes(self, layout: ShardLayout) -> int:
        """Bytes of K that one launch reads."""
        return sum(self.columns(layout)) * layout.page_bytes


SIZES = (
    Size("1 x 2K", (2048,)),
    Size("1 x 8K", (8192,)),
    Size("1 x 32K", (32768,)),
    Size("16 x 8K", (8192,) * 16),
    Size("64 x 8K", (8192,) * 64),
    Size("64 x 32K", (32768,) * 64),
    Size("ragged / 4", tuple(keys // 4 for keys in RAGGED)),
    Size("ragged", RAGGED),
)


@dataclass(frozen=True)
class Row:
    """One figure; times in microseconds per launch. `keys` is a number, or a name where they differ."""

    backend: str
    layout: str
    query_len: int
    batch: int
    keys: int | str
    bytes: int
    us: float
    plain_read_us: float | None
    chained_read_us: float | None

    @property
    def of_plain_read(self) -> float | None:
        """The figure that counts: plain read / ours, above one where we are faster."""
        return None if self.plain_read_us is None else self.plain_read_us / self.us

    @property
    def of_chained_read(self) -> float | None:
        """Chained read / ours: what is left to a read whose launches overlap as ours do."""
        return None if self.chained_read_us is None else self.chained_read_us / self.us


_LEFT = f"backend layout q {'batch x rows':>15} {'MB':>6} {'us':>9} {'GB/s':>7}"
HEADING = f"{_LEFT}  plain read us  plain/ours  chained/ours"


def words(row: Row) -> str:
    """A row for a reader, below `HEADING`."""
    reads = (row.plain_read_us, row.of_plain_read, row.of_chained_read)
    plain, of_plain, of_chained = ("-" if read is None else f"{read:.2f}" for read in reads)
    return (
        f"{row.backend:7} {row.layout} {row.query_len} {f'{row.batch} x {row.keys}':>15} "
        f"{row.bytes / 1e6:6.1f} {row.us:9.2f} {row.bytes / row.us / 1e3:7.2f} "
        f"{plain:>14} {of_plain:>11} {of_chained:>13}"
    )


class Workload:
    """Random keys for every layer of a chain, and a batch over randomly permuted pages."""

    def __init__(self, pool: Tensor, size: Size, layout: ShardLayout, query_len: int) -> None:
        device = pool.device
        self.layout = layout
        self.query_len = query_len
        columns = size.columns(layout)
        pages = sum(columns)
        self.k_bytes = size.k_bytes(layout)
        self.buffers = layers_of(pool, self.k_bytes, chain_length(self.k_bytes, device))
        self.layers = [
            buffer.view(torch.float8_e4m3fn).view(pages, layout.rows, HEAD_DIM) for buffer in self.buffers
        ]
        self.block_table = block_table(columns, pages).to(device)
        lens = [keys * layout.world_size for keys in size.keys]
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        tokens = len(columns) * query_len
        self.index_q = pool[: tokens * NUM_HEADS * HEAD_DIM].clone().view(torch.float8_e4m3fn)
        self.index_q = self.index_q.view(tokens, NUM_HEADS, HEAD_DIM)
        self.score_out = torch.empty((tokens, NUM_HEADS, ceil_div(max(columns), 4) * 4), device=device)

    def score(self, layer: int, backend: str, enable_pdl: bool = True) -> None:
        """One launch."""
        msa_icp.msa_icp_decode_index_score_sharded(
            self.index_q,
            self.layers[layer],
            self.block_table,
            self.seq_lens,
            self.score_out,
            rank=self.layout.rank,
            world_size=self.layout.world_size,
            page_size=self.layout.page_size,
            decode_query_len=self.query_len,
            max_decode_query_len=max(QUERY_LENS),
            enable_pdl=enable_pdl,
            backend=backend,
        )


def rows(
    device: torch.device,
    backends: list[str],
    *,
    sizes: Sequence[Size] = SIZES,
    layouts: Sequence[str] = tuple(LAYOUTS),
    query_lens: Sequence[int] = QUERY_LENS,
) -> Iterator[Row]:
    """Measure every combination and yield its row as soon as it is there."""
    largest = max(size.k_bytes(LAYOUTS[layout]) for size in sizes for layout in layouts)
    pool = random_keys(largest + chain_bytes(device), device)
    reader = ruler.Ruler(device) if ruler.unavailable(device) is None else None
    reads: dict[int, tuple[float | None, float | None]] = {}
    for size, layout, query_len in itertools.product(sizes, layouts, query_lens):
        work = Workload(pool, size, LAYOUTS[layout], query_len)
        if work.k_bytes not in reads:
            reads[work.k_bytes] = reader.time(work.buffers) if reader else (None, None)
        plain, chained = reads[work.k_bytes]
        for backend in backends:
            us = time_chain(functools.partial(work.score, backend=backend), len(work.layers), device)
            yield Row(
                backend=backend,
                layout=layout,
                query_len=query_len,
                batch=len(size.keys),
                keys=size.name if len(set(size.keys)) > 1 else size.keys[0],
                bytes=work.k_bytes,
                us=round(us, 3),
                plain_read_us=_round(plain),
                chained_read_us=_round(chained),
            )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
