"""What the prefill scorer and its fused form share: one worker's share of a plan, scored tile by tile.

Keys are the M dimension of the matrix product, query rows (token times heads) the N dimension. The queries of
an item are converted once and stay in shared memory; keys stream through shared memory as the bytes that
they are, and are converted in the registers from which the matrix instruction takes them.

One product takes 64 key rows: a few of each of STEP_PAGES pages, and the next product the next few of the
same pages. So the maximum over a page is, but for the last factor of eight or so, a maximum over products,
one instruction an element; only when all rows of a step's pages are through are the rows of a page that
lie in other threads compared.

Two programs share a multiprocessor and a worker's share, each with half of an item's query rows or, of items
that have no more than that, each with half of the units: while one converts keys and compares, the other
multiplies.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from ..geometry import BLOCK, HEAD_DIM, ITEM_TOKENS, NUM_HEADS, UNIT_BLOCKS, ShardLayout
from .e4m3 import e4m3_to_fp16
from .launch import INTERPRETED, Target, trip_count

HEADS = tl.constexpr(NUM_HEADS)
DIM = tl.constexpr(HEAD_DIM)
KEYS_OF_BLOCK = tl.constexpr(BLOCK)
TOKENS_OF_ITEM = tl.constexpr(ITEM_TOKENS)
BLOCKS_OF_UNIT = tl.constexpr(UNIT_BLOCKS)
ROWS_OF_ITEM = tl.constexpr(ITEM_TOKENS * NUM_HEADS)
KEEPS_NAN = tl.constexpr(INTERPRETED)
"""Whether `tl.maximum` of a NaN is NaN: the interpreter's is, every GPU's is the other operand."""
KEY_ROWS = tl.constexpr(64)
"""Key rows of one product: what a matrix instruction of four warps takes."""
WARPS = tl.constexpr(4)


@dataclass(frozen=True)
class Schedule:
    """How the work is cut; any values are right."""

    threads: int = 32 * WARPS.value
    query_rows: int = 128
    """Query rows of a program: half an item's."""
    few_query_rows: int = 64
    """The same for windows of short segments; a worker's share then has four programs."""
    step_pages: int = 8
    stages: int = 5
    """Iterations of the pipeline: one less products' keys are in flight or waiting in shared memory."""
    small_stages: int = 2
    """The same where shared memory is small (AMD)."""


SCHEDULE = Schedule()


def query_rows(max_query_len: int) -> int:
    """Query rows of a program, for a window whose segments have up to so many tokens."""
    few = SCHEDULE.few_query_rows
    return few if NUM_HEADS * max_query_len <= few else SCHEDULE.query_rows


def parts(rows: int) -> int:
    """Programs of one worker."""
    return ITEM_TOKENS * NUM_HEADS // rows


def share_constants(layout: ShardLayout, rows: int, step_pages: int, target: Target) -> tuple[Any, ...]:
    """The constants of `score_share` from PAGE to E4M3."""
    return (
        layout.page_size,
        layout.rows,
        layout.world_size if layout.page_size == BLOCK else 1,
        rows,
        step_pages,
        SCHEDULE.small_stages if target.small_shared_memory else SCHEDULE.stages,
        target.warp_group,
        target.e4m3,
    )


