"""The decode scorer (contract, section 4).

A program scores tiles of 128 key rows: 4, 2 or 1 pages of a request, 16 KiB. Keys are the M dimension of
the matrix product, the request's (token, head) rows the N dimension. Every tile of every layout is the
same product of the same instructions, so a score's bits depend on its q row and K rows alone.

Many small programs hide the chain seq_lens -> block_table -> keys behind each other; what one program
does in which order is what makes it short (see `_score_tile`).
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import BLOCK, HEAD_DIM, MAX_QUERY_ROWS, NUM_HEADS, Layouts, ShardLayout, ceil_div
from .e4m3 import e4m3_to_fp16
from .launch import BYTES, FLOATS, I32, I64, INTS, Kernel, Target, kernel, target_of
from .pdl import release_dependents, wait_for_predecessor

HEADS = tl.constexpr(NUM_HEADS)
DIM = tl.constexpr(HEAD_DIM)
NONE, FIRST_WAVE, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Which programs read keys while the predecessor still runs."""


@dataclass(frozen=True)
class Schedule:
    """How the work is cut. Measured on an H200 (docs/performance.md); any values are right."""

    tile_rows: int = 128
    threads: int = 128
    registers: int = 64
    """Registers a thread may use: 64 let eight programs share a multiprocessor."""
    wide_registers: int = 128
    """The same for more query rows than one matrix instruction takes."""
    programs: int = 16384
    """Most programs of a launch; with more tiles, a program takes every n-th of its request's."""
    many_tiles: int = 65536
    fewer_programs: int = 8192
    """Launches of as many tiles, or more, have no more: one without a tile costs a nanosecond."""
    long_table: int = 512
    """Tiles of a request from which on its table is long: most lengths are far below what it has room for. A
    few such requests have as many programs as keep the card busy, whatever the table."""
    long_table_programs: tuple[int, int] = (2048, 256)
    """Of a launch at least, and of a request; as long as that is fewer than `fewer_programs`."""
    gaps: int = 2
    """Programs a multiprocessor that only wait, every other of those that start first, in launches of more
    than one wave. They leave their places to programs that read while those beside them multiply."""
    gaps_below: int = 8192
    """Launches of as many tiles, or more, have none. With many queries they start a request's tiles one after
    the other."""

    def most_programs(self, requests: int, tiles: int) -> int:
        """Of a launch of requests of so many tiles each."""
        most = self.fewer_programs if requests * tiles >= self.many_tiles else self.programs
        least, each = self.long_table_programs
        few = tiles >= self.long_table and each * requests < self.fewer_programs
        return min(most, max(least, each * requests)) if few else most

    def residents(self, target: Target, wide: bool) -> int:
        """Programs that start at once, given the 65536 registers of a multiprocessor."""
        registers = self.wide_registers if wide else self.registers
        return target.multiprocessors * (65536 // (self.threads * registers))


SCHEDULE = Schedule()


@triton.jit
def tile_count(seq_len, columns, first_column, PAGE: tl.constexpr, TILE_PAGES: tl.constexpr):
    """Tiles that cover the columns to be written: those of the sequence, rounded up to four."""
    pages = tl.where(seq_len > 0, (seq_len - 1) // PAGE + 1, 0)
    written = tl.minimum((pages + 3) // 4 * 4 - first_column, columns)
    return tl.maximum(written + TILE_PAGES - 1, 0) // TILE_PAGES


@triton.jit
def _load_pages(table_row, tile, width, TILE_PAGES: tl.constexpr):
    """Physical pages of a tile; entries behind the live prefix may be read, but not followed."""
    column = tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
    return tl.load(table_row + column, mask=column < width, other=-1)


@triton.jit
def _load_keys(index_k, page, readable, page_pitch, row):
    """uint8 [I, pages, PART, 128]: all of a tile's loads at once, 16 bytes a thread, read once."""
    offset = tl.multiple_of(page.to(tl.int64) * page_pitch, 16)
    within = row[:, None, :, None] * DIM + tl.arange(0, DIM)[None, None, None, :]
    address = tl.multiple_of(index_k + (offset[None, :, None, None] + within), (1, 1, 1, 16))
    return tl.load(address, mask=readable[None, :, None, None], other=0, eviction_policy="evict_first")


@triton.jit
def _load_queries(index_q, first_row, row, rows):
    """uint8 [N, 128]; zeros where there is no row."""
    address = index_q + (first_row + row[:, None]) * DIM + tl.arange(0, DIM)[None, :]
    return tl.load(address, mask=(row < rows)[:, None], other=0)


@triton.jit
def _score_tile(
    tensors,
    sizes,
    request,
    seq_len,
    tile,
    history,
    last,
    page,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    IN_LOOP: tl.constexpr,
):
    index_q, index_k, score_out = tensors
    pages, page_pitch, columns, first_column, query_len, first_key, token_stride, head_stride = sizes
    # A warp's matrix instructions take 16 rows of every 16 times the warps: with the rows of a page dealt
    # out in INTERLEAVE parts, a page's maximum stays within as few warps as can be.
    TILE_PAGES: tl.constexpr = TILE // ROWS
    PART: tl.constexpr = ROWS // INTERLEAVE
    row = tl.arange(0, INTERLEAVE)[:, None] * PART + tl.arange(0, PART)[None, :]
    # An opaque copy: what is computed from the row numbers is made anew for every tile of a loop, instead of
    # staying in registers, of which this kernel has 64 a thread.
    if IN_LOOP and GROUPS == 1 and E4M3 != "integer":
        move: tl.constexpr = "mov.b32 $0, $1;"
        row = tl.inline_asm_elementwise(move, "=r,r", [row], dtype=tl.int32, is_pure=False, pack=1)
    column = tile * TILE_PAGES + tl.arange(0, TILE_PAGES)
    page_begin = (first_column + column) * PAGE
    readable = (page >= 0) & (page < pages) & (page_begin < seq_len)
    query = tl.arange(0, GROUP)
    queries = HEADS * query_len

    # The compiler passes keys through shared memory right behind their load, which waits for them; so
    # what is to be in flight beside them must be issued before: the queries, as a rule. Keys go first
    # where the predecessor still runs: they can be loaded already, the queries it may still write.
    # Dependents are released with the last loads: earlier, they would take the places of later tiles.
    if KEYS_FIRST:
        if history == 0:
            wait_for_predecessor(DEPENDENT)
        release_dependents(last, DEPENDENT)
        keys = _load_keys(index_k, page, readable, page_pitch, row)
        wait_for_predecessor(DEPENDENT)
        q = _load_queries(index_q, request * queries, query, queries)
    else:
        q = _load_queries(index_q, request * queries, query, queries)
        release_dependents(last, DEPENDENT)
        keys = _load_keys(index_k, page, readable, page_pitch, row)
    if E4M3 != "integer":  # keeps the queries' way through shared memory behind the keys' loads
        q = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [q], dtype=tl.uint8, is_pure=False, pack=4)

    k = e4m3_to_fp16(keys.reshape(TILE, DIM), E4M3)
    position = page_begin[None, :, None] + first_key + row[:, None, :] * KEY_STEP
    for group in tl.static_range(GROUPS):
        # Groups of one width for every query length: the instruction, so the bits, are the same.
        query = group * GROUP + tl.arange(0, GROUP)
        if group > 0:
            q = _load_queries(index_q, request * queries, query, queries)
        products = tl.dot(k, tl.trans(e4m3_to_fp16(q, E4M3)), out_dtype=tl.float32)
        products = products.reshape(INTERLEAVE, TILE_PAGES, PART, GROUP)
        last_seen = seq_len - query_len + query // HEADS
        seen = (position[:, :, :, None] <= last_seen[None, None, None, :]) & readable[None, :, None, None]
        products = tl.where(seen & (products == products), products, float("-inf"))
        best = tl.max(tl.max(products, axis=0), axis=1) + 0.0  # -0.0 becomes +0.0
        token = request * query_len + query // HEADS
        address = score_out + token[None, :] * token_stride + (query % HEADS)[None, :] * head_stride
        mask = (column < columns)[:, None] & (query < queries)[None, :]
        tl.store(address + column[:, None], best, mask=mask)


@triton.jit
def _score_early(
    tensors,
    sizes,
    table_row,
    width,
    request,
    seq_len,
    tile,
    tiles,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The one tile of a program that starts while the predecessor still runs."""
    TILE_PAGES: tl.constexpr = TILE // ROWS
    page = _load_pages(table_row, tile, width, TILE_PAGES)
    first_column = sizes[3]
    query_len = sizes[4]
    history = ((first_column + (tile + 1) * TILE_PAGES) * PAGE <= seq_len - query_len).to(tl.int32)
    if tile < tiles:
        _score_tile(
            tensors, sizes, request, seq_len, tile, history, True, page, PAGE, ROWS, KEY_STEP, GROUPS, GROUP,
            TILE, INTERLEAVE, E4M3, DEPENDENT, True, False,
        )  # fmt: skip
    wait_for_predecessor(DEPENDENT)


def _score(
    index_q: BYTES,
    index_k: BYTES,
    block_table: INTS,
    seq_lens: INTS,
    score_out: FLOATS,
    pages: I32,
    page_pitch: I64,
    table_columns: I32,
    table_stride: I64,
    columns: I32,
    first_column: I32,
    token_stride: I64,
    head_stride: I64,
    query_len: I32,
    first_key: I32,
    requests: I32,
    gaps: I32,
    early: I32,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    TILE_PAGES: tl.constexpr = TILE // ROWS
    if EARLY == FIRST_WAVE:
        place = tl.program_id(0)
        gap = (place < 2 * gaps) & (place % 2 == 1)
        place = tl.where(place < 2 * gaps, place // 2, place - gaps)
        if gap:
            wait_for_predecessor(DEPENDENT)
            return
        tile = place // requests
        request = place - tile * requests
    elif ONE_TILE and GROUPS > 1:  # many queries: programs side by side share those of a request
        place = 0
        tile = tl.program_id(0)
        request = tl.program_id(1)
    else:  # requests alternate, so that the programs of long ones, which run longest, are not all at the end
        place = 0
        request = tl.program_id(0)
        tile = tl.program_id(1)
    tensors = index_q, index_k, score_out
    sizes = pages, page_pitch, columns, first_column, query_len, first_key, token_stride, head_stride
    table_row = block_table + request * table_stride + first_column
    width = table_columns - first_column

    seq_len = tl.load(seq_lens + request)
    tiles = tile_count(seq_len, columns, first_column, PAGE, TILE_PAGES)
    if EARLY == ALL:
        _score_early(
            tensors, sizes, table_row, width, request, seq_len, tile, tiles, PAGE, ROWS, KEY_STEP, GROUPS,
            GROUP, TILE, INTERLEAVE, E4M3, DEPENDENT,
        )  # fmt: skip
    elif ONE_TILE:  # apart from the loop, which keeps more in registers than there is room for
        if EARLY == FIRST_WAVE and place < early:
            _score_early(
                tensors, sizes, table_row, width, request, seq_len, tile, tiles, PAGE, ROWS, KEY_STEP, GROUPS,
                GROUP, TILE, INTERLEAVE, E4M3, DEPENDENT,
            )  # fmt: skip
        else:
            wait_for_predecessor(DEPENDENT)
            page = _load_pages(table_row, tile, width, TILE_PAGES)
            if tile < tiles:
                _score_tile(
                    tensors, sizes, request, seq_len, tile, 0, True, page, PAGE, ROWS, KEY_STEP, GROUPS,
                    GROUP, TILE, INTERLEAVE, E4M3, DEPENDENT, False, False,
                )  # fmt: skip
    else:
        wait_for_predecessor(DEPENDENT)
        while tile < tiles:  # no range: the interpreter's takes no tensors from NumPy 2.4 on
            page = _load_pages(table_row, tile, width, TILE_PAGES)
            last = tile + tl.num_programs(1) >= tiles
            _score_tile(
                tensors, sizes, request, seq_len, tile, 0, last, page, PAGE, ROWS, KEY_STEP, GROUPS, GROUP,
                TILE, INTERLEAVE, E4M3, DEPENDENT, False, True,
            )  # fmt: skip
            tile += tl.num_programs(1)


def _kernel(registers: int) -> Kernel:
    return kernel(aligned=("index_q", "index_k"), threads=SCHEDULE.threads, registers=registers)(_score)


score_kernel = _kernel(SCHEDULE.registers)
wide_score_kernel = _kernel(SCHEDULE.wide_registers)


def variant(
    layout: ShardLayout, query_len: int, target: Target, dependent: bool, one_tile: bool, early: int
) -> tuple[Kernel, tuple[Any, ...]]:
    """The kernel and its constants for a layout and a query length."""
    groups = _groups(query_len, target)
    tile = _tile_rows(layout)
    constants = (
        layout.page_size,
        layout.rows,
        layout.world_size if layout.page_size == BLOCK else 1,
        groups,
        target.dot_rows,
        tile,
        max(1, tile // (SCHEDULE.threads // 2)),
        target.e4m3,
        dependent,
        one_tile,
        early,
    )
    return (score_kernel if groups == 1 else wide_score_kernel), constants


def _groups(query_len: int, target: Target) -> int:
    return int(ceil_div(NUM_HEADS * query_len, target.dot_rows))


def _tile_rows(layout: ShardLayout) -> int:
    return max(SCHEDULE.tile_rows, layout.rows)


def variants(target: Target, layouts: Layouts) -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    """Every variant that a device may need."""
    launches = [(False, False, NONE.value), (False, True, NONE.value)]
    if target.dependent_launch:
        launches += [
            (True, False, NONE.value),
            *((True, True, early.value) for early in (NONE, FIRST_WAVE, ALL)),
        ]
    for page_size, world_size in layouts:
        layout = ShardLayout(world_size, 0, page_size)
        for groups in range(1, _groups(MAX_QUERY_ROWS // NUM_HEADS, target) + 1):
            for launch in launches:
                yield variant(layout, groups * target.dot_rows // NUM_HEADS, target, *launch)


@dataclass(frozen=True)
class Plan:
    """A launch, but for its tensors."""

    kernel: Kernel
    constants: tuple[Any, ...]
    grid: tuple[int, ...]
    gaps: int
    early: int
    """Programs of the first wave, where there are gaps."""


@lru_cache(1024)
def plan(
    schedule: Schedule,
    layout: ShardLayout,
    query_len: int,
    target: Target,
    columns: int,
    requests: int,
    enable_pdl: bool,
) -> Plan:
    """How a batch is cut. Looks at sizes alone, never at a length."""
    tiles = int(ceil_div(columns * layout.rows, _tile_rows(layout)))
    programs = min(tiles, max(1, schedule.most_programs(requests, tiles) // requests))
    wide = _groups(query_len, target) > 1
    # With many queries the requests are the second axis, which takes 65535 programs.
    one_tile = programs == tiles and not (wide and requests > 65535)
    grid: tuple[int, ...] = (tiles, requests) if wide and one_tile else (requests, programs)
    dependent = enable_pdl and target.dependent_launch
    residents = schedule.residents(target, wide)
    early, gaps = NONE, 0
    if dependent and one_tile and tiles * requests <= residents:
        early = ALL
    elif dependent and one_tile and tiles * requests < schedule.gaps_below:
        early, gaps = FIRST_WAVE, min(residents, schedule.gaps * target.multiprocessors)
        grid = (tiles * requests + gaps,)
    chosen, constants = variant(layout, query_len, target, dependent, one_tile, early.value)
    return Plan(chosen, constants, grid, gaps, residents)


def launch_scores(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scores: Tensor,
    *,
    columns: int,
    token_stride: int,
    head_stride: int,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
    first_column: int = 0,
) -> None:
    """Score the columns from `first_column` on into the `columns` of FP32 rows that start at `scores`."""
    requests = seq_lens.shape[0]
    if requests == 0:
        return
    device = index_q.device
    cut = plan(SCHEDULE, layout, decode_query_len, target_of(device), columns, requests, enable_pdl)
    cut.kernel(
        cut.grid,
        (
            index_q,
            index_k,
            block_table,
            seq_lens,
            scores,
            index_k.shape[0],
            index_k.stride()[0],
            block_table.shape[1],
            block_table.stride()[0],
            columns,
            first_column,
            token_stride,
            head_stride,
            decode_query_len,
            layout.key_position(0, 0),
            requests,
            cut.gaps,
            cut.early,
        ),
        cut.constants,
        device,
    )


def decode_index_score_sharded(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
) -> None:
    """Write the scores of this rank's shard; every other element of `score_out` keeps its bits."""
    token_stride, head_stride, _ = score_out.stride()
    launch_scores(
        index_q,
        index_k,
        block_table,
        seq_lens,
        score_out,
        columns=score_out.shape[2],
        token_stride=token_stride,
        head_stride=head_stride,
        layout=layout,
        decode_query_len=decode_query_len,
        enable_pdl=enable_pdl,
    )
