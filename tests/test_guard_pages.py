"""One byte read or written out of bounds crashes a process (contract, section 10)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import msa_icp
from msa_icp import verify

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of Linux")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or msa_icp.backends("cuda")["cuda"] is not None,
    reason="the reader is a kernel for compute capability 9.0",
)
PROGRAM = Path(__file__).with_name("guarded.py")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.exchange
@pytest.mark.parametrize("where", ["end", "start"])
def test_nothing_is_touched_out_of_bounds(backend, device, where):
    every = 23 if verify.is_slow(backend, device) else 1
    ended = run(backend, where, str(every), device)
    lines = ended.stdout.splitlines()
    last = lines[-1] if lines else "nothing ran"
    assert ended.returncode == 0, f"{ended.returncode} in: {last}\n{ended.stderr[-2000:]}"
    assert last == "done"
    assert len(lines) > 200 // every


@needs_gpu
@pytest.mark.parametrize("where", ["end", "start"])
def test_cuda_guards_are_there(where):
    ended = run(f"control-gpu-{where}")
    assert ended.stdout.splitlines() == ["about to crash"]
    assert ended.returncode == 1
    assert "illegal memory access" in ended.stderr


@pytest.mark.parametrize("kind", ["read", "write", "torch", "input"])
def test_the_guards_are_there(kind):
    ended = run(f"control-{kind}")
    assert ended.stdout.splitlines() == ["about to crash"]
    assert ended.returncode == -signal.SIGSEGV
