"""What a rank's indexer is built for: the serving limits, and the sizes that follow from them (section 8)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import api, checks
from ..geometry import (
    BLOCK,
    MAX_BLOCKS,
    MAX_QUERY_ROWS,
    MAX_SEGMENTS,
    NUM_HEADS,
    PREFILL_WINDOW_TOKENS,
    ShardLayout,
    ceil_div,
    comm_layout,
    prefill_chunk_tokens,
    prefill_pitch,
)


@dataclass(frozen=True)
class Limits:
    """The arguments of `prepare_msa_icp_indexer` that are numbers; made by `checked`."""

    world_size: int
    rank: int
    num_index_heads: int
    page_size: int
    init_blocks: int
    local_blocks: int
    max_decode_tokens: int
    max_decode_query_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_sparse_layers: int

    @staticmethod
    def checked(**numbers: Any) -> Limits:
        """Limits that hold the rules; ValueError otherwise."""
        checks.layout(numbers["rank"], numbers["world_size"], numbers["page_size"])
        checks.one_of("num_index_heads", numbers["num_index_heads"], (NUM_HEADS,))
        checks.forced_blocks("init_blocks", numbers["init_blocks"], "local_blocks", numbers["local_blocks"])
        most = {
            "max_decode_query_len": MAX_QUERY_ROWS // NUM_HEADS,
            "max_num_seqs": MAX_SEGMENTS,
            "max_model_len": MAX_BLOCKS * BLOCK,  # no block behind it is ever selected
        }
        for name in (
            "max_decode_tokens",
            "max_decode_query_len",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "num_sparse_layers",
        ):
            checks.integer(name, numbers[name], 1, most.get(name, 2**31 - 1))
        return Limits(**{name: int(value) for name, value in numbers.items()})

    @cached_property
    def layout(self) -> ShardLayout:
        """Which keys of every page this rank holds."""
        return ShardLayout(self.world_size, self.rank, self.page_size)

    @cached_property
    def heads_per_rank(self) -> int:
        """Index heads that this rank owns."""
        return self.num_index_heads // self.world_size

    @cached_property
    def comm_layout(self) -> dict[str, Any]:
        """`msa_icp_comm_layout` for `max_decode_tokens` tokens."""
        return comm_layout(self.world_size, self.heads_per_rank, self.max_decode_tokens)

    @cached_property
    def window_tokens(self) -> int:
        """Most tokens of a prefill window of the fused form."""
        return min(PREFILL_WINDOW_TOKENS, self.max_num_batched_tokens)

    @cached_property
    def max_prefill_windows(self) -> int:
        """Windows of a step where every one has score rows for the longest context."""
        pitch = self.scratch_pitch(self.max_model_len)
        return int(ceil_div(self.max_num_batched_tokens, prefill_chunk_tokens(pitch)))

    def scratch_pitch(self, max_seq_len: int) -> int:
        """Score columns of prefill for contexts of so many keys, rounded up to 16."""
        return prefill_pitch(api.msa_icp_index_score_columns(max_seq_len, self.page_size))

    def scratch_shape(self, max_seq_len: int) -> tuple[int, int, int]:
        """Of the score rows of one prefill window."""
        pitch = self.scratch_pitch(max_seq_len)
        return min(prefill_chunk_tokens(pitch), self.max_num_batched_tokens), NUM_HEADS, pitch

    def plan_storage(self, device: torch.device) -> dict[str, int]:
        """What the device plan of one prefill window needs."""
        return api.msa_icp_index_score_plan_storage(
            num_qo_heads=NUM_HEADS, total_q=self.window_tokens, batch=self.max_num_seqs, device=device
        )
