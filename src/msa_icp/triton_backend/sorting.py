"""Sorted ranking keys: of many rows at once, either a row a thread or a row spread over lanes."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code="assignment"

import triton
import triton.language as tl

from .ranking import TOP

# ---------------------------------------------------------------- a row a thread: tuples of vectors


@triton.jit
def _stage(keys, DISTANCE: tl.constexpr, RUN: tl.constexpr):
    """Compare and exchange the keys of a tuple at a distance; runs of RUN keys fall, rise, fall, ..."""
    out = ()
    for i in tl.static_range(len(keys)):
        larger = tl.maximum(keys[i], keys[i ^ DISTANCE])
        if ((i // DISTANCE) % 2 == 0) == ((i // RUN) % 2 == 0):
            out = out + (larger,)
        else:
            # The smaller one, without a second comparison of 64 bits.
            out = out + (keys[i] ^ keys[i ^ DISTANCE] ^ larger,)
    return out


@triton.jit
def sorted8(keys):
    """Eight vectors of keys, the largest of each row first."""
    keys = _stage(keys, 1, 2)
    keys = _stage(keys, 2, 4)
    keys = _stage(keys, 1, 4)
    keys = _stage(keys, 4, 8)
    keys = _stage(keys, 2, 8)
    return _stage(keys, 1, 8)


@triton.jit
def merged16(kept, keys):
    """The 16 best of sixteen sorted vectors and eight sorted ones, sorted."""
    out = ()
    for i in tl.static_range(16):
        if i < 8:
            out = out + (kept[i],)
        else:
            out = out + (tl.maximum(kept[i], keys[15 - i]),)
    out = _stage(out, 8, 16)
    out = _stage(out, 4, 16)
    out = _stage(out, 2, 16)
    return _stage(out, 1, 16)


@triton.jit
def eight(x):
    """[N, 8] -> eight vectors, in whatever order."""
    n: tl.constexpr = x.shape[0]
    even, odd = tl.split(tl.reshape(x, (n, 4, 2)))
    a, b = tl.split(tl.reshape(even, (n, 2, 2)))
    c, d = tl.split(tl.reshape(odd, (n, 2, 2)))
    return tl.split(a) + tl.split(b) + tl.split(c) + tl.split(d)


# ---------------------------------------------------------------- a row in a row of a tensor


@triton.jit
def sorted_rows(keys, falling):
    """[rows, 16] keys, no two of a row equal but -1: sorted, down where `falling` [rows], else up."""
    place = tl.sum((keys[:, :, None] > keys[:, None, :]).to(tl.int32), axis=1)
    place = tl.where(falling[:, None], place, TOP - 1 - place)
    here = place[:, :, None] == tl.arange(0, TOP)[None, None, :]
    return tl.max(tl.where(here, keys[:, :, None], -1), axis=1)


@triton.jit
def best16_with(best, keys):
    """The 16 best of each row of `best` [rows, 16], sorted down, and `keys` [rows, 32]; sorted down."""
    rows: tl.constexpr = best.shape[0]
    # Of two rows sorted down and up, the larger ones side by side are the 16 best.
    keys = sorted_rows(tl.reshape(keys, (2 * rows, TOP)), tl.arange(0, 2 * rows) % 2 == 0)
    falling, rising = tl.split(tl.permute(tl.reshape(keys, (rows, 2, TOP)), (0, 2, 1)))
    keys = sorted_rows(tl.maximum(falling, rising), tl.arange(0, rows) < 0)
    return sorted_rows(tl.maximum(best, keys), tl.arange(0, rows) >= 0)
