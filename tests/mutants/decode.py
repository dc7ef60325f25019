"""Faults of geometry, cache, decode scorer, ranking and the fused form."""

from __future__ import annotations

from .fault import FIELD_TESTS, FUSED_TESTS, SCORE_TESTS, SELECT_TESTS, Mutant

SCORER = "torch_backend/decode_index_score_sharded.py"
EXACT = "torch_backend/exact.py"
RANKING = "torch_backend/ranking.py"
FUSED = "torch_backend/decode_score_publish.py"
PREFILL_SELECT_TESTS = ("test_topk_select_prefill.py",)
PITCH_TESTS = ("test_field_cases.py", "-k", "test_07 and 4-128")

MUTANTS = (
    Mutant(
        "positions of another rank's rows",
        (("geometry.py", "self.world_size * row + self.rank", "self.world_size * row + self.rank ^ 1"),),
        SCORE_TESTS,
    ),
    Mutant(
        "the shard of another rank",
        (("cache.py", "layout.key_position(0, torch", "layout.key_position(0, -1 - torch"),),
        ("test_cache.py",),
    ),
    Mutant(
        "new keys into another rank's rows",
        (
            (
                "torch_backend/write_index_keys.py",
                "owner == layout.rank",
                "owner == layout.world_size - 1 - layout.rank",
            ),
        ),
        ("test_write_index_keys.py",),
    ),
    Mutant(
        "blocks of the wrong half of a page",
        (("geometry.py", "self.rank * self.index_scale // self.world_size", "self.rank % self.index_scale"),),
        FUSED_TESTS,
    ),
    Mutant(
        "a 32-bit offset",
        (
            (
                EXACT,
                "torch.index_select(_page_bytes(index_k), 0, pages, out=raw)",
                "flat, width = index_k.view(torch.uint8), (rows * HEAD_DIM,)\n"
                "    torch.stack([flat.as_strided(width, (1,), int(p) * index_k.stride(0) % 2**32)"
                " for p in pages], out=raw)",
            ),
        ),
        PITCH_TESTS,
    ),
    Mutant(
        "a signed 32-bit offset",
        (
            (
                EXACT,
                "torch.index_select(_page_bytes(index_k), 0, pages, out=raw)",
                "flat, width = index_k.view(torch.uint8), (rows * HEAD_DIM,)\n"
                "    torch.stack([flat.as_strided(width, (1,), int(p) * index_k.stride(0) % 2**31)"
                " for p in pages], out=raw)",
            ),
        ),
        PITCH_TESTS,
    ),
    Mutant(
        "a maximum over heads",
        (
            (
                SCORER,
                "return dots.amax(-1).to(torch.float32) + 0.0",
                "best = dots.amax(-1).view(count, -1, NUM_HEADS)\n"
                "    return best.amax(-1, keepdim=True).expand_as(best).flatten(1).to(torch.float32) + 0.0",
            ),
        ),
        SCORE_TESTS,
    ),
    Mutant(
        "the causal limit one key late",
        (
            (
                SCORER,
                "keys[:, None, :] <= positions[request]",
                "keys[:, None, :] <= 1 + positions[request]",
            ),
        ),
        SCORE_TESTS,
    ),
    Mutant(
        "the causal limit one key early",
        (
            (
                SCORER,
                "keys[:, None, :] <= positions[request]",
                "keys[:, None, :] < positions[request]",
            ),
        ),
        SCORE_TESTS,
    ),
    Mutant(
        "the limit of the last query token for all",
        ((SCORER, "<= positions[items.request, 0]", "<= positions[items.request, -1]"),),
        SCORE_TESTS,
    ),
    Mutant(
        "an unmasked tail",
        ((SCORER, "(items.readable & ~whole, True)", "(items.readable & ~whole, False)"),),
        SCORE_TESTS,
    ),
    Mutant(
        "a NaN key row poisons its block",
        (
            (
                SCORER,
                "dots.masked_fill_(~number.view(count, 1, rows), NEG_INF)",
                'dots.masked_fill_(~number.view(count, 1, rows), float("nan"))',
            ),
        ),
        FIELD_TESTS,
    ),
    Mutant(
        "a NaN byte is a number",
        ((EXACT, "if int(magnitude.max()) == 0x7F:", "if int(magnitude.max()) == 0xFF:"),),
        FIELD_TESTS,
    ),
    Mutant(
        "a NaN query row is zero",
        ((SCORER, "values.masked_fill_(dead[items.request], NEG_INF)", "pass"),),
        FIELD_TESTS,
    ),
    Mutant(
        "padding rows are written",
        ((SCORER, "layout.columns(lens.clamp(min=0))", "layout.columns(lens.clamp(min=1))"),),
        SCORE_TESTS,
    ),
    Mutant(
        "columns are not rounded up",
        ((SCORER, "((exist + 3) // 4 * 4)", "(exist)"),),
        SCORE_TESTS,
    ),
    Mutant(
        "a column past the table is read",
        ((SCORER, "torch.clamp(exist[request], max=width)", "exist[request]"),),
        FIELD_TESTS,
    ),
    Mutant(
        "a page id out of range is read as another",
        (
            (SCORER, "readable = in_table & (page >= 0) & (page < pages)", "readable = in_table"),
            (SCORER, "torch.where(readable, page, 0)", "page.clamp(0, pages - 1)"),
        ),
        FIELD_TESTS,
    ),
    Mutant(
        "-0.0 ranks below 0.0",
        ((RANKING, 'float("-inf"), scores) + 0.0', 'float("-inf"), scores)'),),
        SELECT_TESTS,
    ),
    Mutant(
        "-0.0 is written",
        (
            (
                SCORER,
                "return dots.amax(-1).to(torch.float32) + 0.0",
                "best = dots.amax(-1).to(torch.float32)\n    return torch.where(best == 0, -0.0, best)",
            ),
        ),
        SCORE_TESTS,
    ),
    Mutant(
        "ties to the higher id",
        (
            (
                RANKING,
                "| (MAX_BLOCKS - 1 - ids.clamp(0, MAX_BLOCKS - 1))",
                "| ids.clamp(0, MAX_BLOCKS - 1)",
            ),
            (RANKING, "ids = MAX_BLOCKS - 1 - (best & (MAX_BLOCKS - 1))", "ids = best & (MAX_BLOCKS - 1)"),
        ),
        SELECT_TESTS,
    ),
    Mutant(
        "candidates past the valid blocks",
        ((RANKING, "(ids < num_valid.clamp(max=MAX_BLOCKS))", "(ids < num_valid + 1)"),),
        SELECT_TESTS,
    ),
    Mutant(
        "forced blocks counted from 8192",
        (
            (
                RANKING,
                "(ids >= num_valid - force_end)",
                "(ids >= num_valid.clamp(max=MAX_BLOCKS) - force_end)",
            ),
        ),
        SELECT_TESTS,
    ),
    Mutant(
        "a column more in the fused form",
        ((FUSED, "min(block_table.shape[1], MAX_BLOCKS)", "min(block_table.shape[1] + 1, MAX_BLOCKS)"),),
        FUSED_TESTS,
    ),
    Mutant(
        "a carrier row without its ready word",
        (("rows.py", "value=READY)", "value=0)"),),
        PREFILL_SELECT_TESTS,
    ),
)
