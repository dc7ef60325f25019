"""What names no device, or one without a backend, is refused with a ValueError that says so."""

from __future__ import annotations

import pytest
import torch

import msa_icp

NO_DEVICES = ["abacus", "cuda:x", None, 1.5]


@pytest.mark.parametrize("name", NO_DEVICES)
@pytest.mark.parametrize("function", [msa_icp.backends, msa_icp.is_supported, msa_icp.warmup])
def test_what_is_no_device(function, name):
    with pytest.raises(ValueError, match=r"^device: must be a torch.device or the name of one, was "):
        function(name)


def test_a_device_without_a_backend():
    assert not msa_icp.is_supported("meta")
    assert all(msa_icp.backends("meta").values())
    with pytest.raises(ValueError, match="no backend serves meta"):
        msa_icp.warmup("meta")


@pytest.mark.parametrize("device", ["meta", "abacus"])
def test_a_storage_that_cannot_be(device):
    with pytest.raises(ValueError, match=r"^device: must be "):
        msa_icp.ReceiveStorage.in_process(2, capacity=1, device=device)


def test_tensors_that_are_not_dense():
    table = torch.zeros((1, 4), dtype=torch.int32).to_sparse()
    with pytest.raises(
        ValueError, match=r"^block_table: must be a strided \(dense\) tensor, was torch.sparse_coo"
    ):
        msa_icp.write_index_keys(
            torch.zeros((1, 128), dtype=torch.uint8).view(torch.float8_e4m3fn),
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            table,
            torch.zeros((1, 32, 128), dtype=torch.uint8).view(torch.float8_e4m3fn),
            rank=0,
            world_size=4,
            page_size=128,
        )
