"""Select a rank's Top16 and store it into the owners' receive storage (contract, sections 5 and 6)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .. import geometry, launches, rows
from .ranking import select_top16
from .waiting import fence, memory, record_failures, wait


@launches.tensor_code(takes_query=False)
def topk_select_publish(
    scores: Tensor,
    num_valid_pages: Tensor,
    recv_bases: Tensor,
    errors: Tensor,
    *,
    slot: int,
    rank: int,
    world_size: int,
    heads_per_rank: int,
    capacity: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    generations: Tensor | None,
    index_scale: int,
    index_offset: int,
) -> None:
    """Publish every row `t < T`; `enable_pdl` changes nothing here."""
    if scores.device.type != "cpu":
        raise ValueError(f"backend: 'torch' publishes CPU tensors only, scores was on {scores.device}")
    tokens, heads, _ = scores.shape
    if tokens == 0:
        return
    words = rows.words(
        *select_top16(
            scores, num_valid_pages, force_begin_blocks, force_end_blocks, index_scale, index_offset
        )
    )
    bases = recv_bases.tolist()
    # NumPy's numbers, which are integers too, overflow in an address.
    slot, rank, world_size, heads_per_rank, capacity = map(
        int, (slot, rank, world_size, heads_per_rank, capacity)
    )

    def destination(head: int, width: int, dtype: torch.dtype) -> Tensor:
        first = geometry.first_receive_row(
            slot, rank, head, world_size=world_size, heads_per_rank=heads_per_rank, capacity=capacity
        )
        address = bases[head // heads_per_rank] + first * width * dtype.itemsize
        return memory(address, (tokens, width), dtype)

    if generations is not None:
        targets = [destination(head, geometry.TAGGED_WORDS, torch.int64) for head in range(heads)]
        counters = generations[slot, :, :tokens]
        counters += 1
        for head, target in enumerate(targets):
            # Aligned 64-bit lanes: each word and its tag become visible together.
            target.copy_(rows.tag(words[:, head], counters[head]))
        return

    targets = [destination(head, geometry.LEGACY_WORDS, torch.int32) for head in range(heads)]

    def look() -> Tensor:
        return torch.stack([target[:, rows.READY_WORD] for target in targets], dim=1) != 0

    def watch(row: tuple[int, ...]) -> Callable[[], bool]:
        t, head = row
        word = ctypes.c_int32.from_address(targets[head][t, rows.READY_WORD].data_ptr())
        return lambda: word.value != 0

    def ended(late: Tensor) -> None:
        record_failures(errors, late, slot, lambda _, head: 1 << (head // heads_per_rank))

    wait((tokens, heads), look, lambda free: _store(words, targets, free), watch, ended, errors, spin_limit)


def _store(words: Tensor, targets: list[Tensor], free: Tensor) -> None:
    """Store the rows `free`, bool [T, heads], of `words` [T, heads, 32], each before its ready word."""
    fence()  # the owner's reads of the rows before our stores
    chosen = [free[:, head].nonzero().squeeze(1) for head in range(len(targets))]
    for head, target in enumerate(targets):
        target[chosen[head], : rows.READY_WORD] = words[chosen[head], head]
    fence()  # the words before the ready word
    for head, target in enumerate(targets):
        target[chosen[head], rows.READY_WORD] = rows.READY
