"""The two reads that a scorer is judged by, compiled at run time through NVRTC (`plain_read.cu`)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .measure import time_chain

GRIDS = (132, 264, 528, 1056, 2112)
"""Grids to try; the fastest counts."""
THREADS = 512
LEAST_TB_S = {"NVIDIA H200": 4.1}
"""TB/s of the plain read of 268 MB below which something else is on a card, by its whole name: a part of a
card, and one of a like name (GH200), have no rule."""


def unavailable(device: torch.device) -> str | None:
    """None where the ruler can be measured on `device`, else the reason."""
    if device.type != "cuda":
        return "the plain read is a CUDA kernel"
    if torch.version.hip is not None:
        return "the plain read is a CUDA kernel, and this PyTorch is for ROCm"
    try:
        import cuda.core  # noqa: F401
    except ImportError:
        return "cuda-core is not installed; install msa-icp[cuda13] or msa-icp[cuda12]"
    return None


@dataclass(frozen=True)
class Judgement:
    """The plain read of 268 MB, and the least that it must be; TB/s."""

    speed: float | None
    """None where it cannot be measured."""
    least: float | None
    """None where no rule is known for the card."""
    reason: str | None = None
    """Why it cannot be measured."""

    @property
    def too_slow(self) -> bool:
        """Whether the run is to be thrown away."""
        return self.speed is not None and self.least is not None and self.speed < self.least

    def __str__(self) -> str:
        if self.speed is None:
            return f"plain read of 268 MB: not measured, {self.reason}"
        read = f"plain read of 268 MB: {self.speed} TB/s"
        return f"{read}, below {self.least} TB/s: something else is on the card" if self.too_slow else read


def judge(device: torch.device) -> Judgement:
    """Measure what a run on this card is judged by."""
    if (reason := unavailable(device)) is not None:
        return Judgement(None, None, reason)
    return Judgement(speed(device), LEAST_TB_S.get(torch.cuda.get_device_name(device)))


def speed(device: torch.device) -> float | None:
    """TB/s of the plain read of 268 MB; None where it cannot be measured."""
    if unavailable(device) is not None:
        return None
    nbytes = 64 * 8192 * 4 * 128
    pool = torch.zeros(6 * nbytes, dtype=torch.uint8, device=device)
    plain, _ = Ruler(device).time(list(pool.split(nbytes)))
    return round(nbytes / plain / 1e6, 3)


class Ruler:
    """The kernels of one source file; ours unless `source` names another with the same two kernels."""

    def __init__(self, device: torch.device, source: Path | None = None) -> None:
        from cuda.core import Device, Program, ProgramOptions

        self._device = Device(device.index or 0)
        self._device.set_current()
        self._narrow = source is None  # the type of our kernels' line count
        text = (source or resources.files(__package__) / "plain_read.cu").read_text()
        major, minor = torch.cuda.get_device_capability(device)
        # griddepcontrol needs 9.0; an older card has no chained read.
        self._chained = major >= 9
        if not self._chained:
            text = text[
                : text.index('extern "C" __global__ void __launch_bounds__(kThreads)\n    chained_read')
            ]
        program = Program(text, "c++", ProgramOptions(arch=f"sm_{major}{minor}", std="c++17"))
        self._code = program.compile("cubin")
        self._sink = torch.zeros(1, dtype=torch.int32, device=device)

    def time(self, buffers: list[Tensor]) -> tuple[float, float | None]:
        """Microseconds per buffer of the plain and of the chained read of all buffers, one after another.

        The buffers are contiguous and of one size.
        """
        plain = min(self._chain("plain_read", buffers, grid, pdl=False) for grid in GRIDS)
        if not self._chained:
            return plain, None
        return plain, min(self._chain("chained_read", buffers, grid, pdl=True) for grid in GRIDS)

    def _chain(self, name: str, buffers: list[Tensor], grid: int, *, pdl: bool) -> float:
        from cuda.core import LaunchConfig, Stream, launch

        kernel: Any = self._code.get_kernel(name)
        config = LaunchConfig(grid=grid, block=THREADS, programmatic_stream_serialization=pdl)
        lines = buffers[0].numel() * buffers[0].element_size() // 16
        addresses = [buffer.data_ptr() for buffer in buffers]
        sink = self._sink.data_ptr()
        count = ctypes.c_uint32(lines) if self._narrow else ctypes.c_int64(lines)

        def read(index: int) -> None:
            stream = Stream.from_handle(torch.cuda.current_stream(self._sink.device).cuda_stream)
            launch(stream, config, kernel, addresses[index], count, sink)

        return time_chain(read, len(buffers), self._sink.device)
