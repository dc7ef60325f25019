"""Run as a program under compute-sanitizer: every kernel of a backend, on small inputs.

    compute-sanitizer --tool memcheck python tests/sanitized.py cuda

Every call of the registry twice, the second of which no compilation delays; then the decode scorer in every
layout, query length and form over ragged batches, and every prefill op in every layout over hostile windows,
with dependent launch. `make sanitize` runs all four tools.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from calls import CALLS, unserved
from helpers import score
from test_index_score_sharded import score as score_window

from msa_icp import cases, prefill_cases, verify
from msa_icp.prefill_cases import PrefillCase
from msa_icp.verify.prefill import plan_on_device, run_fused, run_select

DEVICE = "cuda"


def calls(backend: str) -> None:
    """Every function that the backend serves."""
    for name, make in CALLS.items():
        if unserved(name, backend, DEVICE) is not None:
            continue
        for _ in range(2):
            call = make(DEVICE, backend)
            call.function(**call.arguments)
        torch.cuda.synchronize()
        print(name, flush=True)


def decode_scores(backend: str) -> None:
    """Batches whose requests end in every part of a page, with padding."""
    for world_size, page_size in cases.LAYOUTS:
        for query_len in (1, 2, 4, 8):
            case = cases.decode_case(
                "",
                world_size,
                page_size,
                seq_lens=(page_size * 18 + 5, 0, page_size * 2, 1, page_size * 7 - 1),
                decode_query_len=query_len,
            )
            for enable_pdl in (False, True):
                score(case, world_size - 1, backend, DEVICE, enable_pdl=enable_pdl)
        torch.cuda.synchronize()
        print(f"scores of world size {world_size}, page size {page_size}", flush=True)


def hostile_scores(backend: str) -> None:
    """Page ids that are nowhere, lengths past the table, narrow tables, NaN."""
    for world_size, page_size in cases.LAYOUTS:
        for case in cases.nasty_cases(world_size, page_size):
            if not case.large:
                score(case, 0, backend, DEVICE, enable_pdl=True)
    torch.cuda.synchronize()
    print("hostile batches", flush=True)


SHORT = 16
"""Tokens of a segment up to which a Triton program takes fewer query rows."""


def windows(backend: str) -> None:
    """Ragged windows: empty segments, bounds that lie, lengths below 0, pages that are nowhere, NaN."""
    for world_size, page_size in cases.LAYOUTS:
        for case in prefill_cases.nasty_cases(world_size, page_size):
            if not case.large:
                every_prefill_op(case, backend)
        torch.cuda.synchronize()
        print(f"windows of world size {world_size}, page size {page_size}", flush=True)


def every_prefill_op(case: PrefillCase, backend: str) -> None:
    """Plan, score, select and the fused form, for long segments and as if all were short."""
    rank, num_valid = case.world_size - 1, case.num_valid_pages()
    planned = plan_on_device(case, backend, DEVICE)
    for longest in sorted({min(SHORT, planned.max_query_len), planned.max_query_len}):
        plan = replace(planned, max_query_len=longest)
        for compact in case.layouts:
            form = {"compact": compact, "plan": plan, "enable_pdl": True}
            scores = score_window(case, rank, backend, DEVICE, initialize=compact, **form)
            if compact == case.fused_compact:
                run_select(case, rank, scores, backend, num_valid, compact=compact)
        if not verify.no_prefill(backend, ["prefill_score_select"]):
            run_fused(case, plan, rank, backend, num_valid, enable_pdl=True)


def every_form() -> None:
    """The forms of the CUDA scorer, whatever the schedule would choose for so small a batch."""
    from test_cuda_forms import FORMS, tune

    for name, form in FORMS.items():
        with tune.using(tune.everywhere(*form)):
            decode_scores("cuda")
        print(name, flush=True)


if __name__ == "__main__":
    (backend,) = sys.argv[1:]
    calls(backend)
    decode_scores(backend)
    hostile_scores(backend)
    windows(backend)
    if backend == "cuda":
        every_form()
