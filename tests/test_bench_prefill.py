"""What the benchmark of prefill windows counts, by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import msa_icp
from msa_icp.bench.prefill import Window, spread
from msa_icp.geometry import ShardLayout


@pytest.mark.parametrize("world_size", [2, 4])
def test_useful_operations(world_size):
    """Tokens 0, 1, 2 behind 5 keys see 6, 7 and 8; one behind none sees one; an empty segment's see none."""
    window = Window("", ((3, 5), (0, 900), (1, 0), (2, 98)))
    pairs = 6 + 7 + 8 + 1 + 99 + 100
    layout = ShardLayout(world_size, 0, 128)
    multiplications_and_additions = 2 * 128
    assert window.operations(layout) == multiplications_and_additions * 4 * pairs // world_size
    assert window.tokens == 6


def test_units_and_costs_of_the_least_and_the_most_loaded_worker():
    """Items of 3, 5, 5 and 2 units, dealt to four workers as 1 + 0 + 12 + 2.

    They have 1, 64, 20 and 1 tokens, the second and third of one segment.
    """
    tokens = torch.tensor([1, 84, 1], dtype=torch.int32)
    keys = torch.tensor([3, 5, 2], dtype=torch.int32) * 4 * 128
    plan = msa_icp.msa_icp_index_score_sharded_plan(tokens, keys, 4, qo_offset=keys - tokens, device="cpu")
    begins_and_end = [(0, 0), (0, 1), (0, 1), (3, 0), (4, 0)]  # item, unit of it
    words = [item | unit << 16 for item, unit in begins_and_end]
    shares = torch.tensor([a | b << 32 for a, b in itertools.pairwise(words)])
    eighths = [5, 0, 2 * 5 + (8 + 5 * 8) + (8 + 5 * 6), 8 + 2 * 5]
    assert spread(dataclasses.replace(plan, packed_work_range=shares)) == {
        "units": (0, 3.75, 12),
        "costs": (0, round(sum(eighths) / 4 / 8, 3), max(eighths) / 8),
    }
    assert spread(plan)["units"][1] * plan.packed_work_range.shape[0] == 15
