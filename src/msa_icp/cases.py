"""Makers of inputs that `msa-icp verify` and the tests share: random ones, and those that broke kernels.

Everything is made on the CPU from a seed and moved to a device afterwards, so every backend and every
device sees the same bytes. A case is hostile wherever the contract allows it: pages are shuffled, the block
table holds garbage behind its live entries, keys past the end of a sequence are NaN, and pages that
nobody may read hold the largest number there is.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import reference

FP8 = torch.float8_e4m3fn
HEADS = 4
DIM = 128
NAN_BYTE = 0x7F
LARGEST_BYTE = 0x7E
"""448, the largest e4m3 number."""
NEGATIVE_ZERO_BYTE = 0x80
POISON = 0x7FC0DEAD
"""Bits of a NaN that no arithmetic makes: what outputs hold before a call."""
GARBAGE_PAGES = (-1, 2**31 - 1, -(2**31), 2**30)
"""Page ids outside any cache, for table entries that mean nothing."""
LAYOUTS = ((2, 128), (4, 128), (2, 256), (4, 256))
"""(world size, page size)."""


# ---------------------------------------------------------------- values


def generator(seed: int) -> torch.Generator:
    """A seeded generator of CPU numbers."""
    return torch.Generator().manual_seed(seed)


def fp8(values: Tensor) -> Tensor:
    """Numbers that e4m3 holds -> `float8_e4m3fn`."""
    return values.to(FP8)


def full_range(shape: Sequence[int], seed: int, *, nan: bool = False) -> Tensor:
    """Every e4m3 byte with the same probability; without `nan`, the two NaN bytes become zeros.

    The sums of such products need up to 43 bits and cancel badly, so FP32 sums depend on their order.
    """
    raw = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator(seed))
    if not nan:
        raw.masked_fill_((raw & NAN_BYTE) == NAN_BYTE, 0)
    return raw.view(FP8)


def exact(shape: Sequence[int], seed: int) -> Tensor:
    """Multiples of 1/16 from 1/2 to 2, of either sign: FP32 holds every partial sum of 128 products."""
    raw = torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=generator(seed))
    return ((raw & 0x8F) | 0x30).view(FP8)


def bytes_of(shape: Sequence[int], byte: int) -> Tensor:
    """The same e4m3 byte everywhere."""
    return torch.full(tuple(shape), byte, dtype=torch.uint8).view(FP8)


def signed_zeros(shape: Sequence[int], seed: int) -> Tensor:
    """+0.0 and -0.0 at random."""
    sign = torch.randint(0, 2, tuple(shape), dtype=torch.uint8, generator=generator(seed))
    return (sign * NEGATIVE_ZERO_BYTE).view(FP8)


def half_way_keys(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A query `[128]` and keys `[rows, 128]` whose exact scores lie on, or 2**-18 beside, FP32 midpoints.

    448 * 448 has an FP32 spacing of 2**-6; 2**-7 on top is half of it, and one more product of 2**-18
    decides which neighbour is the canonical score. Scores of neighbouring rows are near ties.
    """
    query = torch.zeros(DIM)
    query[:3] = torch.tensor([448.0, 2.0**-6, 2.0**-9])
    pick = torch.randint(0, 9, (rows,), generator=generator(seed))
    keys = torch.zeros(rows, DIM)
    keys[:, 0] = 448.0
    keys[:, 1] = torch.tensor([0.5, 1.5, -0.5])[pick % 3]
    keys[:, 2] = torch.tensor([0.0, 2.0**-9, -(2.0**-9)])[pick // 3]
    return fp8(query), fp8(keys)


# ---------------------------------------------------------------- memory


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An output of 4-byte elements before the call: `POISON` in every one."""
    return torch.full(tuple(shape), POISON, dtype=torch.int32, device=device).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The 4-byte elements as int32 on the CPU, so that NaN equals itself and -0.0 is not +0.0."""
    return tensor.detach().cpu().contiguous().view(torch.int32)


def strided(
    values: Tensor, stride: Sequence[int], *, device: torch.device | str = "cpu", fill: int = NAN_BYTE
) -> Tensor:
    """`values` at `stride` (elements) in memory of its own whose other bytes are `fill`."""
    extent = 1 + sum((size - 1) * step for size, step in zip(values.shape, stride, strict=True))
    if values.numel() == 0:
        extent = 0
    memory = torch.full((extent * values.element_size(),), fill, dtype=torch.uint8, device=device)
    view = memory.view(values.dtype).as_strided(tuple(values.shape), tuple(stride))
    view.copy_(values)
    return view


def off_by_one(values: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """`values` `[n]` one element past the begin of its memory: aligned to an element and no more."""
    return torch.cat((values[:1], values)).to(device)[1:] if values.numel() else values.to(device)


def sparse_bytes(count: int, device: torch.device | str = "cpu") -> Tensor:
    """`count` uint8 of which the machine spends memory only on what is touched (on a CPU)."""
    if torch.device(device).type != "cpu":
        return torch.empty(count, dtype=torch.uint8, device=device)
    if not sys.platform.startswith("linux"):
        return torch.frombuffer(mmap.mmap(-1, count), dtype=torch.uint8)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=torch.uint8)


# ---------------------------------------------------------------- batches


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """Queries over paged sequences, with the keys of all ranks."""

    name: str
    world_size: int
    page_size: int
    index_q: Tensor  # fp8 [T, 4, 128]
    cache: Tensor  # fp8 [pages, P, 128]: row p of a page is the key at position P * column + p
    block_table: Tensor  # int32 [B, columns]
    init_blocks: int = 0
    local_blocks: int = 1
    exact: bool = True
    """FP32 holds every partial sum, so all backends must give the same bits."""
    whole: bool = True
    """Every page of every sequence is readable, so the unsharded selection is the truth."""
    pitch: int | None = None
    """Bytes from one page of a shard to the next, None: dense."""
    sliced: bool = False
    """Lengths and table are slices of larger tensors: 4-byte aligned bases, a free row stride."""
    large: bool = False
    """Too much for a slow backend (an interpreter) or for a quick check."""

    @property
    def index_scale(self) -> int:
        """Blocks from one page column to the next."""
        return self.page_size // 128

    def index_offset(self, rank: int) -> int:
        """Block, within its page, that the rank's rows belong to."""
        return reference.column_block(0, rank=rank, world_size=self.world_size, page_size=self.page_size)

    def shard(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """This rank's K shard, at the case's pitch in memory that is NaN elsewhere."""
        rows = [
            reference.key_position(0, i, rank=rank, world_size=self.world_size, page_size=self.page_size)
            for i in range(self.page_size // self.world_size)
        ]
        dense = self.cache.view(torch.uint8)[:, rows].contiguous().view(FP8)
        if self.pitch is None:
            return dense.to(device)
        return strided(dense, (self.pitch, DIM, 1), device=device)

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """The block table on `device`, a slice of a wider one where the case says so."""
        if not self.sliced:
            return self.block_table.to(device)
        wider = torch.cat((self.block_table[:, :1], self.block_table), dim=1)
        return strided(wider, (wider.shape[1] + 4, 1), device=device)[:, 1:]

    def keys_of(self, row: int, count: int) -> Tensor:
        """The first `count` keys of a row of the block table in order of position; for `whole` cases."""
        pages = self.block_table[row, : math.ceil(count / self.page_size)].long()
        return self.cache.view(torch.uint8)[pages].reshape(-1, DIM)[:count].view(FP8)


Case = TypeVar("Case", bound=PagedCase)


@dataclass(frozen=True, kw_only=True)
class DecodeCase(PagedCase):
    """One decode batch."""

    decode_query_len: int
    seq_lens: Tensor  # int32 [B]

    @property
    def tokens(self) -> int:
        return self.seq_lens.numel() * self.decode_query_len

    @property
    def score_columns(self) -> int:
        """Columns of a score buffer: what the batch and the table need, and four that stay unwritten."""
        longest: int = max([0, *self.seq_lens.tolist()])
        pages = min(math.ceil(longest / self.page_size), 8192)
        return min(8192, 4 * math.ceil(max(pages, self.block_table.shape[1]) / 4) + 4)

    def metadata(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Block table, lengths and valid block counts on `device`, sliced where the case says so."""
        lens, num_valid = self.seq_lens, self.num_valid_pages()
        if self.sliced:
            return self.table(device), off_by_one(lens, device), off_by_one(num_valid, device)
        return self.table(device), lens.to(device), num_valid.to(device)

    def num_valid_pages(self) -> Tensor:
        """int32 `[T]`: ceil((position + 1) / 128), 0 for padding (contract, section 5)."""
        counts = []
        for seq_len in self.seq_lens.tolist():
            for j in range(self.decode_query_len):
                seen = seq_len - self.decode_query_len + j + 1
                counts.append(math.ceil(max(seen, 0) / 128) if seq_len > 0 else 0)
        return torch.tensor(counts, dtype=torch.int32)

    def sequence_keys(self, request: int) -> Tensor:
        """All keys of a request in order of position; for `whole` cases."""
        return self.keys_of(request, max(0, int(self.seq_lens[request])))

    def with_layout(self, world_size: int) -> DecodeCase:
        """The same batch over another number of ranks."""
        return replace(self, world_size=world_size)


Values = Callable[[Sequence[int], int], Tensor]
"""What makes keys or queries of a shape from a seed."""


def paged(
    seq_lens: Sequence[int],
    page_size: int,
    keys: Values,
    seed: int,
    *,
    least_columns: int = 1,
    spare_columns: int = 0,
) -> tuple[Tensor, Tensor]:
    """Cache and block table of sequences with pages of their own, hostile wherever nobody may look.

    Pages are handed out shuffled. Keys at or after the end of a sequence are NaN, three pages that
    nobody owns hold 448 everywhere, and table entries behind the live ones point there or nowhere.
    """
    pages_of = [math.ceil(max(0, n) / page_size) for n in seq_lens]
    used, spare = sum(pages_of), 3
    order = torch.randperm(used + spare, generator=generator(seed)).tolist()
    cache = keys((used + spare, page_size, DIM), seed + 1).view(torch.uint8).clone()
    cache[order[used:]] = LARGEST_BYTE
    columns = max([least_columns, *pages_of]) + spare_columns
    table = torch.empty((len(seq_lens), columns), dtype=torch.int32)
    stale = [*GARBAGE_PAGES, *order[used:]]
    first = 0
    for b, (seq_len, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
        mine = order[first : first + count]
        first += count
        rest = [stale[(b + i) % len(stale)] for i in range(columns - count)]
        table[b] = torch.tensor(mine + rest, dtype=torch.int32)
        if count:
            cache[mine[-1], seq_len - page_size * (count - 1) :] = NAN_BYTE
    return cache.view(FP8), table


def decode_case(
    name: str,
    world_size: int,
    page_size: int,
    *,
    seq_lens: Sequence[int],
    decode_query_len: int = 1,
    keys: Values = exact,
    queries: Values = exact,
    spare_columns: int = 3,
    init_blocks: int = 0,
    local_blocks: int = 1,
    pitch: int | None = None,
    sliced: bool = False,
    large: bool = False,
    seed: int = 0,
) -> DecodeCase:
    """A batch of requests, hostile wherever nobody may look (see `paged`)."""
    cache, table = paged(seq_lens, page_size, keys, seed, spare_columns=spare_columns)
    return DecodeCase(
        name=name,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=decode_query_len,
        index_q=queries((len(seq_lens) * decode_query_len, HEADS, DIM), seed + 2),
        cache=cache,
        block_table=table,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        exact=keys is not full_range and queries is not full_range,
        pitch=pitch,
        sliced=sliced,
        large=large,
    )


def random_cases(world_size: int, page_size: int) -> Iterator[DecodeCase]:
    """Mixed lengths with exact sums and with every e4m3 byte, one and several query tokens."""
    lengths = (3077, 640, 129, 0, 128, 1)
    for values, kind in ((exact, "exact sums"), (full_range, "every byte")):
        for q in (1, 2, 4, 8):
            yield decode_case(
                f"random, {kind}, {q} query tokens",
                world_size,
                page_size,
                seq_lens=lengths if q == 1 else lengths[:3],
                decode_query_len=q,
                keys=values,
                queries=values,
                seed=10 * q,
            )


def nasty_cases(world_size: int, page_size: int) -> Iterator[DecodeCase]:
    """The classes of inputs that broke kernels like these, by their number in the tests."""

    def case(name: str, seq_lens: Sequence[int], **rest: Any) -> DecodeCase:
        return decode_case(name, world_size, page_size, seq_lens=seq_lens, **rest)

    yield case("01 padding rows", (0, 300, 0, -7, 2200, 0))
    yield case("01 nothing but padding", (0, 0, 0))
    yield case("02 one token", (1,), spare_columns=0)
    yield case("02 one whole page", (page_size,), spare_columns=0)
    yield unreadable_pages(case("03 page ids out of range in the live prefix", (2600, 700)))
    yield narrow_table(case("04 table narrower than the sequence", (2600, 90, 1500)))
    yield case("05 dirty tail", (page_size + 1, 2 * page_size - 1, 65, 63), decode_query_len=2)
    yield nan_keys(case("06 NaN keys", (2900, 500), decode_query_len=2))
    yield nan_queries(case("06 NaN queries", (2900, 500), decode_query_len=2))
    yield case("07 pitch above the page", (700, 2100), pitch=page_size // world_size * DIM + 48)
    yield case("08 constant keys", (2600, 5000), keys=ones)
    yield case("08 zero queries", (2600, 5000), queries=zeros)
    yield case("08 zeros of both signs", (2600, 300), keys=signed_zeros, queries=signed_zeros)
    yield tie_at_16(case("08 tie at the 16th place", (24 * 128,), local_blocks=0))
    yield half_way(case("08 near ties", (2600, 4100)))
    yield case(
        "09 at most 17 blocks", (1, 128, 15 * 128, 16 * 128, 16 * 128 + 1), init_blocks=2, local_blocks=3
    )
    yield case("09 forced blocks overlap", (1, 300, 600), init_blocks=9, local_blocks=7)
    yield case("09 all 16 forced", (3000, 2049), init_blocks=8, local_blocks=8)
    for q in (3, 5, 7):
        yield case(f"10 {q} query tokens", (2307, 2 * page_size + q - 1, 133), decode_query_len=q)
    yield case("10 sequences shorter than the query", (3, 1, 7), decode_query_len=8)
    yield heads_disagree(case("11 each head for itself", (40 * 128,), local_blocks=0))
    yield case("12 sliced metadata", (0, 700, 2300, 130), sliced=True)
    yield endless(case("18 lengths past the table and the score columns", (2600, 300), large=True))
    yield production_mix(world_size, page_size)


# ---------------------------------------------------------------- what makes a case nasty


def ones(shape: Sequence[int], _: int) -> Tensor:
    """1.0 everywhere."""
    return fp8(torch.ones(tuple(shape)))


def zeros(shape: Sequence[int], _: int) -> Tensor:
    """+0.0 everywhere."""
    return fp8(torch.zeros(tuple(shape)))


def page_of(case: PagedCase, request: int, block: int) -> tuple[int, slice]:
    """Page and rows of the cache that hold a block of a request."""
    page = int(case.block_table[request, block * 128 // case.page_size])
    start = block * 128 % case.page_size
    return page, slice(start, start + 128)


def with_keys(case: Case, change: Callable[[Tensor], None]) -> Case:
    """The case with the bytes of its cache `[pages, P, 128]` changed in place."""
    raw = case.cache.view(torch.uint8).clone()
    change(raw)
    return replace(case, cache=raw.view(FP8))


def unreadable_pages(case: Case) -> Case:
    """Every second live entry of the block table names no page."""
    table = case.block_table.clone()
    wrong = torch.tensor([*GARBAGE_PAGES, case.cache.shape[0]], dtype=torch.int32)
    odd = table[:, 1::2]
    odd.copy_(wrong.repeat(odd.shape[1])[: odd.shape[1]].expand_as(odd))
    return replace(case, block_table=table, whole=False)


def narrow_table(case: DecodeCase) -> DecodeCase:
    """A block table of half the columns that the longest sequence needs."""
    longest = math.ceil(int(case.seq_lens.max()) / case.page_size)
    return replace(case, block_table=case.block_table[:, : longest // 2], whole=False)


def nan_keys(case: Case) -> Case:
    """One NaN row in block 3, one NaN element in every row of block 5, block 7 all NaN."""

    def change(raw: Tensor) -> None:
        page, rows = page_of(case, 0, 3)
        raw[page, rows.start + 17] = 0xFF
        page, rows = page_of(case, 0, 5)
        raw[page, rows, 77] = NAN_BYTE
        page, rows = page_of(case, 0, 7)
        raw[page, rows] = NAN_BYTE

    return with_keys(case, change)


def nan_queries(case: Case) -> Case:
    """One NaN element in two query rows: those rows alone see nothing but -inf."""
    raw = case.index_q.view(torch.uint8).clone()
    raw[0, 1, 127] = NAN_BYTE
    raw[-1, 3, 0] = 0xFF
    return replace(case, index_q=raw.view(FP8))


def tie_at_16(case: Case) -> Case:
    """Ten blocks score 2 and all others 1: six of the equal ones go in, those of the lowest ids."""

    def change(raw: Tensor) -> None:
        raw.copy_(fp8(torch.full((DIM,), 1 / 128)).view(torch.uint8))
        for block in (1, 2, 5, 8, 9, 13, 17, 20, 22, 23):
            page, rows = page_of(case, 0, block)
            raw[page, rows] = fp8(torch.full((DIM,), 2 / 128)).view(torch.uint8)

    return replace(with_keys(case, change), index_q=ones(case.index_q.shape, 0))


def half_way(case: Case) -> Case:
    """Scores on and beside the midpoints of FP32 numbers; not exact, and full of near ties."""
    live = case.cache.view(torch.uint8)
    clean = ((live & NAN_BYTE) != NAN_BYTE).all(-1) & (live != LARGEST_BYTE).all(-1)

    def change(raw: Tensor) -> None:
        _, keys = half_way_keys(int(clean.sum()), seed=3)
        raw[clean] = keys.view(torch.uint8)

    query, _ = half_way_keys(1, seed=3)
    queries = query.view(torch.uint8).expand(case.index_q.shape).contiguous().view(FP8)
    return replace(with_keys(case, change), index_q=queries, exact=False)


def heads_disagree(case: DecodeCase) -> DecodeCase:
    """Head `h` likes the blocks `b % 4 == h` alone, so no two heads select the same ones."""

    def change(raw: Tensor) -> None:
        raw.zero_()
        for block in range(int(case.seq_lens[0]) // 128):
            page, rows = page_of(case, 0, block)
            raw[page, rows, block % 4] = fp8(torch.tensor(1 + block // 4 % 8 / 8)).view(torch.uint8)

    queries = torch.zeros(case.index_q.shape)
    for head in range(HEADS):
        queries[:, head, head] = 1.0
    return replace(with_keys(case, change), index_q=fp8(queries))


def endless(case: DecodeCase) -> DecodeCase:
    """Lengths that no table and no score row holds; what they hold is scored all the same."""
    longest = torch.full_like(case.seq_lens, 2**31 - 1)
    table = case.block_table.clone()
    for b, seq_len in enumerate(case.seq_lens.tolist()):
        table[b, math.ceil(seq_len / case.page_size) :] = -1
    return replace(case, seq_lens=longest, block_table=table, whole=False)


def shared_prefix(case: DecodeCase, pages: int) -> DecodeCase:
    """Every request begins with the same `pages` physical pages (those of the first request)."""
    table = case.block_table.clone()
    for b, seq_len in enumerate(case.seq_lens.tolist()):
        shared = min(pages, max(0, seq_len) // case.page_size)
        table[b, :shared] = table[0, :shared]
    return replace(case, block_table=table)


def production_mix(world_size: int, page_size: int) -> DecodeCase:
    """Long and short contexts of a serving engine in one batch, half of them on a shared prefix."""
    case = decode_case(
        "20 production mix with a shared prefix",
        world_size,
        page_size,
        seq_lens=(10_240, 1000, 50_003, 5120, 4097, 0, 10_007),
        decode_query_len=2,
        local_blocks=2,
        init_blocks=1,
        large=True,
    )
    return shared_prefix(case, 3500 // page_size)
