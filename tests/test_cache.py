"""Sharding a whole cache and counting blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import msa_icp
from msa_icp import cases, reference
from msa_icp.cases import LAYOUTS


def raw(tensor):
    return tensor.cpu().view(torch.uint8)


@pytest.mark.parametrize(("world_size", "page_size"), LAYOUTS)
def test_shard_index_keys(world_size, page_size):
    cache = cases.full_range((5, page_size, 128), seed=1, nan=True)
    for rank in range(world_size):
        shard = msa_icp.shard_index_keys(cache, rank=rank, world_size=world_size)
        assert shard.shape == (5, page_size // world_size, 128)
        assert shard.dtype == torch.float8_e4m3fn
        assert shard.is_contiguous()
        for row in range(shard.shape[1]):
            position = reference.key_position(0, row, rank=rank, world_size=world_size, page_size=page_size)
            assert torch.equal(raw(shard[:, row]), raw(cache[:, position]))


def test_shard_index_keys_of_any_strides():
    whole = cases.full_range((4, 256, 128), seed=2, nan=True)
    for stride in ((128, 4 * 128, 1), (40000, 128, 1), (256 * 130, 130, 1)):
        view = cases.strided(whole, stride)
        for rank in range(4):
            expected = msa_icp.shard_index_keys(whole, rank=rank, world_size=4)
            assert torch.equal(raw(msa_icp.shard_index_keys(view, rank=rank, world_size=4)), raw(expected))


def test_shard_index_keys_of_no_pages_and_as_a_copy():
    assert msa_icp.shard_index_keys(cases.exact((0, 128, 128), 0), rank=0, world_size=2).shape == (0, 64, 128)
    cache = cases.exact((1, 128, 128), 0)
    shard = msa_icp.shard_index_keys(cache, rank=1, world_size=2)
    before = raw(shard).clone()
    raw(cache).zero_()
    assert torch.equal(raw(shard), before)


def test_num_valid_pages_by_hand():
    lens = torch.tensor([0, 1, 128, 129, 130, 2, -4, 1 << 20, 2**31 - 1], dtype=torch.int32)
    assert msa_icp.num_valid_pages(lens, 1).tolist() == [0, 1, 1, 2, 2, 1, 0, 8192, 1 << 24]
    assert msa_icp.num_valid_pages(lens[3:6], 3).tolist() == [1, 1, 2, 1, 2, 2, 0, 1, 1]
    assert msa_icp.num_valid_pages(lens[:2], 8).tolist() == [0] * 15 + [1]
    got = msa_icp.num_valid_pages(lens[:0], 2)
    assert got.shape == (0,)
    assert got.dtype == torch.int32


@given(lens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), query_len=st.integers(1, 8))
def test_num_valid_pages(lens, query_len):
    got = msa_icp.num_valid_pages(torch.tensor(lens, dtype=torch.int32), query_len)
    expected = []
    for seq_len in lens:
        for j in range(query_len):
            position = seq_len - query_len + j
            expected.append(0 if seq_len <= 0 or position < 0 else -(-(position + 1) // 128))
    assert got.tolist() == expected
    assert got.is_contiguous()


def test_num_valid_pages_into_out():
    lens = torch.tensor([7, 300, 513], dtype=torch.int32)
    memory = cases.poisoned((8,), torch.int32)
    out = memory[1:7]
    assert msa_icp.num_valid_pages(lens, 2, out=out) is out
    assert memory.tolist() == [cases.POISON, 1, 1, 3, 3, 4, 5, cases.POISON]
    assert msa_icp.num_valid_pages(lens, 1, out=lens).tolist() == [1, 3, 5]  # in place
