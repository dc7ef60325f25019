"""The shard layout and the sizes, against tables written out by hand from the contract."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import msa_icp
from msa_icp import geometry, reference
from msa_icp.cases import LAYOUTS
from msa_icp.geometry import ShardLayout

# (W, P, rank): rows a page, positions of rows 0, 1 and the last of column 3, block of column 3
BY_HAND = {
    (2, 128, 0): (64, (384, 386, 510), 3),
    (2, 128, 1): (64, (385, 387, 511), 3),
    (4, 128, 0): (32, (384, 388, 508), 3),
    (4, 128, 3): (32, (387, 391, 511), 3),
    (2, 256, 0): (128, (768, 769, 895), 6),
    (2, 256, 1): (128, (896, 897, 1023), 7),
    (4, 256, 0): (64, (768, 769, 831), 6),
    (4, 256, 1): (64, (832, 833, 895), 6),
    (4, 256, 2): (64, (896, 897, 959), 7),
    (4, 256, 3): (64, (960, 961, 1023), 7),
}


@pytest.mark.parametrize("key", BY_HAND)
def test_rows_positions_and_blocks(key):
    rows, positions, block = BY_HAND[key]
    layout = ShardLayout(key[0], key[2], key[1])
    assert layout.rows == rows
    assert layout.page_bytes == rows * 128
    assert tuple(layout.key_position(3, i) for i in (0, 1, rows - 1)) == positions
    assert layout.block(3) == block == 3 * layout.index_scale + layout.index_offset


@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
def test_ranks_hold_every_key_once_and_agree_with_the_reference(world_size, page_size):
    seen = []
    for rank in range(world_size):
        layout = ShardLayout(world_size, rank, page_size)
        for row in range(layout.rows):
            position = layout.key_position(5, row)
            assert position == reference.key_position(
                5, row, rank=rank, world_size=world_size, page_size=page_size
            )
            assert position // 128 == layout.block(5)
            assert layout.owner_and_row(position) == (rank, row)
            seen.append(position)
    assert sorted(seen) == list(range(5 * page_size, 6 * page_size))


def test_layout_takes_tensors():
    layout = ShardLayout(4, 2, 256)
    columns, rows = torch.arange(4)[:, None], torch.arange(layout.rows)
    positions = layout.key_position(columns, rows)
    assert positions[3, 7] == layout.key_position(3, 7)
    owner, row = layout.owner_and_row(positions)
    assert (owner == 2).all()
    assert (row == rows).all()


@pytest.mark.parametrize(
    ("seq_len", "page_size", "columns"),
    [(0, 128, 0), (1, 128, 1), (128, 128, 1), (129, 128, 2), (257, 256, 2)],
)
def test_columns(seq_len, page_size, columns):
    assert ShardLayout(2, 0, page_size).columns(seq_len) == columns


@pytest.mark.parametrize(
    ("max_model_len", "page_size", "columns"),
    [
        (1, 128, 4),
        (512, 128, 4),
        (513, 128, 8),
        (1024, 256, 4),
        (1025, 256, 8),
        (131072, 128, 1024),
        (1 << 20, 128, 8192),
        (1 << 20, 256, 4096),
        (1 << 21, 256, 8192),
        (1 << 30, 128, 8192),
    ],
)
def test_decode_score_columns(max_model_len, page_size, columns):
    assert msa_icp.msa_icp_decode_score_columns(max_model_len, page_size) == columns


def test_decode_pool_bytes():
    assert msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=1) == 65536
    assert msa_icp.msa_icp_decode_pool_bytes(max_decode_tokens=512, num_heads=4) == 33554432


def test_comm_layout_by_hand():
    assert msa_icp.msa_icp_comm_layout(2, 2, 5) == {
        "storage_words": 60 * 33 + 60 * 64,
        "legacy_offset_bytes": 0,
        "legacy_shape": (3, 2, 2, 5, 33),
        "tagged_offset_bytes": 60 * 132,
        "tagged_shape": (3, 2, 2, 5, 32),
        "generations_shape": (3, 4, 5),
        "expected_shape": (3, 2, 5),
    }
    assert msa_icp.msa_icp_comm_layout(4, 1, 7)["tagged_offset_bytes"] == 84 * 132


@pytest.mark.parametrize("capacity", range(1, 9))
@pytest.mark.parametrize(("world_size", "hpr"), [(2, 2), (4, 1)])
def test_tagged_rows_are_aligned_to_their_words(world_size, hpr, capacity):
    assert msa_icp.msa_icp_comm_layout(world_size, hpr, capacity)["tagged_offset_bytes"] % 8 == 0


def test_first_receive_row():
    sizes = {"world_size": 2, "heads_per_rank": 2, "capacity": 10}
    assert geometry.first_receive_row(0, 0, 0, **sizes) == 0
    assert geometry.first_receive_row(0, 0, 1, **sizes) == 10
    assert geometry.first_receive_row(0, 1, 2, **sizes) == 20
    assert geometry.first_receive_row(2, 1, 3, **sizes) == ((2 * 2 + 1) * 2 + 1) * 10


def test_the_reference_shares_nothing_with_the_backends():
    tree = ast.parse(Path(reference.__file__).read_text())
    modules = {
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")]
        )
    }
    assert modules == {"__future__", "math", "collections.abc", "torch"}
