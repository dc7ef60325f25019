"""The Top16 row formats: the one place that knows what each word is (contract, section 5).

A legacy row is 33 int32 words: 16 raw FP32 score bits, their 16 block ids ascending, the ready word.
A tagged row is the first 32 of those words, each in the low half of an int64 below its generation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .geometry import LEGACY_WORDS, SLOT_SETS, TAGGED_WORDS, TOP_K

READY_WORD = 2 * TOP_K
"""Index of a legacy row's ready word."""
READY = 1
PAD_ID = -1
PAD_SCORE_BITS = -(2**23)
"""Bits of -inf as an int32."""
_LOW = 0xFFFFFFFF


def words(score_bits: Tensor, ids: Tensor) -> Tensor:
    """int32 score bits and ids, both `[..., 16]` -> the 32 words of a row, int32 `[..., 32]`."""
    return torch.cat((score_bits, ids), dim=-1)


def legacy(score_bits: Tensor, ids: Tensor) -> Tensor:
    """int32 score bits and ids, both `[..., 16]` -> legacy rows with their ready word, int32 `[..., 33]`."""
    return torch.nn.functional.pad(words(score_bits, ids), (0, 1), value=READY)


def split(row_words: Tensor) -> tuple[Tensor, Tensor]:
    """int32 `[..., >= 32]` words -> FP32 scores and int32 ids, both `[..., 16]`."""
    bits = row_words[..., :TOP_K].contiguous()
    return bits.view(torch.float32), row_words[..., TOP_K:READY_WORD]


def tag(row_words: Tensor, generations: Tensor) -> Tensor:
    """int32 words `[..., 32]` under int32 generations `[...]` -> tagged rows, int64 `[..., 32]`."""
    return (generations.to(torch.int64).unsqueeze(-1) << 32) | (row_words.to(torch.int64) & _LOW)


def untag(tagged: Tensor) -> tuple[Tensor, Tensor]:
    """Tagged words, int64 -> their int32 generations and their int32 words."""
    return (tagged >> 32).to(torch.int32), (tagged & _LOW).to(torch.int32)


def slot_of(recv_slot: Tensor) -> int:
    """Which slot set a view of a receive storage lies in; 0 for a buffer that is no such view.

    Legacy rows lie at the start of the storage and tagged rows right after the legacy ones
    (`msa_icp_comm_layout`), so the view's place in its storage tells. A view of fewer tokens keeps the
    strides of the whole slot set.
    """
    world_size, _, _, width = recv_slot.shape
    slot_words = world_size * recv_slot.stride()[0]
    offset = int(recv_slot.storage_offset())
    if width == TAGGED_WORDS:
        offset -= SLOT_SETS * (slot_words // width) * LEGACY_WORDS // 2  # int64 elements
    return offset // slot_words if 0 <= offset < SLOT_SETS * slot_words else 0
