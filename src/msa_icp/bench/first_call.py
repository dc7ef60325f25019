"""How long the first call takes: with nothing compiled yet, and with kernels of an earlier process on disk.

Each case is a process of its own, whose caches lie in a temporary folder. Without a GPU it is the compilation
that is timed (NVRTC needs none): of one kernel a source of the CUDA backend.

python -m msa_icp.bench.first_call DEVICE BACKEND [warmup]   one such process's JSON: seconds by what was done
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import msa_icp
from msa_icp import cuda_backend

STATES = ("cold", "from the disk cache")
COMPILER = "import and load of the compiler"
"""What a process of the CUDA backend does once, with a cache or without: no op's row contains it."""
WARMUP = "warmup of everything else"
LAYOUT_WARMUP = "warmup of P128W4"
RANKS = 4
TOGETHER = f"cold, {RANKS} processes at once"


@dataclass(frozen=True)
class Row:
    """Seconds of the first call of an op, of the compilation of a source, or of `COMPILER`."""

    what: str
    backend: str
    op: str
    state: str
    seconds: float


def rows(device: torch.device, backends: Sequence[str]) -> Iterator[Row]:
    """Two processes a backend, one after the other over the same folder; then what an engine waits for at its
    start: the warm-up of one layout, in a process and in a group of them."""
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            for state in STATES:
                _expect_cache(folder, backend, state)
                for op, seconds in _in_processes(device, backend, folder)[0].items():
                    yield Row("first call", backend, op, state, round(seconds, 4))
    for backend in (*backends, "cake") if device.type == "cuda" else ():
        for processes in (1, RANKS):
            with tempfile.TemporaryDirectory() as folder:
                for state in STATES if processes == 1 else (TOGETHER,):
                    _expect_cache(folder, backend, state)
                    found = _in_processes(device, backend, folder, "warmup", processes=processes)
                    slowest = max(seconds[LAYOUT_WARMUP] for seconds in found)
                    yield Row("warmup", backend, LAYOUT_WARMUP, state, round(slowest, 4))


def _expect_cache(folder: str, backend: str, state: str) -> None:
    """A process that is timed as cold finds nothing, and the next one what the first left there."""
    found = any(Path(folder).iterdir())
    if found and state != STATES[1]:
        raise RuntimeError(f"{folder} is not empty, so no call of {backend} would be cold")
    if not found and state == STATES[1] and backend != "torch":
        raise RuntimeError(f"nothing is in {folder}, so {backend} keeps its kernels elsewhere, or keeps none")


def _in_processes(
    device: torch.device, backend: str, folder: str, *what: str, processes: int = 1
) -> list[dict[str, float]]:
    """What each of the processes, started together, says."""
    source = str(Path(msa_icp.__file__).parents[1])
    environment = dict(
        os.environ,
        XDG_CACHE_HOME=folder,
        TRITON_CACHE_DIR=str(Path(folder) / "triton"),
        PYTHONPATH=os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    )
    command = [sys.executable, "-m", "msa_icp.bench.first_call", str(device), backend, *what]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    try:
        said = [process.communicate() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, error) in zip(started, said, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{error}")
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def first_calls(device: torch.device, backend: str) -> dict[str, float]:
    """Seconds of the first call of every op in this process, whose GPU is up, then of the warmup."""
    device = torch.empty(0, device=device).device  # with its index
    seconds: dict[str, float] = {}
    if backend == "cuda":
        _load_compiler(seconds)
    from .host_time import Workload

    for op, call in Workload(device, backend).calls.items():
        with _timed(seconds, op):
            call()
            torch.cuda.synchronize(device)
    with _timed(seconds, WARMUP):
        msa_icp.warmup(device, backend)
    return seconds


def layout_warmup(device: torch.device, backend: str) -> dict[str, float]:
    """Seconds of the warm-up of one layout in this process, whose GPU is up."""
    torch.zeros(1, device=device).item()
    seconds: dict[str, float] = {}
    with _timed(seconds, LAYOUT_WARMUP):
        msa_icp.warmup(device, backend, page_size=128, world_size=4)
    return seconds


def compilations() -> dict[str, float]:
    """Seconds of compiling the first kernel of every source of the CUDA backend, or of finding it on disk."""
    seconds: dict[str, float] = {}
    _load_compiler(seconds)
    for kernel in cuda_backend.kernels():
        if kernel.variant.source not in seconds:
            with _timed(seconds, kernel.variant.source):
                kernel.variant.compile()
    return seconds


def _load_compiler(seconds: dict[str, float]) -> None:
    """Take down what everything that is compiled or found on disk afterwards has ready."""
    if "cuda.core" in sys.modules:
        raise RuntimeError("the compiler is imported already, so its import cannot be timed")
    with _timed(seconds, COMPILER):
        import cuda.core.utils  # noqa: F401
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


if __name__ == "__main__":
    where = torch.device(sys.argv[1])
    if where.type == "cpu":
        print(json.dumps(compilations()))
    else:
        print(json.dumps((layout_warmup if sys.argv[3:] else first_calls)(where, sys.argv[2])))
