"""A kernel that lets its successor start and writes afterwards, and a successor that does not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msa_icp.cuda_backend.loader import Kernel, Variant

_LATE = """
struct Arguments { unsigned char* const* parts; long long count, cycles; };

// parts: where to, where from, and how many bytes, `count` times.
extern "C" __global__ void write_late(const __grid_constant__ Arguments with) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const long long start = clock64();
  while (clock64() - start < with.cycles) {}
  for (long long i = 0; i < with.count; ++i) {
    unsigned char* const to = with.parts[3 * i];
    const unsigned char* const from = with.parts[3 * i + 1];
    const long long bytes = reinterpret_cast<long long>(with.parts[3 * i + 2]);
    for (long long at = threadIdx.x; at < bytes; at += blockDim.x) to[at] = from[at];
  }
}
"""
_EARLY = """
struct Arguments { unsigned char* to; const unsigned char* from; long long bytes; };

extern "C" __global__ void read_early(const __grid_constant__ Arguments with) {
  for (long long at = threadIdx.x; at < with.bytes; at += blockDim.x) with.to[at] = with.from[at];
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
"""
_CYCLES = 400_000
"""Some 0.2 ms: longer than any of the launches here takes by itself."""


@dataclass(frozen=True)
class _Source(Variant):
    code: str = ""

    def text(self, *ptx_headers: object) -> str:
        return self.code


_write_late = Kernel(_Source("write_late", (), _LATE), 256, 3)
_read_early = Kernel(_Source("read_early", (), _EARLY), 256, 3)


class WriteLate:
    """Launches the writer of some contiguous pieces of memory, each with what it will be."""

    def __init__(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pieces = list(pieces)  # they must live
        self._device = pieces[0][0].device
        words = [(to.data_ptr(), made.data_ptr(), to.nbytes) for to, made in pieces]
        self._words = torch.tensor(words, dtype=torch.int64, device=self._device)

    def __call__(self) -> None:
        arguments = (self._words.data_ptr(), len(self._pieces), _CYCLES)
        _write_late((1, 1, 1), arguments, self._device, dependent=False)


def read(to: Tensor, address: int, *, dependent: bool = False) -> None:
    """Fill `to` with what is at an address. `dependent`: as a scorer must not do it, before the wait."""
    _read_early((1, 1, 1), (to.data_ptr(), address, to.nbytes), to.device, dependent=dependent)
