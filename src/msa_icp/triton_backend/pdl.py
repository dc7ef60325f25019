"""Programmatic dependent launch (contract, section 11); nothing where DEPENDENT is false."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(DEPENDENT: tl.constexpr):
    """Until the preceding kernel of the stream is complete and its writes are visible."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release_dependents(now, DEPENDENT: tl.constexpr):
    """If `now`: let the next kernel start beside this one, once every program has said so or has ended."""
    if DEPENDENT and now:
        gdc_launch_dependents()
