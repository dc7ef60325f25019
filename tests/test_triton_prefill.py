"""However a prefill window is cut into parts, pieces and lists, the Triton kernels give the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import msa_icp
from msa_icp.cases import bits
from msa_icp.geometry import prefill_pool_bytes
from msa_icp.prefill_cases import prefill_case
from msa_icp.verify.prefill import plan_on_device, run_fused, run_scores, run_select

DEVICES = [d for d in ("cpu", "cuda") if msa_icp.backends(d)["triton"] is None]
if not DEVICES:
    pytest.skip("Triton serves no device here", allow_module_level=True)
pytestmark = pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"triton-{device}")

WINDOWS = {
    # More pieces than the 16 whose lists are read, and four lists a piece.
    "a short query over a long prefix": {"qo_lens": (2,), "kv_lens": (9000,), "page_size": 256},
    # An item of 64 tokens and one of two in shares that begin and end inside items; and empty shares.
    "items that are cut": {"qo_lens": (65, 0, 1), "kv_lens": (1000, 7, 200), "page_size": 128},
    # Parts that have a slice of the units beside parts that have a slice of the tokens, and more columns in
    # one list than it keeps.
    "parts of both kinds": {"qo_lens": (34, 3), "kv_lens": (3000, 1100), "page_size": 128},
    # Four shares, of which two or more end where an item begins that they have nothing of.
    "whole items": {"qo_lens": (1, 1, 1, 1), "kv_lens": (300,) * 4, "page_size": 128},
}
WORKERS = {"whole items": 4}
"""On a CPU, beside one; else 23."""


def results(case, device, workers=1, max_query_len=None):
    """Scores and fused carrier of the last rank, of a plan for so many workers (on a GPU: its own)."""
    rank, num_valid = case.world_size - 1, case.num_valid_pages()
    threads = torch.get_num_threads()
    torch.set_num_threads(workers)
    try:
        plan = plan_on_device(case, "triton", device)
        if max_query_len is not None:
            plan = replace(plan, max_query_len=max_query_len)
        compact = case.fused_compact
        scores = run_scores(case, plan, rank, "triton", compact=compact, initialize=True)
        carrier = run_fused(case, plan, rank, "triton", num_valid)
    finally:
        torch.set_num_threads(threads)
    return scores, carrier


@pytest.mark.parametrize("name", WINDOWS)
def test_any_number_of_workers(device, name):
    case = prefill_case("", 4, init_blocks=1, local_blocks=2, **WINDOWS[name])
    scores, carrier = results(case, device)
    assert torch.isfinite(scores).any()
    compact = case.fused_compact
    selects = "torch" if device == "cpu" else "triton"
    two_steps = run_select(case, 3, scores, selects, case.num_valid_pages(), compact=compact)
    assert torch.equal(carrier, two_steps)
    for workers in (WORKERS.get(name, 23),) if device == "cpu" else (1,):
        again = results(case, device, workers)
        assert torch.equal(bits(again[0]), bits(scores)), workers
        assert torch.equal(again[1], carrier), workers


def test_more_workers_than_the_merge_can_number(device):
    """Refused before anything is launched: their lists would be taken for one another's."""
    case = prefill_case("", 4, 128, qo_lens=(2,), kv_lens=(300,))
    plan = plan_on_device(case, "triton", device)
    shares = torch.zeros(2049, dtype=torch.int64, device=device)
    pool = torch.empty(prefill_pool_bytes(2, 1, 2049, 4), dtype=torch.uint8, device=device)
    error = r"^plan\.packed_work_range\.shape\[0\]: must be at most 2048 workers .*, was 2049$"
    with pytest.raises(ValueError, match=error):
        run_fused(
            case,
            replace(plan, packed_work_range=shares),
            0,
            "triton",
            case.num_valid_pages(),
            pool=pool,
        )


def test_the_bound_of_the_query_lengths_changes_no_bit(device):
    """It says whether a program takes 64 query rows or 128; a segment may even be longer than it says."""
    case = prefill_case("", 2, 128, qo_lens=(5, 20), kv_lens=(600, 20))
    scores, carrier = results(case, device, max_query_len=25)
    for longest in (16,) if device == "cpu" else (16, 1):
        again = results(case, device, workers=3, max_query_len=longest)
        assert torch.equal(bits(again[0]), bits(scores)), longest
        assert torch.equal(again[1], carrier), longest
