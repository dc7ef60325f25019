"""Plan a prefill window in tensor code, without a look at any value (contract, section 7)."""

from __future__ import annotations

from torch import Tensor

from .. import launches
from ..prefill_plan import plan_words


@launches.tensor_code(takes_query=False)
def index_score_sharded_plan_device(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_segment_offsets: Tensor,
    kv_segment_offsets: Tensor,
    qo_offset: Tensor,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    packed_work_range: Tensor,
    packed_work_info: Tensor,
    workspace: Tensor,
) -> None:
    """Write the packed words; neither prefix sums nor workspace are needed here."""
    shares, info = plan_words(
        qo_segment_lens,
        kv_segment_lens,
        qo_offset,
        total_q=total_q,
        max_seq_len=max_seq_len,
        workers=packed_work_range.shape[0],
    )
    packed_work_range.copy_(shares)
    packed_work_info[: info.shape[0]].copy_(info)
