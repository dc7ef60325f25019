"""`msa-icp verify`: every backend of this machine against the FP64 reference.

Random and nasty batches (`msa_icp.cases`) go through the whole decode path of all ranks: scores,
selection and exchange in both row forms, the fused form, the merge. Random and nasty windows
(`msa_icp.prefill_cases`) go through the prefill path: scores of every column layout, selection, the fused
form, the merge. Scores may differ from the canonical ones by the bound of section 3 of the contract, and
not at all where the sums are exact in FP32; everything after the scores is compared bit for bit.
"""

from . import command, decode, prefill
from .command import KINDS, run
from .comparison import BITWISE, Result, is_slow, no_exchange, no_prefill, padded
from .decode import check_case, exchange, score_differences, score_truth, unsharded

__all__ = [
    "BITWISE",
    "KINDS",
    "Result",
    "check_case",
    "command",
    "decode",
    "exchange",
    "is_slow",
    "no_exchange",
    "no_prefill",
    "padded",
    "prefill",
    "run",
    "score_differences",
    "score_truth",
    "unsharded",
]
