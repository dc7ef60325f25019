"""The ops of `torch.compile`: `torch.ops.msa_icp.<op>`, one for every entry point that launches something.

While a function is traced an entry point puts its op into the graph; when the graph runs, the op is that same
entry point, checks included. An op returns nothing: all that it makes is in the arguments that its schema
declares as mutated, so its fake kernel has nothing to do.

The rows that a decode merge waits for are no argument (`receive_rows.py` says why); those of a prefill merge
are one like any other. `recv_bases` stands for the rows behind it, which a publish writes and a merge takes:
declared as mutated by both, it is a chain through the exchanges of a group, so that no pass drops a publish
or moves a merge before one, be it of another rank in this process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import api, receive_rows
from .api.received import merge_slot_set
from .prefill_plan import MSAIcpScorePlan

LIBRARY = torch.library.Library("msa_icp", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Strides are part of the contract: a pass must not change those of an argument."""


def merge_received(
    recv_bases: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    expected_generations: Tensor | None,
    *,
    address: int,
    slot: int,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    backend: str,
) -> None:
    """`api.merge_received`, the rows by their address and the counters of all slot sets."""
    merge_slot_set(
        receive_rows.at(address),
        num_valid_pages,
        output,
        errors,
        expected_generations,
        slot=slot,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        backend=backend,
    )


def merge_prefill(
    received: Tensor,
    num_valid_pages: Tensor,
    output: Tensor,
    errors: Tensor,
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int,
    enable_pdl: bool,
    backend: str,
) -> None:
    """`api.msa_icp_merge_candidates` with `prefill`."""
    api.msa_icp_merge_candidates(
        received,
        num_valid_pages,
        output,
        errors,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        spin_limit=spin_limit,
        enable_pdl=enable_pdl,
        prefill=True,
        backend=backend,
    )


def index_score_sharded_plan_device(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    qo_offset: Tensor,
    num_qo_heads: int,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    packed_work_range: Tensor,
    packed_work_info: Tensor,
    workspace: Tensor,
    backend: str,
) -> None:
    """`api.msa_icp_index_score_sharded_plan_device`, which makes the plan's object in the traced function."""
    api.msa_icp_index_score_sharded_plan_device(
        qo_segment_lens,
        kv_segment_lens,
        qo_segment_offsets,
        kv_segment_offsets,
        qo_offset,
        num_qo_heads,
        total_q=total_q,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        packed_work_range=packed_work_range,
        packed_work_info=packed_work_info,
        workspace=workspace,
        backend=backend,
    )


def _plan(tensors: list[Tensor], numbers: list[int]) -> MSAIcpScorePlan:
    return MSAIcpScorePlan(*tensors, *numbers)  # type: ignore[arg-type]  # the fields are in that order


def index_score_sharded(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan_tensors: list[Tensor],
    plan_numbers: list[int],
    *,
    rank: int,
    max_score: Tensor,
    sm_scale: float,
    initialize: bool,
    tp: int,
    compact: bool,
    enable_pdl: bool,
    backend: str,
) -> None:
    """`api.msa_icp_index_score_sharded`, the plan in its parts."""
    api.msa_icp_index_score_sharded(
        q,
        k,
        block_table,
        _plan(plan_tensors, plan_numbers),
        rank=rank,
        max_score=max_score,
        sm_scale=sm_scale,
        initialize=initialize,
        tp=tp,
        compact=compact,
        enable_pdl=enable_pdl,
        backend=backend,
    )


def prefill_score_select(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    plan_tensors: list[Tensor],
    plan_numbers: list[int],
    num_valid_pages: Tensor,
    pool: Tensor,
    carrier: Tensor,
    *,
    rank: int,
    tp: int,
    compact: bool,
    force_begin_blocks: int,
    force_end_blocks: int,
    enable_pdl: bool,
    backend: str,
) -> None:
    """`api.msa_icp_prefill_score_select`, the plan in its parts."""
    api.msa_icp_prefill_score_select(
        q,
        k,
        block_table,
        _plan(plan_tensors, plan_numbers),
        num_valid_pages,
        pool,
        carrier,
        rank=rank,
        tp=tp,
        compact=compact,
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        enable_pdl=enable_pdl,
        backend=backend,
    )


OPS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "decode_index_score_sharded": (api.msa_icp_decode_index_score_sharded, ("score_out",)),
    "topk_select_publish": (api.msa_icp_topk_select_publish, ("recv_bases", "errors", "generations")),
    "merge_received": (merge_received, ("recv_bases", "output", "errors", "expected_generations")),
    "decode_score_publish": (
        api.msa_icp_decode_score_publish,
        ("pool", "recv_bases", "errors", "generations"),
    ),
    "write_index_keys": (api.write_index_keys, ("index_k",)),
    "index_score_sharded_plan_device": (
        index_score_sharded_plan_device,
        ("packed_work_range", "packed_work_info"),
    ),
    "index_score_sharded": (index_score_sharded, ("max_score",)),
    "topk_select_prefill": (api.msa_icp_topk_select_prefill, ("carrier",)),
    "prefill_score_select": (prefill_score_select, ("pool", "carrier")),
    "merge_prefill": (merge_prefill, ("output",)),
}
"""What each op runs, and which of its arguments it writes."""


def _nothing(*arguments: object, **numbers: object) -> None:
    """Every fake kernel: an op returns nothing, and fakes have no contents to write."""


for _name, (_function, _mutated) in OPS.items():
    LIBRARY.define(_name + torch.library.infer_schema(_function, mutates_args=_mutated), tags=TAGS)
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"msa_icp::{_name}", _nothing, lib=LIBRARY)
