"""The decode scorer (contract, section 4); the kernel is in `decode_index_score_sharded.cu`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..geometry import MAX_QUERY_ROWS, NUM_HEADS, Layouts, ShardLayout, ceil_div
from .loader import Kernel, Variant

_THREADS = 128
_ROUND_ROWS = 128
"""Key rows of a round: 32 for each warp."""
_WORDS = 20
_GROUP_ROWS = 8


@dataclass(frozen=True)
class Form:
    """How a CTA works; see the kernel. Any values are right."""

    stages: int
    """Pieces that a warp may have in flight. With one a CTA has one round."""
    resident: int
    """CTAs that are to share a multiprocessor: what the compiler fits the registers to."""
    chains: int
    """Blocks of 16 key rows that a warp multiplies side by side, 1 or 2."""
    together: bool
    """Whether the four warps multiply as one warp group, with the queries in shared memory."""
    gaps: int
    """CTAs a multiprocessor that only wait for the predecessor."""


_MANY = {1: Form(2, 6, 2, False, 1), 2: Form(2, 6, 1, True, 2), 4: Form(2, 5, 1, True, 2)}
"""The forms of launches with many rounds, by groups."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """How the work is cut. Measured on an H200 (docs/performance.md); any values are right.

    Compared by identity, so that a call's look-up of its plan takes no time.
    """

    forms: tuple[tuple[int, int, Form, int], ...] = (
        (1, 0, Form(1, 7, 2, False, 1), 1),
        (1, 128, Form(2, 5, 2, False, 1), 1),
        (1, 512, Form(1, 8, 2, False, 4), 1),
        (1, 4096, _MANY[1], 3),
        (1, 32768, _MANY[1], 6),
        (2, 0, Form(1, 5, 2, False, 2), 1),
        (2, 2048, _MANY[2], 2),
        (2, 4096, _MANY[2], 4),
        (2, 8192, _MANY[2], 5),
        (2, 32768, _MANY[2], 8),
        (4, 0, Form(1, 6, 1, True, 2), 1),
        (4, 1024, Form(1, 6, 1, True, 4), 1),
        (4, 2048, _MANY[4], 2),
        (4, 4096, _MANY[4], 4),
        (4, 8192, _MANY[4], 5),
        (4, 32768, _MANY[4], 8),
    )
    """Groups of eight query rows (1, 2 or 4), rounds of a launch, and from there on form and a CTA's rounds;
    ascending."""
    many_rounds: int = 65536
    most_ctas: int = 6336
    """Launches of as many rounds, or more, have no more CTAs: a CTA without a round costs a nanosecond."""
    few_requests: int = 32
    long_table: int = 256
    long_tables: int = 2048
    """Fewer requests than that, of as many rounds each and as many in all: tables so long that most lengths
    are far below what they have room for. Such a launch has the CTAs that keep the card busy."""
    long_table_ctas: tuple[int, int] = (512, 128)
    """Of such a launch at least, and of a request."""
    least_rounds: int = 3
    """Of a CTA of such a request: with fewer its start weighs too much."""
    whole_waves: int = 4096
    """Such launches of as many rounds, or more, have a multiple of the CTAs that the card holds at a time."""
    gaps_below: int = 32768
    """Launches of as many rounds, or more, have no gaps."""

    def cut(self, groups: int, requests: int, rounds: int, multiprocessors: int) -> tuple[Form, int]:
        """The form for a launch of requests of so many rounds each, and the rounds of a CTA."""
        total = requests * rounds
        few = requests < self.few_requests and rounds >= self.long_table and total >= self.long_tables
        form, own = [
            (form, own)
            for count, begin, form, own in self.forms
            if count == groups and (few or total >= begin)
        ][-1]
        if few:
            least, each = self.long_table_ctas
            ctas = max(least, min(each, rounds // self.least_rounds) * requests)
            if total >= self.whole_waves:
                held = form.resident * multiprocessors
                ctas = int(ceil_div(ctas, held)) * held
        elif total >= self.many_rounds and form.stages > 1:
            ctas = self.most_ctas
        else:
            return form, own
        return form, int(ceil_div(rounds, max(1, ctas // requests)))


SCHEDULE = Schedule()


def _groups(query_len: int) -> int:
    """Groups of eight query rows that a kernel takes: 1, 2 or 4."""
    needed = int(ceil_div(query_len * NUM_HEADS, _GROUP_ROWS))
    return needed if needed < 3 else MAX_QUERY_ROWS // _GROUP_ROWS


def kernel_for(layout: tuple[int, int], groups: int, form: Form) -> Kernel:
    """The kernel for a layout (page size, world size), query groups, and a form, whatever its gaps."""
    return _kernel_for(layout, groups, replace(form, gaps=0))


@functools.cache
def _kernel_for(layout: tuple[int, int], groups: int, form: Form) -> Kernel:
    page_size, world_size = layout
    constants = {
        "PAGE": page_size,
        "WORLD": world_size,
        "GROUPS": groups,
        "STAGES": form.stages,
        "RESIDENT": form.resident,
        "CHAINS": form.chains,
        "TOGETHER": int(form.together),
    }
    variant = Variant("decode_index_score_sharded", tuple(constants.items()))
    return Kernel(variant, _THREADS, _WORDS, takes_query=True)


def kernels(layouts: Layouts) -> Iterator[Kernel]:
    """Every kernel that a call may need."""
    for layout in layouts:
        yield from dict.fromkeys(kernel_for(layout, groups, form) for groups, _, form, _ in SCHEDULE.forms)


@dataclass(frozen=True)
class Plan:
    """A launch, but for its tensors."""

    kernel: Kernel
    requests: int
    ctas: int
    stride: int
    """CTAs of a request."""
    rounds: int
    """Rounds of a CTA, at most."""
    gaps: int

    @functools.cached_property
    def words(self) -> tuple[int, int, int, int]:
        """The kernel's last four."""
        reciprocal = -(-(1 << 64) // self.requests) % (1 << 64)
        signed = reciprocal - (1 << 64) if reciprocal >> 63 else reciprocal
        return self.stride, signed, self.rounds, self.gaps


@functools.lru_cache(1024)
def plan(
    schedule: Schedule,
    requests: int,
    columns: int,
    layout: tuple[int, int],
    query_len: int,
    dependent: bool,
    device: torch.device,
) -> Plan:
    """How a batch is cut. Looks at sizes alone, never at a length."""
    groups = _groups(query_len)
    page_size, world_size = layout
    rounds = int(ceil_div(columns * (page_size // world_size), _ROUND_ROWS))
    form, own = schedule.cut(groups, requests, rounds, Kernel.multiprocessors(device))
    stride = int(ceil_div(rounds, own))
    ctas = stride * requests
    gaps = 0
    if dependent and rounds * requests < schedule.gaps_below:
        gaps = min(ctas, form.gaps * Kernel.multiprocessors(device))
    return Plan(kernel_for(layout, groups, form), requests, ctas + gaps, stride, own, gaps)


def launch_scores(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    score_out: Tensor,
    *,
    columns: int,
    token_stride: int,
    head_stride: int,
    layout: ShardLayout,
    decode_query_len: int,
    enable_pdl: bool,
    first_column: int = 0,
) -> None:
    """Score `columns` columns from `first_column` on, a multiple of four, into rows of these strides."""
    requests, table_columns = block_table.shape
    if requests == 0:
        return
    work = plan(
        SCHEDULE,
        requests,
        columns,
        (layout.page_size, layout.world_size),
        decode_query_len,
        enable_pdl,
        index_q.device,
    )
    work.kernel(
        (work.ctas, 1, 1),
        (
            index_q.data_ptr(),
            index_k.data_ptr(),
            block_table.data_ptr() + first_column * block_table.element_size(),
            seq_lens.data_ptr(),
            score_out.data_ptr(),
            requests,
            index_k.shape[0],
            index_k.stride()[0],
            table_columns - first_column,
            block_table.stride()[0],
            columns,
            token_stride,
            head_stride,
            decode_query_len,
            layout.rank,
            first_column * layout.page_size,
            *work.words,
        ),
        index_q.device,
        dependent=enable_pdl,
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
