"""Planted faults: each must make the tests fail.

    python tests/mutants.py [WORD ...]      all faults, or those whose name contains a word

For every fault the sources are copied, a text that must occur exactly once is replaced, and the part of
the tests that ought to notice runs against the copy. A fault that no test notices survives: exit code 1.
A text that does not occur exactly once means that the code has moved on and the fault must follow it:
exit code 2. First of all the copy without a fault must pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "src"
PARALLEL = 2
TIMEOUT_S = 20
"""Of one test: a fault may turn a short wait into an endless one. The process then ends there, with exit
code 1: the other way, an exception raised at whatever instruction runs, hits places that have no line
number, and pytest breaks off without a verdict when it words them."""


@dataclass(frozen=True)
class Mutant:
    """One fault: what it is, the replacements that make it, and the tests that must notice."""

    name: str
    edits: tuple[tuple[str, str, str], ...]  # file below src/msa_icp, text, its replacement
    tests: tuple[str, ...]


SCORER = "torch_backend/decode_index_score_sharded.py"
EXACT = "torch_backend/exact.py"
PUBLISH = "torch_backend/topk_select_publish.py"
MERGE = "torch_backend/merge_candidates.py"
RANKING = "torch_backend/ranking.py"
WAITING = "torch_backend/waiting.py"
FUSED = "torch_backend/decode_score_publish.py"

PLAN = "prefill_plan.py"
PREFILL_SCORER = "torch_backend/index_score_sharded.py"
PREFILL_FUSED = "torch_backend/prefill_score_select.py"

SCORE_TESTS = ("test_decode_index_score_sharded.py", "-k", "not million")
FIELD_TESTS = ("test_field_cases.py", "-k", "test_nasty and 4-128 and not production")
SELECT_TESTS = ("test_topk_select_publish.py",)
MERGE_TESTS = ("test_merge_candidates.py",)
EXCHANGE_TESTS = ("test_exchange.py", "-k", "not threads and not wait and not one_limit and not hold_up")
FUSED_TESTS = ("test_decode_score_publish.py", "-k", "not 8192")
PLAN_TESTS = ("test_prefill_plan.py",)
PREFILL_SCORE_TESTS = ("test_index_score_sharded.py", "-k", "not test_07")
PREFILL_SELECT_TESTS = ("test_topk_select_prefill.py",)
PREFILL_FUSED_TESTS = ("test_prefill_score_select.py",)
PREFILL_WINDOW_TESTS = ("test_prefill_windows.py", "-k", "test_nasty and 4-128 or thousand or many_columns")
PITCH_TESTS = ("test_field_cases.py", "-k", "test_07 and 4-128")
BASELINE = (
    "test_geometry.py",
    "test_cache.py",
    "test_write_index_keys.py",
    "test_checks.py",
    "test_storage.py",
    "test_prefill_plan.py",
    "test_index_score_sharded.py",
    "test_topk_select_prefill.py",
    "test_prefill_score_select.py",
    "test_prefill_windows.py",
    *(
        group[0]
        for group in (SCORE_TESTS, SELECT_TESTS, MERGE_TESTS, EXCHANGE_TESTS, FUSED_TESTS, FIELD_TESTS)
    ),
    "-k",
    "not million and not production and not threads and not one_limit and not hold_up and not 8192 "
    "and not no_score_rows and not test_07",
)

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
        "a duplicate id keeps its smaller score",
        ((MERGE, "keys.sort(-1, descending=True)", "keys.sort(-1, descending=False)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "one word's tag speaks for its row",
        ((MERGE, "lambda: absent().any(-1).any(0)", "lambda: absent()[..., -1].any(0)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "the ready word is not cleared",
        ((MERGE, "ready.masked_fill_(there, 0)", "ready.masked_fill_(there, 1)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "a late merge clears ready words",
        ((MERGE, "ready.masked_fill_(there, 0)", "ready.zero_()"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late merge does not advance the generation",
        ((MERGE, "expected.copy_(wanted)", "expected.copy_(torch.where(late, expected, wanted))"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late merge returns what is there",
        ((MERGE, "merged.masked_fill_(late.T[:, :, None], rows.PAD_ID)", "pass"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late publish stores",
        (
            (
                PUBLISH,
                "    record_failures(errors, late, slot",
                "    _store(words, targets, late)\n    record_failures(errors, late, slot",
            ),
        ),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a publish does not wait",
        ((PUBLISH, "dim=1) != 0", "dim=1) < 0"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "every wait takes its whole limit",
        ((WAITING, "1 if int(errors[0]) != 0 else spin_limit", "spin_limit"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a failure is counted once a call",
        ((WAITING, "errors[0] += count", "errors[0] += 1"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "the last failure is recorded, not the first",
        ((WAITING, "if int(errors[0]) == 0 and errors.shape[0] >= 4:", "if errors.shape[0] >= 4:"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a column more in the fused form",
        ((FUSED, "min(block_table.shape[1], MAX_BLOCKS)", "min(block_table.shape[1] + 1, MAX_BLOCKS)"),),
        FUSED_TESTS,
    ),
    Mutant(
        "a slot set in flight is handed out",
        (("storage.py", "if chosen in self._in_flight and not idle:", "if False:"),),
        ("test_storage.py",),
    ),
    Mutant(
        "a stride is not checked",
        (("checks/arguments.py", "if rows.stride(0) < NUM_HEADS * rows.stride(1):", "if False:"),),
        ("test_checks.py",),
    ),
    Mutant(
        "an item costs what its first token sees",
        ((PLAN, "(index + 1) * ITEM_TOKENS, lens[segment]", "index * ITEM_TOKENS + 1, lens[segment]"),),
        PLAN_TESTS,
    ),
    Mutant(
        "an item that sees nothing is not visited",
        (
            (
                PLAN,
                ".clamp(min=1, max=block_columns(max_seq_len))",
                ".clamp(min=0, max=block_columns(max_seq_len))",
            ),
        ),
        PLAN_TESTS,
    ),
    Mutant(
        "units past the columns",
        ((PLAN, ".clamp(min=1, max=block_columns(max_seq_len))", ".clamp(min=1)"),),
        PLAN_TESTS,
    ),
    Mutant(
        "items past the capacity",
        ((PLAN, "ends[-1].clamp(max=capacity)", "ends[-1]"),),
        PLAN_TESTS,
    ),
    Mutant(
        "the last worker has the rest",
        ((PLAN, "share * units_up_to[-1] // workers", "share * (units_up_to[-1] // workers)"),),
        PLAN_TESTS,
    ),
    Mutant(
        "a share ends in the item before",
        (
            (
                PLAN,
                "torch.searchsorted(units_up_to, bounds, right=True)",
                "torch.searchsorted(units_up_to, bounds)",
            ),
        ),
        PLAN_TESTS,
    ),
    Mutant(
        "a prefill plan of the caller's tensors",
        (("api/prefill.py", "values.contiguous().to(where, copy=True)", "values.contiguous().to(where)"),),
        PLAN_TESTS,
    ),
    Mutant(
        "the prefill's causal limit one key late",
        ((PREFILL_SCORER, "row) > last_key[:, None, None]", "row) > 1 + last_key[:, None, None]"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "the prefill's causal limit one key early",
        ((PREFILL_SCORER, "row) > last_key[:, None, None]", "row) >= last_key[:, None, None]"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "a tile's causal limit is that of its last token",
        ((PREFILL_SCORER, "masked = last_keys[t] <", "masked = last_keys[end - 1] <"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "prefill tokens see past the keys",
        ((PREFILL_SCORER, "own.clamp(max=self.keys - 1)", "own"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "prefill keys behind the columns",
        ((PREFILL_SCORER, "min(keys, BLOCK * plan.columns)", "keys"),),
        ("test_prefill_windows.py", "-k", "test_nasty and bounds and 2-256"),
    ),
    Mutant(
        "the causal prefix of a tile's last token",
        ((PREFILL_SCORER, "device=out.device) < prefix[:, None]", "device=out.device) < prefix[-1:, None]"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "blocks of a page in the wrong column",
        ((PREFILL_SCORER, "blocks[..., columns.layout.index_offset] = values", "blocks[..., 0] = values"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "the prefill scorer always initializes",
        ((PREFILL_SCORER, "    if initialize:", "    if True:"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "the prefill scorer never initializes",
        ((PREFILL_SCORER, "    if initialize:", "    if False:"),),
        PREFILL_SCORE_TESTS,
    ),
    Mutant(
        "an unreadable page of a window is read",
        ((PREFILL_SCORER, "values.masked_fill_(~there, NEG_INF)", "pass"),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "a NaN query row of a window is zero",
        ((PREFILL_SCORER, "values.masked_fill_(dead[heads].view(-1, NUM_HEADS, 1), NEG_INF)", "pass"),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "every chunk of a segment begins at its offset",
        ((PREFILL_SCORER, "position + row - begin", "position"),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "rows of a window before its first",
        ((PREFILL_SCORER, "range(max(begin, first), end, most)", "range(begin, end, most)"),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "fused windows keep the scores of the tokens before",
        ((PREFILL_FUSED, ".fill_(NEG_INF)", ""),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "valid blocks of other tokens",
        ((PREFILL_FUSED, "num_valid_pages[first:last]", "num_valid_pages[: last - first]"),),
        PREFILL_WINDOW_TESTS,
    ),
    Mutant(
        "a carrier row without its ready word",
        (("rows.py", "value=READY)", "value=0)"),),
        PREFILL_SELECT_TESTS,
    ),
    Mutant(
        "a carrier's stride is not checked",
        (("checks/prefill.py", "if rows.stride(0) < tokens * rows.stride(1):", "if False:"),),
        ("test_checks.py", "-k", "prefill"),
    ),
)


def run_tests(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The tests against the sources in `copy`, up to the first failure."""
    files = [str(TESTS / word) if word.endswith(".py") else word for word in tests]
    options = ["-x", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", "--timeout-method=thread"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)  # the faults are in the torch backend
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def copy_sources(folder: Path) -> Path:
    copy = folder / "src"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def plant(copy: Path, mutant: Mutant) -> str:
    """Make the fault in the copy; why it cannot be made, or an empty text."""
    for file, text, replacement in mutant.edits:
        path = copy / "msa_icp" / file
        source = path.read_text()
        if source.count(text) != 1:
            return f"{file} holds {text!r} {source.count(text)} times"
        path.write_text(source.replace(text, replacement))
    return ""


def try_mutant(mutant: Mutant) -> tuple[str, str]:
    """What became of a fault: 'killed', 'SURVIVED' or 'STALE', and a line about it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_sources(Path(folder))
        stale = plant(copy, mutant)
        if stale:
            return "STALE", stale
        ended = run_tests(copy, mutant.tests)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    seconds = f"{time.monotonic() - began:.1f} s"
    if ended.returncode == 1:
        return "killed", f"{seconds}  {failed[0].split(' - ')[0] if failed else 'a test took too long'}"
    if ended.returncode == 0:
        return "SURVIVED", f"{seconds}  {' '.join(mutant.tests)}"
    return "STALE", f"the tests did not run: {(ended.stdout + ended.stderr)[-500:]}"


def without_fault() -> bool:
    """Whether the tests pass on a copy without a fault, and run on the copy at all."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = copy_sources(Path(folder))
        where = subprocess.run(
            [sys.executable, "-c", "import msa_icp; print(msa_icp.__file__)"],
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if str(copy) not in where:
            print(f"The tests would not run on the copy but on {where}")
            return False
        ended = run_tests(copy, BASELINE)
    print(ended.stdout.strip().splitlines()[-1])
    if ended.returncode != 0:
        print(ended.stdout[-3000:])
    return ended.returncode == 0


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    print("Without a fault: ", end="", flush=True)
    if not without_fault():
        return 2
    counts = {"killed": 0, "SURVIVED": 0, "STALE": 0}
    with ThreadPoolExecutor(PARALLEL) as pool:
        for number, (mutant, (verdict, line)) in enumerate(
            zip(chosen, pool.map(try_mutant, chosen), strict=True), 1
        ):
            counts[verdict] += 1
            print(f"[{number:2}/{len(chosen)}] {verdict:8} {mutant.name}: {line}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 2 if counts["STALE"] else int(counts["SURVIVED"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
