"""Memory between pages that crash a process when they are touched, of a CPU or of a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap

import torch
from torch import Tensor

from msa_icp import cases

PAGE = mmap.PAGESIZE
PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


device = "cpu"
"""Whose memory is guarded."""


def guarded(values: Tensor, where: str, *, read_only: bool) -> Tensor:
    """A copy of `values`, with its strides, flush against a page that nobody may touch.

    What only is read is read-only on a CPU.
    """
    if device == "cuda":
        import gpu_guards

        return gpu_guards.guarded(values, where)
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True))
    nbytes = (extent if values.numel() else 0) * values.element_size()
    inner = max(1, -(-nbytes // PAGE)) * PAGE
    base = libc.mmap(None, inner + 2 * PAGE, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert base != ctypes.c_void_p(-1).value
    first = base + PAGE
    assert libc.mprotect(first, inner, PROT_READ | PROT_WRITE) == 0
    address = first + inner - nbytes if where == "end" else first
    if nbytes == 0:
        return values.clone()
    raw = torch.frombuffer((ctypes.c_byte * nbytes).from_address(address), dtype=torch.uint8)
    raw.fill_(cases.NAN_BYTE)
    copy = raw.view(values.dtype).as_strided(values.shape, values.stride())
    copy.copy_(values)
    if read_only:
        assert libc.mprotect(first, inner, PROT_READ) == 0
    return copy


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def run(name: str, where: str, function, reads: dict, writes: dict, **scalars) -> None:
    """Call `function` in ordinary and in guarded memory and compare what it wrote."""
    print(name, flush=True)
    ordinary = {k: cases.strided(t, t.stride(), device=device) for k, t in writes.items()}
    function(**{k: t.to(device) for k, t in reads.items()}, **ordinary, **scalars)
    inputs = {k: guarded(t, where, read_only=True) for k, t in reads.items()}
    outputs = {k: guarded(t, where, read_only=False) for k, t in writes.items()}
    function(**inputs, **outputs, **scalars)
    for k, t in outputs.items():
        assert same(t, ordinary[k]), f"{name}: {k}"
