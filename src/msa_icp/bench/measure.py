"""How everything here is timed.

On a GPU: one CUDA graph holds a chain of back-to-back launches, each over another layer's buffers, as
many as make the buffers together larger than any cache: decode finds its keys cold. The median over
replays, divided by the launches, is the time of one. On a CPU: the median of the wall-clock times. The host's
own time of a call is the least of many short bursts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from msa_icp.geometry import ceil_div

CHAIN_LAUNCHES = 6000
"""The most launches of one chain."""
_REPLAYS = 15
_BURSTS = 200
_BURST_CALLS = 200
_MEASURE_SECONDS = 0.05


def chain_bytes(device: torch.device) -> int:
    """Bytes that the buffers of one chain have together, at least: many times the largest cache."""
    return 1_500_000_000 if device.type == "cuda" else 100_000_000


def chain_length(bytes_per_launch: int, device: torch.device) -> int:
    """Launches of a chain over buffers of that size."""
    return max(1, min(CHAIN_LAUNCHES, int(ceil_div(chain_bytes(device), bytes_per_launch))))


def time_chain(launch: Callable[[int], None], launches: int, device: torch.device) -> float:
    """Microseconds of one of `launch(0) ... launch(launches - 1)`, run back to back."""
    if device.type == "cuda":
        return _time_graph(launch, launches, device)
    for index in range(launches):
        launch(index)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for index in range(launches):
            launch(index)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / launches * 1e6


def capture(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays the launches of `call()` as one CUDA graph; on a CPU, which has none, `call` itself.

    In the thread's own mode, as NCCL's watchdog asks for its events meanwhile.
    """
    if device.type != "cuda":
        return call
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    replay: Callable[[], None] = graph.replay
    return replay


def _time_graph(launch: Callable[[int], None], launches: int, device: torch.device) -> float:
    def chain() -> None:
        for index in range(launches):
            launch(index)

    with torch.cuda.device(device):
        launch(0)  # compiles and loads what is not loaded yet
        torch.cuda.synchronize()
        replay = capture(chain, device)
        replay()
        torch.cuda.synchronize()
        times: list[float] = []
        spent = 0.0
        while len(times) < _REPLAYS or (spent < _MEASURE_SECONDS and len(times) < 20 * _REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
            spent += times[-1] / 1e3
        return statistics.median(times) / launches * 1e3


class HostTime(NamedTuple):
    """Microseconds that the host spends in one call, over many short bursts of them."""

    fastest: float
    """What the call takes: whatever else a host does only adds to it."""
    median: float
    """What it took on this host."""


def host_times(call: Callable[[], None], device: torch.device) -> HostTime:
    """The host's time of one `call()`. Between bursts a GPU is waited for, so its queue never fills."""
    times = []
    for _ in range(_BURSTS):
        start = time.perf_counter()
        for _ in range(_BURST_CALLS):
            call()
        times.append((time.perf_counter() - start) / _BURST_CALLS * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return HostTime(min(times), statistics.median(times))


def time_host(call: Callable[[], None], device: torch.device) -> float:
    """Microseconds that the host spends in one `call()`, the fastest of many short bursts."""
    return host_times(call, device).fastest


def versions(device: torch.device) -> dict[str, str | None]:
    """The card (or processor) and the versions that a figure holds for."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {"card": card, "torch": torch.__version__, "triton": triton_version}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        name = platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
