"""Every way in which the Triton kernels turn an e4m3 byte into fp16 is exact, for all 256 bytes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from msa_icp.triton_backend.e4m3 import e4m3_to_fp16
from msa_icp.triton_backend.launch import INTERPRETED


@triton.jit
def convert_kernel(bits, out, HOW: tl.constexpr):
    byte = tl.arange(0, 256)
    tl.store(out + byte, e4m3_to_fp16(tl.load(bits + byte), HOW))


def places() -> list[tuple[str, str]]:
    """Device and way: inline assembly and fp8 types exist on the GPU alone."""
    if INTERPRETED:
        return [("cpu", "integer")]
    if not torch.cuda.is_available():
        return []
    ways = ["integer"]
    if torch.version.hip is None:
        ways.append("packed")
        if torch.cuda.get_device_capability() >= (8, 9):
            ways.append("hardware")
    return [("cuda", way) for way in ways]


@pytest.mark.parametrize(("device", "how"), places())
def test_every_byte(device: str, how: str) -> None:
    bits = torch.arange(256, dtype=torch.uint8, device=device)
    out = torch.zeros(256, dtype=torch.float16, device=device)
    convert_kernel[(1,)](bits, out, how)
    expected = bits.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(out.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(out[number].to(torch.float32), expected[number])
    assert torch.equal(out[number].signbit(), expected[number].signbit())
