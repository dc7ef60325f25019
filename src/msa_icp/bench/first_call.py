"""How long the first call takes: with nothing compiled yet, and with kernels of an earlier process on disk.

Each case is a process of its own, whose caches lie in a temporary folder. Without a GPU it is the compilation
that is timed (NVRTC needs none): of one kernel a source of the CUDA backend.

python -m msa_icp.bench.first_call DEVICE BACKEND    prints one such process's JSON: seconds by what was done
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
WARMUP = "warmup of everything else"


@dataclass(frozen=True)
class Row:
    """Seconds of the first call of an op, or of the compilation of a source."""

    what: str
    backend: str
    op: str
    state: str
    seconds: float


def rows(device: torch.device, backends: Sequence[str]) -> Iterator[Row]:
    """Two processes a backend, one after the other over the same folder."""
    for backend in backends:
        with tempfile.TemporaryDirectory() as folder:
            for state in STATES:
                for op, seconds in _in_process(device, backend, folder).items():
                    yield Row("first call", backend, op, state, round(seconds, 4))


def _in_process(device: torch.device, backend: str, folder: str) -> dict[str, float]:
    source = str(Path(msa_icp.__file__).parents[1])
    environment = dict(
        os.environ,
        XDG_CACHE_HOME=folder,
        TRITON_CACHE_DIR=str(Path(folder) / "triton"),
        PYTHONPATH=os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
    )
    command = [sys.executable, "-m", "msa_icp.bench.first_call", str(device), backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def first_calls(device: torch.device, backend: str) -> dict[str, float]:
    """Seconds of the first call of every op in this process, whose GPU is up, then of the warmup."""
    from .host_time import Workload

    device = torch.empty(0, device=device).device  # with its index
    seconds: dict[str, float] = {}
    for op, call in Workload(device, backend).calls.items():
        with _timed(seconds, op):
            call()
            torch.cuda.synchronize(device)
    with _timed(seconds, WARMUP):
        msa_icp.warmup(device, backend)
    return seconds


def compilations() -> dict[str, float]:
    """Seconds of compiling the first kernel of every source of the CUDA backend, or of finding it on disk."""
    seconds: dict[str, float] = {}
    for kernel in cuda_backend.kernels():
        if kernel.variant.source not in seconds:
            with _timed(seconds, kernel.variant.source):
                kernel.variant.compile()
    return seconds


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


if __name__ == "__main__":
    where = torch.device(sys.argv[1])
    print(json.dumps(first_calls(where, sys.argv[2]) if where.type == "cuda" else compilations()))
