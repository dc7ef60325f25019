"""The canonical semantics, in FP64, slow, and written to be read first.

Nothing here is shared with a backend, not even the key positions: it is what every backend is
compared with. Section numbers are those of docs/contract.md.

A key and a query are 128 `float8_e4m3fn` values. Every product of two such values is a multiple of
2**-18 below 2**18, so a dot product needs at most 43 bits: FP64 adds it exactly in any order, and
rounding it once to FP32 gives the *canonical score*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

NEG_INF = -math.inf


# ---------------------------------------------------------------- scores (section 3)


def canonical_scores(q: Tensor, keys: Tensor) -> Tensor:
    """Canonical score of every query row with every key row.

    `q` `[..., 128]` and `keys` `[n, 128]`, both `float8_e4m3fn` -> float32 `[..., n]`. A NaN in
    either row gives NaN.
    """
    exact = q.to(torch.float64) @ keys.to(torch.float64).T
    return exact.to(torch.float32) + 0.0  # -0.0 + 0.0 is +0.0


def _maximum(scores: Tensor, visible: Tensor) -> Tensor:
    """Maximum over the last dimension of the visible scores that are numbers; -inf where none is."""
    usable = visible & ~torch.isnan(scores)
    return torch.where(usable, scores, torch.full_like(scores, NEG_INF)).amax(dim=-1)


def block_scores(q: Tensor, keys: Tensor, positions: Sequence[int] | Tensor) -> Tensor:
    """Unsharded scores: what one rank with all the keys computes.

    `q` `[T, H, 128]`, `keys` `[n, 128]`: the whole sequence in order of position; `positions[t]`: the
    position of token `t`. Returns float32 `[T, H, ceil(n / 128)]`: block `b` is the maximum over the
    keys `128 b ... 128 b + 127` at positions up to the token's own.
    """
    n = keys.shape[0]
    blocks = math.ceil(n / 128)
    key_positions = torch.arange(n)
    out = torch.full((q.shape[0], q.shape[1], blocks), NEG_INF, dtype=torch.float32)
    for t, position in enumerate(int(p) for p in positions):
        scores = canonical_scores(q[t], keys)
        visible = key_positions <= position
        for b in range(blocks):
            rows = slice(128 * b, min(128 * b + 128, n))
            out[t, :, b] = _maximum(scores[:, rows], visible[rows])
    return out


def key_position(column: int, row: int, *, rank: int, world_size: int, page_size: int) -> int:
    """Global position of local row `row` of page column `column` (section 2, one case a line)."""
    local_rows = page_size // world_size
    if page_size == 128:
        return 128 * column + row * world_size + rank
    if page_size == 256:
        return 256 * column + local_rows * rank + row
    raise ValueError(f"page_size: must be 128 or 256, was {page_size}")


def column_block(column: int, *, rank: int, world_size: int, page_size: int) -> int:
    """B128 block that the rank's rows of page column `column` belong to (section 2)."""
    return key_position(column, 0, rank=rank, world_size=world_size, page_size=page_size) // 128


def shard_scores(
    index_q: Tensor,
    index_k: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    cols: int,
) -> tuple[Tensor, Tensor]:
    """What the decode scorer writes (section 4).

    Arguments as for `msa_icp_decode_index_score_sharded`. Returns the scores, float32 `[T, H, cols]`,
    and the mask of the elements that are written, bool of the same shape; the scores are -inf where
    nothing is written.
    """
    tokens, heads, _ = index_q.shape
    scores = torch.full((tokens, heads, cols), NEG_INF, dtype=torch.float32)
    written = torch.zeros((tokens, heads, cols), dtype=torch.bool)
    for b, seq_len in enumerate(seq_lens.tolist()):
        if seq_len <= 0:
            continue
        pages = math.ceil(seq_len / page_size)
        for j in range(decode_query_len):
            t = b * decode_query_len + j
            position = seq_len - decode_query_len + j
            written[t, :, : min(cols, 4 * math.ceil(pages / 4))] = True
            for c in range(min(pages, cols, block_table.shape[1])):
                page = int(block_table[b, c])
                if not 0 <= page < index_k.shape[0]:
                    continue
                where = [
                    key_position(c, i, rank=rank, world_size=world_size, page_size=page_size)
                    for i in range(index_k.shape[1])
                ]
                visible = torch.tensor([p <= position and p < seq_len for p in where])
                scores[t, :, c] = _maximum(canonical_scores(index_q[t], index_k[page]), visible)
    return scores, written


