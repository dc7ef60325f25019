"""Faults of the Triton kernels, whose tests run interpreted, or look at what the compiler made of them."""

from __future__ import annotations

from .fault import Mutant

SCORER = "triton_backend/decode_index_score_sharded.py"
WAITING = "triton_backend/waiting.py"
PUBLISH = "triton_backend/topk_select_publish.py"
FUSED_WINDOW = "triton_backend/prefill_score_select.py"

COMPILED_TESTS = ("test_triton_compile.py", "-k", "compiles_for and 90")
AXES_TESTS = ("test_triton_schedule.py", "-k", "axes")
EARLY_TESTS = ("test_triton_interpreted.py", "-k", "early")
POLLS_TESTS = ("test_triton_interpreted.py", "-k", "polls")
ROUNDS_TESTS = ("test_decode_score_publish.py", "-k", "triton-cpu and rounds")
PITCH_TESTS = ("test_field_cases.py", "-k", "triton-cpu and test_07 and 4-128")
LIMIT_TESTS = ("test_index_score_sharded.py", "-k", "triton-cpu and end_of_what and 40-4-128")
CUT_TESTS = ("test_triton_prefill.py", "-k", "workers and prefix")
WARMUP_TESTS = ("test_warmup.py", "-k", "triton-cpu and large_window and 128-4")
WRITE_PITCH_TESTS = ("test_write_index_keys.py", "-k", "triton-cpu and big_pitch")

MUTANTS = (
    Mutant(
        "a Triton kernel signals without an order of memory",
        ((WAITING, 'value, sem="release", scope="sys"', 'value, sem="relaxed", scope="gpu"'),),
        COMPILED_TESTS,
    ),
    Mutant(
        "a Triton kernel says that a row is there before it stores it",
        (
            (
                PUBLISH,
                "            tl.store(row + place, bits)\n",
                "            signal(row + READY_AT, IS_READY)\n",
            ),
            (
                PUBLISH,
                "tl.store(row + TOP + place, ids)\n            signal(row + READY_AT, IS_READY)\n",
                "tl.store(row + place, bits)\n            tl.store(row + TOP + place, ids)\n",
            ),
        ),
        COMPILED_TESTS,
    ),
    Mutant(
        "a Triton kernel polls on after a failure",
        ((WAITING, "!= 0, 1, spin_limit)", "!= 0, spin_limit, spin_limit)"),),
        POLLS_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton kernel forgets the best of earlier rounds",
        (("triton_backend/decode_score_publish.py", "if first_column > 0:", "if first_column < 0:"),),
        ROUNDS_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton scorer's grid with more requests than an axis takes",
        ((SCORER, " and not (wide and requests > 65535)", ""),),
        AXES_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton scorer's 32-bit offset",
        ((SCORER, "page.to(tl.int64) * page_pitch", "(page * page_pitch).to(tl.int64)"),),
        PITCH_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a 32-bit offset where a Triton kernel writes keys",
        (
            (
                "triton_backend/write_index_keys.py",
                "page.to(tl.int64) * page_pitch",
                "(page * page_pitch).to(tl.int64)",
            ),
        ),
        WRITE_PITCH_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton program that starts early reads new keys",
        ((SCORER, "        if history == 0:\n            wait_for_predecessor(DEPENDENT)\n", ""),),
        EARLY_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton program of a later wave does not wait",
        (
            (
                SCORER,
                "        else:\n            wait_for_predecessor(DEPENDENT)\n",
                "        else:\n",
            ),
        ),
        EARLY_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton scorer's gaps have no programs of their own",
        ((SCORER, "grid = (tiles * requests + gaps,)", "grid = (tiles * requests,)"),),
        EARLY_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a Triton prefill scorer lets tokens see the last key of the step behind them",
        (("triton_backend/prefill_share.py", "* PAGE - 1 > all_see", "* PAGE - 2 > all_see"),),
        LIMIT_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a fused Triton window keeps columns of another program's units",
        ((FUSED_WINDOW, "keys = tl.where((column < end)[None, :], keys, -1)", "pass"),),
        CUT_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a fused Triton window merges the first 16 lists of an item, not the best",
        (("triton_backend/prefill_merge.py", "chosen = _best_lists(lists, row)", "pass"),),
        CUT_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a fused Triton window forgets the best of the steps before",
        (
            (
                FUSED_WINDOW,
                "kept = merged16(kept, sorted8(eight(keys)))",
                "kept = merged16((kept[15],) * 16, sorted8(eight(keys)))",
            ),
        ),
        CUT_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a warm-up loads the Triton prefill scorer for short segments alone",
        (
            (
                "triton_backend/index_score_sharded.py",
                "for rows in (SCHEDULE.few_query_rows, SCHEDULE.query_rows):",
                "for rows in (SCHEDULE.few_query_rows,):",
            ),
        ),
        WARMUP_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a warm-up loads the fused Triton form for short segments alone",
        (
            (
                FUSED_WINDOW,
                "for rows in (SCHEDULE.few_query_rows, SCHEDULE.query_rows):",
                "for rows in (SCHEDULE.few_query_rows,):",
            ),
        ),
        WARMUP_TESTS,
        interpreted=True,
    ),
    Mutant(
        "a share that ends where an item begins has a list of it",
        (("triton_backend/prefill_merge.py", "& (end_unit > 0)", "& (end_unit >= 0)"),),
        ("test_triton_prefill.py", "-k", "any_number and whole"),
        interpreted=True,
    ),
    Mutant(
        "the Triton plan looks through costs that others still add up",
        (
            (
                "triton_backend/index_score_sharded_plan_device.py",
                "    tl.debug_barrier()\n    _write_shares",
                "    _write_shares",
            ),
        ),
        COMPILED_TESTS,
    ),
    Mutant(
        "the Triton plan's unit costs the same for any number of tokens",
        (
            (
                "triton_backend/index_score_sharded_plan_device.py",
                "(tokens_of_item + (TOKENS_OF_COST - 1)) // TOKENS_OF_COST",
                "4",
            ),
        ),
        ("test_prefill_plan.py", "-k", "device_words"),
        interpreted=True,
    ),
    Mutant(
        "the Triton plan's first item has a start as well",
        (
            (
                "triton_backend/index_score_sharded_plan_device.py",
                "start = tl.where(item > 0, COST_OF_START, 0)",
                "start = tl.where(item >= 0, COST_OF_START, 0)",
            ),
        ),
        ("test_prefill_plan.py", "-k", "device_words"),
        interpreted=True,
    ),
    Mutant(
        "a warm-up loads the Triton plan for few segments alone",
        (
            (
                "triton_backend/index_score_sharded_plan_device.py",
                "    for shape in SHAPES:",
                "    for shape in SHAPES[:1]:",
            ),
        ),
        WARMUP_TESTS,
        interpreted=True,
    ),
)
