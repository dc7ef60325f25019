"""Index context parallelism for MiniMax sparse attention.

The names of `flashinfer.msa_ops`' `msa_icp_*` functions with the same signatures, for every device
that a backend serves; `backends(device)` tells which. `install()` puts them behind FlashInfer's own names.
"""

from . import custom_ops as _custom_ops  # noqa: F401  (registers the ops of torch.compile)
from .api import (
    merge_received,
    msa_icp_comm_layout,
    msa_icp_decode_index_score_sharded,
    msa_icp_decode_pool_bytes,
    msa_icp_decode_score_columns,
    msa_icp_decode_score_publish,
    msa_icp_index_score_columns,
    msa_icp_index_score_plan_storage,
    msa_icp_index_score_sharded,
    msa_icp_index_score_sharded_plan,
    msa_icp_index_score_sharded_plan_device,
    msa_icp_merge_candidates,
    msa_icp_prefill_pool_bytes,
    msa_icp_prefill_score_select,
    msa_icp_topk_select_prefill,
    msa_icp_topk_select_publish,
    register_comm,
    write_index_keys,
)
from .cache import num_valid_pages, shard_index_keys
from .dispatch import backends, is_supported, warmup
from .indexer import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from .prefill_exchange import exchange_prefill
from .prefill_plan import MSAIcpScorePlan
from .storage import IcpTimeoutError, LocalGroup, ReceiveStorage
from .upstream import install, uninstall

__version__ = "0.1.0"

__all__ = [
    "IcpTimeoutError",
    "LocalGroup",
    "MSAIcpIndexerPlan",
    "MSAIcpScorePlan",
    "ReceiveStorage",
    "backends",
    "exchange_prefill",
    "install",
    "is_supported",
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
    "num_valid_pages",
    "prepare_msa_icp_indexer",
    "register_comm",
    "shard_index_keys",
    "uninstall",
    "warmup",
    "write_index_keys",
]
