"""The facade: one object per rank that a serving engine calls (contract, section 8).

`plan.py` is what the engine holds, `prepare.py` makes it; `limits.py` is what it is built for, `comm.py` the
receive storage as it takes it, `rules.py` which form serves. `chains.py` turns a layer into launches,
`steps.py` and `graphs.py` launch them again with less host time.
"""

from .graphs import MSAIcpGraphStep, MSAIcpLayerGraphs
from .plan import MSAIcpIndexerPlan
from .prepare import prepare_msa_icp_indexer
from .steps import MSAIcpDecodeStep, MSAIcpPrefillStep

__all__ = [
    "MSAIcpDecodeStep",
    "MSAIcpGraphStep",
    "MSAIcpIndexerPlan",
    "MSAIcpLayerGraphs",
    "MSAIcpPrefillStep",
    "prepare_msa_icp_indexer",
]
