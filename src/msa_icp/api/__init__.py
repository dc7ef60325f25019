"""The entry points: docstring, check, hand over to the backend. No arithmetic."""

from .decode import (
    msa_icp_comm_layout,
    msa_icp_decode_index_score_sharded,
    msa_icp_decode_pool_bytes,
    msa_icp_decode_score_columns,
    msa_icp_decode_score_publish,
    msa_icp_merge_candidates,
    msa_icp_topk_select_publish,
    write_index_keys,
)
from .prefill import (
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_index_score_sharded,
    msa_icp_index_score_sharded_plan,
    msa_icp_index_score_sharded_plan_device,
    msa_icp_prefill_pool_bytes,
    msa_icp_prefill_score_select,
    msa_icp_topk_select_prefill,
)
from .received import merge_received, register_comm

__all__ = [
    "merge_received",
    "msa_icp_comm_layout",
    "msa_icp_decode_index_score_sharded",
    "msa_icp_decode_pool_bytes",
    "msa_icp_decode_score_columns",
    "msa_icp_decode_score_publish",
    "msa_icp_index_score_columns",
    "msa_icp_index_score_plan_storage",
    "msa_icp_index_score_sharded",
    "msa_icp_index_score_sharded_plan",
    "msa_icp_index_score_sharded_plan_device",
    "msa_icp_merge_candidates",
    "msa_icp_prefill_pool_bytes",
    "msa_icp_prefill_score_select",
    "msa_icp_topk_select_prefill",
    "msa_icp_topk_select_publish",
    "register_comm",
    "write_index_keys",
]
