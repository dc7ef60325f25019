"""GPU memory between addresses that nothing is mapped to: a kernel that touches those ends with an error."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from cuda.bindings import driver
from torch import Tensor

from msa_icp.driver_calls import checked


def guarded(values: Tensor, where: str) -> Tensor:
    """A copy of `values` on the GPU, with its strides, at the start or the end of a mapping of its own.

    The mapping stays for as long as the process lives.
    """
    extent = 1 + sum((n - 1) * s for n, s in zip(values.shape, values.stride(), strict=True))
    nbytes = (extent if values.numel() else 0) * values.element_size()
    if nbytes == 0:
        return values.cuda()
    raw = as_bytes(*_mapped(nbytes, where))
    copy = raw.view(values.dtype).as_strided(values.shape, values.stride())
    return copy.copy_(values)


def as_bytes(address: int, nbytes: int) -> Tensor:
    """The bytes at an address of the GPU."""

    there = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=there), device="cuda")


def _mapped(nbytes: int, where: str) -> tuple[int, int]:
    """Address of `nbytes` at the end or the start of a mapping with a hole on either side, and `nbytes`."""
    torch.cuda.init()
    what = driver.CUmemAllocationProp()
    what.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    what.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    what.location.id = torch.cuda.current_device()
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granule = checked(driver.cuMemGetAllocationGranularity(what, least))
    inner = -(-nbytes // granule) * granule
    base = int(checked(driver.cuMemAddressReserve(inner + 2 * granule, granule, driver.CUdeviceptr(0), 0)))
    first = base + granule
    memory = checked(driver.cuMemCreate(inner, what, 0))
    checked(driver.cuMemMap(driver.CUdeviceptr(first), inner, 0, memory, 0))
    access = driver.CUmemAccessDesc()
    access.location = what.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked(driver.cuMemSetAccess(driver.CUdeviceptr(first), inner, [access], 1))
    return (first + inner - nbytes if where == "end" else first), nbytes
