"""Faults of the ops that `torch.compile` sees."""

from __future__ import annotations

from .fault import Mutant

OPS = "custom_ops.py"
FILE = "test_custom_ops.py"

MUTANTS = (
    Mutant(
        "an op's score rows are not declared as mutated",
        (
            (
                OPS,
                '(api.msa_icp_decode_index_score_sharded, ("score_out",))',
                "(api.msa_icp_decode_index_score_sharded, ())",
            ),
        ),
        (FILE, "-k", "declares"),
    ),
    Mutant(
        "the counters of a publish are not declared as mutated",
        (
            (
                OPS,
                '(api.msa_icp_topk_select_publish, ("recv_bases", "errors", "generations"))',
                '(api.msa_icp_topk_select_publish, ("recv_bases", "errors"))',
            ),
        ),
        (FILE, "-k", "declares"),
    ),
    Mutant(
        "nothing keeps a merge behind the publishes of other ranks",
        (
            (OPS, '"recv_bases", "errors", "generations"))', '"errors", "generations"))'),
            (OPS, '(merge_received, ("recv_bases", ', "(merge_received, ("),
        ),
        (FILE, "-k", "any_order"),
    ),
    Mutant(
        "a merge by communicator takes another slot set",
        (("api/received.py", "rows[own],", "rows[own - 1],"),),
        (FILE, "-k", "by_communicator"),
    ),
    Mutant(
        "a compiled merge of legacy rows is let through",
        (
            (
                "api/decode.py",
                "if prefill and expected_generations is None:",
                "if expected_generations is None:",
            ),
        ),
        (FILE, "-k", "refused_by_name"),
    ),
    Mutant(
        "a compiled fused publish forgets enable_pdl",
        (
            (
                "api/decode.py",
                "generations=generations,\n            enable_pdl=enable_pdl,\n            backend=backend,",
                "generations=generations,\n            backend=backend,",
            ),
        ),
        (FILE, "-k", "reaches_the_op"),
    ),
    Mutant(
        "an eager call takes the way of a traced one while another thread compiles",
        (
            (
                "api/decode.py",
                "from torch.compiler import is_dynamo_compiling",
                "from torch.compiler import is_compiling as is_dynamo_compiling",
            ),
        ),
        (FILE, "-k", "another_thread"),
    ),
    Mutant(
        "a closed storage is still found by its address",
        (
            ("storage.py", "            receive_rows.withdraw(self.recv_address)\n", ""),
            ("storage.py", "self.recv_address = self.tagged_recv_address = 0", "pass"),
        ),
        (FILE, "-k", "other_storages"),
    ),
)
