"""Merge the ranks' candidates into the final Top16 (contract, section 6)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from .. import launches, rows
from ..geometry import MAX_BLOCKS
from .ranking import NOT_A_CANDIDATE, best16, ranking_keys
from .waiting import fence, record_failures, wait


@launches.tensor_code(takes_query=False)
def merge_candidates(
    recv_slot: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    expected_generations: Tensor | None,
    prefill: bool,
    slot: int,
) -> None:
    """Write `output` for every token; `enable_pdl` changes nothing here."""
    if recv_slot.device.type != "cpu":
        raise ValueError(f"backend: 'torch' merges CPU tensors only, recv_slot was on {recv_slot.device}")
    tokens = output.shape[0]
    if tokens == 0:
        return
    received = recv_slot[:, :, :tokens]  # [W, hpr, T, words]
    if prefill:
        words, late = received[..., : rows.READY_WORD], None
    elif expected_generations is not None:
        words, late = _take_tagged(received, expected_generations[:, :tokens], errors, spin_limit, slot)
    else:
        words, late = _take_legacy(received, errors, spin_limit, slot)

    scores, ids = rows.split(words.permute(2, 1, 0, 3))  # [T, hpr, W, 16]
    merged = _merge(scores.flatten(2), ids.flatten(2), num_valid_pages, init_blocks, local_blocks)
    if prefill:
        # A padding token of a prefill window attends to block 0, which always exists.
        merged[..., 0].masked_fill_((num_valid_pages <= 0)[:, None], 0)
    if late is not None:
        merged.masked_fill_(late.T[:, :, None], rows.PAD_ID)
    output.copy_(merged)


def _merge(
    scores: Tensor, ids: Tensor, num_valid_pages: Tensor, init_blocks: int, local_blocks: int
) -> Tensor:
    """Candidates `[T, hpr, n]` -> int32 `[T, hpr, 16]`, ascending with a tail of -1."""
    num_valid = num_valid_pages.to(torch.int64)[:, None, None]
    keys = ranking_keys(scores, ids.to(torch.int64), num_valid, init_blocks, local_blocks)
    # The keys of one block differ in nothing but the score, so in descending order its largest score
    # comes first and its other keys follow somewhere behind: all but the first are no candidates.
    keys = keys.sort(-1, descending=True).values
    block = torch.where(keys == NOT_A_CANDIDATE, -1, keys & (MAX_BLOCKS - 1))
    count = keys.shape[-1]
    earlier = torch.ones((count, count), dtype=torch.bool, device=keys.device).tril(-1)
    repeated = ((block.unsqueeze(-1) == block.unsqueeze(-2)) & earlier).any(-1)
    merged = best16(torch.where(repeated, NOT_A_CANDIDATE, keys))
    return torch.where(merged == MAX_BLOCKS, rows.PAD_ID, merged).to(torch.int32)


def _take_tagged(
    received: Tensor, expected: Tensor, errors: Tensor, spin_limit: int, slot: int
) -> tuple[Tensor, Tensor]:
    """Wait for the generation after `expected` [hpr, T] and advance it.

    Returns the words and which rows are late, bool `[hpr, T]`. What is decoded is the very copy
    whose tags matched: a later write of a fast rank cannot mix into it.
    """
    wanted = expected + 1
    # Zeros: until the first look has been taken every row is missing, if that is interrupted.
    snapshot = torch.zeros(received.shape, dtype=received.dtype, device=received.device)
    words = torch.zeros(received.shape, dtype=torch.int32, device=received.device)

    def absent() -> Tensor:  # [W, hpr, T, words]
        snapshot.copy_(received)
        return rows.untag(snapshot)[0] != wanted[..., None]

    def take(there: Tensor) -> None:
        words[:, there] = rows.untag(snapshot[:, there])[1]

    def watch(row: tuple[int, ...]) -> Callable[[], bool]:
        head, t = row
        missing = absent()[:, head, t].nonzero().tolist()
        if not missing:  # it has come since
            return lambda: False
        rank, word = missing[0]
        want = int(wanted[head, t])
        tagged = ctypes.c_int64.from_address(received[rank, head, t, word].data_ptr())
        return lambda: (tagged.value >> 32) != want

    def ended(late: Tensor) -> None:
        expected.copy_(wanted)
        ahead = rows.untag(snapshot)[0] - wanted[..., None]  # at the last look
        # After a failure nobody waits, so a living rank may have overwritten its row: it was not missing.
        _record(errors, late, (ahead != 0).any(-1) & ~(ahead > 0).all(-1), slot)

    late = wait(wanted.shape, lambda: absent().any(-1).any(0), take, watch, ended, errors, spin_limit)
    return words, late


def _take_legacy(received: Tensor, errors: Tensor, spin_limit: int, slot: int) -> tuple[Tensor, Tensor]:
    """Wait for the ready words, copy the rows and clear the ready words.

    Returns the words and which rows are late, bool `[hpr, T]`. Where one rank's row is late, the other
    ranks' rows of that (token, head) keep their ready words.
    """
    ready = received[..., rows.READY_WORD]
    words = torch.zeros((*received.shape[:-1], rows.READY_WORD), dtype=received.dtype, device=received.device)

    absent = torch.ones(ready.shape, dtype=torch.bool, device=ready.device)  # [W, hpr, T], the last look

    def look() -> Tensor:
        return torch.ne(ready, rows.READY, out=absent).any(0)

    def take(there: Tensor) -> None:
        fence()  # the ready words before the rows
        words[:, there] = received[..., : rows.READY_WORD][:, there]  # in one, PyTorch 2.8 cuts another dim
        fence()  # the rows before the ready words are cleared
        ready.masked_fill_(there, 0)

    def watch(row: tuple[int, ...]) -> Callable[[], bool]:
        head, t = row
        missing = (ready[:, head, t] != rows.READY).nonzero().flatten().tolist()
        if not missing:  # it has come since
            return lambda: False
        word = ctypes.c_int32.from_address(ready[missing[0], head, t].data_ptr())
        return lambda: word.value != rows.READY

    def ended(late: Tensor) -> None:
        _record(errors, late, absent, slot)

    return words, wait(received.shape[1:3], look, take, watch, ended, errors, spin_limit)


def _record(errors: Tensor, late: Tensor, absent: Tensor, slot: int) -> None:
    """Count the late rows [hpr, T]; `absent` [W, hpr, T] tells whose rows are missing."""

    def ranks_of(t: int, head: int) -> int:
        return sum(1 << rank for rank, missing in enumerate(absent[:, head, t].tolist()) if missing)

    record_failures(errors, late.T, slot, ranks_of)
