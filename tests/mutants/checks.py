"""Faults of the argument rules and of what is remembered of them."""

from __future__ import annotations

from .fault import Mutant

REMEMBER = "checks/remember.py"
REMEMBERED_TESTS = ("test_checks_remembered.py", "-k", "not compiled")

MUTANTS = (
    Mutant(
        "a stride is not checked",
        (("checks/arguments.py", "if rows.stride(0) < NUM_HEADS * rows.stride(1):", "if False:"),),
        ("test_checks.py",),
    ),
    Mutant(
        "True passes where 1 was accepted",
        ((REMEMBER, '_NUMBER = "type({0}), {0}"', '_NUMBER = "{0}"'),),
        REMEMBERED_TESTS,
    ),
    Mutant(
        "other strides pass where the shape was accepted",
        ((REMEMBER, "{0}.stride(), ", ""),),
        REMEMBERED_TESTS,
    ),
    Mutant(
        "an address eight bytes off passes",
        ((REMEMBER, "{0}.data_ptr() % 16", "{0}.data_ptr() % 8"),),
        REMEMBERED_TESTS,
    ),
    Mutant(
        "a tensor without memory passes",
        ((REMEMBER, "{0}.data_ptr() % 16, ", ""),),
        (*REMEMBERED_TESTS[:2], "sparse"),
    ),
    Mutant(
        "an output that requires a gradient passes",
        ((REMEMBER, ", {0}.requires_grad", ""),),
        (*REMEMBERED_TESTS[:2], "gradient"),
    ),
    Mutant(
        "what a subclass answered is remembered",
        ((REMEMBER, "all(t is None or type(t) is Tensor for t in arguments)", "True"),),
        (*REMEMBERED_TESTS[:2], "subclass"),
    ),
    Mutant(
        "what a number of another type was is remembered",
        ((REMEMBER, "type(n) in NUMBERS for n in numbers.values()", "True for n in numbers.values()"),),
        (*REMEMBERED_TESTS[:2], "mind"),
    ),
    Mutant(
        "nothing is found again",
        ((REMEMBER, "return accepted[{key}]", "return accepted[0, {key}]"),),
        (*REMEMBERED_TESTS[:2], "reaches_no_rule"),
    ),
    Mutant(
        "every accepted call is kept",
        ((REMEMBER, "len(accepted) >= LIMIT", "False"),),
        (*REMEMBERED_TESTS[:2], "bounded"),
    ),
    Mutant(
        "a carrier's stride is not checked",
        (("checks/prefill.py", "if rows.stride(0) < tokens * rows.stride(1):", "if False:"),),
        ("test_checks.py", "-k", "prefill"),
    ),
    Mutant(
        "a carrier with gaps is sent",
        (("checks/prefill.py", "if tokens > 1 and rows.stride(1) != LEGACY_WORDS:", "if False:"),),
        ("test_exchange_prefill.py", "-k", "wrong_argument_of_one"),
    ),
)
