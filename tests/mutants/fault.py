"""What a planted fault is, and the tests that several of them share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault: what it is, the replacements that make it, and the tests that must notice."""

    name: str
    edits: tuple[tuple[str, str, str], ...]  # file below src/msa_icp, text, its replacement
    tests: tuple[str, ...]
    emulated: bool = False
    """A fault in a CUDA kernel, whose tests run over the emulator."""
    interpreted: bool = False
    """A fault in a Triton kernel, whose tests run interpreted."""


SCORE_TESTS = ("test_decode_index_score_sharded.py", "-k", "not million")
FIELD_TESTS = ("test_field_cases.py", "-k", "test_nasty and 4-128 and not production")
SELECT_TESTS = ("test_topk_select_publish.py",)
MERGE_TESTS = ("test_merge_candidates.py",)
EXCHANGE_TESTS = ("test_exchange.py", "-k", "not threads and not wait and not one_limit and not hold_up")
FUSED_TESTS = ("test_decode_score_publish.py", "-k", "not 8192")
