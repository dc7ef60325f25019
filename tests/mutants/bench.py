"""Faults of the benchmarks."""

from __future__ import annotations

from .fault import Mutant

CHAIN_TESTS = ("test_bench_chain.py", "-k", "right_blocks and 4")

MUTANTS = (
    Mutant(
        "page striding that starts with rank 0's block everywhere",
        (("bench/batch.py", "scale=world_size, offset=rank", "scale=world_size, offset=0"),),
        CHAIN_TESTS,
    ),
    Mutant(
        "a chain whose producer leaves the newest keys out",
        (("bench/producer.py", "mine = self._own_keys", "mine = self._own_keys[:0]"),),
        CHAIN_TESTS,
    ),
    Mutant(
        "a chain with one slot set",
        (("bench/chain.py", "step(index % len(self.batch.layers), index % SLOT_SETS)", "step(0, 0)"),),
        CHAIN_TESTS,
    ),
    Mutant(
        "kernels of the schedule before",
        (("bench/tune_decode_score.py", "kept.cache_clear()", "pass"),),
        ("test_bench_tune.py", "-k", "form_at or comes_back"),
    ),
)
