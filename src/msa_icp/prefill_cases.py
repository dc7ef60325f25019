"""Makers of prefill windows that `msa-icp verify` and the tests share; `cases` has what they are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .cases import (
    DIM,
    HEADS,
    PagedCase,
    Values,
    exact,
    fp8,
    full_range,
    half_way,
    nan_keys,
    nan_queries,
    off_by_one,
    ones,
    page_of,
    paged,
    signed_zeros,
    tie_at_16,
    unreadable_pages,
    with_keys,
    zeros,
)

RECORDED_SHAPES = (
    (1, 0),
    (7, 20480),
    (13, 57984),
    (28, 44160),
    (39, 124160),
    (46, 136704),
    (48, 89088),
    (50, 100864),
    (4096, 0),
    (8192, 65536),
)
"""(query tokens, cached prefix) of windows that a serving engine recorded."""


@dataclass(frozen=True, kw_only=True)
class PrefillCase(PagedCase):
    """One ragged window. `index_q` has as many rows as the window's bound, `total_q`."""

    qo_lens: Tensor  # int32 [B]
    kv_lens: Tensor  # int32 [B]
    qo_offset: Tensor  # int32 [B]: position of each segment's first query token
    qo_offsets: Tensor  # int32 [B + 1]: row of each segment's first query token
    max_seq_len: int
    on_host: bool = True
    """The host's plan takes this metadata, and means the same with it."""

    @property
    def total_q(self) -> int:
        return self.index_q.shape[0]

    @property
    def blocks(self) -> int:
        """B128 blocks of the longest context: the plan's `columns`."""
        return math.ceil(self.max_seq_len / 128)

    def score_columns(self, compact: bool) -> int:
        """The least width of score rows."""
        return math.ceil(self.blocks / self.index_scale) if compact else self.blocks

    @property
    def layouts(self) -> tuple[bool, ...]:
        """`compact` or not: what the page size allows."""
        return (False,) if self.page_size == 128 else (False, True)

    @property
    def fused_compact(self) -> bool:
        """What the fused form takes."""
        return self.page_size == 256

    def tokens(self) -> list[tuple[int, int, int]]:
        """(row, segment, position) of every query token that has a row."""
        found = []
        for s, count in enumerate(self.qo_lens.tolist()):
            for i in range(count):
                row = int(self.qo_offsets[s]) + i
                if 0 <= row < self.total_q:
                    found.append((row, s, int(self.qo_offset[s]) + i))
        return found

    def num_valid_pages(self) -> Tensor:
        """int32 `[T]`: ceil((position + 1) / 128), no more than the keys fill; 0 for rows of no segment."""
        counts = torch.zeros(self.total_q, dtype=torch.int32)
        for row, s, position in self.tokens():
            counts[row] = max(0, math.ceil(min(position + 1, int(self.kv_lens[s])) / 128))
        return counts

    def metadata(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The segment tensors as the device plan takes them, sliced where the case says so."""
        keys = torch.nn.functional.pad(self.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        tensors = {
            "qo_segment_lens": self.qo_lens,
            "kv_segment_lens": self.kv_lens,
            "qo_segment_offsets": self.qo_offsets,
            "kv_segment_offsets": keys,
            "qo_offset": self.qo_offset,
        }
        if self.sliced:
            return {name: off_by_one(t, device) for name, t in tensors.items()}
        return {name: t.to(device) for name, t in tensors.items()}


def prefill_case(
    name: str,
    world_size: int,
    page_size: int,
    *,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int] | None = None,
    qo_offset: Sequence[int] | None = None,
    keys: Values = exact,
    queries: Values = exact,
    spare_tokens: int = 0,
    spare_keys: int = 0,
    spare_columns: int = 1,
    pitch: int | None = None,
    seed: int = 0,
    **rest: Any,
) -> PrefillCase:
    """A window of segments, hostile wherever nobody may look (see `cases.paged`).

    Without `kv_lens` the segments are fresh prompts, without `qo_offset` the query tokens are the last
    of their segments. `spare_tokens` and `spare_keys` make the bounds larger than the metadata.
    """
    kv = list(qo_lens if kv_lens is None else kv_lens)
    first = [k - q for q, k in zip(qo_lens, kv, strict=True)] if qo_offset is None else list(qo_offset)
    max_seq_len = max(1, *kv) + spare_keys
    cache, table = paged(
        kv,
        page_size,
        keys,
        seed,
        least_columns=math.ceil(math.ceil(max_seq_len / 128) * 128 / page_size),
        spare_columns=spare_columns,
    )
    offsets = torch.tensor([0, *qo_lens]).clamp(min=0).cumsum(0)
    total_q = max(1, int(offsets[-1])) + spare_tokens
    return PrefillCase(
        name=name,
        world_size=world_size,
        page_size=page_size,
        index_q=queries((total_q, HEADS, DIM), seed + 2),
        cache=cache,
        block_table=table,
        qo_lens=torch.tensor(qo_lens, dtype=torch.int32),
        kv_lens=torch.tensor(kv, dtype=torch.int32),
        qo_offset=torch.tensor(first, dtype=torch.int32),
        qo_offsets=offsets.to(torch.int32),
        max_seq_len=max_seq_len,
        exact=keys is not full_range and queries is not full_range,
        pitch=pitch,
        on_host=spare_tokens == spare_keys == 0,
        **rest,
    )


def random_cases(world_size: int, page_size: int) -> Iterator[PrefillCase]:
    """Fresh prompts, chunks and short queries in one window, with exact sums and with every e4m3 byte."""
    for values, kind in ((exact, "exact sums"), (full_range, "every byte")):
        yield prefill_case(
            f"random, {kind}",
            world_size,
            page_size,
            qo_lens=(70, 0, 1, 33, 3),
            kv_lens=(70, 300, 2177, 500, 3),
            keys=values,
            queries=values,
            init_blocks=1,
            local_blocks=2,
        )


def nasty_cases(world_size: int, page_size: int) -> Iterator[PrefillCase]:
    """The classes of inputs that broke kernels like these, by their number in the tests."""

    def case(
        name: str, qo_lens: Sequence[int], kv_lens: Sequence[int] | None = None, **rest: Any
    ) -> PrefillCase:
        return prefill_case(name, world_size, page_size, qo_lens=qo_lens, kv_lens=kv_lens, **rest)

    yield case("01 empty segments", (0, 5, 0, 0, 66, 0), (300, 5, 0, 129, 66, 1))
    yield case("01 nothing but empty segments", (0, 0), (0, 40))
    yield case("01 nothing but empty segments, larger bounds", (0, 0), (0, 40), spare_tokens=3)
    yield case("02 one token", (1,), spare_columns=0)
    yield case("02 tokens of one segment each", (1, 1, 1, 1), (1, 128, 129, 700))
    yield unreadable_pages(case("03 page ids out of range in the live prefix", (5, 3), (2600, 700)))
    yield case("05 dirty tail", (3, 2, 2), (page_size + 1, 2 * page_size - 1, 65))
    yield nan_keys(case("06 NaN keys", (3, 2), (2300, 500)))
    yield nan_queries(case("06 NaN queries", (3, 2), (2300, 500)))
    yield case("07 pitch above the page", (9, 4), (700, 1300), pitch=page_size // world_size * DIM + 48)
    yield case("08 constant keys", (3, 2), (2600, 3000), keys=ones)
    yield case("08 zero queries", (3, 2), (2600, 3000), queries=zeros)
    yield case("08 zeros of both signs", (3, 2), (2600, 300), keys=signed_zeros, queries=signed_zeros)
    yield tie_at_16(case("08 tie at the 16th place", (1,), (24 * 128,), local_blocks=0))
    yield half_way(case("08 near ties", (3, 2), (2600, 3000)))
    yield case(
        "09 at most 17 blocks",
        (1, 1, 2, 2, 1),
        (1, 128, 15 * 128 + 1, 16 * 128 + 1, 17 * 128),
        init_blocks=2,
        local_blocks=3,
    )
    yield case("09 forced blocks overlap", (1, 3, 2), (1, 300, 600), init_blocks=9, local_blocks=7)
    yield case("09 all 16 forced", (2, 2), (2400, 2049), init_blocks=8, local_blocks=8)
    yield heads_disagree(case("11 each head for itself", (2,), (40 * 128,), local_blocks=0))
    yield case("12 sliced metadata", (0, 9, 3, 2), (0, 700, 1300, 130), sliced=True)
    yield case("13 bounds larger than the metadata", (5, 0, 9), (700, 0, 9), spare_tokens=70, spare_keys=900)
    yield case("19 a fresh prompt", (200,))
    yield case("19 chunks at their offsets", (67, 30), (600, 333))
    yield case("19 items of 63, 64, 65 tokens and one", (63, 64, 65, 1), (63, 200, 65, 300), large=True)
    yield case("19 short queries over cached prefixes", (7, 13, 1, 3), (1300, 2317, 900, 40))
    yield case("19 queries before the last keys", (4, 66), (600, 700), qo_offset=(130, 254))
    yield case("19 positions past the keys", (9, 80, 3), (250, 300, 5), qo_offset=(249, 230, 900))
    yield hostile_segments(case("lengths and positions below 0", (3, 4, 2, 5), (700, 300, 40, 128)))
    yield rows_apart(case("rows between the segments", (3, 4, 66), (700, 300, 66), spare_tokens=9))
    yield beyond_bounds(case("metadata beyond the bounds", (90, 4), (1300, 1300), seed=3))


def heads_disagree(case: PrefillCase) -> PrefillCase:
    """Head `h` likes the blocks `b % 4 == h` alone, so no two heads select the same ones."""

    def change(raw: Tensor) -> None:
        raw.zero_()
        for block in range(int(case.kv_lens[0]) // 128):
            page, rows = page_of(case, 0, block)
            raw[page, rows, block % 4] = fp8(torch.tensor(1 + block // 4 % 8 / 8)).view(torch.uint8)

    queries = torch.zeros(case.index_q.shape)
    for head in range(HEADS):
        queries[:, head, head] = 1.0
    return replace(with_keys(case, change), index_q=fp8(queries))


def hostile_segments(case: PrefillCase) -> PrefillCase:
    """A negative query length, a negative number of keys, and queries that begin before position 0."""
    qo_lens, kv_lens, qo_offset = case.qo_lens.clone(), case.kv_lens.clone(), case.qo_offset.clone()
    qo_lens[0], kv_lens[1], qo_offset[3] = -3, -300, -2
    return replace(case, qo_lens=qo_lens, kv_lens=kv_lens, qo_offset=qo_offset, on_host=False, whole=False)


def rows_apart(case: PrefillCase) -> PrefillCase:
    """Prefix sums that leave rows between the segments: those belong to nobody."""
    apart = torch.arange(case.qo_offsets.shape[0], dtype=torch.int32) * 2 + 1
    return replace(case, qo_offsets=case.qo_offsets + apart, on_host=False)


def beyond_bounds(case: PrefillCase) -> PrefillCase:
    """More keys than `max_seq_len`, and a last segment of more tokens than there are rows."""
    qo_lens = case.qo_lens.clone()
    qo_lens[-1] += 9
    return replace(case, max_seq_len=600, qo_lens=qo_lens, on_host=False, whole=False)


def recorded_window(
    world_size: int, page_size: int, shapes: Sequence[tuple[int, int]], **rest: Any
) -> PrefillCase:
    """Recorded (query tokens, cached prefix) shapes in one window, with an empty segment between any two."""
    qo_lens = [count for query, _ in shapes for count in (query, 0)]
    kv_lens = [count for query, prefix in shapes for count in (query + prefix, prefix)]
    return prefill_case("19 recorded shapes", world_size, page_size, qo_lens=qo_lens, kv_lens=kv_lens, **rest)