def prefill_scores(
    q: Tensor,
    k: Tensor,
    block_table: Tensor,
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    qo_segment_offsets: Tensor,
    qo_offset: Tensor,
    *,
    rank: int,
    world_size: int,
    page_size: int,
    blocks: int,
    cols: int,
    compact: bool,
    initialize: bool,
) -> tuple[Tensor, Tensor]:
    """What the prefill scorer writes (section 7).

    Arguments as for `msa_icp_index_score_sharded` and its plan; `blocks` is the plan's `columns`, `cols` the
    width of the score rows. Returns the scores, float32 `[T, H, cols]`, and the mask of the elements that
    are written, bool of the same shape; the scores are -inf where nothing is written.
    """
    tokens, heads, _ = q.shape
    scores = torch.full((tokens, heads, cols), NEG_INF, dtype=torch.float32)
    written = torch.full((tokens, heads, cols), initialize, dtype=torch.bool)
    shard = {"rank": rank, "world_size": world_size, "page_size": page_size}
    for s, query_len in enumerate(qo_segment_lens.tolist()):
        first, keys = int(qo_segment_offsets[s]), int(kv_segment_lens[s])
        tokens_of = [i for i in range(query_len) if 0 <= first + i < tokens]
        rows = [first + i for i in tokens_of]
        # A token sees the keys up to its own position and of the sequence, none behind the plan's
        # columns; the blocks that hold them are its causal prefix.
        seen = torch.tensor([min(int(qo_offset[s]) + i + 1, keys, 128 * blocks) for i in tokens_of])
        prefix = [math.ceil(max(0, n) / 128) for n in seen.tolist()]
        for t, count in zip(rows, prefix, strict=True):
            written[t, :, : math.ceil(count * 128 / page_size) if compact else count] = True
        for c in range(math.ceil(max([0, *prefix]) * 128 / page_size)):
            page, block = int(block_table[s, c]), column_block(c, **shard)
            if not 0 <= page < k.shape[0] or block >= blocks:  # a block behind the columns has none
                continue
            where = torch.tensor([key_position(c, i, **shard) for i in range(k.shape[1])])
            visible = where < seen[:, None, None]
            best = _maximum(canonical_scores(q[rows], k[page]), visible)
            scores[rows, :, c if compact else block] = best
    return scores, written


# ---------------------------------------------------------------- ranking (section 5)


def _rank(score: float, block: int, forced: bool) -> tuple[bool, float, int]:
    """Sort key, best first: forced, then score descending (NaN as -inf), then the lower id."""
    return (not forced, -(NEG_INF if math.isnan(score) else score), block)


def _best16(
    candidates: Iterable[tuple[int, float]], num_valid: int, force_begin: int, force_end: int
) -> list[int]:
    """The 16 best block ids, ascending, of `(id, score)` pairs with distinct ids."""
    limit = min(num_valid, 8192)
    ranked = sorted(
        _rank(score, block, block < force_begin or block >= num_valid - force_end)
        for block, score in candidates
        if 0 <= block < limit
    )
    return sorted(block for _, _, block in ranked[:16])


def select(
    scores: Tensor | Sequence[float],
    num_valid: int,
    force_begin: int,
    force_end: int,
    index_scale: int = 1,
    index_offset: int = 0,
) -> list[int]:
    """One rank's Top16 of one score row: the B128 ids, ascending, at most 16 of them.

    `scores[c]` belongs to block `c * index_scale + index_offset`; `num_valid` is the token's global
    block count.
    """
    values = scores.tolist() if isinstance(scores, Tensor) else scores
    return _best16(
        ((c * index_scale + index_offset, score) for c, score in enumerate(values)),
        num_valid,
        force_begin,
        force_end,
    )


# ---------------------------------------------------------------- merging (section 6)


def merge(
    candidates: Iterable[tuple[int, float]], num_valid: int, init_blocks: int, local_blocks: int
) -> list[int]:
    """The owner's Top16 of all ranks' `(id, score)` candidates: ids ascending, at most 16 of them.

    A block that several ranks sent keeps its largest score, NaN counting as -inf.
    """
    best: dict[int, float] = {}
    for block, score in candidates:
        value = NEG_INF if math.isnan(score) else score
        best[block] = max(best.get(block, NEG_INF), value)
    return _best16(best.items(), num_valid, init_blocks, local_blocks)


# ---------------------------------------------------------------- prefill (section 7)


def carrier_row(
    scores: Tensor,
    num_valid: int,
    force_begin: int,
    force_end: int,
    index_scale: int = 1,
    index_offset: int = 0,
) -> Tensor:
    """The carrier row of one float32 score row `[K]`: int32 `[33]`, arguments as for `select`.

    Sixteen raw score bits, their ids ascending, padding (-inf, -1) last, the ready word 1.
    """
    ids = select(scores, num_valid, force_begin, force_end, index_scale, index_offset)
    chosen = scores.new_full((16,), NEG_INF)
    chosen[: len(ids)] = scores[[(block - index_offset) // index_scale for block in ids]]
    words = [*chosen.view(torch.int32).tolist(), *ids, *[-1] * (16 - len(ids)), 1]
    return torch.tensor(words, dtype=torch.int32)


def merge_carrier_rows(
    rows: Sequence[Tensor], num_valid: int, init_blocks: int, local_blocks: int
) -> list[int]:
    """The owner's Top16 of all ranks' carrier rows `[33]` of one (token, head): 16 ids with a -1 tail.

    A token without valid blocks (padding) gets block 0, which always exists.
    """
    if num_valid <= 0:
        return [0, *[-1] * 15]
    candidates = [
        (block, score)
        for row in rows
        for block, score in zip(row[16:32].tolist(), row[:16].view(torch.float32).tolist(), strict=True)
    ]
    ids = merge(candidates, num_valid, init_blocks, local_blocks)
    return [*ids, *[-1] * (16 - len(ids))]


# ---------------------------------------------------------------- without sharding (section 1)


def select_unsharded(
    q: Tensor, keys: Tensor, positions: Sequence[int] | Tensor, init_blocks: int, local_blocks: int
) -> list[list[list[int]]]:
    """The selection that one rank with all keys makes; ICP must give the same.

    Arguments as for `block_scores`. Returns `[T][H]` lists of at most 16 ids, ascending.
    """
    scores = block_scores(q, keys, positions)
    return [
        [
            select(scores[t, h], max(0, math.ceil((int(position) + 1) / 128)), init_blocks, local_blocks)
            for h in range(q.shape[1])
        ]
        for t, position in enumerate(positions)
    ]
