"""Faults of the benchmarks."""

from __future__ import annotations

from .fault import Mutant

CHAIN_TESTS = ("test_bench_chain.py", "-k", "right_blocks and 4")

WINDOW_TESTS = ("test_bench_prefill.py",)

MUTANTS = (
    Mutant(
        "a window's tokens see one another, but not themselves",
        (("bench/prefill.py", "tokens * (tokens + 1) // 2", "tokens * (tokens - 1) // 2"),),
        WINDOW_TESTS,
    ),
    Mutant(
        "a worker's units are counted from its item's first",
        (("bench/prefill.py", "own += up_to - first", "own += up_to"),),
        WINDOW_TESTS,
    ),
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
        "a chain of a group whose producer makes the peers' rows",
        (("bench/chain.py", "if self.group and batch.exchanges", "if batch.exchanges"),),
        ("test_bench_chain.py", "-k", "their_own_rows"),
    ),
    Mutant(
        "ranks are as fast as the fastest",
        (("bench/multi_gpu/together.py", "slowest = [max(", "slowest = [min("),),
        ("test_bench_multi_gpu.py", "-k", "timed_together"),
    ),
    Mutant(
        "wrong rows of several ranks are not counted",
        (("bench/multi_gpu/correctness.py", ").any(-1)\n", ").any(-1) * 0\n"),),
        ("test_bench_multi_gpu.py", "-k", "wrong_for_one_owner"),
    ),
    Mutant(
        "any wrong row is taken for the planted one",
        (
            (
                "bench/multi_gpu/correctness.py",
                'return bool(row["wrong_rows"] == wanted)',
                'return any(row["wrong_rows"]) == any(wanted)',
            ),
        ),
        ("test_bench_multi_gpu.py", "-k", "is_judged"),
    ),
    Mutant(
        "a rank that was killed may be any",
        (("bench/multi_gpu/faults.py", 'dead in each["named"] and', ""),),
        ("test_bench_multi_gpu.py", "-k", "nobody_names"),
    ),
    Mutant(
        "a time limit loses what was measured",
        (("bench/results.py", "signal.signal(signal.SIGTERM, _end_as_with_ctrl_c)", "signal.SIG_DFL"),),
        ("test_bench_results.py", "-k", "time_limits and decode_score"),
    ),
    Mutant(
        "a candidate's schedule stays",
        (("bench/tune_decode_score.py", "scorer.SCHEDULE = own", "pass"),),
        ("test_bench_tune.py", "-k", "form_at or comes_back"),
    ),
)
