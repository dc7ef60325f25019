"""The argument rules. Every sentence that tells a caller what is wrong with an argument is here.

A rule that does not hold raises `ValueError`, before anything is launched or written, and says which
argument it is, what it must be and what it was. The contents of device tensors (lengths, page ids)
are not checked here: the kernels never trust them with an address.
"""

from .arguments import (
    FP8,
    at_least,
    device,
    flag,
    forced_blocks,
    group_shape,
    integer,
    k_shard,
    layout,
    one_of,
    refuse,
    score_rows,
    separate_rows,
    tensor,
    unit_last_stride,
)
from .decode import (
    comm_rows,
    decode_inputs,
    decode_score,
    merge,
    publish,
    score_publish,
    shard_cache,
    valid_pages,
    write_keys,
)
from .prefill import (
    exchange,
    local_exchange,
    plan_device,
    plan_storage,
    pool_bytes,
    prefill_fused,
    prefill_score,
    prefill_select,
    segments,
    segments_on_device,
)

__all__ = [
    "FP8",
    "at_least",
    "comm_rows",
    "decode_inputs",
    "decode_score",
    "device",
    "exchange",
    "flag",
    "forced_blocks",
    "group_shape",
    "integer",
    "k_shard",
    "layout",
    "local_exchange",
    "merge",
    "one_of",
    "plan_device",
    "plan_storage",
    "pool_bytes",
    "prefill_fused",
    "prefill_score",
    "prefill_select",
    "publish",
    "refuse",
    "score_publish",
    "score_rows",
    "segments",
    "segments_on_device",
    "separate_rows",
    "shard_cache",
    "tensor",
    "unit_last_stride",
    "valid_pages",
    "write_keys",
]
