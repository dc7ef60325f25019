"""The geometry of a shard: rows, key positions, columns, blocks and sizes.

Pure integers, no torch: this is the one place that knows section 2 of the contract. The methods of
`ShardLayout` are plain arithmetic, so they take integers and integer tensors alike.

Terms: a *B128 block* is 128 consecutive keys of a sequence, a *page* is what a block table entry names
(`page_size` keys over all ranks), a *column* is the index of a page within its request, a *row* is
one key of a page that this rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

NUM_HEADS = 4
"""Index heads of MiniMax-M3, over all ranks."""
HEAD_DIM = 128
"""Dimensions, and bytes, of one index key."""
BLOCK = 128
"""Keys in a B128 block."""
TOP_K = 16
"""Blocks selected for each (token, index head)."""
MAX_BLOCKS = 8192
"""Blocks of a 1M-token context; ids at or past it are not candidates."""
MAX_SELECT_COLUMNS = 12288
"""Score rows that the selection takes are narrower than this."""
SLOT_SETS = 3
"""Receive slot sets that the layers of a step rotate through."""
MAX_QUERY_ROWS = 32
"""Query rows (tokens times heads) of one request that a decode call takes."""
WORLD_SIZES = (2, 4)
PAGE_SIZES = (128, 256)
Layouts = Collection[tuple[int, int]]
"""Page sizes with world sizes: what kernels are compiled for."""
LAYOUTS = tuple(product(PAGE_SIZES, WORLD_SIZES))
"""All of them."""

LEGACY_WORDS = 33
"""int32 words of a legacy row: 16 score bits, 16 ids, the ready word."""
TAGGED_WORDS = 32
"""int64 words of a tagged row: generation << 32 | word."""

ITEM_TOKENS = 64
"""Most query tokens of one item of a prefill plan."""
UNIT_BLOCKS = 4
"""B128 blocks in one unit of a prefill item: where a share of a plan may begin and end."""
UNIT_COST = 4
"""What a unit costs before its tokens are counted, in eighths of what one costs that 64 tokens look at."""
COST_TOKENS = 16
"""Tokens of an item, or fewer, for which each of its units costs one eighth more."""
START_COST = 8
"""What it costs a share to go on to another item, in the same eighths."""
MAX_SEGMENTS = 65536
"""Segments of a prefill window."""
MAX_ITEMS = 65535
"""Items of a prefill window."""
MAX_COLUMNS = 65535
"""B128 blocks, and so score columns, of the longest segment of a prefill window."""
MAX_ITEM_COLUMNS = 2**31 - 1
"""Items times columns of a prefill window."""
PLAN_WORKSPACE_BYTES = 32 << 20
PREFILL_WINDOW_TOKENS = 8192
"""Most tokens of a prefill window that the facade plans."""
PREFILL_SCRATCH_BYTES = 256 << 20
"""What such a window may take, at five bytes a score: four of its own, and one for whatever else there is."""

_POOL_SPLITS = 128
_POOL_KEY_BYTES = 8
_WORK_INFO_TOKENS = 128


def ceil_div(value: Any, divisor: int) -> Any:
    """`value / divisor` rounded up, for integers and integer tensors."""
    return -((-value) // divisor)


@dataclass(frozen=True)
class ShardLayout:
    """Which keys of every page one rank holds.

    `world_size` is 2 or 4, `0 <= rank < world_size`, `page_size` is 128 or 256; the entry points have
    checked that.
    """

    world_size: int
    rank: int
    page_size: int

    @cached_property
    def rows(self) -> int:
        """Keys of one page that a rank holds (R)."""
        return self.page_size // self.world_size

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page's shard; a page is dense, pages need not be."""
        return self.rows * HEAD_DIM

    @cached_property
    def index_scale(self) -> int:
        """Blocks from one column to the next."""
        return self.page_size // BLOCK

    @cached_property
    def index_offset(self) -> int:
        """Block, within its page, that this rank's rows belong to."""
        return self.rank * self.index_scale // self.world_size

    def key_position(self, column: Any, row: Any) -> Any:
        """Position in the sequence of local row `row` of page column `column`."""
        if self.page_size == BLOCK:
            return BLOCK * column + self.world_size * row + self.rank
        return self.page_size * column + self.rows * self.rank + row

    def owner_and_row(self, position: Any) -> tuple[Any, Any]:
        """The rank that holds the key at `position`, and its local row there."""
        within = position % self.page_size
        if self.page_size == BLOCK:
            return within % self.world_size, within // self.world_size
        return within // self.rows, within % self.rows

    def block(self, column: Any) -> Any:
        """B128 block of which this rank holds rows in page column `column`."""
        return column * self.index_scale + self.index_offset

    def columns(self, seq_len: Any) -> Any:
        """Pages that hold `seq_len` keys; not positive where there are none."""
        return ceil_div(seq_len, self.page_size)