@triton.jit
def regrouped(x, REGROUP: tl.constexpr):
    """[N, 128] -> the same with the dims of every 32 in another order: 0 1, 4 5, 8 9, 12 13, 16 17, ...

    Of its sixteen places, a matrix instruction takes 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 from one thread. In
    this order two instructions take four bytes side by side and the four that lie sixteen further, so
    that keys reach their registers as whole words. And each sums up the sixteen dims that an instruction of
    the decode scorer does, whose order the compiler chooses for fp16 that comes from bytes: the bits
    are equal also where the sums round. Nothing changes where not REGROUP.
    """
    if not REGROUP:
        return x
    x = tl.reshape(x, (x.shape[0], DIM // 32, 2, 4, 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 4, 2, 3, 5)), (x.shape[0], DIM))


@triton.jit
def piece_of(word, item, capacity, segments):
    """Whether there is such an item, its segment, the index of its first token, its tokens and units."""
    qo_lens, batch = segments
    segment = (word & 0xFFFF).to(tl.int32)
    first = ((word >> 16) & 0xFFFF).to(tl.int32) * TOKENS_OF_ITEM
    there = (segment < batch) & (item < capacity)
    length = tl.load(qo_lens + segment, mask=there, other=0)
    tokens = tl.minimum(tl.maximum(length - first, 0), TOKENS_OF_ITEM)
    return there, segment, first, tokens, (word >> 32).to(tl.int32)


@triton.jit
def _pages(table_row, column, end):
    """Physical pages of columns; -1 from `end` on."""
    return tl.load(table_row + column, mask=column < end, other=-1)


@triton.jit
def _load_rows(base, offset, mask):
    """uint8 [n, 128]: rows at byte offsets that are multiples of 16; zeros where not `mask`."""
    address = base + (offset[:, None] + tl.arange(0, DIM)[None, :])
    return tl.load(tl.multiple_of(address, (1, 16)), mask=mask[:, None], other=0)


@triton.jit
def _step_maxima(best, STEP_PAGES: tl.constexpr):
    """[64, N] maxima of rows -> [STEP_PAGES, N] maxima of pages; row `r` is of page `r % STEP_PAGES`.

    Each warp has sixteen rows. Its own are compared first; then the four warps' maxima are brought into one
    thread each, which takes two passes through shared memory instead of a tree of shuffles.
    """
    own: tl.constexpr = KEY_ROWS // STEP_PAGES // WARPS
    best = tl.max(tl.reshape(best, (2, 2, own, STEP_PAGES, best.shape[1])), axis=2)
    low, high = tl.split(tl.permute(best, (2, 3, 0, 1)))
    low, high = tl.split(tl.maximum(low, high))
    return tl.maximum(low, high) + 0.0  # -0.0 becomes +0.0


@triton.jit
def _cut(tokens, unit, end_unit, part, columns, SCALE: tl.constexpr, QUERY_ROWS: tl.constexpr):
    """First token, first page and end of the pages of a part of an item's units.

    Each part takes its tokens and all units or, where one part has room for all tokens, those and its units.
    """
    TOKENS: tl.constexpr = QUERY_ROWS // HEADS
    narrow = tokens <= TOKENS
    slices = tl.where(narrow, ROWS_OF_ITEM // QUERY_ROWS, 1)
    which = tl.where(narrow, part, 0)
    end_unit = tl.minimum(end_unit, (columns + BLOCKS_OF_UNIT - 1) // BLOCKS_OF_UNIT)
    count = tl.maximum(end_unit - unit, 0)
    first_page = (unit + count * which // slices) * BLOCKS_OF_UNIT // SCALE
    end_page = (unit + count * (which + 1) // slices) * BLOCKS_OF_UNIT // SCALE
    return (
        tl.where(narrow, 0, part * TOKENS),
        first_page,
        tl.minimum(end_page, (columns + SCALE - 1) // SCALE),
    )


@triton.jit
def score_piece(
    tensors, sizes, sink, word, item, unit, end_unit, part, START: tl.constexpr, KEEP: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, KEY_STEP: tl.constexpr, QUERY_ROWS: tl.constexpr,
    STEP_PAGES: tl.constexpr, STAGES: tl.constexpr, REGROUP: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """This program's part of the units `unit ... end_unit - 1` of an item."""
    q, k, block_table, qo_lens, kv_lens, qo_starts, qo_offset, _, _ = tensors
    pages, page_pitch, table_columns, table_stride, batch, total_q, columns, capacity, first_key = sizes
    SUB_ROWS: tl.constexpr = KEY_ROWS // STEP_PAGES
    PRODUCTS: tl.constexpr = ROWS // SUB_ROWS

    there, segment, first, tokens, _ = piece_of(word, item, capacity, (qo_lens, batch))
    keys = tl.load(kv_lens + segment, mask=there, other=0)
    row = tl.load(qo_starts + segment, mask=there, other=0).to(tl.int64) + first
    position = tl.load(qo_offset + segment, mask=there, other=0).to(tl.int64) + first
    first_token, first_page, end_page = _cut(
        tokens, unit, end_unit, part, columns, PAGE // KEYS_OF_BLOCK, QUERY_ROWS
    )
    n = tl.arange(0, QUERY_ROWS)
    token = first_token + n // HEADS
    row += token
    live = (token < tokens) & (row >= 0) & (row < total_q)
    # Positions grow with the tokens: what the first one sees all see, what the last one sees not none sees.
    known = tl.minimum(keys, columns * KEYS_OF_BLOCK) - 1
    last_key = tl.maximum(tl.minimum(position + token, known), -1).to(tl.int32)
    last_token = tl.minimum(first_token + QUERY_ROWS // HEADS, tokens) - 1
    all_see = tl.maximum(tl.minimum(position + first_token, known), -1).to(tl.int32)
    any_sees = tl.maximum(tl.minimum(position + last_token, known), -1).to(tl.int32)

    # A step's products, step by step. Pages are looked up one product ahead.
    m = tl.arange(0, KEY_ROWS)
    table_row = block_table + segment * table_stride + first_page
    readable = tl.minimum(tl.minimum((any_sees + PAGE) // PAGE, end_page), table_columns) - first_page
    steps = tl.maximum(end_page - first_page + STEP_PAGES - 1, 0) // STEP_PAGES
    steps = tl.where(first_token < tokens, steps, 0)
    page = _pages(table_row, m % STEP_PAGES, readable)
    queries = _load_rows(q, (row * HEADS + n % HEADS) * DIM, live)
    queries = tl.trans(e4m3_to_fp16(regrouped(queries, REGROUP), E4M3))
    state = START(sink, (item, part), n, row, live, last_key)
    best = tl.full((KEY_ROWS, QUERY_ROWS), float("-inf"), tl.float32)
    for i in tl.range(0, trip_count(steps * PRODUCTS), num_stages=STAGES):
        step = i // PRODUCTS
        number = i - step * PRODUCTS  # of the product in its step
        key_row = number * SUB_ROWS + m // STEP_PAGES
        offset = tl.multiple_of(page.to(tl.int64) * page_pitch, 16) + key_row * DIM
        tile = _load_rows(k, offset, (page >= 0) & (page < pages))
        page = _pages(table_row, (i + 1) // PRODUCTS * STEP_PAGES + m % STEP_PAGES, readable)
        products = tl.dot(e4m3_to_fp16(regrouped(tile, REGROUP), E4M3), queries, out_dtype=tl.float32)
        first_column = first_page + step * STEP_PAGES
        if (first_column + STEP_PAGES) * PAGE - 1 > all_see:
            key = (first_column + m % STEP_PAGES) * PAGE + first_key + key_row * KEY_STEP
            products = tl.where(key[:, None] <= last_key[None, :], products, float("-inf"))
        if KEEPS_NAN:
            products = tl.where(products == products, products, float("-inf"))
        best = tl.maximum(best, products)  # a NaN is not taken
        if number == PRODUCTS - 1:
            column = step * STEP_PAGES + tl.arange(0, STEP_PAGES)
            maxima = _step_maxima(best, STEP_PAGES)
            own = _pages(table_row, column, readable)
            maxima = tl.where(((own >= 0) & (own < pages))[:, None], maxima, float("-inf"))
            state = KEEP(
                sink, state, (item, part), n, row, live, last_key, first_page + column, end_page, maxima
            )
            best = tl.full((KEY_ROWS, QUERY_ROWS), float("-inf"), tl.float32)


@triton.jit
def score_share(
    tensors, sizes, sink, START: tl.constexpr, KEEP: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEY_STEP: tl.constexpr, QUERY_ROWS: tl.constexpr, STEP_PAGES: tl.constexpr, STAGES: tl.constexpr,
    REGROUP: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Score the share of worker `program_id(0)`, part `program_id(1)`, and hand each step's maxima to KEEP.

    `START(sink, place, n, row, live, last_key)` begins a part of an item and gives the state that
    `KEEP(sink, state, place, n, row, live, last_key, column, end, maxima)` takes and gives back: float32
    maxima `[STEP_PAGES, QUERY_ROWS]` of page columns `column`; those from `end` on are another program's.
    `place` is (item, part); `row` is the row of the query of each query row, `live` whether it is one, and
    `last_key` the last key position that it sees.
    """
    work_range, work_info = tensors[7], tensors[8]
    capacity = sizes[7]
    part = tl.program_id(1)
    work = tl.load(work_range + tl.program_id(0))
    item = (work & 0xFFFF).to(tl.int32)
    unit = ((work >> 16) & 0xFFFF).to(tl.int32)
    last_item = ((work >> 32) & 0xFFFF).to(tl.int32)
    last_unit = ((work >> 48) & 0xFFFF).to(tl.int32)
    while (item < last_item) | ((item == last_item) & (unit < last_unit)):
        word = tl.load(work_info + item, mask=item < capacity, other=0)
        end_unit = tl.where(item == last_item, last_unit, (word >> 32).to(tl.int32))
        score_piece(
            tensors, sizes, sink, word, item, unit, end_unit, part, START, KEEP, PAGE, ROWS, KEY_STEP,
            QUERY_ROWS, STEP_PAGES, STAGES, REGROUP, E4M3,
        )  # fmt: skip
        item += 1
        unit = tl.zeros_like(unit)
