"""Bounded waits and failure words of the exchange (contract, section 6)."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def polls_allowed(errors, spin_limit):
    """One where a wait has failed already: a step with a dead peer ends in one spin limit."""
    # An atomic reads it once for all threads. Each on its own, they could leave a loop at different times.
    return tl.where(tl.atomic_add(errors, 0, sem="relaxed") != 0, 1, spin_limit)


@triton.jit
def poll(word):
    """A word that another device may write, with acquire order at system scope, the same for all threads."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def signal(word, value):
    """Store a word behind everything that this program has read and written so far."""
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def record_failure(errors, error_words, slot, missing, token):
    """Count a failed row; the first one also says in which slot set, which ranks (a mask), which token."""
    if (tl.atomic_add(errors, 1) == 0) & (error_words >= 4):
        tl.store(errors + 1, slot + 1)
        tl.store(errors + 2, missing)
        tl.store(errors + 3, token)
