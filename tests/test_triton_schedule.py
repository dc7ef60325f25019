"""However the Triton scorer cuts its work the bits are the same: a tile a program, or a loop over tiles."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from helpers import score

import msa_icp
from msa_icp import cases
from msa_icp.cases import LAYOUTS, bits

DEVICES = [d for d in ("cpu", "cuda") if msa_icp.backends(d)["triton"] is None]
if not DEVICES:
    pytest.skip("Triton serves no device here", allow_module_level=True)
scorer = importlib.import_module("msa_icp.triton_backend.decode_index_score_sharded")


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"triton-{device}")
@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("enable_pdl", [False, True])
def test_a_bounded_grid_loops(monkeypatch, device, world_size, page_size, query_len, enable_pdl):
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(page_size * 9 + 5, 0, page_size * 2, 1),
        decode_query_len=query_len,
        keys=cases.full_range,
    )
    expected = score(case, 1, "triton", device, enable_pdl=enable_pdl)
    assert torch.isfinite(expected[0, 0, :9]).all()
    for change in ({"programs": 1}, {"programs": 8}, {"programs": 12}):
        monkeypatch.setattr(scorer, "SCHEDULE", dataclasses.replace(scorer.SCHEDULE, **change))
        got = score(case, 1, "triton", device, enable_pdl=enable_pdl)
        assert torch.equal(bits(got), bits(expected)), change


@pytest.mark.parametrize("device", [d for d in DEVICES if d == "cuda"], ids=lambda device: f"triton-{device}")
@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
@pytest.mark.parametrize("query_len", [1, 3])
def test_gaps_and_several_waves(monkeypatch, device, world_size, page_size, query_len):
    """As if one program filled a multiprocessor: all but the first wave read behind the wait."""
    most = scorer.target_of(torch.device(device)).multiprocessors
    pages = 4 * (most // 8 + 8)
    case = cases.decode_case(
        "",
        world_size,
        page_size,
        seq_lens=(page_size * pages, page_size * 9 + 5, 0, page_size * 2, 1, *[page_size * pages - 3] * 4),
        decode_query_len=query_len,
    )
    without = dataclasses.replace(scorer.SCHEDULE, registers=512, wide_registers=512, gaps=0)
    expected = score(case, 1, "torch", device)
    for change in ({"gaps": 0}, {"gaps": 1}, {"gaps": 3}, {"gaps_below": 0}):
        monkeypatch.setattr(scorer, "SCHEDULE", dataclasses.replace(without, **change))
        got = score(case, 1, "triton", device, enable_pdl=True)
        assert torch.equal(bits(got), bits(expected)), change


def test_a_grid_fits_its_axes():
    """A device takes 65535 programs on every axis but the first."""
    target = scorer.Target.of_capability("cuda", 90, 132)
    for requests in (1, 64, 8192, 16384, 16385, 100_003):
        for columns, query_len, enable_pdl in ((4, 1, True), (4, 1, False), (4, 8, False), (8192, 8, True)):
            layout = scorer.ShardLayout(4, 0, 128)
            work = scorer.plan(scorer.SCHEDULE, layout, query_len, target, columns, requests, enable_pdl)
            assert all(extent <= 65535 for extent in work.grid[1:]), (requests, columns, work.grid)
            programs = work.grid[0] * (work.grid[1] if len(work.grid) > 1 else 1) - work.gaps
            assert programs % requests == 0
            assert programs >= requests


@pytest.mark.parametrize(
    ("requests", "tiles", "most"),
    [
        (1, 511, 16384),
        (1, 512, 2048),
        (16, 2048, 4096),
        (31, 2048, 7936),
        (32, 1844, 16384),
        (32, 2048, 8192),
        (256, 8, 16384),
        (256, 2048, 8192),
    ],
)
def test_programs_follow_the_table_only_so_far(requests, tiles, most):
    """Of a table that is made for long contexts most tiles are nobody's."""
    assert scorer.SCHEDULE.most_programs(requests, tiles) == most