def decode_score_columns(max_model_len: int, page_size: int) -> int:
    """Score columns that a decode buffer for contexts of `max_model_len` tokens needs."""
    return min(MAX_BLOCKS, int(ceil_div(max_model_len, 4 * page_size)) * 4)


def decode_pool_bytes(max_decode_tokens: int, num_heads: int) -> int:
    """Bytes of the fused decode form's pool: for each row up to 128 splits of 16 candidates."""
    return max_decode_tokens * num_heads * _POOL_SPLITS * TOP_K * _POOL_KEY_BYTES


POOL_ROW_WORDS = decode_pool_bytes(1, 1) // 4
"""FP32 words that the fused decode form's pool has for one (token, head) row."""


def pool_rounds(columns: int) -> Iterator[tuple[int, int]]:
    """First column and columns of each round of a fused form that keeps score rows in its pool.

    There is one round, or as many as leave the end of a row room for the keys of the best 16 columns so far.
    """
    carry = TOP_K * _POOL_KEY_BYTES // 4
    step = columns if columns <= POOL_ROW_WORDS else POOL_ROW_WORDS - carry
    for first in range(0, columns, step):
        yield first, min(step, columns - first)


def block_columns(max_seq_len: int) -> int:
    """Score columns, one a B128 block, of a prefill window whose segments have up to so many keys."""
    return int(ceil_div(max_seq_len, BLOCK))


def shard_columns(columns: Any, page_size: int) -> Any:
    """Page columns, and so compact score columns, that hold so many B128 blocks."""
    return ceil_div(columns, page_size // BLOCK)


def prefill_pitch(columns: int) -> int:
    """Columns of the score rows of a prefill window: whole groups of 64 bytes."""
    return int(ceil_div(columns, 16)) * 16


def prefill_chunk_tokens(pitch: int) -> int:
    """Tokens of a prefill window whose score rows have that pitch."""
    fit = PREFILL_SCRATCH_BYTES // (5 * NUM_HEADS * pitch) // BLOCK * BLOCK
    return min(PREFILL_WINDOW_TOKENS, max(BLOCK, fit))


def prefill_items(total_q: int, batch: int) -> int:
    """Most items that a prefill window of so many query tokens and segments has."""
    return min(int(ceil_div(total_q, ITEM_TOKENS)) + batch - 1, total_q)


def work_info_numel(total_q: int, batch: int, num_heads: int) -> int:
    """int64 words of a prefill plan's `packed_work_info`; never fewer than the items."""
    return int(ceil_div(total_q, _WORK_INFO_TOKENS) + batch - 1) * num_heads


def prefill_pool_bytes(total_q: int, batch: int, workers: int, num_heads: int) -> int:
    """Bytes of the fused prefill form's pool: 16 candidates for each row of each piece of an item.

    One more worker than one cuts at most one more item in two, so there are at most
    `items + workers - 1` pieces.
    """
    pieces = int(ceil_div(total_q, ITEM_TOKENS)) + batch - 1 + workers - 1
    return pieces * ITEM_TOKENS * num_heads * TOP_K * _POOL_KEY_BYTES


def comm_layout(world_size: int, heads_per_rank: int, capacity: int) -> dict[str, Any]:
    """Where the rows and counters of one rank's receive storage lie (contract, section 6)."""
    rows = SLOT_SETS * world_size * heads_per_rank * capacity
    legacy_words = rows * LEGACY_WORDS
    return {
        "storage_words": legacy_words + rows * TAGGED_WORDS * 2,
        "legacy_offset_bytes": 0,
        "legacy_shape": (SLOT_SETS, world_size, heads_per_rank, capacity, LEGACY_WORDS),
        "tagged_offset_bytes": legacy_words * 4,
        "tagged_shape": (SLOT_SETS, world_size, heads_per_rank, capacity, TAGGED_WORDS),
        "generations_shape": (SLOT_SETS, world_size * heads_per_rank, capacity),
        "expected_shape": (SLOT_SETS, heads_per_rank, capacity),
    }


def first_receive_row(
    slot: int, rank: int, head: int, *, world_size: int, heads_per_rank: int, capacity: int
) -> int:
    """Row, in the owner's storage, of token 0 of `head` as published by `rank` into slot set `slot`."""
    return ((slot * world_size + rank) * heads_per_rank + head % heads_per_rank) * capacity
