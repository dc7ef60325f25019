"""Faults of prefill plans, scorers and selections, and of their exchange."""

from __future__ import annotations

from .fault import Mutant

PLAN = "prefill_plan.py"
PREFILL_SCORER = "torch_backend/index_score_sharded.py"
PREFILL_FUSED = "torch_backend/prefill_score_select.py"
PREFILL_EXCHANGE = "prefill_exchange.py"
PLAN_TESTS = ("test_prefill_plan.py",)
PREFILL_SCORE_TESTS = ("test_index_score_sharded.py", "-k", "not test_07")
PREFILL_WINDOW_TESTS = ("test_prefill_windows.py", "-k", "test_nasty and 4-128 or thousand or many_columns")
PREFILL_EXCHANGE_TESTS = ("test_exchange_prefill.py", "-k", "(uneven or of_one) and 2")

MUTANTS = (
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
        ((PLAN, "share * cost_up_to[-1] // workers", "share * (cost_up_to[-1] // workers)"),),
        PLAN_TESTS,
    ),
    Mutant(
        "a share ends in the item before",
        (
            (
                PLAN,
                "torch.searchsorted(cost_up_to, bounds, right=True)",
                "torch.searchsorted(cost_up_to, bounds)",
            ),
        ),
        PLAN_TESTS,
    ),
    Mutant(
        "a unit costs the same for any number of tokens",
        ((PLAN, "UNIT_COST + ceil_div(tokens, COST_TOKENS)", "UNIT_COST + 0 * tokens"),),
        PLAN_TESTS,
    ),
    Mutant(
        "a worker goes on to another item for nothing",
        ((PLAN, "torch.where(live & (item > 0), START_COST, 0)", "torch.where(live & (item > 0), 0, 0)"),),
        PLAN_TESTS,
    ),
    Mutant(
        "the first item has a start as well",
        ((PLAN, "live & (item > 0), START_COST", "live, START_COST"),),
        PLAN_TESTS,
    ),
    Mutant(
        "a bound before an item's first unit is before its begin",
        ((PLAN, "(bounds - first_unit_at[at]).clamp(min=0)", "(bounds - first_unit_at[at])"),),
        PLAN_TESTS,
    ),
    Mutant(
        "a benchmark counts no start of an item",
        (("bench/prefill.py", "START_COST if item and not first else 0", "0"),),
        ("test_bench_prefill.py",),
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
        "a query that requires a gradient keeps it",
        (("launches.py", "        op = torch.inference_mode()(op)\n", ""),),
        ("test_torch_defaults.py", "-k", "gradient and prefill"),
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
        "the exchange sends its sender's heads",
        ((PREFILL_EXCHANGE, "sent[_owned(rank, len(sources))]", "sent[_owned(source, len(sources))]"),),
        PREFILL_EXCHANGE_TESTS,
    ),
    Mutant(
        "all of a rank's heads in the first one's place",
        ((PREFILL_EXCHANGE, "received[peer, place]", "received[peer, 0]"),),
        PREFILL_EXCHANGE_TESTS,
    ),
    Mutant(
        "a rank's own rows are not exchanged",
        ((PREFILL_EXCHANGE, "    rows[rank].copy_(carrier[_owned(rank, world_size)])\n", ""),),
        PREFILL_EXCHANGE_TESTS,
    ),
    Mutant(
        "the exchange does not wait",
        ((PREFILL_EXCHANGE, "work.wait()", "pass"),),
        PREFILL_EXCHANGE_TESTS,
    ),
    Mutant(
        "rows are received on those of another rank",
        (("checks/prefill.py", "and (written or other_written)", "and written != other_written"),),
        ("test_exchange_prefill.py", "-k", "lie_apart"),
    ),
    Mutant(
        "rows are received on those that are sent",
        (("checks/prefill.py", "and (written or other_written)", "and (written and other_written)"),),
        ("test_exchange_prefill.py", "-k", "lie_apart"),
    ),
    Mutant(
        "an exchange that waits handles no signals",
        ((PREFILL_EXCHANGE, "        wait_for(wait)", "        wait()"),),
        ("test_exchange_prefill.py", "-k", "handles_signals"),
    ),
    Mutant(
        "another rank is blamed for the one that is gone",
        ((PREFILL_EXCHANGE, 'else f"rank {peer}"', 'else f"rank {(peer + 1) % world_size}"'),),
        ("test_exchange_prefill.py", "-k", "killed and 2-0"),
    ),
    Mutant(
        "gloo sends from addresses of a GPU",
        ((PREFILL_EXCHANGE, ' or (chosen == "gloo" and kind != "cpu")', ""),),
        ("test_exchange_prefill.py", "-k", "without_a_backend"),
    ),
)
