"""The ranking as integer keys, and the Top16 of a score row (contract, section 5)."""

# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from ..geometry import MAX_BLOCKS, TOP_K
from ..rows import PAD_ID, PAD_SCORE_BITS

BLOCKS = tl.constexpr(MAX_BLOCKS)
TOP = tl.constexpr(TOP_K)
PADDING_ID = tl.constexpr(PAD_ID)
PADDING_BITS = tl.constexpr(PAD_SCORE_BITS)
ID_BITS = tl.constexpr(13)
CLASSES = tl.constexpr(64)
"""Residue classes of columns that one round of `top16` compares."""
FIRST_DEPTH = tl.constexpr(16)
DEPTH = tl.constexpr(8)
"""Columns of a class that are loaded at once, in the first round and later."""


@triton.jit
def ranking_keys(score, ids, num_valid, force_begin, force_end):
    """int64 keys: the better candidate has the larger key, no two blocks the same; -1: no candidate.

    From the top: forced or not, the score (NaN as -inf, -0.0 as +0.0), the lower id.
    """
    number = tl.where(score == score, score, float("-inf")) + 0.0
    bits = number.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    forced = (ids < force_begin) | (ids >= num_valid - force_end)
    ordered += forced.to(tl.int64) << 32
    candidate = (ids >= 0) & (ids < tl.minimum(num_valid, BLOCKS))
    return tl.where(candidate, (ordered << ID_BITS) | (BLOCKS - 1 - ids), -1)


@triton.jit
def block_of(key):
    """The block id in a key that is not -1."""
    return BLOCKS - 1 - (key & (BLOCKS - 1)).to(tl.int32)


@triton.jit
def score_bits_of(key):
    """The bits of a key's score: the raw ones of a score that is neither NaN nor -0.0."""
    ordered = ((key >> ID_BITS) & 0xFFFFFFFF) - 2147483648
    ordered = ordered.to(tl.int32)
    return ordered ^ ((ordered >> 31) & 0x7FFFFFFF)


@triton.jit
def best16(keys):
    """The 16 largest of some keys, descending. Each finds its place by comparing itself with all others."""
    place = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), axis=0)
    here = place[:, None] == tl.arange(0, TOP)[None, :]
    return tl.max(tl.where(here, keys[:, None], -1), axis=0)


@triton.jit
def ascending(best):
    """Block ids of 16 keys, -1 for what is no candidate, and their places in a row: by id, padding last."""
    lane = tl.arange(0, TOP)
    live = best >= 0
    order = tl.where(live, block_of(best), BLOCKS + lane)
    place = tl.sum((order[:, None] < order[None, :]).to(tl.int32), axis=0)
    return tl.where(live, order, PADDING_ID), place


@triton.jit
def ascending_rows(best):
    """`ascending` of every row: [rows, 16] keys -> ids and places, [rows, 16]."""
    lane = tl.arange(0, TOP)[None, :]
    live = best >= 0
    order = tl.where(live, block_of(best), BLOCKS + lane)
    place = tl.sum((order[:, :, None] < order[:, None, :]).to(tl.int32), axis=1)
    return tl.where(live, order, PADDING_ID), place


@triton.jit
def _best_of_classes(
    row, residue, modulus, columns, scored, num_valid, force_begin, force_end, scale, offset,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """The 16 largest keys among the best columns of some residue classes; residue -1 is no class."""
    best = tl.full(residue.shape, -1, tl.int64)
    first = 0
    while first * modulus < columns:
        step = first + tl.arange(0, DEPTH)
        column = residue[None, :] + step[:, None] * modulus
        there = (residue >= 0)[None, :] & (column < columns)
        score = tl.load(row + column, mask=there & (column < scored), other=float("-inf"))
        keys = ranking_keys(score, column * scale + offset, num_valid, force_begin, force_end)
        best = tl.maximum(best, tl.max(tl.where(there, keys, -1), axis=0))
        first += DEPTH
    return best16(best)


@triton.jit
def top16(row, columns, scored, num_valid, force_begin, force_end, scale, offset):
    """The keys of a score row's Top16, descending; column `c` is block `c * scale + offset`.

    Columns from `scored` on count as -inf. The best 16 columns lie in the 16 classes of columns, modulo
    64, whose own best are the largest: any class before them holds a better column. Those 16 fall into
    64 classes modulo 256, and so on, until a class is one column: a thousand columns take three rounds,
    and each reads a quarter of the columns of the one before.
    """
    below = tl.minimum(tl.maximum(num_valid, 0), BLOCKS)
    columns = tl.minimum(columns, (tl.maximum(below - offset, 0) + scale - 1) // scale)
    modulus = tl.full((), CLASSES, tl.int32)
    residue = tl.arange(0, CLASSES)
    best = _best_of_classes(
        row, residue, modulus, columns, scored, num_valid, force_begin, force_end, scale, offset, FIRST_DEPTH
    )
    while modulus < columns:
        residue = tl.where(best < 0, -1, ((block_of(best) - offset) // scale) % modulus)
        members = residue[:, None] + modulus * tl.arange(0, CLASSES // TOP)[None, :]
        residue = tl.where((residue >= 0)[:, None], members, -1).reshape(CLASSES)
        modulus *= CLASSES // TOP
        best = _best_of_classes(
            row, residue, modulus, columns, scored, num_valid, force_begin, force_end, scale, offset, DEPTH
        )
    return best
